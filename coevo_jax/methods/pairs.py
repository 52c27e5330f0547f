"""Preference pairs made from the policy's own answers (EvoLM section 3): a stored answer loses to a fresh one; an answer to an
inferred question loses to one to the real question; an answer without the rubric loses to one that saw it. Or from elsewhere: of
two frozen policies the better one's answer wins; a data set says which answer was chosen.

All text that depends only on the question (the pair's first answers and the rubrics in training) is drawn in one engine call.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from coevo_jax.config.several import frozen_models
from coevo_jax.methods.context import Context
from coevo_jax.methods.stage import Step
from coevo_jax.preference.buffer import Entry, hashed
from coevo_jax.preference.guards import leaked, same_text
from coevo_jax.preference.pairs import OWN, Pair, PairPlan
from coevo_jax.rubrics import parse_rubric
from coevo_jax.sampler import Completion


@dataclasses.dataclass
class _Draft:
    """A pair in the making. `entry`: the stored answer of a temporal pair; `writers`: the roles that give the accepted and the
    rejected answer."""

    slot: int
    source: str
    record: dict[str, Any]
    writers: tuple[str, str]
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
    _frozen_answers(ctx, step, attempt, [d for d in drafts if d.source == "frozen"], guards)
    _second_call(ctx, step, attempt, [d for d in drafts if d.source in ("inferred", "conditioned")], guards)
    made = {d.slot: pair for d in drafts if (pair := _finish(ctx, d, guards)) is not None}
    return made, {slot: rubrics[slot] for slot in made}


def _draft(ctx: Context, step: Step, slot: int, attempt: int, guards: dict[str, int]) -> _Draft | None:
    plan, both = PairPlan.from_config(ctx.cfg.pairs), (step.policy, step.policy)
    source = plan.source(ctx.cfg.seed, step.update, slot, attempt)
    if source == "dataset":
        return _Draft(slot, source, ctx.streams["pairs"].next(slot), both)
    if source == "frozen":
        return _Draft(slot, source, ctx.streams["rubric"].next(slot), _two_frozen(ctx, step, slot, attempt))
    if source != "temporal":
        return _Draft(slot, source, ctx.streams["rubric"].next(slot), both)
    where = ctx.buffer_slot(step.policy, slot)
    drawn = ctx.buffer.draw(where, step.policy_updates, plan.draw_key(ctx.cfg.seed, step.update, slot, attempt))
    if drawn.entry is None:
        _count(guards, "no_stored_answer")
        return None
    record = {"id": drawn.entry.record_id, "prompt": drawn.entry.question}
    return _Draft(slot, source, record, both, drawn.entry, drawn.gap, drawn.fallback)


def _two_frozen(ctx: Context, step: Step, slot: int, attempt: int) -> tuple[str, str]:
    """Two of the frozen policies, the better first: every two of them as often."""
    two = list(itertools.combinations(frozen_models(ctx.cfg), 2))
    return two[hashed("frozen pair", ctx.cfg.seed, step.update, slot, attempt) % len(two)]


def _first_call(ctx: Context, step: Step, attempt: int, drafts: list[_Draft]) -> dict[int, list[Completion]]:
    """The rubrics of training, every draft's plain answer, and the rubrics that condition an answer."""
    cfg, own = ctx.cfg, [d for d in drafts if d.source in OWN]
    rubrics = [
        ctx.request(ctx.rubric_prompt(d.question, training=True), cfg.schedule.group, "rubric", "rubric", step.update,
                    cfg.rubric_sampling, slot=d.slot, attempt=attempt)
        for d in drafts
    ]  # fmt: skip
    plain = [
        ctx.request(ctx.answer_prompt(d.question, step.policy), 1, "rejected" if d.source == "conditioned" else "accepted",
                    step.policy, step.update, cfg.answer, slot=d.slot, attempt=attempt)
        for d in own
    ]  # fmt: skip
    conditioned = [d for d in drafts if d.source == "conditioned"]
    guides = [
        ctx.request(ctx.rubric_prompt(d.question), 1, "pair_rubric", "rubric", step.update, cfg.rubric_sampling,
                    slot=d.slot, attempt=attempt)
        for d in conditioned
    ]  # fmt: skip
    written, answered = ctx.generate_both(rubrics + guides, plain, step.policy)
    for draft, (answer,) in zip(own, answered):
        if draft.source == "conditioned":
            draft.rejected = answer
        else:
            draft.accepted = answer
    for draft, (guide,) in zip(conditioned, written[len(rubrics) :]):
        draft.middle = guide
    return {d.slot: out for d, out in zip(drafts, written)}


