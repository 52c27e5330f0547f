"""Bootstrap intervals (Efron, 1979) of scores that are weighted means of a statistic over strata. Seeded.

A stratum's examples are drawn with replacement inside it, so that a benchmark's subsets keep their sizes.

Axes: D draws, N examples of a stratum.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import numpy as np

DRAWS, LEVEL = 10_000, 0.95
CHUNK = 2_000_000  # indices drawn at a time
Statistic = Callable[[np.ndarray], np.ndarray]  # indices [..., N] -> values [...]


@dataclasses.dataclass(frozen=True)
class Stratum:
    """`size` examples and what is computed from any choice of them; a score is the mean over strata by weight."""

    name: str
    size: int
    statistic: Statistic
    weight: float = 1.0

    def value(self) -> float:
        """The statistic of the examples as they are; NaN without any."""
        return float(self.statistic(np.arange(self.size))) if self.size else float("nan")


def mean_of(values: Sequence[float] | np.ndarray) -> Statistic:
    """The mean of the chosen values; NaN values are left out."""
    array = np.asarray(values, np.float64)
    known = ~np.isnan(array)
    return ratio_of(np.where(known, array, 0.0), known)


def ratio_of(top: Sequence[float] | np.ndarray, bottom: Sequence[float] | np.ndarray) -> Statistic:
    """Sum of the chosen tops over the sum of the chosen bottoms; NaN where that is 0."""
    tops, bottoms = np.asarray(top, np.float64), np.asarray(bottom, np.float64)

    def statistic(indices: np.ndarray) -> np.ndarray:
        below = bottoms[indices].sum(axis=-1)
        return np.where(below > 0, tops[indices].sum(axis=-1) / np.where(below > 0, below, 1.0), np.nan)

    return statistic


def estimate(strata: Sequence[Stratum]) -> float:
    """Weighted mean of the strata's values; those without one are left out and the weights normalised over the rest."""
    found = [(s.value(), s.weight) for s in strata]
    known = [(value, weight) for value, weight in found if not np.isnan(value)]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total > 0 else float("nan")


def bootstrap(strata: Sequence[Stratum], seed: int = 0, draws: int = DRAWS, level: float = LEVEL) -> tuple[float, float]:
    """Percentile interval of `estimate`. The draws of a stratum depend on the seed and its name alone."""
    values = [(_draw(s, seed, draws), s.weight) for s in strata if s.size]
    if not values:
        return float("nan"), float("nan")
    top, bottom = np.zeros(draws), np.zeros(draws)
    for found, weight in values:
        known = ~np.isnan(found)
        top += np.where(known, found, 0.0) * weight
        bottom += known * weight
    means = np.where(bottom > 0, top / np.where(bottom > 0, bottom, 1.0), np.nan)
    if np.isnan(means).all():
        return float("nan"), float("nan")
    low, high = np.nanpercentile(means, [50 * (1 - level), 50 * (1 + level)])
    return float(low), float(high)


def _draw(stratum: Stratum, seed: int, draws: int) -> np.ndarray:
    """The statistic of `draws` choices, [D]."""
    digest = hashlib.blake2b(f"{seed}\0{stratum.name}".encode(), digest_size=32).digest()
    random = np.random.RandomState(np.frombuffer(digest, "<u4"))
    step = max(1, CHUNK // stratum.size)
    parts = [
        stratum.statistic(random.randint(stratum.size, size=(min(step, draws - start), stratum.size)))
        for start in range(0, draws, step)
    ]
    return np.concatenate(parts)
