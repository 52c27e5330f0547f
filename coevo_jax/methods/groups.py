"""Groups of completions with rewards: drawn per prompt slot, drawn again where they teach nothing, turned into training samples.

A group has an explicit id, `attempt * P + slot`; advantages are computed over ids, never over positions or texts (design.md 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from coevo_jax.learn.advantages import Advantages, group_advantages
from coevo_jax.learn.packing import Sample
from coevo_jax.methods.context import Context
from coevo_jax.methods.control import watch
from coevo_jax.methods.members import Group, Member
from coevo_jax.methods.stage import Batch, Step
from coevo_jax.records.facts import Facts

Maker = Callable[[list[int], int], list[Group]]  # (slots, attempt) -> the groups that could be made, at most one a slot
Weigh = Callable[[Context, list[Group]], Advantages]


def collect(ctx: Context, slots: Iterable[int], make: Maker, weigh: Weigh | None = None) -> tuple[list[Group], Advantages]:
    """Make a group for each slot; slots whose group is missing or dropped draw again, up to advantage.max_resample times.

    Every group made is returned (metrics count them all); `Advantages.keep` says which samples train. weigh: where advantages
    are made of more than one reward (None: advantages_of).
    """
    weigh = weigh or advantages_of
    groups: list[Group] = []
    pending = list(slots)
    for attempt in range(1 + ctx.cfg.advantage.max_resample):
        made = make(pending, attempt)
        groups += made
        kept = _kept_slots(ctx, made, weigh)
        pending = [slot for slot in pending if slot not in kept]
        if not pending:
            break
    return groups, weigh(ctx, groups)


def advantages_of(ctx: Context, groups: list[Group]) -> Advantages:
    """Advantages of all members, inside their groups."""
    ids = np.asarray([g.attempt * ctx.cfg.schedule.prompts + g.slot for g in groups for _ in g.members], np.int64)
    rewards = np.asarray([0.0 if m.reward is None else m.reward for g in groups for m in g.members], np.float64)
    valid = np.asarray([m.reward is not None for g in groups for m in g.members], bool)
    if ctx.cfg.compat.failed_to_mean:
        rewards, valid = _fill_failed(ids, rewards, valid)
    return group_advantages(rewards, ids, valid, ctx.cfg.advantage)


def _fill_failed(ids: np.ndarray, rewards: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """compat.failed_to_mean: a failed verdict takes the mean of its group's valid rewards (0 when there are none)."""
    filled = rewards.copy()
    for group in np.unique(ids):
        inside = ids == group
        mean = rewards[inside & valid].mean() if (inside & valid).any() else 0.0
        filled[inside & ~valid] = mean
    return filled, np.ones_like(valid)


def _kept_slots(ctx: Context, groups: list[Group], weigh: Weigh) -> set[int]:
    keep = weigh(ctx, groups).keep if groups else np.zeros(0, bool)
    owners = [g.slot for g in groups for _ in g.members]
    return {slot for slot, kept in zip(owners, keep) if kept}


def to_batch(ctx: Context, step: Step, groups: list[Group], advantages: Advantages, facts: Facts) -> Batch:
    """Training samples of the kept groups, with the common metrics before the method's and the dump rows of all groups."""
    samples: list[Sample] = []
    rollouts: list[dict[str, Any]] = []
    watched, behind = watch(ctx.cfg, step.role, groups)  # before the rows, whose notes it may add to
    position = 0
    for group in groups:
        for index, member in enumerate(group.members):
            kept, advantage = bool(advantages.keep[position]), float(advantages.values[position])
            position += 1
            group_id = group.attempt * ctx.cfg.schedule.prompts + group.slot
            rollouts.append(_row(ctx, step, group, group_id, index, member, kept, advantage))
            if kept:
                c = member.completion
                samples.append(
                    Sample(
                        prompt=member.prompt or group.prompt, completion=c.tokens, sampler_logp=c.logprobs, advantage=advantage,
                        group=group_id, index=index, truncated=c.finish == "length",
                    )
                )  # fmt: skip
    common = _common_facts(groups, advantages)
    common.extend(facts)
    common.extend(watched)
    return Batch(samples, common, rollouts, behind)


def _row(
    ctx: Context, step: Step, group: Group, group_id: int, index: int, member: Member, kept: bool, advantage: float
) -> dict[str, Any]:
    c = member.completion
    ids = member.prompt or group.prompt
    prompt = ctx.voices[step.role].tokenizer.decode(ids, keep_special=True)
    return {
        "update": step.update, "cycle": step.cycle, "role": step.role, "slot": group.slot, "group": group_id, "sample": index,
        "record": group.record_id, "question": group.question, "prompt": prompt,
        "completion": ctx.raw(c.tokens, step.role), "prompt_ids": list(ids), "completion_ids": c.tokens.tolist(),
        "finish": c.finish, "reward": member.reward, "parts": member.parts, "advantage": advantage, "trained": kept,
        **group.note, **member.note,
    }  # fmt: skip


def _common_facts(groups: list[Group], advantages: Advantages) -> Facts:
    facts, members = Facts(), [m for g in groups for m in g.members]
    lengths = [len(m.completion.tokens) for m in members]
    kept = len({(g.slot, g.attempt) for g, k in zip(_owners(groups), advantages.keep) if k})
    facts.mean_std("reward", [m.reward for m in members if m.reward is not None])
    facts.mean_std("completions/length", lengths)
    facts.share("completions/truncated_share", [m.completion.finish == "length" for m in members])
    facts.std("advantage/std", advantages.values[advantages.keep])
    facts.total("groups/made", len(groups))
    facts.total("groups/kept", kept)
    facts.share("groups/zero_variance_share", [_constant(g) for g in groups])
    facts.share("groups/failed_sample_share", [m.reward is None for m in members])
    facts.total("tokens/completion", sum(lengths))
    facts.add("rest", "groups/dropped_share", [kept, len(groups)])
    for name in sorted({name for m in members for name in m.parts}):
        facts.mean_std(f"reward/{name}", [m.parts[name] for m in members if name in m.parts])
    return facts


def _owners(groups: list[Group]) -> list[Group]:
    return [g for g in groups for _ in g.members]


def _constant(group: Group) -> bool:
    rewards = [m.reward for m in group.members if m.reward is not None]
    return len(rewards) > 1 and max(rewards) == min(rewards)
