"""RLCER (arXiv 2602.10885): the policy answers verifiable questions and writes a rubric for each of its own answers; a frozen
judge checks every rubric of a question on every answer to it.

A criterion is valid where its checks correlate with correctness over the answers (rubrics/rlcer.py). An answer's reward is its
correctness and the points of its own rubric's valid criteria; with schedule.order=alternate (evolving) the writer of a rubric is
rewarded for the share of valid ones and its form, in a second optimizer step of the same update, by the answers and verdicts of
the first. A question whose answers are all right or all wrong says nothing and draws again: no rubric is written for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from coevo_jax.config import Experiment
from coevo_jax.judges import JudgeItem
from coevo_jax.learn.verifiers import resolve_verifier
from coevo_jax.methods.context import Context, request_id
from coevo_jax.methods.control import shape_lengths
from coevo_jax.methods.groups import advantages_of, collect, to_batch
from coevo_jax.methods.members import Group, Member
from coevo_jax.methods.stage import Batch, Part, Stage, Step
from coevo_jax.records.facts import Facts
from coevo_jax.records.verdicts import STATUSES, Verdict
from coevo_jax.rubrics import Rubric, parse_rubric, render_rubric
from coevo_jax.rubrics.rlcer import reasoner_reward, reasoning_reward, valid_criteria, writer_reward
from coevo_jax.sampler import Completion
from coevo_jax.text.parse import Parsed
from coevo_jax.text.prompts import prompt_slots, render_prompt

WRITER = "writer"  # before the metrics of the second optimizer step


def stages(cfg: Experiment) -> list[Stage]:
    """`cycles` stages of K updates. UserError for a verifier that can't be imported."""
    resolve_verifier(cfg.schedule.verifier)
    then = "rubric" if cfg.schedule.order == "alternate" else ""
    return [
        Stage("rlcer", "policy", cycle, cfg.schedule.k, rlcer_batch, counts_as_policy=True, then_role=then)
        for cycle in range(cfg.schedule.cycles)
    ]


@dataclasses.dataclass
class _Found:
    """What an update has seen: counts for its metrics, and the groups of writers."""

    facts: Facts = dataclasses.field(default_factory=Facts)
    verdicts: list[Verdict] = dataclasses.field(default_factory=list)
    writers: list[Group] = dataclasses.field(default_factory=list)


def rlcer_batch(ctx: Context, step: Step) -> Batch:
    """G answers a question, a rubric for each, and their rewards; the writers' part when they train too."""
    verifier, found = resolve_verifier(ctx.cfg.schedule.verifier), _Found()

    def make(slots: list[int], attempt: int) -> list[Group]:
        records = {slot: ctx.streams["policy"].next(slot) for slot in slots}
        groups = _answer(ctx, step, records, attempt)
        mixed = []
        for group in groups:
            scores = [float(verifier(records[group.slot], member.text)) for member in group.members]
            for member, score in zip(group.members, scores):
                member.parts = {"outcome": float(score >= ctx.cfg.rlcer.correct)}
            right = [member.parts["outcome"] for member in group.members]
            found.facts.mean("rlcer/correct_share", right)
            found.facts.share("rlcer/mixed_share", [0 < sum(right) < len(right)])
            if 0 < sum(right) < len(right):
                mixed.append(group)
        _reward(ctx, step, mixed, attempt, found)
        shape_lengths(ctx.cfg, groups)
        return groups

    groups, advantages = collect(ctx, ctx.slots, make)
    _add_verdicts(found.facts, found.verdicts, ctx.cfg.judge.alarm_failure_share)
    batch = to_batch(ctx, step, groups, advantages, found.facts)
    if ctx.cfg.schedule.order == "alternate":
        batch.then = (_writers(ctx, step, batch, found.writers),)
    return batch


def _writers(ctx: Context, step: Step, batch: Batch, groups: list[Group]) -> Part:
    """The second optimizer step's samples; its metrics join those of the batch."""
    own = to_batch(ctx, dataclasses.replace(step, role="rubric"), groups, advantages_of(ctx, groups), Facts())
    batch.facts.extend(own.facts.prefixed(WRITER))
    return Part(WRITER, "rubric", own.samples, own.rollouts, ctx.cfg.rubric_sampling.temperature)


