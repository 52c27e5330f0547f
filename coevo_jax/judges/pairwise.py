"""Pairwise verdicts and the order of the two answers: a call says who sat in slot A, and a verdict names an answer, never a slot.

The policy's answer is 'own', the other one 'other'. In the forward call it sits in slot A, in the reverse call in slot B.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from coevo_jax.judges.base import Instrument, Judge, JudgeItem, WritingJudge
from coevo_jax.records.verdicts import Verdict
from coevo_jax.rubrics import render_rubric
from coevo_jax.text.parse import parse_winner

TEMPLATE = "judge_pair"
SCORES = {"A": 1.0, "tie": 0.5, "B": 0.0}  # of the answer in slot A
Slot = Literal["A", "B"]
Side = Literal["own", "other", "tie"]


def side_of(winner: str | None, own_slot: Slot) -> Side | None:
    """Which answer a call's winner ('A', 'B' or 'tie'; None: the judge failed) is."""
    if winner is None or winner == "tie":
        return None if winner is None else "tie"
    if winner not in ("A", "B"):
        raise ValueError(f"winner {winner!r} is none of A, B, tie")
    return "own" if winner == own_slot else "other"


def both_orders(forward: str | None, reverse: str | None) -> float | None:
    """1/2 (own wins forward) + 1/2 (own wins reverse), a tie giving half of its half: Rubric-ARM's policy reward.

    A judge that always says 'A' gives 1/2. None when a call failed: half a reward would be a failure's (design.md 4.1).
    """
    sides = (side_of(forward, "A"), side_of(reverse, "B"))
    if None in sides:
        return None
    return sum({"own": 0.5, "tie": 0.25, "other": 0.0}[str(side)] for side in sides)


def agreed(forward: str | None, reverse: str | None) -> Side | None:
    """The answer that both orders name, the filter of pairs for DPO; None where they differ, tie or fail."""
    first, second = side_of(forward, "A"), side_of(reverse, "B")
    return first if first == second and first != "tie" else None


def order_flipped(forward: str | None, reverse: str | None) -> bool | None:
    """Did the order decide? None when a call failed."""
    first, second = side_of(forward, "A"), side_of(reverse, "B")
    return None if first is None or second is None else first != second


# ------------------------------------------------------------------------------------------------- a judge of pairs


def slots(item: JudgeItem) -> dict[str, str]:
    """What the prompt shows of an item."""
    rubric = render_rubric(item.rubric)
    return {"question": item.question, "rubric": rubric, "answer_a": item.answer, "answer_b": item.other}


def read(text: str, item: JudgeItem, truncated: bool, opened: bool) -> Verdict:
    """The verdict in the judge's text: 1 where the answer in slot A wins, 0 where that in B does, 1/2 for a tie."""
    found = parse_winner(text, ties=True, truncated=truncated, opened=opened)
    return Verdict(found.status, None if found.value is None else SCORES[found.value], text, (), None, found.detail)


read_verdict = read


def make(instrument: Instrument) -> WritingJudge:
    """A judge of pairs over a model: it is asked under the same settings as the judge of single answers."""
    return WritingJudge("pairwise", instrument, slots, instrument.cfg.pairs_prompt or TEMPLATE, read)


@dataclasses.dataclass(frozen=True)
class ByScores:
    """A judge of pairs over one of single answers that costs nothing (the small world's rules): the higher score wins."""

    inner: Judge
    name: str = "pairwise"

    def judge(self, items: list[JudgeItem], update: int) -> list[Verdict]:
        """One verdict an item, in their order."""
        first = self.inner.judge(items, update)
        second = self.inner.judge([dataclasses.replace(item, answer=item.other) for item in items], update)
        return [_compared(a, b) for a, b in zip(first, second)]


def _compared(a: Verdict, b: Verdict) -> Verdict:
    if a.score is None or b.score is None:
        return a if a.score is None else b
    return Verdict("ok", 0.5 + 0.5 * ((a.score > b.score) - (a.score < b.score)))


def sides(order: str, coin: int) -> tuple[Slot, ...]:
    """In which slot the better answer sits, call by call, under judge.order. coin: 0 or 1, of 'random'."""
    if order == "random":
        return ("A",) if coin else ("B",)
    return ("A",) if order == "first" else ("A", "B")


def margin_of(scores: Sequence[float], slots_: Sequence[Slot], order: str) -> float:
    """Margin of the better answer, from -1 to 1, of verdicts (1: slot A wins): the mean over the calls. agree: 0 unless both
    orders name the same answer, so a judge that always says 'A' gives 0 under both and agree, and 1 under first."""
    own = [2 * s - 1 if slot == "A" else 1 - 2 * s for s, slot in zip(scores, slots_)]
    if order == "agree" and min(own) * max(own) <= 0:
        return 0.0
    return sum(own) / len(own)
