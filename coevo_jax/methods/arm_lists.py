"""Numbered lists of the generator where it is not in training: for the judge's phase, the test pairs and the policy.

Greedy or drawn as rubric_sampling says, one list a question; an invalid one is written again, colder each time
(rubric.retry_temperatures), and a question that gets none is dropped and counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, overload

from coevo_jax.methods.context import Context
from coevo_jax.methods.stage import Step
from coevo_jax.records.facts import Facts
from coevo_jax.rubrics import Rubric, numbered_list, parse_rubric
from coevo_jax.text.parse import Parsed


@overload
def parse_list(ctx: Context, text: str, truncated: bool = False, *, detail: Literal[True]) -> Parsed[Rubric]: ...
@overload
def parse_list(ctx: Context, text: str, truncated: bool = False) -> Rubric | None: ...
def parse_list(ctx: Context, text: str, truncated: bool = False, *, detail: bool = False) -> Any:
    """A text of the generator as a list; with `detail` as the parser gives it."""
    parsed = parse_rubric(text, ctx.cfg.rubric, truncated=truncated, opened=ctx.opened("rubric"))
    return parsed if detail else parsed.value


def write_lists(
    ctx: Context, step: Step, places: Sequence[tuple[int, int]], questions: Sequence[str], facts: Facts, greedy: bool = False
) -> list[Rubric | None]:
    """A valid list for each question, or None. places: (slot, number) of each, which name its noise. greedy: at temperature 0
    first, as the paper deploys it."""
    found: list[Rubric | None] = [None] * len(questions)
    prompts = [ctx.rubric_prompt(question) for question in questions]
    pending = [i for i, ids in enumerate(prompts) if len(ids) <= ctx.cfg.sampler.max_prompt]
    facts.share("arm/prompt_too_long_share", [len(ids) > ctx.cfg.sampler.max_prompt for ids in prompts])
    first = 0.0 if greedy else ctx.cfg.rubric_sampling.temperature
    for retry, temperature in enumerate((first, *ctx.cfg.rubric.retry_temperatures)):
        if not pending:
            break
        sampling = dataclasses.replace(ctx.cfg.rubric_sampling, temperature=temperature)
        requests = [
            ctx.request(prompts[i], 1, "policy_rubric", "rubric", step.update, sampling, slot=places[i][0], sample=places[i][1],
                        retry=retry)
            for i in pending
        ]  # fmt: skip
        for i, (completion,) in zip(pending, ctx.generate("rubric", requests)):
            found[i] = parse_list(ctx, ctx.raw(completion.tokens, "rubric"), completion.finish == "length")
        if retry == 0:
            facts.share("rubric/valid_share", [found[i] is not None for i in pending])
        else:
            facts.total("rubric/retried", len(pending))
        pending = [i for i in pending if found[i] is None]
    facts.total("rubric/prompts_dropped", sum(rubric is None for rubric in found))
    add_lists(facts, [rubric for rubric in found if rubric is not None])
    return found


def add_lists(facts: Facts, rubrics: Sequence[Rubric]) -> None:
    """The shape of lists."""
    for rubric in rubrics:
        for name, value in numbered_list.list_stats(rubric).items():
            facts.mean(f"rubric/{name}", [value])
