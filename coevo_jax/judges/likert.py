"""Ratings from 1 to 10 as scores (r - 1) / 9 (RaR, arXiv 2507.17746): one rating an answer, the judge's own weighing.

likert: the question and the answer alone. likert_reference: a reference answer beside them. rar_implicit: the whole rubric.
"""

from __future__ import annotations

from collections.abc import Callable

from coevo_jax.judges.base import Instrument, JudgeItem, WritingJudge
from coevo_jax.judges.json_score import slots as rubric_slots
from coevo_jax.records.verdicts import Verdict
from coevo_jax.text.parse import parse_rating

LOW, HIGH = 1.0, 10.0


def scaled(rating: float) -> float:
    """(r - 1) / 9 of a rating from 1 to 10: 1 -> 0, 7 -> 2/3, 10 -> 1. ValueError outside, a failure's business."""
    if not LOW <= rating <= HIGH:
        raise ValueError(f"rating {rating} is outside {LOW:g} to {HIGH:g}")
    return (rating - LOW) / (HIGH - LOW)


def likert_slots(item: JudgeItem) -> dict[str, str]:
    return {"question": item.question, "answer": item.answer}


def reference_slots(item: JudgeItem) -> dict[str, str]:
    return {"question": item.question, "reference": item.reference, "answer": item.answer}


# protocol -> (template, what its slots show)
RATINGS: dict[str, tuple[str, Callable[[JudgeItem], dict[str, str]]]] = {
    "likert": ("judge_likert", likert_slots),
    "likert_reference": ("judge_reference", reference_slots),
    "rar_implicit": ("judge_rubric_rating", rubric_slots),
}


def read(text: str, item: JudgeItem, truncated: bool, opened: bool) -> Verdict:
    """The verdict in the judge's text."""
    found = parse_rating(text, low=LOW, high=HIGH, truncated=truncated, opened=opened)
    if found.value is None:
        return Verdict(found.status, None, text, (), None, found.detail)
    return Verdict("ok", scaled(found.value), text)


def make(protocol: str) -> Callable[[Instrument], WritingJudge]:
    """The judge of one of these protocols over a model."""
    template, slots = RATINGS[protocol]
    return lambda instrument: WritingJudge(protocol, instrument, slots, template, read)
