"""RRD rubrics for a file of prompts, each built once and kept in a folder: the column 'rubric' that rubric.source=data reads.

    python -m coevo_jax.rubrics --input answers.jsonl --output rrd.jsonl --cache rrd_cache --weights whitened \
        --source api:gpt-4.1 --base_url https://api.openai.com/v1 --key_env OPENAI_API_KEY

A record of the input has 'prompt', 'samples' (a list of answers), 'strong' and 'weak' (reference answers); other columns stay.
Records without an accepted item, and with --weights preference those none of whose items tells strong (the preferred answer) from
weak (the rejected one), are left out and counted. --source is a model of ours as well: smollm2, a folder, a .gguf file.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from coevo_jax.config import Sampling
from coevo_jax.errors import UserError, nearest
from coevo_jax.rubrics import rrd
from coevo_jax.rubrics.cache import RubricFolder, content_key
from coevo_jax.rubrics.json_criteria import Rubric
from coevo_jax.rubrics.preference_weights import delta_weights
from coevo_jax.rubrics.rrd import Ask, Limits, Refined
from coevo_jax.text.chat import ChatTokenizer
from coevo_jax.text.parse import Parsed
from coevo_jax.text.prompts import render_prompt, template_identity

if TYPE_CHECKING:
    from coevo_jax.remote import Endpoint
    from coevo_jax.sampler import Engine

WEIGHTS = ("uniform", "model", "whitened", "preference")
TEMPLATES = ("rrd_propose", "criterion_yes_no", "rrd_split", "rrd_overlap", "rrd_conflict")
VERSION = 2  # of what is kept in the folder
Asker = Callable[[list[Ask]], list[Parsed[Any]]]


@dataclasses.dataclass(frozen=True)
class Builder:
    """What rubrics are built with. model: names the writer and how it samples, for the folder's keys."""

    ask: Asker
    folder: RubricFolder
    model: str
    weights: str = "whitened"
    limits: Limits = Limits()
    counts: Counter[str] = dataclasses.field(default_factory=Counter)

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise UserError(f"unknown weights {self.weights!r}", where="--weights", expected=" | ".join(WEIGHTS),
                            nearest=nearest(self.weights, WEIGHTS))  # fmt: skip

    def build(self, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any] | None]:
        """The rubric of each record as {"criteria": [{"criterion", "weight"}]}, None where nothing was accepted."""
        refined = self._refined(records)
        weights = self._weights(records, refined)
        rubrics = [None if w is None else rrd.rubric_of(r, w) for r, w in zip(refined, weights)]
        self.counts.update(built=sum(r is not None for r in rubrics), none=sum(r is None for r in rubrics))
        return [None if r is None else _as_json(r) for r in rubrics]

    def _refined(self, records: Sequence[Mapping[str, Any]]) -> list[Refined]:
        """From the folder, or made now, all questions together."""
        keys = [self._key("items", TEMPLATES, *_given(record), dataclasses.asdict(self.limits)) for record in records]
        kept = {key: self.folder.get(key) for key in dict.fromkeys(keys)}
        first = {key: record for key, record in reversed(list(zip(keys, records))) if kept[key] is None}
        made = rrd.run_all([rrd.refine(*_given(record), self.limits) for record in first.values()], self.ask)
        for key, found in zip(first, made):
            value = {"items": found.items, "votes": found.votes.tolist(), "counts": found.counts, "detail": found.detail,
                     "references": found.references.tolist()}  # fmt: skip
            kept[key] = value
            self.counts.update(found.counts)
            if any(found.counts.values()) and not found.counts["failed"]:  # else a further run tries again
                self.folder.put(key, value)
        return [_of_json(kept[key] or {}) for key in keys]

    def _weights(self, records: Sequence[Mapping[str, Any]], refined: Sequence[Refined]) -> list[Sequence[float] | None]:
        if self.weights == "uniform":
            return [rrd.uniform(len(r.items)).tolist() for r in refined]
        if self.weights == "whitened":
            return [rrd.whitened_uniform(r.votes).tolist() for r in refined]
        if self.weights == "preference":  # the strong reference is the preferred answer, the weak one the rejected
            return [delta_weights(*r.references.tolist()) for r in refined]
        keys = [self._key("weights", ("rrd_weights",), record["prompt"], r.items) for record, r in zip(records, refined)]
        kept: dict[str, Any] = {key: self.folder.get(key) for key in dict.fromkeys(keys)}
        todo = {k: (rec["prompt"], r) for k, rec, r in zip(keys, records, refined) if kept[k] is None and r.items}
        for key, found in zip(todo, rrd.run_all([rrd.ask_weights(*one) for one in todo.values()], self.ask)):
            if found.value is None:
                self.counts["weights_failed"] += 1
                continue
            kept[key] = {"weights": found.value.tolist()}
            self.folder.put(key, kept[key])
        return [kept[key]["weights"] if kept[key] else None for key in keys]

    def _key(self, what: str, templates: Sequence[str], *parts: Any) -> str:
        hashes = [template_identity(name)[0] for name in templates]
        return content_key(what=what, version=VERSION, model=self.model, templates=hashes, parts=list(parts))