def _answer(ctx: Context, step: Step, records: dict[int, dict[str, Any]], attempt: int) -> list[Group]:
    prompts = {slot: ctx.answer_prompt(record["prompt"]) for slot, record in records.items()}
    requests = [
        ctx.request(ids, ctx.cfg.schedule.group, "answer", "policy", step.update, ctx.cfg.answer, slot=slot, attempt=attempt)
        for slot, ids in prompts.items()
    ]
    out = []
    for (slot, record), answers in zip(records.items(), ctx.generate("policy", requests)):
        members = [Member(c, ctx.text(c.tokens), None) for c in answers]
        out.append(Group(slot, attempt, prompts[slot], record["prompt"], record["id"], members))
    return out


def _reward(ctx: Context, step: Step, groups: list[Group], attempt: int, found: _Found) -> None:
    """Write a rubric for each answer, check all rubrics of a question on all its answers, and set both roles' rewards."""
    writers = _write(ctx, step, groups, attempt, found.facts)
    rubrics = {writer.slot: [_parse(ctx, member) for member in writer.members] for writer in writers}
    checks = _check(ctx, step, groups, rubrics, found)
    for group, writer in zip(groups, writers):
        correct = np.asarray([member.parts["outcome"] for member in group.members])
        for i, (member, author, parsed) in enumerate(zip(group.members, writer.members, rubrics[group.slot])):
            _set_rewards(ctx, member, author, parsed, checks.get((group.slot, i), {}), i, correct, found.facts)
    found.writers += writers


def _write(ctx: Context, step: Step, groups: list[Group], attempt: int, facts: Facts) -> list[Group]:
    """A rubric for each answer, as a group of writers a question. One whose prompt is too long stays empty, and is no outcome."""
    requests, places, trains = [], [], ctx.cfg.schedule.order == "alternate"
    for number, group in enumerate(groups):
        for i, member in enumerate(group.members):
            ids = rubric_prompt(ctx, group.question, ctx.raw(member.completion.tokens, "policy"))
            room = ctx.cfg.update.pack_length - ctx.cfg.rubric_sampling.max_new_tokens if trains else len(ids)
            fits = len(ids) <= min(ctx.cfg.sampler.max_prompt, room)
            facts.share("rlcer/prompt_too_long_share", [not fits])
            if fits:
                places.append((number, i, ids))
                requests.append(ctx.request(ids, 1, "rubric", "rubric", step.update, ctx.cfg.rubric_sampling,
                                            slot=group.slot, attempt=attempt, sample=i))  # fmt: skip
    out = [Group(g.slot, attempt, g.prompt, g.question, g.record_id, [_nothing() for _ in g.members]) for g in groups]
    for (number, i, ids), (completion,) in zip(places, ctx.generate("rubric", requests)):
        out[number].members[i] = Member(completion, ctx.text(completion.tokens, "rubric"), None, prompt=ids)
    return out


def _nothing() -> Member:
    """A writer that was not asked."""
    return Member(Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32), "stop"), "", None)


def rubric_prompt(ctx: Context, question: str, answer: str) -> list[int]:
    """The writer's prompt; a template without the slot 'answer' shows the question alone."""
    slots = {"question": question} | ({"answer": answer} if "answer" in prompt_slots(ctx.cfg.rubric.prompt) else {})
    messages = render_prompt(ctx.cfg.rubric.prompt, **slots)
    return ctx.voices["rubric"].tokenizer.render_messages(messages, thinking=ctx.cfg.generator.thinking)


def _parse(ctx: Context, member: Member) -> Parsed[Rubric] | None:
    """None: no rubric was asked for."""
    if not member.prompt:
        return None
    text = ctx.raw(member.completion.tokens, "rubric")
    cut = member.completion.finish == "length"
    return parse_rubric(text, ctx.cfg.rubric, truncated=cut, opened=ctx.opened("rubric"))


Checks = dict[tuple[int, int], dict[int, Verdict]]  # (slot, whose rubric) -> by answer


