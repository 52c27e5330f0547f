"""Preference pairs made from the policy's own answers (EvoLM section 3): a stored answer loses to a fresh one; an answer to an
inferred question loses to one to the real question; an answer without the rubric loses to one that saw it.

All text that depends only on the question (the pair's first answers and the rubrics in training) is drawn in one engine call.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from coevo_jax.methods.context import Context
from coevo_jax.methods.stage import Step
from coevo_jax.preference.buffer import Entry
from coevo_jax.preference.pairs import Pair, PairPlan
from coevo_jax.rubrics import parse_rubric
from coevo_jax.sampler import Completion


@dataclasses.dataclass
class _Draft:
    """A pair in the making. `entry`: the stored answer of a temporal pair."""

    slot: int
    source: str
    record: dict[str, Any]
    entry: Entry | None = None
    gap: int | None = None
    fallback: str | None = None
    accepted: Completion | None = None
    rejected: Completion | None = None
    middle: Completion | None = None  # the inferred question, or the rubric that conditions the answer

    @property
    def question(self) -> str:
        return self.record["prompt"]


def make_pairs(
    ctx: Context, step: Step, slots: list[int], attempt: int, guards: dict[str, int]
) -> tuple[dict[int, Pair], dict[int, list[Completion]]]:
    """Pairs by slot, and the G rubrics of training drawn for their questions. Slots without a usable pair are missing;
    `guards` counts why."""
    drafts = [d for d in (_draft(ctx, step, slot, attempt, guards) for slot in slots) if d is not None]
    rubrics = _first_call(ctx, step, attempt, drafts)
    _second_call(ctx, step, attempt, [d for d in drafts if d.source != "temporal"], guards)
    made = {d.slot: pair for d in drafts if (pair := _finish(ctx, d, guards)) is not None}
    return made, {slot: rubrics[slot] for slot in made}


def _draft(ctx: Context, step: Step, slot: int, attempt: int, guards: dict[str, int]) -> _Draft | None:
    plan = PairPlan.from_config(ctx.cfg.pairs)
    source = plan.source(ctx.cfg.seed, step.update, slot, attempt)
    if source != "temporal":
        return _Draft(slot, source, ctx.streams["rubric"].next(slot))
    drawn = ctx.buffer.draw(slot, step.policy_updates, plan.draw_key(ctx.cfg.seed, step.update, slot, attempt))
    if drawn.entry is None:
        _count(guards, "no_stored_answer")
        return None
    record = {"id": drawn.entry.record_id, "prompt": drawn.entry.question}
    return _Draft(slot, source, record, drawn.entry, drawn.gap, drawn.fallback)


def _first_call(ctx: Context, step: Step, attempt: int, drafts: list[_Draft]) -> dict[int, list[Completion]]:
    """The rubrics of training, every draft's plain answer, and the rubrics that condition an answer."""
    cfg = ctx.cfg
    rubrics = [
        ctx.request(ctx.rubric_prompt(d.question, training=True), cfg.schedule.group, "rubric", "rubric", step.update,
                    cfg.rubric_sampling, slot=d.slot, attempt=attempt)
        for d in drafts
    ]  # fmt: skip
    plain = [
        ctx.request(ctx.answer_prompt(d.question), 1, "rejected" if d.source == "conditioned" else "accepted", "policy",
                    step.update, cfg.answer, slot=d.slot, attempt=attempt)
        for d in drafts
    ]  # fmt: skip
    conditioned = [d for d in drafts if d.source == "conditioned"]
    guides = [
        ctx.request(ctx.rubric_prompt(d.question), 1, "pair_rubric", "rubric", step.update, cfg.rubric_sampling,
                    slot=d.slot, attempt=attempt)
        for d in conditioned
    ]  # fmt: skip
    written, answered = ctx.generate_both(rubrics + guides, plain)
    for draft, (answer,) in zip(drafts, answered):
        if draft.source == "conditioned":
            draft.rejected = answer
        else:
            draft.accepted = answer
    for draft, (guide,) in zip(conditioned, written[len(rubrics) :]):
        draft.middle = guide
    return {d.slot: out for d, out in zip(drafts, written)}