def _given(record: Mapping[str, Any]) -> tuple[str, list[str], str, str]:
    return record["prompt"], record["samples"], record["strong"], record["weak"]


def _as_json(rubric: Rubric) -> dict[str, Any]:
    return {"criteria": [{"criterion": c.text, "weight": c.weight} for c in rubric.criteria]}


def _of_json(value: Mapping[str, Any]) -> Refined:
    """What the folder keeps, as it was."""
    votes = np.asarray(value["votes"], np.float64).reshape(len(value["votes"]), len(value["items"]))
    references = np.asarray(value["references"], np.float64).reshape(2, len(value["items"]))
    return Refined(list(value["items"]), votes, dict(value["counts"]), value["detail"], references)


def check_record(record: Mapping[str, Any], place: str) -> None:
    """UserError for a record that RRD can't start from."""
    samples = record.get("samples")
    good = isinstance(samples, list) and len(samples) > 1 and all(isinstance(s, str) and s.strip() for s in samples)
    if not good:
        raise UserError("'samples' is no list of two answers or more", where=place, expected="texts that several models wrote")
    for name in ("prompt", "strong", "weak"):
        if not isinstance(record.get(name), str) or not record[name].strip():
            raise UserError(f"{name!r} is no text", where=place, expected="prompt, samples, strong and weak")


# ---------------------------------------------------------------------------------------------------- who is asked


def endpoint_asker(endpoint: Endpoint, sampling: Sampling, retries: int = 2) -> Asker:
    """Ask a model behind an API; what doesn't read is asked for again."""
    from coevo_jax.remote import Ask as Request

    def once(asks: list[Ask], attempt: int) -> list[Parsed[Any]]:
        replies = endpoint.ask([Request(render_prompt(a.template, **a.slots), sampling, attempt) for a in asks])
        return [
            a.read(r.text, r.truncated, False) if r.status == "ok" else Parsed(r.status, None, r.detail)
            for a, r in zip(asks, replies)
        ]

    return _retrying(once, retries)


def engine_asker(engine: Engine, params: Any, tokenizer: ChatTokenizer, sampling: Sampling, retries: int = 2) -> Asker:
    """Ask a model of ours. A prompt that the engine has no room for is a failure ('refused'). The noise belongs to the prompt and
    the attempt, so a rubric depends on no other question's."""
    from coevo_jax.sampler import Request

    def once(asks: list[Ask], attempt: int) -> list[Parsed[Any]]:
        prompts = [tokenizer.render_messages(render_prompt(a.template, **a.slots), thinking=False) for a in asks]
        fits = [i for i, ids in enumerate(prompts) if len(ids) <= engine.cfg.max_prompt]
        distinct = {bytes(np.asarray(prompts[i], np.int32)): i for i in fits}
        requests = [
            Request(np.asarray(prompts[i], np.int32), 1, "rrd", attempt, _identity(name), sampling)
            for name, i in distinct.items()
        ]
        found = dict(zip(distinct, (one for (one,) in engine.generate(params, requests))))
        out = [Parsed[Any]("refused", None, f"a prompt of {len(ids)} tokens (sampler.max_prompt)") for ids in prompts]
        for i in fits:
            completion = found[bytes(np.asarray(prompts[i], np.int32))]
            text = tokenizer.decode(completion.tokens.tolist())
            out[i] = asks[i].read(text, completion.finish == "length", tokenizer.opens_reasoning(False))
        return out

    return _retrying(once, retries)


def _identity(prompt: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(prompt, digest_size=7).digest(), "big")


def _retrying(once: Callable[[list[Ask], int], list[Parsed[Any]]], retries: int) -> Asker:
    def ask(asks: list[Ask]) -> list[Parsed[Any]]:
        found = once(asks, 0)
        for attempt in range(1, retries + 1):
            again = [i for i, one in enumerate(found) if one.status in ("parse_fail", "truncated")]
            if not again:
                break
            for i, one in zip(again, once([asks[i] for i in again], attempt)):
                found[i] = one
        return found

    return ask
