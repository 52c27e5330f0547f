"""GRPO on a verifiable reward: a Python function scores each answer. The plainest check that the loop learns."""

from __future__ import annotations

from coevo_jax.config import Experiment
from coevo_jax.learn.verifiers import resolve_verifier
from coevo_jax.methods.context import Context
from coevo_jax.methods.control import shape_lengths
from coevo_jax.methods.groups import Group, Member, collect, to_batch
from coevo_jax.methods.stage import Batch, Stage, Step
from coevo_jax.records.facts import Facts


def stages(cfg: Experiment) -> list[Stage]:
    """`cycles` stages of K policy updates. UserError for a verifier that can't be imported."""
    resolve_verifier(cfg.schedule.verifier)
    return [
        Stage("policy", "policy", cycle, cfg.schedule.k, policy_batch, counts_as_policy=True)
        for cycle in range(cfg.schedule.cycles)
    ]


def policy_batch(ctx: Context, step: Step) -> Batch:
    """G answers a prompt, each scored by `schedule.verifier` on the prompt's record."""
    verifier = resolve_verifier(ctx.cfg.schedule.verifier)

    def make(slots: list[int], attempt: int) -> list[Group]:
        records = [ctx.streams["policy"].next(slot) for slot in slots]
        prompts = [ctx.answer_prompt(r["prompt"]) for r in records]
        requests = [
            ctx.request(ids, ctx.cfg.schedule.group, "answer", "policy", step.update, ctx.cfg.answer, slot=slot, attempt=attempt)
            for slot, ids in zip(slots, prompts)
        ]
        groups = []
        for slot, record, ids, answers in zip(slots, records, prompts, ctx.generate("policy", requests)):
            members = [Member(c, text, float(verifier(record, text))) for c in answers for text in [ctx.text(c.tokens)]]
            for member in members:
                member.parts = {"verifier": member.reward or 0.0}
            groups.append(Group(slot, attempt, ids, record["prompt"], record["id"], members))
        shape_lengths(ctx.cfg, groups)
        return groups

    groups, advantages = collect(ctx, ctx.slots, make)
    return to_batch(ctx, step, groups, advantages, Facts())
