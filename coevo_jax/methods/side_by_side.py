"""judge.pairs=pairwise: the judge sees both answers of a pair at once under a rubric, in the order that judge.order names.

Judges like a slot as well as an answer. With the better answer always in slot A, a judge that always says 'A' would be taken for
perfect, so both orders are asked by default, and the share of pairs on which the order decided is a metric.
"""

from __future__ import annotations

import dataclasses

from coevo_jax.judges import JudgeItem
from coevo_jax.judges.aggregate import vote
from coevo_jax.judges.pairwise import margin_of, sides
from coevo_jax.judges.several import Panel
from coevo_jax.methods.context import Context
from coevo_jax.methods.groups import Member
from coevo_jax.methods.rewards import margin_reward
from coevo_jax.methods.stage import Step
from coevo_jax.preference.buffer import hashed
from coevo_jax.records.verdicts import Verdict


def judge_side_by_side(ctx: Context, step: Step, members: list[Member], items: list[JudgeItem]) -> list[Verdict]:
    """Set margin, reward and note of each member. items: two a member, those of the better and of the worse answer alone, whose
    request ids the calls take. A failed call leaves the member without a reward."""
    assert ctx.pair_judge is not None
    order, calls = ctx.cfg.judge.order, list[JudgeItem]()
    slots = [sides(order, hashed("slot", ctx.cfg.seed, step.update, item.request) % 2) for item in items[::2]]
    for better, worse, where in zip(items[::2], items[1::2], slots):
        for slot in where:
            first, second = (better, worse) if slot == "A" else (worse, better)
            calls.append(dataclasses.replace(first, other=second.answer))
    verdicts = ctx.pair_judge.judge(calls, step.update) if calls else []
    found = iter(verdicts)
    for member, where in zip(members, slots):
        own = [next(found) for _ in where]
        member.note["judge_pair"] = [{"better_in": slot, **dataclasses.asdict(v)} for slot, v in zip(where, own)]
        scores = [v.score for v in own if v.score is not None]
        if len(scores) < len(own):
            continue
        margin = margin_of(scores, where, order)
        member.parts["margin"] = margin
        member.reward = margin_reward(margin, 1.0, ctx.cfg.rubric)
        if len(own) == 2:  # what the better answer has in slot A and in slot B
            member.note["flipped"] = vote(scores[0] - 0.5) != vote(0.5 - scores[1])
        if isinstance(ctx.pair_judge, Panel):
            member.note["margins"] = [margin_of(one, where, order) for one in zip(*(v.parts for v in own))]
    return verdicts
