"""json_score: the judge reads question, rubric and answer, and writes reasoning and one score in [0, 1] (EvoLM, section 3)."""

from __future__ import annotations

from coevo_jax.judges.base import Instrument, JudgeItem, WritingJudge
from coevo_jax.records.verdicts import Verdict
from coevo_jax.rubrics import render_rubric
from coevo_jax.text.parse import parse_score


def make(instrument: Instrument) -> WritingJudge:
    """The judge of this protocol over a model."""
    return WritingJudge("json_score", instrument, slots, "judge_score", read)


def slots(item: JudgeItem) -> dict[str, str]:
    """What the prompt shows of an item."""
    return {"question": item.question, "rubric": render_rubric(item.rubric), "answer": item.answer}


def read(text: str, item: JudgeItem, truncated: bool, opened: bool) -> Verdict:
    """The verdict in the judge's text."""
    found = parse_score(text, truncated=truncated, opened=opened)
    return Verdict(found.status, found.value, text, (), None, found.detail)
