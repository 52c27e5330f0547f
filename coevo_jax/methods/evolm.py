"""EvoLM (arXiv 2605.03871): policy and rubric generator trained in turn, K updates each, over one judge.

Policy phase: question -> one rubric; question -> G answers; the judge scores each answer under the rubric.
Rubric phase: a preference pair of the policy's own answers; question -> G rubrics; the reward of a rubric is
alpha * f(J(a+), J(a-)) + (1 - alpha) * format, f the margin by default (section 3 of the paper; alpha = 0.7).
What failures mean is design.md 4.1: a failed verdict removes its sample; an invalid rubric of the role in training is an outcome.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from coevo_jax.config import Experiment, RubricConfig
from coevo_jax.config.several import policy_names
from coevo_jax.judges import JudgeItem
from coevo_jax.judges.aggregate import group_kappa, vote
from coevo_jax.judges.several import Panel
from coevo_jax.methods.context import Context, request_id
from coevo_jax.methods.control import ask_heldout, drop_criteria, shape_lengths
from coevo_jax.methods.fixed_rubrics import fixed_rubric
from coevo_jax.methods.groups import Group, Member, collect, to_batch
from coevo_jax.methods.pairs import make_pairs
from coevo_jax.methods.rewards import panel_rewards, rubric_reward
from coevo_jax.methods.side_by_side import judge_side_by_side
from coevo_jax.methods.stage import Batch, Stage, Step
from coevo_jax.methods.written_rubrics import COUNTS, parse, retry_invalid, written
from coevo_jax.preference.pairs import Pair, add_pairs
from coevo_jax.records.facts import Facts
from coevo_jax.records.verdicts import STATUSES, Verdict
from coevo_jax.rubrics import Rubric, format_reward, render_rubric, rubric_stats
from coevo_jax.sampler import Completion
from coevo_jax.text.parse import Parsed


def stages(cfg: Experiment) -> list[Stage]:
    """The schedule: alternating phases, generator first (sequential), or one role alone. Of several policies each has K updates a
    cycle, and they take turns in giving the answers of the rubric phase."""
    k, out, policies = cfg.schedule.k, list[Stage](), policy_names(cfg)
    rubric = lambda cycle, n: Stage("rubric", "rubric", cycle, n, rubric_batch, policy=policies[cycle % len(policies)])  # noqa: E731
    if cfg.schedule.order == "generator_first":
        total = k * cfg.schedule.cycles
        return [rubric(0, total), policy_stage("policy", 1, total)]
    for cycle in range(cfg.schedule.cycles):
        if cfg.schedule.order != "generator_only":
            out += [policy_stage(name, cycle, k) for name in policies]
        if cfg.schedule.order != "policy_only" and not cfg.generator.frozen:
            out.append(rubric(cycle, k))
    return out


def policy_stage(name: str, cycle: int, updates: int) -> Stage:
    """A phase that trains one policy."""
    return Stage(name, name, cycle, updates, policy_batch, counts_as_policy=True, policy=name)


# ---------------------------------------------------------------------------------------------------- policy phase


def policy_batch(ctx: Context, step: Step) -> Batch:
    """Answers of the policy, scored by the judge under one rubric a question."""
    counts = dict.fromkeys(COUNTS, 0)
    verdicts: list[Verdict] = []
    rubrics: list[Rubric] = []
    dropped = Facts()

    def make(slots: list[int], attempt: int) -> list[Group]:
        records = {slot: ctx.streams[step.policy].next(slot) for slot in slots}
        answers, parsed = _answers_and_rubrics(ctx, step, records, attempt)
        counts["rubric/endpoint_failed"] += len(slots) - len(parsed)
        found = retry_invalid(ctx, step, records, attempt, parsed, counts)
        found = {slot: drop_criteria(ctx.cfg, rubric, step, slot, attempt, dropped) for slot, rubric in found.items()}
        rubrics.extend(rubric for rubric in found.values() if rubric.criteria)
        groups = [
            _answer_group(ctx, step, slot, attempt, records[slot], answers[slot], found[slot]) for slot in slots if slot in found
        ]
        for slot in slots:  # the buffer keeps one answer a slot and update, of a dropped group too
            _store(ctx, step, slot, records[slot], answers[slot][0])
        verdicts.extend(_judge_answers(ctx, step, groups, found, records))
        shape_lengths(ctx.cfg, groups)
        return groups

    groups, advantages = collect(ctx, ctx.slots, make)
    facts = dropped
    facts.ratio("rubric/valid_share", counts["rubric/valid"], counts["rubric/written"])
    facts.total("rubric/retried", counts["rubric/retried"])
    facts.total("rubric/prompts_dropped", counts["rubric/prompts_dropped"])
    _add_buffer(facts, ctx)
    _add_rubrics(facts, rubrics)
    _add_verdicts(facts, verdicts, ctx.cfg.judge.alarm_failure_share)
    facts.ratio("judge/tie_share", *_ties(groups))
    _add_spread(facts, groups, "judge")
    _add_seats(facts, ctx, verdicts)
    if ctx.writer is not None:
        facts.total("rubric/endpoint_failed", counts["rubric/endpoint_failed"])
    return to_batch(ctx, step, groups, advantages, facts)


def _answers_and_rubrics(
    ctx: Context, step: Step, records: dict[int, dict[str, Any]], attempt: int
) -> tuple[dict[int, list[Completion]], dict[int, Parsed[Rubric]]]:
    """G answers and one rubric, valid or not, for each slot's question; no rubric where an endpoint failed to give one."""
    cfg, slots = ctx.cfg, list(records)
    sampling = cfg.rubric_sampling
    if cfg.compat.policy_rubric_temperature:
        sampling = dataclasses.replace(sampling, temperature=cfg.compat.policy_rubric_temperature)
    ask = [
        ctx.request(ctx.answer_prompt(records[s]["prompt"], step.policy), cfg.schedule.group, "answer", step.policy, step.update,
                    cfg.answer, slot=s, attempt=attempt)
        for s in slots
    ]  # fmt: skip
    if cfg.rubric.source != "generator":
        return dict(zip(slots, ctx.generate(step.policy, ask))), {s: fixed_rubric(cfg.rubric, records[s]) for s in slots}
    if ctx.writer is not None:  # the endpoint writes while we sample
        collect = ctx.writer.start([records[s]["prompt"] for s in slots], sampling)
        answers = ctx.generate(step.policy, ask)
        return dict(zip(slots, answers)), written(ctx, slots, collect)
    write = [
        ctx.request(ctx.rubric_prompt(records[s]["prompt"]), 1, "policy_rubric", "rubric", step.update, sampling,
                    slot=s, attempt=attempt)
        for s in slots
    ]  # fmt: skip
    rubrics, answers = ctx.generate_both(write, ask, step.policy)
    return dict(zip(slots, answers)), {s: parse(ctx, r[0]) for s, r in zip(slots, rubrics)}


