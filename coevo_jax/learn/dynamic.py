"""DynamicRubric's formulas (arXiv 2607.20083): scores, discriminability, anchors, two objectives as advantages. NumPy, float64.

Axes: M items of a rubric, K candidates or N answers, G rubrics of a group, B samples of a batch in any order.
A vote is 1 (yes), 0 (no) or NaN (the verifier failed).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coevo_jax.config import AdvantageConfig
from coevo_jax.learn.advantages import Advantages, group_advantages


def scores(votes_MxN: np.ndarray, weights_M: np.ndarray) -> np.ndarray:
    """E(y) = sum_m w_m v_m(y) / sum_m w_m, [N] in [0, 1]. NaN where a vote failed: a mean over the rest is of another rubric."""
    votes, weights = _checked(votes_MxN, weights_M)
    return weights @ votes / weights.sum()


def discriminability(votes_MxK: np.ndarray, weights_M: np.ndarray) -> float:
    """R_disc = sum_m w_m v_m (1 - v_m) / sum_m w_m, in [0, 0.25], v_m the mean over the candidates whose vote is valid.

    NaN where an item has no valid vote at all: nothing can be said of the rubric.
    """
    votes, weights = _checked(votes_MxK, weights_M)
    valid = ~np.isnan(votes)
    count = valid.sum(axis=1)
    if not count.all():
        return float("nan")
    share = np.where(valid, votes, 0.0).sum(axis=1) / count
    return float(weights @ (share * (1 - share)) / weights.sum())


def bt_anchor(scores_N: np.ndarray, labels_N: Sequence[float]) -> float:
    """R_anchor = sum_{i<j} log sigmoid(S_i - S_j) / ((j - i) 2^(i-1)) over labelled answers, i = 1 the best. At most 0.

    labels: higher is better. A pair with equal labels has no order and is left out; ranks count all answers all the same, so
    that the weights stay those of n answers (tied ones stand in their own order).
    """
    s, labels = _ranked(scores_N, labels_N)
    total = 0.0
    for i in range(len(s)):
        for j in range(i + 1, len(s)):
            if labels[i] > labels[j]:
                total += log_sigmoid(s[i] - s[j]) / ((j - i) * 2.0**i)  # i counts from 0 here
    return float(total)


def listnet_anchor(scores_N: np.ndarray, labels_N: Sequence[float], tau: float = 1.0) -> float:
    """sum_i softmax(rel)_i log softmax(S / tau)_i (ListNet's top-one form), rel = n - rank; tied answers share a mean rank."""
    s, labels = _ranked(scores_N, labels_N)
    rank = np.asarray([np.flatnonzero(labels == label).mean() + 1 for label in labels])
    rel = len(s) - rank
    return float(np.exp(_log_softmax(rel)) @ _log_softmax(s / tau))


def pair_accuracy(scores_N: np.ndarray, labels_N: Sequence[float]) -> float:
    """Share of the differently labelled pairs that the scores order alike; a tie of scores counts one half. NaN for none."""
    found = [0.5 + 0.5 * np.sign(a) for a in _ordered_gaps(scores_N, labels_N)]
    return float(np.mean(found)) if found else float("nan")


def kendall_tau(scores_N: np.ndarray, labels_N: Sequence[float]) -> float:
    """Kendall's tau-b of scores and labels, in [-1, 1]. NaN where either doesn't vary."""
    s, labels = np.asarray(scores_N, np.float64), np.asarray(labels_N, np.float64)
    i, j = np.triu_indices(len(s), 1)
    a, b = np.sign(s[i] - s[j]), np.sign(labels[i] - labels[j])
    scale = np.sqrt((a != 0).sum() * (b != 0).sum())
    return float((a * b).sum() / scale) if scale else float("nan")


def two_objectives(
    disc_B: np.ndarray, anchor_B: np.ndarray, groups_B: np.ndarray, valid_B: np.ndarray, skipped: Sequence[int],
    cfg: AdvantageConfig, objectives: str = "both", weight: float = 1.0,
) -> Advantages:  # fmt: skip
    """A = A_disc + weight * A_anchor, each reward normalised inside its group first: raw, R_disc <= 0.25 would vanish beside an
    anchor of -1 to -10. objectives: both | discriminability | anchor.

    A reward that is equal over a group adds 0. A group trains nothing where it has fewer than two valid samples, where it is in
    `skipped`, or, with cfg.drop_zero_variance, where all its advantages would be 0 for equal rewards.
    """
    use = {"both": (1.0, weight), "discriminability": (1.0, 0.0), "anchor": (0.0, 1.0)}[objectives]
    found = [group_advantages(r, groups_B, valid_B, cfg) for r in (disc_B, anchor_B)]
    values = sum(factor * part.values for factor, part in zip(use, found))
    used = [part for factor, part in zip(use, found) if factor]
    groups = found[0].groups
    constant = [g for g in groups if all(g in part.zero_variance for part in used)]
    few = [g for g in groups if ((groups_B == g) & valid_B).sum() < 2]
    gone = [g for g in groups if g in few or g in skipped or (cfg.drop_zero_variance and g in constant)]
    keep = valid_B & ~np.isin(groups_B, np.asarray(gone, groups.dtype))
    as_ids = lambda ids: np.asarray(ids, groups.dtype)  # noqa: E731
    return Advantages(np.where(keep, values, 0.0), keep, groups, as_ids(constant), as_ids(gone))


def log_sigmoid(x: float) -> float:
    """log(1 / (1 + exp(-x)))."""
    return float(-np.logaddexp(0.0, -x))


def _log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max()
    return shifted - np.log(np.exp(shifted).sum())


def _ranked(scores_N: np.ndarray, labels_N: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Both, the best label first; ties in their own order. ValueError for a score that isn't finite."""
    s, labels = np.asarray(scores_N, np.float64), np.asarray(labels_N, np.float64)
    if s.shape != labels.shape or s.ndim != 1 or len(s) < 2:
        raise ValueError(f"scores {s.shape} and labels {labels.shape} of at least two answers are needed")
    if not np.isfinite(s).all():
        raise ValueError("a failed score anchors nothing")
    order = np.argsort(-labels, kind="stable")
    return s[order], labels[order]


def _ordered_gaps(scores_N: np.ndarray, labels_N: Sequence[float]) -> list[float]:
    s, labels = _ranked(scores_N, labels_N)
    return [s[i] - s[j] for i in range(len(s)) for j in range(i + 1, len(s)) if labels[i] > labels[j]]


def _checked(votes_MxN: np.ndarray, weights_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    votes, weights = np.asarray(votes_MxN, np.float64), np.asarray(weights_M, np.float64)
    if votes.ndim != 2 or weights.shape != votes.shape[:1] or not weights.size or not (weights > 0).all():
        raise ValueError(f"votes {votes.shape} and weights {weights.shape}, all above 0, don't belong together")
    if not np.isin(votes[~np.isnan(votes)], (0.0, 1.0)).all():
        raise ValueError("a vote is 0, 1 or NaN")
    return votes, weights
