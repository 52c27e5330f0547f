"""Several judges, or several samples of one, as one judge.

Samples of one judge are exchangeable: those that failed are left out, and none left is a failure. Judges are not: an answer that
a lenient judge failed on would be scored by the strict ones alone, so one judge's failure fails the verdict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from coevo_jax.judges.aggregate import combine_scores
from coevo_jax.judges.base import Judge, JudgeItem, check_items
from coevo_jax.records.verdicts import Verdict, failed

SEPARATOR = "\n===\n"  # between the texts of samples or judges in a verdict's raw text


@dataclasses.dataclass(frozen=True)
class Sampled:
    """One judge asked `samples` times an item, each time with noise of its own (voting@k). how: see combine_scores."""

    inner: Judge
    samples: int
    how: str = "mean"

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def instrument(self) -> object | None:
        return getattr(self.inner, "instrument", None)

    def judge(self, items: list[JudgeItem], update: int) -> list[Verdict]:
        """One verdict an item, in their order; parts: the scores of the samples that did not fail."""
        check_items(items)
        asked = [dataclasses.replace(item, branch=(*item.branch, s)) for item in items for s in range(self.samples)]
        found = iter(self.inner.judge(asked, update))
        return [survivors([next(found) for _ in range(self.samples)], self.how) for _ in items]


@dataclasses.dataclass(frozen=True)
class Panel:
    """Several judges, each asked once. how: see combine_scores; seats: their names in messages, '' = their protocols'."""

    judges: tuple[Judge, ...]
    how: str = "mean"
    seats: tuple[str, ...] = ()
    name: str = "panel"

    def judge(self, items: list[JudgeItem], update: int) -> list[Verdict]:
        """One verdict an item, in their order; parts: a score of each judge, in the order of `judges`.

        Each judge says what it would say alone. What one failed on is not asked of those after it.
        """
        check_items(items)
        names = self.seats or tuple(judge.name for judge in self.judges)
        found: list[list[Verdict]] = [[] for _ in items]
        for judge in self.judges:
            asked = [i for i, own in enumerate(found) if not own or own[-1].score is not None]
            for i, verdict in zip(asked, judge.judge([items[i] for i in asked], update) if asked else []):
                found[i].append(verdict)
        return [unanimous(own, self.how, names) for own in found]


def members(judge: Judge) -> tuple[Judge, ...]:
    """The judges of a panel, or the judge itself."""
    return judge.judges if isinstance(judge, Panel) else (judge,)


def survivors(verdicts: Sequence[Verdict], how: str) -> Verdict:
    """One verdict from samples of one judge."""
    scores = tuple(v.score for v in verdicts if v.score is not None)
    raw = SEPARATOR.join(v.raw for v in verdicts)
    if not scores:
        return failed(verdicts[0].status, f"none of {len(verdicts)} samples: {verdicts[0].detail}", raw)
    return Verdict("ok", combine_scores(scores, how), raw, scores)


def unanimous(verdicts: Sequence[Verdict], how: str, names: Sequence[str]) -> Verdict:
    """One verdict from different judges, of which none may have failed."""
    raw = SEPARATOR.join(v.raw for v in verdicts)
    for name, verdict in zip(names, verdicts):
        if verdict.score is None:
            return failed(verdict.status, f"{name}: {verdict.detail}", raw)
    scores = tuple(v.score for v in verdicts if v.score is not None)
    return Verdict("ok", combine_scores(scores, how), raw, scores)