def _frozen_answers(ctx: Context, step: Step, attempt: int, drafts: list[_Draft], guards: dict[str, int]) -> None:
    """Answers of the frozen policies, in one engine call each. A question too long in one's own tokens makes no pair."""
    prompts = {(d.slot, role): ctx.answer_prompt(d.question, role) for d in drafts for role in d.writers}
    long = {slot for (slot, _), ids in prompts.items() if len(ids) > ctx.cfg.sampler.max_prompt}
    for _ in long:
        _count(guards, "frozen_prompt_too_long")
    for role in frozen_models(ctx.cfg):
        asked = [d for d in drafts if role in d.writers and d.slot not in long]
        requests = [
            ctx.request(prompts[d.slot, role], 1, "accepted" if role == d.writers[0] else "rejected", role, step.update,
                        ctx.cfg.answer, slot=d.slot, attempt=attempt)
            for d in asked
        ]  # fmt: skip
        for d, (answer,) in zip(asked, ctx.generate(role, requests)):
            if role == d.writers[0]:
                d.accepted = answer
            else:
                d.rejected = answer


def _second_call(ctx: Context, step: Step, attempt: int, drafts: list[_Draft], guards: dict[str, int]) -> None:
    """Inferred question: ask what the answer answers, then answer that. Conditioned: answer with the rubric in sight."""
    cfg = ctx.cfg
    requests, asked = [], []
    for d in drafts:
        if d.source == "inferred":
            assert d.accepted is not None
            text = ctx.text(d.accepted.tokens, step.policy)
            ids, kind, sampling = ctx.inference_prompt(text, step.policy), "infer", cfg.question_sampling
        else:
            assert d.middle is not None
            text = _guide_text(ctx, d, guards)
            ids, kind, sampling = ctx.conditioned_prompt(d.question, text, step.policy), "accepted", cfg.answer
        if len(ids) > cfg.sampler.max_prompt:
            _count(guards, f"{d.source}_prompt_too_long")
            continue
        requests.append(ctx.request(ids, 1, kind, step.policy, step.update, sampling, slot=d.slot, attempt=attempt))
        asked.append(d)
    for d, (completion,) in zip(asked, ctx.generate(step.policy, requests)):
        if d.source == "inferred":
            d.middle = completion
        else:
            d.accepted = completion
    inferred = [d for d in asked if d.source == "inferred" and _question_usable(ctx, d, guards)]
    answers = ctx.generate(step.policy, [
        ctx.request(ctx.answer_prompt(ctx.text(d.middle.tokens, step.policy), step.policy), 1, "rejected", step.policy,
                    step.update, cfg.answer, slot=d.slot, attempt=attempt)
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
    role = draft.writers[0]
    text = ctx.text(draft.middle.tokens, role)
    if not text:
        _count(guards, "inferred_empty")
        return False
    if same_text(text, draft.question):
        _count(guards, "inferred_equal")
        return False
    if len(ctx.answer_prompt(text, role)) > ctx.cfg.sampler.max_prompt:
        _count(guards, "inferred_too_long")
        return False
    return True


def _finish(ctx: Context, d: _Draft, guards: dict[str, int]) -> Pair | None:
    """The pair, or None where an answer is missing or a guard refuses it."""
    nothing = np.zeros(0, np.int32)  # of a text that no model sampled
    if d.source == "dataset":
        (accepted_ids, rejected_ids), accepted, rejected = (nothing, nothing), d.record["chosen"], d.record["rejected"]
    elif d.accepted is None or (d.rejected is None and d.entry is None):
        return None
    else:
        accepted_ids = d.accepted.tokens
        rejected_ids = d.entry.tokens if d.entry is not None else d.rejected.tokens if d.rejected is not None else nothing
        rejected = ctx.text(rejected_ids, d.writers[1])
        accepted = ctx.text(accepted_ids, d.writers[0])
    if not accepted.strip():  # reasoning that never ended, or nothing at all: no answer to prefer
        _count(guards, "accepted_empty")
        return None
    if same_text(accepted, rejected):  # no rubric can tell them apart
        _count(guards, "identical_answers")
        return None
    if d.middle is not None and d.source == "conditioned" and _leaks(ctx, d, accepted):
        _count(guards, "rubric_leaked")
        return None
    writers = d.writers if d.source == "frozen" else None
    return Pair(
        d.slot, d.question, d.record["id"], accepted_ids, accepted, rejected_ids, rejected, d.source, d.gap, d.fallback, writers
    )


def _leaks(ctx: Context, d: _Draft, accepted: str) -> bool:
    """Does the answer that saw the rubric speak the rubric's words? Then it is known by them, and not by its quality."""
    assert d.middle is not None
    rubric = ctx.text(d.middle.tokens, "rubric")
    return leaked(accepted, rubric, d.question, ctx.cfg.pairs.leak_words)


def _count(guards: dict[str, int], name: str) -> None:
    guards[name] = guards.get(name, 0) + 1
