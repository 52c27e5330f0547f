"""Query-specific preference: a question's criteria weigh what they tell between its preferred and its rejected answer.

EvoLM's baseline `query_specific_pref`: weights from the differences of the criterion scores, no generator trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from coevo_jax.rubrics.json_criteria import Rubric


def delta_weights(preferred: Sequence[float], rejected: Sequence[float]) -> list[float] | None:
    """Weights that add up to 1 from the scores of each criterion: max(preferred - rejected, 0), normalised.

    A criterion that favours the rejected answer gets 0, never a negative weight. None where no criterion favours the preferred
    one: such a pair says nothing of the weights.
    """
    if len(preferred) != len(rejected):
        raise ValueError(f"{len(preferred)} and {len(rejected)} scores")
    deltas = [max(p - r, 0.0) for p, r in zip(preferred, rejected)]
    total = sum(deltas)
    return [d / total for d in deltas] if total > 0 else None


def reweigh(rubric: Rubric, preferred: Sequence[float], rejected: Sequence[float]) -> Rubric | None:
    """The rubric under delta_weights, without the criteria that have none; None where there are no weights."""
    weights = delta_weights(preferred, rejected)
    if weights is None:
        return None
    if len(weights) != len(rubric.criteria):
        raise ValueError(f"{len(weights)} scores for {len(rubric.criteria)} criteria")
    kept = tuple(dataclasses.replace(c, weight=w) for c, w in zip(rubric.criteria, weights) if w > 0)
    return Rubric(kept, rubric.raw)
