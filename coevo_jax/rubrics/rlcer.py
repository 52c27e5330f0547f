"""RLCER (arXiv 2602.10885): one policy reasons and writes rubrics for its own reasoning; a frozen verifier grades by them.

Schema: {"rubrics": [{"category", "criterion", "points"}]}, 5 to 15 criteria, points whole numbers from -5 to 5 but 0. The
verifier answers {"judgement": [true, false, ...], "final_score": ...}; its final score is not read, the arithmetic is ours.

Axes: N rollouts of a question, M criteria of a rubric. The training stage is methods/rlcer.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from coevo_jax.config import RubricConfig
from coevo_jax.rubrics.json_criteria import Criterion, Rubric, normalise
from coevo_jax.text.parse import Parsed, last_json_object

MIN_ITEMS, MAX_ITEMS, MOST_POINTS = 5, 15, 5
CORRELATION = 0.2  # a criterion is valid above it


@dataclasses.dataclass(frozen=True)
class PointItem:
    """A criterion and its points, negative for what an answer should not do."""

    category: str
    text: str
    points: int


@dataclasses.dataclass(frozen=True)
class PointRubric:
    """A valid rubric, and the text it was read from."""

    items: tuple[PointItem, ...]
    raw: str = ""

    @property
    def points(self) -> np.ndarray:
        """[M]"""
        return np.asarray([item.points for item in self.items], np.float64)


def parse_points(text: str, *, truncated: bool = False, opened: bool = False) -> Parsed[PointRubric]:
    """The policy's text in its role as writer. Not 'ok' is an outcome of the writer: its format reward is 0."""
    found = last_json_object(text, "rubrics", truncated=truncated, opened=opened)
    if found.value is None:
        return Parsed(found.status, None, found.detail)
    items = found.value.get("rubrics")
    if not isinstance(items, list) or not MIN_ITEMS <= len(items) <= MAX_ITEMS:
        what = f"{len(items)} criteria" if isinstance(items, list) else "no list of criteria"
        return Parsed("parse_fail", None, f"{what}, {MIN_ITEMS} to {MAX_ITEMS} are needed")
    read = [_item(item) for item in items]
    wrongs = [f"criterion {i + 1}: {c}" for i, c in enumerate(read) if isinstance(c, str)]
    if wrongs:
        return Parsed("parse_fail", None, "; ".join(wrongs)[:500])
    good = tuple(c for c in read if isinstance(c, PointItem))
    if len({normalise(c.text) for c in good}) < len(good):
        return Parsed("parse_fail", None, "two criteria are the same")
    return Parsed("ok", PointRubric(good, text))


def _item(item: Any) -> PointItem | str:
    """A criterion, or what is wrong with it."""
    if not isinstance(item, dict):
        return "not an object"
    category, text, points = item.get("category"), item.get("criterion"), item.get("points")
    if not isinstance(text, str) or not normalise(text):
        return "no text"
    if not isinstance(category, str) or not category.strip():
        return "no category"
    if isinstance(points, bool) or not isinstance(points, int) or not 1 <= abs(points) <= MOST_POINTS:
        return f"points {str(points)[:40]!r} are no whole number from -{MOST_POINTS} to {MOST_POINTS} but 0"
    return PointItem(category.strip(), text.strip(), points)


def parse_judgement(text: str, count: int, *, truncated: bool = False, opened: bool = False) -> Parsed[tuple[bool, ...]]:
    """The verifier's answer to each of `count` criteria. Anything but true or false fails the whole verdict."""
    found = last_json_object(text, "judgement", truncated=truncated, opened=opened)
    if found.value is None:
        return Parsed(found.status, None, found.detail)
    said = found.value.get("judgement")
    if not isinstance(said, list) or len(said) != count or not all(isinstance(one, bool) for one in said):
        return Parsed("parse_fail", None, f"judgement is no list of {count} times true or false")
    return Parsed("ok", tuple(said))


def parse_rubric(text: str, cfg: RubricConfig, *, truncated: bool = False, opened: bool = False) -> Parsed[Rubric]:
    """parse_points as a schema among the others: the points are the weights."""
    found = parse_points(text, truncated=truncated, opened=opened)
    if found.value is None:
        return Parsed(found.status, None, found.detail)
    items = found.value.items
    return Parsed("ok", Rubric(tuple(Criterion(i.text, float(i.points), title=i.category) for i in items), text))


def render_points(rubric: PointRubric) -> str:
    """The rubric as the verifier reads it, without its points: they are not its business."""
    return "\n".join(f"{i}. {' '.join(item.text.split())}" for i, item in enumerate(rubric.items, start=1))


# ---------------------------------------------------------------------------------------------------- formulas


def valid_criteria(votes_NxM: np.ndarray, correct_N: np.ndarray, threshold: float = CORRELATION) -> np.ndarray | None:
    """Which criteria are valid, [M]: those that vary over the rollouts and correlate with correctness by more than `threshold`.

    None where correctness doesn't vary: the correlation is undefined, and the question gives no RLCER signal (keeping every
    criterion, as a port does, would reward any rubric).
    """
    votes, correct = np.asarray(votes_NxM, np.float64), np.asarray(correct_N, np.float64)
    if votes.ndim != 2 or correct.shape != votes.shape[:1]:
        raise ValueError(f"votes {votes.shape} and correctness {correct.shape} don't belong together")
    if not correct.size or correct.max() == correct.min():
        return None
    v, z = votes - votes.mean(axis=0), correct - correct.mean()
    varies = votes.max(axis=0) > votes.min(axis=0)
    scale = np.sqrt((v * v).sum(axis=0) * (z @ z))
    correlation = np.divide(v.T @ z, scale, out=np.zeros(votes.shape[1]), where=varies)
    return varies & (correlation > threshold)


def reasoning_reward(points_M: np.ndarray, votes_M: np.ndarray, valid_M: np.ndarray) -> float | None:
    """r_cot = (sum of the points of satisfied criteria - min) / (max - min) over the valid ones, in [0, 1]; min is the sum of
    their negative points, max of their positive ones. None without a valid criterion."""
    points, votes = np.asarray(points_M, np.float64)[valid_M], np.asarray(votes_M, np.float64)[valid_M]
    low, high = points[points < 0].sum(), points[points > 0].sum()
    return None if high == low else float((points @ votes - low) / (high - low))


def reasoner_reward(correct: bool, cot: float | None) -> float | None:
    """r_outcome + r_cot, in [-1, 2], r_outcome being 1 or -1. None without r_cot."""
    return None if cot is None else (1.0 if correct else -1.0) + cot


def writer_reward(valid_M: np.ndarray | None, well_formed: bool) -> float | None:
    """K_valid / K + r_format, in [0, 2], r_format being 1 for a rubric that reads. An unreadable one gets 0: it has no valid
    criterion and no format. None for a readable one whose validity is undefined."""
    if not well_formed:
        return 0.0
    return None if valid_M is None else float(np.mean(valid_M)) + 1.0