def _second_call(ctx: Context, step: Step, attempt: int, drafts: list[_Draft], guards: dict[str, int]) -> None:
    """Inferred question: ask what the answer answers, then answer that. Conditioned: answer with the rubric in sight."""
    cfg = ctx.cfg
    requests, asked = [], []
    for d in drafts:
        if d.source == "inferred":
            assert d.accepted is not None
            ids, kind, sampling = ctx.inference_prompt(ctx.text(d.accepted.tokens)), "infer", cfg.question_sampling
        else:
            assert d.middle is not None
            ids, kind, sampling = ctx.conditioned_prompt(d.question, _guide_text(ctx, d, guards)), "accepted", cfg.answer
        if len(ids) > cfg.sampler.max_prompt:
            _count(guards, f"{d.source}_prompt_too_long")
            continue
        requests.append(ctx.request(ids, 1, kind, "policy", step.update, sampling, slot=d.slot, attempt=attempt))
        asked.append(d)
    for d, (completion,) in zip(asked, ctx.generate("policy", requests)):
        if d.source == "inferred":
            d.middle = completion
        else:
            d.accepted = completion
    inferred = [d for d in asked if d.source == "inferred" and _question_usable(ctx, d, guards)]
    answers = ctx.generate("policy", [
        ctx.request(ctx.answer_prompt(ctx.text(d.middle.tokens)), 1, "rejected", "policy", step.update, cfg.answer,
                    slot=d.slot, attempt=attempt)
        for d in inferred if d.middle is not None
    ])  # fmt: skip
    for d, (completion,) in zip(inferred, answers):
        d.rejected = completion


def _guide_text(ctx: Context, draft: _Draft, guards: dict[str, int]) -> str:
    """The rubric that conditions an answer, as written: an invalid one is counted, not refused (as in the released code)."""
    assert draft.middle is not None
    text = ctx.text(draft.middle.tokens, "rubric")
    if parse_rubric(text, ctx.cfg.rubric).status != "ok":
        _count(guards, "conditioned_on_invalid_rubric")
    return text


def _question_usable(ctx: Context, draft: _Draft, guards: dict[str, int]) -> bool:
    """An empty inferred question, one equal to the original, or one over the prompt limit makes no pair."""
    assert draft.middle is not None
    text = ctx.text(draft.middle.tokens)
    if not text:
        _count(guards, "inferred_empty")
        return False
    if _same(text, draft.question):
        _count(guards, "inferred_equal")
        return False
    if len(ctx.answer_prompt(text)) > ctx.cfg.sampler.max_prompt:
        _count(guards, "inferred_too_long")
        return False
    return True


def _finish(ctx: Context, d: _Draft, guards: dict[str, int]) -> Pair | None:
    if d.accepted is None or (d.rejected is None and d.entry is None):
        return None
    if d.entry is not None:
        rejected_ids = d.entry.tokens
        rejected = ctx.text(rejected_ids)
    else:
        assert d.rejected is not None
        rejected_ids, rejected = d.rejected.tokens, ctx.text(d.rejected.tokens)
    accepted = ctx.text(d.accepted.tokens)
    if not accepted.strip():  # reasoning that never ended, or nothing at all: no answer to prefer
        _count(guards, "accepted_empty")
        return None
    if _same(accepted, rejected):  # no rubric can tell them apart
        _count(guards, "identical_answers")
        return None
    return Pair(
        d.slot, d.question, d.record["id"], d.accepted.tokens, accepted, rejected_ids, rejected, d.source, d.gap, d.fallback
    )


def _same(a: str, b: str) -> bool:
    return " ".join(a.split()).casefold() == " ".join(b.split()).casefold()


def _count(guards: dict[str, int], name: str) -> None:
    guards[name] = guards.get(name, 0) + 1
