"""points: one call checks every criterion of a rubric with yes or no (RLCER, arXiv 2602.10885). parts: 1 or 0 a criterion.

The judge sees neither points nor weights, and no score of its own is read: what the parts are worth is the method's arithmetic.
"""

from __future__ import annotations

from coevo_jax.judges.base import Instrument, JudgeItem, WritingJudge
from coevo_jax.records.verdicts import Verdict, failed
from coevo_jax.rubrics import numbered
from coevo_jax.rubrics.rlcer import parse_judgement

TEMPLATE = "judge_points"


def make(instrument: Instrument) -> WritingJudge:
    """The judge of this protocol over a model."""
    return WritingJudge("points", instrument, slots, TEMPLATE, read)


def slots(item: JudgeItem) -> dict[str, str]:
    """What the prompt shows of an item."""
    return {"question": item.question, "rubric": numbered(item.rubric), "answer": item.answer}


def read(text: str, item: JudgeItem, truncated: bool, opened: bool) -> Verdict:
    """The verdict in the judge's text; its score is the share of criteria that are met."""
    found = parse_judgement(text, len(item.rubric.criteria), truncated=truncated, opened=opened)
    if found.value is None:
        return failed(found.status, found.detail, text)
    parts = tuple(float(met) for met in found.value)
    return Verdict("ok", sum(parts) / len(parts), text, parts)
