"""Rules of lists of answers with reference scores: rankings, alignment at a gap, styles (RM-Bench), and yes/no criteria.

A pair of answers of a list counts where their reference scores differ. A failed score makes its pairs undecided.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from coevo_jax.evaluate.records import Scores
from coevo_jax.judges.agreement import kendall

GAP_TOLERANCE = 1e-9  # gaps are meant as decimals are: 0.3 - 0.2 reaches 0.1


@dataclasses.dataclass(frozen=True)
class PairCounts:
    """Of a list's pairs with different reference scores: how many were ordered as the reference does, tied, undecided, in all."""

    right: int
    tied: int
    failed: int
    total: int


def pair_counts(scores: Scores, reference: Sequence[float], gap: float = 0.0) -> PairCounts:
    """Counts over pairs whose reference scores differ, by at least `gap`."""
    right = tied = failed = total = 0
    for i, j in itertools.combinations(range(len(reference)), 2):
        distance = reference[i] - reference[j]
        if distance == 0 or abs(distance) < gap - GAP_TOLERANCE:
            continue
        total += 1
        a, b = scores[i], scores[j]
        if a is None or b is None:
            failed += 1
        elif a == b:
            tied += 1
        else:
            right += (a > b) == (distance > 0)
    return PairCounts(right, tied, failed, total)


def top_one(scores: Scores, reference: Sequence[float]) -> float | None:
    """Share of the answers scored highest that are among the best by the reference. A failed score is never the highest; 0 where
    all failed. None for fewer than two answers."""
    if len(reference) < 2:
        return None
    known = [s for s in scores if s is not None]
    if not known:
        return 0.0
    winners = [i for i, s in enumerate(scores) if s == max(known)]
    return sum(reference[i] == max(reference) for i in winners) / len(winners)


def tau(scores: Scores, reference: Sequence[float]) -> float | None:
    """Kendall's tau-b over the answers that have a score. None where fewer than two have one or the reference ties them all; 0
    where the system ties them all."""
    known = [(s, r) for s, r in zip(scores, reference) if s is not None]
    if len({r for _, r in known}) < 2:
        return None
    found = kendall([s for s, _ in known], [r for _, r in known])
    return 0.0 if found is None else found


def style_matrix(scores: Scores, styles: int) -> np.ndarray:
    """RM-Bench: [i,j] is 1 where the chosen answer in style i scores above the rejected one in style j, NaN where one failed.
    scores: of the chosen answers by style, then of the rejected ones. A tie is no win."""
    if len(scores) != 2 * styles:
        raise ValueError(f"{len(scores)} scores for {styles} styles")
    values = np.asarray([np.nan if s is None else s for s in scores], np.float64)
    chosen, rejected = values[:styles, None], values[None, styles:]
    return np.where(np.isnan(chosen) | np.isnan(rejected), np.nan, chosen > rejected)


def style_masks(styles: int) -> dict[str, np.ndarray]:
    """easy: the chosen answer has the richer style (below the diagonal), normal: the same one, hard: the plainer one."""
    ones = np.ones((styles, styles), bool)
    return {"easy": np.tril(ones, -1), "normal": np.eye(styles, dtype=bool), "hard": np.triu(ones, 1)}


def copeland(wins: np.ndarray) -> Scores:
    """Ratings of n answers from pairwise calls: (n - 1) times the mean share of wins against the others.

    wins[i,j]: what answer i has of the call with i in slot A and j in slot B, 1, 1/2 or 0; NaN: not asked or failed. An opponent
    counts where both orders were answered; an answer without any has no rating.
    """
    n = len(wins)
    forward, reverse = wins, 1.0 - wins.T  # of i, sitting in A and in B
    both = (forward + reverse) / 2
    np.fill_diagonal(both, np.nan)
    counted = (~np.isnan(both)).sum(axis=1)
    sums = np.nansum(both, axis=1)
    return tuple(float(sums[i] / counted[i]) * (n - 1) if counted[i] else None for i in range(n))


def criteria_counts(scores: Scores, met: Sequence[bool]) -> tuple[int, int, int]:
    """(agreed, tied, failed) of an answer's criteria: a score above 1/2 says that a criterion is met, one below that it is not,
    and 1/2 says nothing."""
    if len(scores) != len(met):
        raise ValueError(f"{len(scores)} scores of {len(met)} criteria")
    agreed = sum(s is not None and s != 0.5 and (s > 0.5) == m for s, m in zip(scores, met))
    return agreed, sum(s == 0.5 for s in scores), sum(s is None for s in scores)
