"""DynamicRubric's verifier: yes or no for each (item, answer) alone, over any judge that scores a rubric of one item.

It never sees another answer, another item or a weight. All rubrics of a prompt are asked together, an item that several of them
hold once; over criterion_logits the prompts are question | answer | item, so everything up to the item is prefilled once for
each answer, whatever the number of rubrics and items (benchmarks/verifier.py measures it).

Axes: M different items of a prompt, N answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from coevo_jax.judges.base import Judge, JudgeItem
from coevo_jax.records.verdicts import Verdict
from coevo_jax.rubrics import Criterion, Rubric


@dataclasses.dataclass(frozen=True)
class Asked:
    """Items and answers of one prompt. requests: the identity of each answer in the update, unique over all prompts."""

    question: str
    items: tuple[str, ...]
    answers: tuple[str, ...]
    requests: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Votes:
    """p_MxN: p(yes) / (p(yes) + p(no)), NaN where the verifier failed; votes_MxN: 1, 0 or NaN. row: of each item's text."""

    p_MxN: np.ndarray
    votes_MxN: np.ndarray
    row: dict[str, int]

    def of(self, rubric: Rubric, table: str = "votes") -> np.ndarray:
        """The rows of a rubric's items."""
        rows = [self.row[c.text] for c in rubric.criteria]
        return (self.votes_MxN if table == "votes" else self.p_MxN)[rows]


def items_of(rubrics: Sequence[Rubric]) -> tuple[str, ...]:
    """Different items of several rubrics, in order of first appearance."""
    return tuple(dict.fromkeys(c.text for rubric in rubrics for c in rubric.criteria))


def verify(judge: Judge, asked: Sequence[Asked], update: int, yes_above: float = 0.5) -> tuple[list[Votes], list[Verdict]]:
    """Votes of each prompt, and every verdict. An answer is yes where p is above `yes_above`: a tie is no yes."""
    items, places = [], []
    for number, one in enumerate(asked):
        for m, text in enumerate(one.items):
            rubric = Rubric((Criterion(text, 1.0),))
            for n, (answer, request) in enumerate(zip(one.answers, one.requests)):
                items.append(JudgeItem(one.question, rubric, answer, request, branch=(m,)))
                places.append((number, m, n))
    verdicts = judge.judge(items, update) if items else []
    tables = [np.full((len(one.items), len(one.answers)), np.nan) for one in asked]
    for (number, m, n), verdict in zip(places, verdicts):
        if verdict.score is not None:
            tables[number][m, n] = verdict.score
    return [_votes(one, p, yes_above) for one, p in zip(asked, tables)], verdicts


def _votes(asked: Asked, p: np.ndarray, yes_above: float) -> Votes:
    votes = np.where(np.isnan(p), np.nan, np.asarray(p > yes_above, np.float64))
    return Votes(p, votes, {text: m for m, text in enumerate(asked.items)})
