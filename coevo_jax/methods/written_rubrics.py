"""One valid rubric a question from the run's generator or the endpoint in its place; what is invalid is sampled again, colder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from coevo_jax.methods.context import Context
from coevo_jax.methods.stage import Step
from coevo_jax.rubrics import Rubric, parse_rubric
from coevo_jax.sampler import Completion
from coevo_jax.text.parse import Parsed

COUNTS = ("rubric/written", "rubric/valid", "rubric/retried", "rubric/prompts_dropped", "rubric/endpoint_failed")


def valid_rubrics(
    ctx: Context, step: Step, records: dict[int, dict[str, Any]], attempt: int, counts: dict[str, int]
) -> dict[int, Rubric]:
    """Valid rubrics by slot, for the questions of `records`; a slot that never gets one is missing. counts: COUNTS, added to."""
    if ctx.writer is not None:
        first = written(ctx, list(records), ctx.writer.start([r["prompt"] for r in records.values()], ctx.cfg.rubric_sampling))
    else:
        out = ctx.generate("rubric", [
            ctx.request(ctx.rubric_prompt(record["prompt"]), 1, "policy_rubric", "rubric", step.update, ctx.cfg.rubric_sampling,
                        slot=slot, attempt=attempt)
            for slot, record in records.items()
        ])  # fmt: skip
        first = {slot: parse(ctx, completion) for slot, (completion,) in zip(records, out)}
    counts["rubric/endpoint_failed"] += len(records) - len(first)
    return retry_invalid(ctx, step, records, attempt, first, counts)


def parse(ctx: Context, completion: Completion) -> Parsed[Rubric]:
    """The rubric that the generator's completion is, or why it is none."""
    text = ctx.raw(completion.tokens, "rubric")
    return parse_rubric(text, ctx.cfg.rubric, truncated=completion.finish == "length", opened=ctx.opened("rubric"))


def written(ctx: Context, slots: list[int], collect: Callable[[], list[Parsed[Rubric] | None]]) -> dict[int, Parsed[Rubric]]:
    """What an endpoint wrote, by slot; what it failed to give is missing (design.md 4.1: no outcome of the generator)."""
    with ctx.timed("write"):
        return {slot: parsed for slot, parsed in zip(slots, collect()) if parsed is not None}


def retry_invalid(
    ctx: Context, step: Step, records: dict[int, dict[str, Any]], attempt: int, first: dict[int, Parsed[Rubric]],
    counts: dict[str, int],
) -> dict[int, Rubric]:  # fmt: skip
    """Valid rubrics by slot. An invalid one is sampled again, colder each time; a slot that never gets one is dropped."""
    found = {slot: parsed.value for slot, parsed in first.items() if parsed.value is not None}
    counts["rubric/written"] += len(first)
    counts["rubric/valid"] += len(found)
    for retry, temperature in enumerate(ctx.cfg.rubric.retry_temperatures, start=1):
        missing = [slot for slot in first if slot not in found]
        if not missing:
            break
        counts["rubric/retried"] += len(missing)
        again = _rewrite(ctx, step, records, attempt, retry, missing, temperature)
        found |= {slot: parsed.value for slot, parsed in again.items() if parsed.value is not None}
    counts["rubric/prompts_dropped"] += len(records) - len(found)
    return {slot: found[slot] for slot in first if slot in found}


def _rewrite(
    ctx: Context, step: Step, records: dict[int, dict[str, Any]], attempt: int, retry: int, slots: list[int], temperature: float
) -> dict[int, Parsed[Rubric]]:
    """Another rubric for each slot, at another temperature."""
    sampling = dataclasses.replace(ctx.cfg.rubric_sampling, temperature=temperature)
    if ctx.writer is not None:
        return written(ctx, slots, ctx.writer.start([records[s]["prompt"] for s in slots], sampling, retry))
    out = ctx.generate("rubric", [
        ctx.request(ctx.rubric_prompt(records[s]["prompt"]), 1, "policy_rubric", "rubric", step.update, sampling,
                    slot=s, attempt=attempt, retry=retry)
        for s in slots
    ])  # fmt: skip
    return {slot: parse(ctx, completion) for slot, (completion,) in zip(slots, out)}
