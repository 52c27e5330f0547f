"""Given preference pairs as a set to walk: those that are too long left out or refused, some set aside by question."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from coevo_jax.data import PromptSet, read_pairs
from coevo_jax.data.prompts import normalise_space
from coevo_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class PairSource:
    """What the group `key` of the config says of its pairs. limit: tokens of what `measure` gives; refuse: of longer ones, the
    first ends the run."""

    key: str
    data: str
    limit: int
    refuse: bool
    heldout: int
    seed: int


def read(
    source: PairSource, measure: Callable[[Mapping[str, Any]], int], progress: Callable[[int, int], None], what: str
) -> PromptSet:
    """The pairs that fit; counts["over_limit"] says how many don't. measure: tokens of a pair's longest `what`, or a UserError.

    UserError: one is too long and that is refused, or none is left.
    """
    found, kept, limit = read_pairs(source.data, key=f"{source.key}.data"), set[str](), source.limit
    for i, record in enumerate(found.records):
        if i % 1000 == 999:
            progress(i + 1, len(found))
        longest = measure(record)
        if longest > limit and source.refuse:
            raise UserError(
                f"a {what} of the pair {record['id']!r} has {longest} tokens, over the limit of {limit}",
                where=f"{source.key}.max_tokens, update.pack_length",
                expected=f"at least {longest}, or data.over_limit=filter",
            )
        if longest <= limit:
            kept.add(record["id"])
    if not kept:
        raise UserError(f"all {len(found)} pairs are over the limit of {limit} tokens", where=f"{source.key}.data={source.data}",
                        expected=f"a larger {source.key}.max_tokens or update.pack_length, or shorter pairs")  # fmt: skip
    found = found if len(kept) == len(found) else _without(found, kept, source.key)
    return _hold_out(found, source)


def _hold_out(found: PromptSet, source: PairSource) -> PromptSet:
    """Set pairs aside, with every pair of the same question: none of theirs is trained on."""
    count, key = source.heldout, f"{source.key}.heldout"
    if count == 0:
        return found
    if count >= len(found):
        raise UserError(f"{key}={count} leaves nothing of {len(found)} pairs", where=key, expected=f"at most {len(found) - 1}")
    order = np.random.RandomState(source.seed % 2**32).permutation(len(found))
    aside = [found.records[i] for i in order[len(order) - count :]]
    questions = {normalise_space(record["prompt"]) for record in aside}
    kept = {record["id"] for record in found.records if normalise_space(record["prompt"]) not in questions}
    if not kept:
        raise UserError(f"{key}={count} leaves no other question", where=key, expected="a smaller number")
    return dataclasses.replace(_without(found, kept, source.key, dict(found.counts)), heldout=tuple(aside))


def _without(found: PromptSet, kept: set[str], key: str, counts: dict[str, int] | None = None) -> PromptSet:
    """A set without the records that are not `kept`; the shares of a mixture stay. counts: of the new set, else how many left for
    their length."""
    records: list[dict[str, Any]] = []
    parts = []
    for start, size, share in found.parts:
        component = [r for r in found.records[start : start + size] if r["id"] in kept]
        if not component:
            raise UserError("nothing is left of one component of the mixture", where=f"{key}.data={found.source}",
                            expected=f"a larger {key}.max_tokens, a smaller {key}.heldout, or a mixture without it")  # fmt: skip
        parts.append((len(records), len(component), share))
        records += component
    counts = {"over_limit": len(found) - len(records)} if counts is None else counts
    return PromptSet(tuple(records), tuple(parts), found.source, counts=counts)
