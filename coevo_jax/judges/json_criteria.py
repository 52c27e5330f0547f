"""json_criteria: the judge reads question, rubric and answer, and writes a score for each criterion; the weighting is ours."""

from __future__ import annotations

from coevo_jax.judges.aggregate import weighted_mean
from coevo_jax.judges.base import Instrument, JudgeItem, WritingJudge
from coevo_jax.judges.json_score import slots
from coevo_jax.records.verdicts import Verdict, failed
from coevo_jax.text.parse import parse_criteria_scores


def make(instrument: Instrument) -> WritingJudge:
    """The judge of this protocol over a model."""
    return WritingJudge("json_criteria", instrument, slots, "judge_criteria", read, lambda item: len(item.rubric.criteria))


def read(text: str, item: JudgeItem, truncated: bool, opened: bool) -> Verdict:
    """The verdict in the judge's text; one bad score fails it."""
    found = parse_criteria_scores(text, len(item.rubric.criteria), truncated=truncated, opened=opened)
    if found.value is None:
        return failed(found.status, found.detail, text)
    return Verdict("ok", weighted_mean(item.rubric, found.value), text, found.value)
