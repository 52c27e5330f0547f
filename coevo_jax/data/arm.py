"""Data of Rubric-ARM: labelled pairs cut into a test part and a part a round by question, and demonstrations for the warm-up.

Imports no JAX. A demonstration is one object a line:

    {"prompt", "chosen", "rejected",
     "rules": [{"text": "The response ...", "tag": "Hard Rule" | "Principle", "chosen": why, "rejected": why}, ...],
     "gate": number of the gatekeeper (0 = none), "check": {"chosen": why, "rejected": why}, "why": "... {chosen} ..."}

It says of each answer, not of a slot, why it meets a rule or doesn't, so that the slots can be shuffled: in texts "{chosen}" and
"{rejected}" become the names of the slots.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from coevo_jax.data.prompts import BUNDLED, HERE, PromptSet, content_id, normalise_space, read_pairs
from coevo_jax.data.readers import Row, check_file, read_rows, take, text
from coevo_jax.data.stream import SlotStream, random_of
from coevo_jax.errors import UserError

DEMONSTRATIONS = {"demo": HERE / "warmup" / "arm.jsonl", "tiny": HERE / "warmup" / "tiny_arm.jsonl"}
TIES = ("tie", "same", "0")


def read_labelled(source: str, key: str = "data.pairs") -> PromptSet:
    """Pairs {id, prompt, chosen, rejected}. A file may have response_a, response_b and a label A, B or tie instead; ties say
    nothing, and an empty answer is none: both are left out (counts)."""
    path = pathlib.Path(source)
    if source in BUNDLED["pairs"] or not path.is_file():
        return read_pairs(source, key=key)
    check_file(source, key)
    place, first = next(read_rows(source, key))
    if "response_a" not in first:
        return read_pairs(source, key=key)
    records: list[Row] = []
    counts = {"ties": 0, "empty": 0}
    for place, row in read_rows(source, key):
        label = str(take(row, "label", {}, place))
        both = [take(row, name, {}, place) for name in ("response_a", "response_b")]
        if label.casefold() in TIES or both[0] == both[1]:
            counts["ties"] += 1
            continue
        if "" in both:
            counts["empty"] += 1
            continue
        answers = [text(answer, name, place) for name, answer in zip(("response_a", "response_b"), both)]
        if label not in ("A", "B"):
            raise UserError(f"the label is {label!r}", where=place, expected=f"A, B, or one of {', '.join(TIES)}")
        chosen, rejected = answers if label == "A" else answers[::-1]
        record = {"prompt": text(take(row, "prompt", {}, place), "prompt", place), "chosen": chosen, "rejected": rejected}
        records.append({"id": str(row.get("id") or content_id(record)), **record})
    return PromptSet(PromptSet.of(records, source).records, ((0, len(records), 1.0),), source, counts=counts)


def split(
    records: Sequence[Row], seed: int, test: int, part: int, rounds: int, where: str
) -> tuple[tuple[Row, ...], tuple[tuple[Row, ...], ...]]:
    """(test pairs, pairs of each round): no question is in two of them. A question's pairs stay together, so each may hold a few
    more than asked for. UserError where there are too few."""
    by_question: dict[str, list[Row]] = {}
    for record in records:
        by_question.setdefault(normalise_space(record["prompt"]), []).append(record)
    groups = list(by_question.values())
    order = iter(np.random.RandomState(seed % 2**32).permutation(len(groups)))

    def take_pairs(wanted: int) -> tuple[Row, ...]:
        found: list[Row] = []
        while len(found) < wanted:
            index = next(order, None)
            if index is None:
                raise UserError(
                    f"{len(records)} pairs of {len(groups)} questions are too few for {test} to test, {rounds} rounds of {part}",
                    where=where, expected="a smaller arm.part, arm.rounds or arm.test, or more pairs",
                )  # fmt: skip
            found += groups[int(index)]
        return tuple(found)

    aside = take_pairs(test)  # first, so that the test pairs do not depend on the number of rounds
    return aside, tuple(take_pairs(part) for _ in range(rounds))


class OwnStream(SlotStream):
    """Slot i of P owns every P-th record of a seeded order for good, and walks through them in another order each epoch: what is
    kept for a record by its slot is there whenever the record comes back."""

    def owned(self, slot: int) -> list[int]:
        """Indices of a slot's records."""
        return self._order[slot :: self.slots]

    @functools.cached_property
    def _order(self) -> list[int]:
        return [int(i) for i in random_of(self.seed, self.name, "own").permutation(len(self.prompts))]

    def index(self, slot: int, count: int) -> int:
        """Index of the record that `slot` draws after `count` others."""
        mine = self.owned(slot)
        epoch, offset = divmod(count, len(mine))
        return mine[int(random_of(self.seed, self.name, "epoch", slot, epoch).permutation(len(mine))[offset])]