def _check(
    ctx: Context, step: Step, groups: list[Group], rubrics: dict[int, list[Parsed[Rubric] | None]], found: _Found
) -> Checks:
    """Verdicts of every readable rubric on every answer to its question, reasoning included: that is what is graded."""
    items, places = [], []
    for group in groups:
        texts = [ctx.raw(member.completion.tokens, "policy") for member in group.members]
        for i, parsed in enumerate(rubrics[group.slot]):
            if parsed is None or parsed.value is None:
                continue
            plain = Rubric(tuple(dataclasses.replace(c, weight=1.0) for c in parsed.value.criteria))
            for j, text in enumerate(texts):
                request = request_id("judge", group.slot, group.attempt, i * ctx.cfg.schedule.group + j)
                items.append(JudgeItem(group.question, plain, text, request))
                places.append((group.slot, i, j))
    out: Checks = {}
    if items:
        assert ctx.judge is not None
        with ctx.timed("judge"):
            found.verdicts += (verdicts := ctx.judge.judge(items, step.update))
        for (slot, i, j), verdict in zip(places, verdicts):
            out.setdefault((slot, i), {})[j] = verdict
    return out


def _set_rewards(
    ctx: Context, member: Member, author: Member, parsed: Parsed[Rubric] | None, verdicts: dict[int, Verdict], i: int,
    correct: np.ndarray, facts: Facts,
) -> None:  # fmt: skip
    """Rewards of answer i and of the writer of its rubric. None where an instrument failed, or where nothing can be said."""
    if parsed is None:
        return
    author.note = {"rubric_status": parsed.status, "rubric_detail": parsed.detail}
    author.parts = {"format": float(parsed.ok)}
    facts.share("rubric/valid_share", [parsed.ok])
    if parsed.value is None:
        author.reward = writer_reward(None, False)
        return
    votes = {j: v.parts for j, v in verdicts.items() if v.status == "ok"}
    judged = sorted(votes)
    valid = valid_criteria(np.asarray([votes[j] for j in judged]), correct[judged], ctx.cfg.rlcer.correlation) if judged else None
    author.reward = writer_reward(valid, True)
    if valid is None:
        return
    share = float(np.mean(valid))
    author.parts |= {"valid": share}
    author.terms = {"valid": share, "format": 1.0}
    author.note |= {"valid_criteria": np.flatnonzero(valid).tolist(), "votes": {str(j): list(votes[j]) for j in judged}}
    facts.mean("rlcer/valid_criteria_share", [share])
    points = np.asarray([c.weight for c in parsed.value.criteria])
    cot = reasoning_reward(points, np.asarray(votes[i]), valid) if i in votes else None
    facts.share("rlcer/no_valid_criterion_share", [not valid.any()])
    member.note = {"rubric": render_rubric(parsed.value), "rubric_valid": np.flatnonzero(valid).tolist()}
    if (reward := _reasoner(ctx.cfg, bool(correct[i]), cot)) is not None and cot is not None:
        member.reward = reward
        member.parts |= {"cot": cot}
        outcome = ctx.cfg.rlcer.outcome_weight * (1.0 if correct[i] else -1.0)
        member.terms = {"outcome": outcome, "cot": reward - outcome}


def _reasoner(cfg: Experiment, correct: bool, cot: float | None) -> float | None:
    """reasoner_reward with the weights of both parts."""
    if (reward := reasoner_reward(correct, cot)) is None or cot is None:
        return None
    return cfg.rlcer.outcome_weight * (reward - cot) + cfg.rlcer.cot_weight * cot


def _add_verdicts(facts: Facts, verdicts: Sequence[Verdict], most_failures: float) -> None:
    failed = [v.status != "ok" for v in verdicts]
    facts.share("judge/failure_share", failed)
    facts.total("judge/verdicts", len(verdicts))
    facts.alarm("judge/alarm", failed, most_failures)
    for status in STATUSES[1:]:
        facts.share(f"judge/{status}_share", [v.status == status for v in verdicts])
    facts.mean_std("judge/score", [v.score for v in verdicts if v.score is not None])