def _answer_group(
    ctx: Context, step: Step, slot: int, attempt: int, record: dict[str, Any], answers: list[Completion], rubric: Rubric
) -> Group:
    members = [Member(c, ctx.text(c.tokens, step.policy), None) for c in answers]
    question = record["prompt"]
    prompt = ctx.answer_prompt(question, step.policy)
    return Group(slot, attempt, prompt, question, record["id"], members, {"rubric": render_rubric(rubric)})


def _judge_answers(
    ctx: Context, step: Step, groups: list[Group], rubrics: dict[int, Rubric], records: dict[int, dict[str, Any]]
) -> list[Verdict]:
    """Judge every answer under its group's rubric and set the members' rewards."""
    asked: list[tuple[Group, int, Member, JudgeItem]] = []
    for group in groups:
        for index, member in enumerate(group.members):
            request = request_id("judge", group.slot, group.attempt, index)
            reference = records[group.slot].get("reference", "")
            asked.append((group, index, member, JudgeItem(group.question, rubrics[group.slot], member.text, request, reference)))
    verdicts = _judge(ctx, [item for *_, item in asked], step)
    for (_, _, member, _), verdict in zip(asked, verdicts):
        member.reward = verdict.score if verdict.status == "ok" else None
        member.note = {"judge": dataclasses.asdict(verdict)}
        if member.reward is not None:
            member.parts = {"judge": member.reward}
    ask_heldout(ctx, step, asked)
    return verdicts


def _store(ctx: Context, step: Step, slot: int, record: dict[str, Any], completion: Completion) -> None:
    where = ctx.buffer_slot(step.policy, slot)
    ctx.buffer.add(where, step.policy_updates, record["id"], record["prompt"], completion.tokens, completion.finish)


# ---------------------------------------------------------------------------------------------------- rubric phase


