"""From a score for each criterion to the score of an answer. The arithmetic is ours, not the judge's."""

from __future__ import annotations

import math
from collections.abc import Sequence

from coevo_jax.rubrics import Rubric


def weighted_mean(rubric: Rubric, parts: Sequence[float]) -> float:
    """sum(w p) / sum(w), in [0, 1] for parts in [0, 1]: weights that add up to 0.9 or 1.1 don't move the scale."""
    if len(parts) != len(rubric.criteria):
        raise ValueError(f"{len(parts)} scores for {len(rubric.criteria)} criteria")
    weights = [c.weight for c in rubric.criteria]
    mean = math.fsum(w * p for w, p in zip(weights, parts)) / math.fsum(weights)
    return min(max(mean, 0.0), 1.0)  # rounding only
