"""How far judges agree: Cohen's and Fleiss' kappa, rank correlations, and the accuracy on pairs with its rule for ties named.

NumPy in float64. A statistic of data that can't carry it (no pair, no variance) is None: it is neither 0 nor 1.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np

Ties = Literal["half", "wrong", "leave_out"]
TIES: tuple[str, ...] = ("half", "wrong", "leave_out")


def pair_accuracy(margins: Sequence[float | None], ties: Ties = "wrong") -> float | None:
    """Share of pairs whose better answer scored higher. margins: score of the better one minus that of the worse one; None: a
    judge failed, and the pair is left out.

    ties: an equal score counts 'half' a point (RewardBench's generative rule), is 'wrong' (its rule for reward models), or is
    'leave_out', of numerator and denominator. Published numbers differ by it, so it is always named.
    """
    if ties not in TIES:
        raise ValueError(f"rule for ties {ties!r} is none of {TIES}")
    known = np.asarray([m for m in margins if m is not None and (ties != "leave_out" or m != 0)], np.float64)
    if not known.size:
        return None
    return float(np.mean((known > 0) + (0.5 if ties == "half" else 0.0) * (known == 0)))


def tie_rate(margins: Sequence[float | None]) -> float | None:
    """Share of equal scores among the pairs without a failure."""
    known = [m == 0 for m in margins if m is not None]
    return float(np.mean(known)) if known else None


def cohen_kappa(first: Sequence[Hashable], second: Sequence[Hashable]) -> float | None:
    """(p_o - p_e) / (1 - p_e) of two raters' categories (Cohen 1960). None where both use one and the same category only."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} ratings")
    if not first:
        return None
    categories = sorted(set(first) | set(second), key=repr)
    shares = [np.asarray([sum(r == c for r in rater) for c in categories]) / len(first) for rater in (first, second)]
    chance = float(shares[0] @ shares[1])
    observed = float(np.mean([a == b for a, b in zip(first, second)]))
    return None if chance == 1.0 else (observed - chance) / (1.0 - chance)


def fleiss_kappa(counts_SxC: Sequence[Sequence[int]] | np.ndarray) -> float | None:
    """Fleiss' kappa (1971) of counts: how many of the n raters put subject s into category c; n is that of every subject.

    None for fewer than two raters, no subject, or one category in use (chance agreement is then 1).
    """
    counts = np.asarray(counts_SxC, np.float64)
    if counts.ndim != 2 or not counts.size:
        return None
    raters = counts.sum(axis=1)
    if (raters != raters[0]).any():
        raise ValueError("every subject needs the same number of ratings")
    n = float(raters[0])
    shares = counts.sum(axis=0) / counts.sum() if n else counts[0]
    chance = float(shares @ shares)
    if n < 2 or chance == 1.0:
        return None
    observed = float(np.mean((counts * (counts - 1)).sum(axis=1) / (n * (n - 1))))
    return (observed - chance) / (1.0 - chance)


def ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 1, equal values sharing the mean of theirs."""
    array = np.asarray(values, np.float64)
    _, inverse, count = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2.0)[inverse]


def pearson(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float | None:
    """Pearson's correlation; None where one side doesn't vary (decided by max == min, not by a small std)."""
    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"two vectors of one length are needed, not {a.shape} and {b.shape}")
    if a.size < 2 or a.max() == a.min() or b.max() == b.min():
        return None
    a, b = a - a.mean(), b - b.mean()
    return float(np.clip(a @ b / np.sqrt((a @ a) * (b @ b)), -1.0, 1.0))


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's correlation of the ranks, equal values sharing theirs."""
    return pearson(ranks(x), ranks(y))


def kendall(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Kendall's tau-b, which corrects for ties: (concordant - discordant) / sqrt((n0 - n1)(n0 - n2))."""
    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"two vectors of one length are needed, not {a.shape} and {b.shape}")
    upper = np.triu_indices(a.size, 1)
    left, right = np.sign(a[:, None] - a[None])[upper], np.sign(b[:, None] - b[None])[upper]
    scale = float(np.sqrt((left @ left) * (right @ right)))
    return float(left @ right) / scale if scale else None