def rubric_batch(ctx: Context, step: Step) -> Batch:
    """Rubrics of the generator, rewarded for telling the better answer of a pair from the worse one."""
    verdicts: list[Verdict] = []
    rubrics: list[Rubric] = []
    pairs: list[Pair] = []
    guards: dict[str, int] = {}
    asked = [0]

    def make(slots: list[int], attempt: int) -> list[Group]:
        asked[0] += len(slots)
        made, completions = make_pairs(ctx, step, slots, attempt, guards)
        pairs.extend(made.values())
        groups = []
        for slot, pair in made.items():
            prompt = ctx.rubric_prompt(pair.question, training=True)
            members = [Member(c, ctx.text(c.tokens, "rubric"), None) for c in completions[slot]]
            groups.append(Group(slot, attempt, prompt, pair.question, pair.record_id, members, {"pair": _pair_note(pair)}))
        verdicts.extend(_judge_rubrics(ctx, step, groups, made, rubrics))
        return groups

    groups, advantages = collect(ctx, ctx.slots, make)
    parts = [m.parts for g in groups for m in g.members if "margin" in m.parts]
    facts = Facts()
    _add_rubrics(facts, rubrics)
    _add_verdicts(facts, verdicts, ctx.cfg.judge.alarm_failure_share)
    add_pairs(facts, pairs, asked[0], ctx.cfg.pairs)
    for name, number in sorted(guards.items()):
        facts.total(f"pairs/{name}", number)
    _add_buffer(facts, ctx)
    facts.share("rubric/valid_share", [m.parts["format"] == 1.0 for g in groups for m in g.members if "format" in m.parts])
    facts.share("judge/tie_share", [p["margin"] == 0.0 for p in parts])
    facts.mean("judge/order_flip_share", [m.note["flipped"] for g in groups for m in g.members if "flipped" in m.note])
    _add_spread(facts, groups, "accepted")
    facts.mean("rubric/pair_accuracy", [p["margin"] > 0 for p in parts])
    _add_panel(facts, groups)
    _add_seats(facts, ctx, verdicts)
    return to_batch(ctx, step, groups, advantages, facts)


def _judge_rubrics(ctx: Context, step: Step, groups: list[Group], pairs: dict[int, Pair], rubrics: list[Rubric]) -> list[Verdict]:
    """Score both answers of the pair under every valid rubric, and set the members' rewards."""
    items: list[JudgeItem] = []
    asked: list[tuple[Member, Rubric]] = []
    for group in groups:
        pair = pairs[group.slot]
        for index, member in enumerate(group.members):
            parsed = parse(ctx, member.completion)
            member.parts = {"format": format_reward(parsed)}
            member.note = {"rubric_status": parsed.status, "rubric_detail": parsed.detail}
            if parsed.value is None:  # an outcome, not a failure: format 0 and both scores 0, the judge is not asked
                _set_reward(member, 0.0, 0.0, 0.0, ctx.cfg.rubric)
                continue
            asked.append((member, parsed.value))
            rubrics.append(parsed.value)
            for side, answer in enumerate((pair.accepted_text, pair.rejected_text)):
                request = request_id("judge", group.slot, group.attempt, index, retry=side)
                items.append(JudgeItem(pair.question, parsed.value, answer, request))
    if ctx.pair_judge is not None:
        with ctx.timed("judge"):
            verdicts = judge_side_by_side(ctx, step, [member for member, _ in asked], items)
        return _by_panel(ctx, groups, verdicts)
    verdicts = _judge(ctx, items, step)
    for (member, _), plus, minus in zip(asked, verdicts[::2], verdicts[1::2]):
        member.note |= {"judge_accepted": dataclasses.asdict(plus), "judge_rejected": dataclasses.asdict(minus)}
        if plus.score is None or minus.score is None:
            continue  # the rubric leaves its group
        member.parts |= {"margin": plus.score - minus.score, "accepted": plus.score, "rejected": minus.score}
        _set_reward(member, plus.score, minus.score, 1.0, ctx.cfg.rubric)
        if isinstance(ctx.judge, Panel):
            member.note["margins"] = [a - b for a, b in zip(plus.parts, minus.parts)]
    return _by_panel(ctx, groups, verdicts)


def _by_panel(ctx: Context, groups: list[Group], verdicts: list[Verdict]) -> list[Verdict]:
    """Of several judges, set the rewards of whole groups. Returns the verdicts."""
    if isinstance(ctx.judge, Panel):
        for group in groups:
            _reward_by_panel(ctx, group, len(ctx.judge.judges))
    return verdicts


def _reward_by_panel(ctx: Context, group: Group, judges: int) -> None:
    """Rewards from the margins of each judge instead of from the combined scores."""
    members = [m for m in group.members if m.reward is not None]
    margins = [m.note.get("margins", [0.0] * judges) for m in members]  # none of an invalid rubric
    rewards = panel_rewards(margins, [m.parts["format"] for m in members], ctx.cfg.rubric, ctx.cfg.panel)
    for member, reward in zip(members, rewards):
        member.reward, member.terms = reward, {}


