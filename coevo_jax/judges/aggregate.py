"""From several scores to one: of an answer's criteria, of several judges, of several samples of one judge.

The arithmetic is ours, not the judge's. Formulas of EvoLM's multi-judge rewards are those of its released code.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from coevo_jax.judges.agreement import fleiss_kappa
from coevo_jax.rubrics import Rubric

How = Literal["majority", "mean", "mean_minus_variance", "margin_kappa_format"]
HOW: tuple[str, ...] = ("majority", "mean", "mean_minus_variance", "margin_kappa_format")


def weighted_mean(rubric: Rubric, parts: Sequence[float]) -> float:
    """sum(w p) / sum(w), in [0, 1] for parts in [0, 1]: weights that add up to 0.9 or 1.1 don't move the scale."""
    if len(parts) != len(rubric.criteria):
        raise ValueError(f"{len(parts)} scores for {len(rubric.criteria)} criteria")
    weights = [c.weight for c in rubric.criteria]
    mean = math.fsum(w * p for w, p in zip(weights, parts)) / math.fsum(weights)
    return min(max(mean, 0.0), 1.0)  # rounding only


def combine_scores(scores: Sequence[float], how: str = "mean") -> float:
    """One score of an answer from those of several judges or samples, each in [0, 1].

    mean; majority: the median, which for 0/1 scores is the majority's (a half for an even split); mean_minus_variance: the mean
    less the population variance, at least 0, so that a split panel scores lower.
    """
    if not scores:
        raise ValueError("no scores to combine")
    if how == "mean":
        return statistics.fmean(scores)
    if how == "majority":
        return float(statistics.median(scores))
    if how == "mean_minus_variance":
        return max(statistics.fmean(scores) - statistics.pvariance(scores), 0.0)
    raise ValueError(f"scores of an answer can't be combined by {how!r}")


# ---------------------------------------------------------------------------------------------------- rewards of rubrics


def vote(margin: float) -> int:
    """1 for the accepted answer, -1 for the rejected one, 0 for a tie."""
    return (margin > 0) - (margin < 0)


def group_kappa(margins_GxJ: Sequence[Sequence[float]]) -> float | None:
    """Fleiss' kappa of J judges over the G rubrics of a group, categories: for, tie, against. None where nothing can disagree
    by chance (all votes alike) or there is one judge."""
    counts = [[sum(vote(m) == c for m in row) for c in (1, 0, -1)] for row in margins_GxJ]
    return fleiss_kappa(counts) if counts else None


def rubric_rewards(
    margins_GxJ: Sequence[Sequence[float]], formats_G: Sequence[float], how: str, tie_breaker: str = "mean_score"
) -> list[float]:
    """The reward of each rubric of a group from its margins under J judges (EvoLM's multi-judge code, in our words).

    majority              1 if more judges vote for than against, 0 if fewer; an even split goes by tie_breaker: the sign of the
                          'mean_score' margin, or the 'first_judge' (0 for a margin of 0)
    mean                  share of the judges that vote for
    mean_minus_variance   that share - (1 - kappa), kappa clipped to [0, 1]
    margin_kappa_format   0.5 mean margin + 0.3 format + 0.2 kappa

    kappa is that of the whole group (a single rubric's is the constant -1/(J-1) or undefined); where all judges vote alike it
    counts as 1.
    """
    if how not in HOW:
        raise ValueError(f"aggregation {how!r} is none of {HOW}")
    if len(margins_GxJ) != len(formats_G) or any(not row for row in margins_GxJ):
        raise ValueError("each rubric needs its format and a margin of each judge")
    found = group_kappa(margins_GxJ)
    kappa = 1.0 if found is None else found
    return [_rubric_reward(row, fmt, kappa, how, tie_breaker) for row, fmt in zip(margins_GxJ, formats_G)]


def _rubric_reward(margins: Sequence[float], fmt: float, kappa: float, how: str, tie_breaker: str) -> float:
    votes = [vote(m) for m in margins]
    share = votes.count(1) / len(votes)
    if how == "mean":
        return share
    if how == "mean_minus_variance":
        return share - (1.0 - min(max(kappa, 0.0), 1.0))
    if how == "margin_kappa_format":
        return 0.5 * statistics.fmean(margins) + 0.3 * fmt + 0.2 * kappa
    balance = sum(votes)
    if balance == 0:
        if tie_breaker not in ("mean_score", "first_judge"):
            raise ValueError(f"tie breaker {tie_breaker!r} is none of mean_score, first_judge")
        balance = vote(statistics.fmean(margins) if tie_breaker == "mean_score" else margins[0])
    return 1.0 if balance > 0 else 0.0
