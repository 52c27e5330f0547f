"""Group advantages, on the host in float64.

Axes: N samples of a batch, in any order. A group is named by an integer id, never by position or text (design.md 4.2).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from coevo_jax.config import AdvantageConfig


@dataclasses.dataclass(frozen=True)
class Advantages:
    """`values` [N], 0 where a sample does not train; `keep` [N] says which samples train.

    Sorted ids of groups: `groups` all of them, `zero_variance` those whose rewards are equal, `dropped` those that train nothing.
    """

    values: np.ndarray
    keep: np.ndarray
    groups: np.ndarray
    zero_variance: np.ndarray
    dropped: np.ndarray

    @property
    def stats(self) -> dict[str, float]:
        """Shares of groups, and mean and std of the advantages that train (absent when none does)."""
        count = max(len(self.groups), 1)
        out = {"dropped_share": len(self.dropped) / count, "zero_variance_share": len(self.zero_variance) / count}
        kept = self.values[self.keep]
        return out | ({"mean": float(kept.mean()), "std": float(kept.std())} if kept.size else {})


def group_advantages(rewards: np.ndarray, group_ids: np.ndarray, valid: np.ndarray, cfg: AdvantageConfig) -> Advantages:
    """Advantages of rewards [N] inside their groups [N].

    A sample that is not `valid` (its judge failed) enters no statistic; a group with fewer than two valid samples is dropped.
    Equal rewards give exactly 0, decided by max == min and not by a small std, and drop the group if cfg.drop_zero_variance;
    kept, such a group still pays the KL term. ValueError for a valid reward that is not finite.
    """
    rewards, group_ids, valid = np.asarray(rewards, np.float64), np.asarray(group_ids), np.asarray(valid, bool)
    _check(rewards, group_ids, valid)
    values, keep = np.zeros(len(rewards)), valid.copy()
    groups = np.unique(group_ids)
    if cfg.kind == "gae":  # rewards as they are: the critic makes advantages of them, token by token (learn/critic.py)
        return _rewards(rewards, group_ids, valid, groups)
    zero_variance, dropped = [], []
    for group in groups:
        inside = (group_ids == group) & valid
        constant = inside.sum() > 1 and rewards[inside].max() == rewards[inside].min()
        if constant:
            zero_variance.append(group)
        if inside.sum() < 2 or (constant and cfg.drop_zero_variance):
            dropped.append(group)
            keep[inside] = False
        elif not constant:
            values[inside] = relative(rewards[inside], cfg)
    return Advantages(values, keep, groups, np.asarray(zero_variance, groups.dtype), np.asarray(dropped, groups.dtype))


def _rewards(rewards: np.ndarray, group_ids: np.ndarray, valid: np.ndarray, groups: np.ndarray) -> Advantages:
    """Every valid sample trains, on its reward; a critic needs no group, and equal rewards teach it too."""
    own = [rewards[(group_ids == group) & valid] for group in groups]
    constant = [g for g, r in zip(groups, own) if len(r) > 1 and r.max() == r.min()]
    empty = [g for g, r in zip(groups, own) if not len(r)]
    return Advantages(
        np.where(valid, rewards, 0.0), valid.copy(), groups, np.asarray(constant, groups.dtype), np.asarray(empty, groups.dtype)
    )


def relative(rewards: np.ndarray, cfg: AdvantageConfig) -> np.ndarray:
    """Advantages of one group's rewards [G], G >= 2, not all equal.

    group_std (GRPO, arXiv 2402.03300): (r - mean) / (std + epsilon). mean (Dr. GRPO, arXiv 2503.20783): r - mean.
    leave_one_out (RLOO, arXiv 2402.14740): r - mean of the others.
    """
    ordered = np.sort(rewards)  # sums over a sorted copy: the order of the batch can't change a bit of the result
    centred = rewards - ordered.mean()
    if cfg.kind == "mean":
        return centred
    if cfg.kind == "leave_one_out":
        return centred * (len(rewards) / (len(rewards) - 1))
    if cfg.kind == "group_std":
        return centred / (ordered.std(ddof=cfg.ddof) + cfg.epsilon)
    raise ValueError(f"unknown advantage kind {cfg.kind!r}")


def _check(rewards: np.ndarray, group_ids: np.ndarray, valid: np.ndarray) -> None:
    if not rewards.shape == group_ids.shape == valid.shape or rewards.ndim != 1:
        shapes = f"{rewards.shape}, {group_ids.shape}, {valid.shape}"
        raise ValueError(f"rewards, group ids and valid flags must be vectors of one length, not {shapes}")
    if not np.issubdtype(group_ids.dtype, np.integer) and group_ids.size:
        raise ValueError(f"group ids must be integers, not {group_ids.dtype}")
    broken = np.flatnonzero(valid & ~np.isfinite(rewards))
    if broken.size:
        raise ValueError(f"reward {rewards[broken[0]]} of sample {broken[0]} is marked valid; a failure is never a reward")
