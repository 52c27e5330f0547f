"""The policy's part of Rubric-ARM: it trains on what generator and judge say, both frozen by then.

dpo, iterated_dpo: pairs of its own answers, labelled under one list a question; both orders must name the same answer
(methods/preferred.py: the reference is the policy at the iteration's start).
grpo (the paper's online variant): beside G drawn answers a question has one greedy answer a0; under one list
R_k = 1/2 I[judge(a_k, a0) names the first] + 1/2 I[judge(a0, a_k) names the second]: a judge that always says A gives 1/2.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from coevo_jax.config import Experiment
from coevo_jax.judges import JudgeItem
from coevo_jax.judges.pairwise import both_orders, order_flipped
from coevo_jax.methods import preferred
from coevo_jax.methods.arm_judge import ArmJudge, add_verdicts, judge_request, winner
from coevo_jax.methods.arm_lists import write_lists
from coevo_jax.methods.context import Context
from coevo_jax.methods.control import shape_lengths
from coevo_jax.methods.groups import collect, to_batch
from coevo_jax.methods.members import Group, Member
from coevo_jax.methods.preferred import PairItem, PairLabel
from coevo_jax.methods.stage import Batch, Stage, Step
from coevo_jax.records.facts import Facts
from coevo_jax.records.verdicts import Verdict
from coevo_jax.rubrics import Rubric, numbered_list

BASELINE = 1  # number of the retry that names the greedy answer's request


def stages(cfg: Experiment, cycle: int) -> list[Stage]:
    """The policy's stages. Those of grpo go on with the count of cycles at `cycle`; an iteration of DPO is a cycle of its own."""
    if cfg.arm.policy in ("dpo", "iterated_dpo"):
        return preferred.iterations(cfg, label, cycles=1 if cfg.arm.policy == "dpo" else cfg.schedule.cycles)
    if cfg.arm.policy == "grpo":
        return [
            Stage("policy", "policy", cycle + i, cfg.schedule.k, policy_batch, counts_as_policy=True)
            for i in range(cfg.schedule.cycles)
        ]
    return []


def stores(cfg: Experiment) -> dict[str, int]:
    """Slots of the stores of the policy's part."""
    return preferred.stores(cfg) if cfg.arm.policy in ("dpo", "iterated_dpo") else {}


def policy_batch(ctx: Context, step: Step) -> Batch:
    """Drawn answers, each against the greedy answer to its question in both orders under one list."""
    facts, verdicts = Facts(), list[Verdict]()

    def make(slots: list[int], attempt: int) -> list[Group]:
        records = {slot: ctx.streams["policy"].next(slot) for slot in slots}
        places = [(slot, attempt) for slot in slots]
        lists = dict(zip(slots, write_lists(ctx, step, places, [r["prompt"] for r in records.values()], facts, greedy=True)))
        found = {slot: rubric for slot, rubric in lists.items() if rubric is not None}
        groups = _answer(ctx, step, {slot: records[slot] for slot in found}, attempt)
        verdicts.extend(_compare(ctx, step, groups, found, facts))
        shape_lengths(ctx.cfg, groups)
        return groups

    groups, advantages = collect(ctx, ctx.slots, make)
    add_verdicts(facts, verdicts, ctx.cfg.judge.alarm_failure_share)
    return to_batch(ctx, step, groups, advantages, facts)


def _answer(ctx: Context, step: Step, records: dict[int, dict[str, Any]], attempt: int) -> list[Group]:
    """G drawn answers a question, and the greedy one in the group's note."""
    cfg, greedy = ctx.cfg, dataclasses.replace(ctx.cfg.answer, temperature=0.0, top_p=1.0, top_k=0)
    prompts = {slot: ctx.answer_prompt(record["prompt"]) for slot, record in records.items()}
    drawn = [
        ctx.request(ids, cfg.schedule.group, "answer", "policy", step.update, cfg.answer, slot=slot, attempt=attempt)
        for slot, ids in prompts.items()
    ]
    plain = [
        ctx.request(ids, 1, "answer", "policy", step.update, greedy, slot=slot, attempt=attempt, retry=BASELINE)
        for slot, ids in prompts.items()
    ]
    out = ctx.generate("policy", drawn + plain)
    groups = []
    for (slot, record), answers, (base,) in zip(records.items(), out, out[len(drawn) :]):
        members = [Member(c, ctx.text(c.tokens), None) for c in answers]
        note = {"greedy": ctx.text(base.tokens)}
        groups.append(Group(slot, attempt, prompts[slot], record["prompt"], record["id"], members, note))
    return groups


def _compare(ctx: Context, step: Step, groups: list[Group], lists: dict[int, Rubric], facts: Facts) -> list[Verdict]:
    """Set the members' rewards. An answer equal to the greedy one is worth 1/2 without a question to the judge: both orders are
    one prompt, so whatever it says counts once for either side."""
    items, asked = [], []
    for group in groups:
        rubric, base = lists[group.slot], group.note["greedy"]
        group.note["rubric"] = numbered_list.render(rubric)
        for index, member in enumerate(group.members):
            if member.text == base:
                member.reward, member.parts = 0.5, {"judge": 0.5}
                continue
            for order, (first, second) in enumerate(((member.text, base), (base, member.text))):
                request = judge_request(group.slot, group.attempt, 2 * index + order)
                items.append(JudgeItem(group.question, rubric, first, request, other=second))
            asked.append(member)
    verdicts = ArmJudge(ctx).judge(items, step.update)
    for member, forward, reverse in zip(asked, verdicts[::2], verdicts[1::2]):
        member.note = {"judge_first": dataclasses.asdict(forward), "judge_second": dataclasses.asdict(reverse)}
        said = winner(forward), winner(reverse)
        member.reward = both_orders(*said)
        if member.reward is not None:
            member.parts = {"judge": member.reward}
            facts.mean("judge/order_flip_share", [bool(order_flipped(*said))])
    facts.share("arm/equals_greedy_share", [m.text == g.note["greedy"] for g in groups for m in g.members])
    return verdicts


# ---------------------------------------------------------------------------------------------------- labels for DPO


def label(ctx: Context, step: Step, items: list[PairItem], facts: Facts) -> list[PairLabel]:
    """The winner of each pair in both orders, under one list a question; none where it got no valid list."""
    asked = {(item.slot, item.attempt): item.question for item in items}
    lists = dict(zip(asked, write_lists(ctx, step, list(asked), list(asked.values()), facts, greedy=True)))
    judged = [(item, rubric) for item in items if (rubric := lists[item.slot, item.attempt]) is not None]
    calls = []
    for item, rubric in judged:
        calls.append(JudgeItem(item.question, rubric, item.first, item.request(False), other=item.second))
        calls.append(JudgeItem(item.question, rubric, item.second, item.request(True), other=item.first))
    verdicts = ArmJudge(ctx).judge(calls, step.update)
    add_verdicts(facts, verdicts, ctx.cfg.judge.alarm_failure_share, own=False)
    note = {"judge_update": step.update, "generator": ctx.cfg.generator.source or ctx.cfg.policy.source}
    found = {
        id(item): PairLabel(winner(one), winner(two), (one.raw, two.raw), numbered_list.render(rubric), note)
        for (item, rubric), one, two in zip(judged, verdicts[::2], verdicts[1::2])
    }
    return [found.get(id(item), PairLabel(None, None)) for item in items]
