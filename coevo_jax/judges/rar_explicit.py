"""rar_explicit: every criterion is asked as a yes/no question of its own; the score is sum(w c) / sum(w), c in {0, 1}.

RaR's explicit aggregation, with the weights of the rubric's categories (rubrics/rar.py). RaR's predefined rubric and RRD's items
are scored the same way. One criterion without a readable answer fails the verdict: a mean over the rest is of another rubric.
"""

from __future__ import annotations

import dataclasses

from coevo_jax.judges.aggregate import weighted_mean
from coevo_jax.judges.base import Instrument, Judge, JudgeItem, WritingJudge, check_items
from coevo_jax.records.verdicts import Verdict, failed
from coevo_jax.rubrics import Rubric
from coevo_jax.text.parse import parse_yes_no

TEMPLATE = "criterion_yes_no"
SEPARATOR = "\n---\n"  # between the texts of an answer's criteria in a verdict's raw text


def slots(item: JudgeItem) -> dict[str, str]:
    """What the prompt shows: the item's only criterion last, so that an answer's prompts begin alike."""
    (criterion,) = item.rubric.criteria
    return {"question": item.question, "answer": item.answer, "criterion": criterion.text}


def read(text: str, item: JudgeItem, truncated: bool, opened: bool) -> Verdict:
    """The yes or no in the judge's text, as 1 or 0."""
    found = parse_yes_no(text, truncated=truncated, opened=opened)
    if found.value is None:
        return failed(found.status, found.detail, text)
    return Verdict("ok", float(found.value), text)


@dataclasses.dataclass(frozen=True)
class PerCriterion:
    """A judge of whole rubrics over one of single criteria."""

    name: str
    single: Judge

    @property
    def instrument(self) -> Instrument | None:
        """The model behind it, whose weights must stay as they are; None over an endpoint."""
        return getattr(self.single, "instrument", None)

    def judge(self, items: list[JudgeItem], update: int) -> list[Verdict]:
        """One verdict an item, in their order; parts: the answer to each criterion."""
        check_items(items)
        verdicts = iter(self.single.judge([one for item in items for one in split(item)], update))
        return [join(item.rubric, [next(verdicts) for _ in item.rubric.criteria]) for item in items]


def split(item: JudgeItem) -> list[JudgeItem]:
    """An item for each criterion, with an identity of its own."""
    return [
        dataclasses.replace(item, rubric=Rubric((criterion,)), branch=(*item.branch, i))
        for i, criterion in enumerate(item.rubric.criteria)
    ]


def join(rubric: Rubric, verdicts: list[Verdict]) -> Verdict:
    """The verdict on the whole rubric, or the first failure among its criteria."""
    raw = SEPARATOR.join(v.raw for v in verdicts)
    for i, verdict in enumerate(verdicts, start=1):
        if verdict.score is None:
            return failed(verdict.status, f"criterion {i}: {verdict.detail}", raw)
    parts = tuple(v.score for v in verdicts if v.score is not None)
    return Verdict("ok", weighted_mean(rubric, parts), raw, parts)


def make(instrument: Instrument) -> PerCriterion:
    """The judge of this protocol over a model."""
    return PerCriterion("rar_explicit", WritingJudge("criterion_yes_no", instrument, slots, TEMPLATE, read))