def keep_short(records: Iterable[Row], length: Callable[[Row], int], limit: int, refuse: bool, where: str) -> list[Row]:
    """The records of at most `limit` tokens. UserError for a longer one with `refuse`, or where none is left."""
    kept, longest = [], 0
    for record in records:
        if (n := length(record)) <= limit:
            kept.append(record)
        longest = max(longest, n)
        if n > limit and refuse:
            raise UserError(f"the pair {record['id']!r} takes {n} tokens beside its list, and there is room for {limit}",
                            where=where, expected=f"room for {n}, or data.over_limit=filter")  # fmt: skip
    if not kept:
        raise UserError(f"no pair leaves room for its list and judgement: the longest takes {longest} tokens of {limit}",
                        where=where, expected="larger sampler.max_prompt and update.pack_length, or shorter answers")  # fmt: skip
    return kept


def read_demonstrations(source: str, key: str = "arm.demonstrations") -> PromptSet:
    """Demonstrations, checked. UserError with file and line."""
    path = str(DEMONSTRATIONS.get(source, source))
    records, seen = [], set()
    for place, row in read_rows(path, "" if source in DEMONSTRATIONS else key):
        record = _demonstration(row, place)
        record["id"] = str(row.get("id") or content_id(record))
        if record["id"] in seen:
            raise UserError(f"the id {record['id']!r} is taken", where=place, expected="ids that differ")
        seen.add(record["id"])
        records.append(record)
    return PromptSet.of(records, source)


def _demonstration(row: Row, place: str) -> Row:
    record: Row = {name: text(take(row, name, {}, place), name, place) for name in ("prompt", "chosen", "rejected", "why")}
    rules, gate, check = row.get("rules"), row.get("gate"), row.get("check")
    if not isinstance(rules, list) or not rules or not all(isinstance(rule, dict) for rule in rules):
        raise UserError("rules is no list of objects", where=place, expected='[{"text", "tag", "chosen", "rejected"}, ...]')
    if isinstance(gate, bool) or not isinstance(gate, int) or not 0 <= gate <= len(rules):
        raise UserError(f"gate is {gate!r}", where=place, expected=f"a number from 0 to {len(rules)}")
    if not isinstance(check, dict):
        raise UserError("check is no object", where=place, expected='{"chosen": why, "rejected": why}')
    names = ("text", "tag", "chosen", "rejected")
    record["rules"] = [{name: text(take(rule, name, {}, place), f"rules.{name}", place) for name in names} for rule in rules]
    record["check"] = {side: text(take(check, side, {}, place), f"check.{side}", place) for side in ("chosen", "rejected")}
    return record | {"gate": gate}


def named(text_: str, slots: dict[str, str]) -> str:
    """A text of a demonstration with the names of the slots. slots: side -> A or B."""
    for side, slot in slots.items():
        text_ = text_.replace("{" + side + "}", slot)
    return text_


def overlap(records: Iterable[Row], others: Iterable[Any], field: str = "prompt") -> list[str]:
    """Questions of `records` that are among those of `others`."""
    known = {normalise_space(record["prompt"]) for record in records}
    return sorted({normalise_space(str(other[field])) for other in others} & known)