def _set_reward(member: Member, accepted: float, rejected: float, fmt: float, cfg: RubricConfig) -> None:
    member.reward = rubric_reward(accepted, rejected, fmt, cfg)
    form = (1 - cfg.alpha) * fmt
    member.terms = {"judge": member.reward - form, "format": form} if cfg.alpha < 1 else {}


# ---------------------------------------------------------------------------------------------------- both phases


def _judge(ctx: Context, items: list[JudgeItem], step: Step) -> list[Verdict]:
    if not items:
        return []
    assert ctx.judge is not None
    with ctx.timed("judge"):
        return ctx.judge.judge(items, step.update)


def _add_verdicts(facts: Facts, verdicts: list[Verdict], most_failures: float) -> None:
    failed = [v.status != "ok" for v in verdicts]
    facts.share("judge/failure_share", failed)
    facts.total("judge/verdicts", len(verdicts))
    facts.alarm("judge/alarm", failed, most_failures)
    for status in STATUSES:
        if status != "ok":
            facts.share(f"judge/{status}_share", [v.status == status for v in verdicts])
    facts.mean_std("judge/score", [v.score for v in verdicts if v.score is not None])
    facts.mean_std("judge/yes_no_mass", [v.yes_no_mass for v in verdicts if v.yes_no_mass is not None])
    facts.mean("judge/criterion_mean", [p for v in verdicts for p in v.parts])
    facts.mean("judge/criterion_spread", [float(np.std(v.parts)) for v in verdicts if v.parts])


def _add_rubrics(facts: Facts, rubrics: list[Rubric]) -> None:
    for name, values in sorted(_columns(rubric_stats(r) for r in rubrics).items()):
        facts.mean(f"rubric/{name}", values)


def _columns(rows: Iterable[dict[str, float]]) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            out.setdefault(name, []).append(value)
    return out


def _ties(groups: list[Group]) -> tuple[int, int]:
    """Pairs of answers inside a group that the judge scored the same, and all pairs."""
    ties = total = 0
    for group in groups:
        scores = [m.reward for m in group.members if m.reward is not None]
        total += len(scores) * (len(scores) - 1) // 2
        ties += sum(a == b for i, a in enumerate(scores) for b in scores[:i])
    return ties, total


def _add_buffer(facts: Facts, ctx: Context) -> None:
    """What the replay buffer holds, and its counts since the start of the run."""
    counts = {"entries": len(ctx.buffer), "bytes": ctx.buffer.nbytes, **ctx.buffer.counters}
    for name, number in counts.items():
        facts.total(f"buffer/{name}", number)


def _add_spread(facts: Facts, groups: list[Group], part: str) -> None:
    """Std of the judge's scores inside a group: of its answers, or of the accepted answer under its rubrics. Mean over groups."""
    scores = [[m.parts[part] for m in group.members if part in m.parts] for group in groups]
    facts.mean("judge/group_spread", [float(np.std(own)) for own in scores if len(own) > 1])


def _add_panel(facts: Facts, groups: list[Group]) -> None:
    """Of several judges: on which share of rubrics they all vote alike, Fleiss' kappa (mean over groups), each one's accuracy."""
    rows = [[m.note["margins"] for m in group.members if "margins" in m.note] for group in groups]
    facts.mean("panel/agreement", [len({vote(m) for m in own}) == 1 for group in rows for own in group])
    facts.mean("panel/kappa", [kappa for group in rows if group and (kappa := group_kappa(group)) is not None])
    for number, margins in enumerate(zip(*[own for group in rows for own in group])):
        facts.mean(f"panel/pair_accuracy_{number}", [m > 0 for m in margins])


def _add_seats(facts: Facts, ctx: Context, verdicts: list[Verdict]) -> None:
    """Of several judges: on which share of the items each was the one that failed."""
    for number, name in enumerate(ctx.judge.seats if isinstance(ctx.judge, Panel) else ()):
        facts.share(f"panel/failure_share_{number}", [v.status != "ok" and v.detail.startswith(f"{name}: ") for v in verdicts])


def _pair_note(pair: Pair) -> dict[str, Any]:
    return {
        "source": pair.source, "gap": pair.gap, "fallback": pair.fallback, "writers": pair.writers,
        "accepted": pair.accepted_text, "rejected": pair.rejected_text, "accepted_ids": pair.accepted_ids.tolist(),
        "rejected_ids": pair.rejected_ids.tolist(),
    }  # fmt: skip
