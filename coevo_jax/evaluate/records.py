"""What a benchmark asks (Example) and what a system said (Judged). A failed score is None, never a number."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

Scores = tuple[float | None, ...]  # of the units of an example: its answers, or its criteria


@dataclasses.dataclass(frozen=True)
class Example:
    """One unit of a benchmark.

    label: of a pair, 'A', 'B' or 'tie'. scores: reference score of each answer, higher is better (1 and 0: right and wrong).
    criteria, met: yes/no criteria of the only answer and whether each is met. rubric: one that comes with the data.
    """

    id: str
    prompt: str
    answers: tuple[str, ...]
    label: str = ""
    scores: tuple[float, ...] = ()
    annotators: tuple[str, ...] = ()
    criteria: tuple[str, ...] = ()
    met: tuple[bool, ...] = ()
    subset: str = ""
    reference: str = ""
    rubric: Any = None


@dataclasses.dataclass(frozen=True)
class Judged:
    """A system's scores of an example, one tuple a game; in the second game of a pair the answers changed places, and its scores
    are mapped back to the example's order.

    calls: verdicts asked for; failures: how many of them failed, by status. rubric: its text; rubric_status: of the generator's
    text, 'ok', what is wrong with it, or '' where none was written.
    """

    id: str
    games: tuple[Scores, ...]
    calls: int = 0
    failures: Mapping[str, int] = dataclasses.field(default_factory=dict)
    rubric: str = ""
    rubric_status: str = ""
    rubric_detail: str = ""
    notes: tuple[dict[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Score:
    """A benchmark's number, by the rule that `rule` names, in [0, 1] where nothing else is said, with its bootstrap interval.

    strict: ties and failures are wrong. tie_share: of the decisions that were made. failure_share: of the decisions that a failed
    verdict or an invalid rubric left open. parts: further numbers by name; subsets: (score, n) by name.
    """

    rule: str
    n: int
    score: float
    strict: float
    tie_share: float
    failure_share: float
    low: float
    high: float
    parts: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    subsets: Mapping[str, tuple[float, int]] = dataclasses.field(default_factory=dict)
