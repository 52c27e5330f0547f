"""What a judge said of one answer under one rubric. A failure is a record of its own and never a number (design.md 4.1)."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

Status = Literal["ok", "parse_fail", "truncated", "timeout", "refused"]
STATUSES: tuple[str, ...] = ("ok", "parse_fail", "truncated", "timeout", "refused")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """status 'ok' with a score in [0, 1] (any finite number where not `bounded`), or a failure of the instrument with score None.

    raw: the judge's text. parts: a score for each criterion, where the protocol has them. yes_no_mass: smallest probability on
    yes and no over the criteria (criterion_logits). detail: what went wrong.
    """

    status: Status
    score: float | None
    raw: str = ""
    parts: tuple[float, ...] = ()
    yes_no_mass: float | None = None
    detail: str = ""
    bounded: bool = True  # a reward model's logit is not

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"verdict status {self.status!r} is none of {STATUSES}")
        if (self.status == "ok") != (self.score is not None):
            raise ValueError(f"a verdict of status {self.status!r} with score {self.score!r}")
        if self.score is not None and not (math.isfinite(self.score) and (not self.bounded or 0.0 <= self.score <= 1.0)):
            raise ValueError(f"a verdict's score is {self.score!r}, " + ("outside [0, 1]" if self.bounded else "not finite"))


def failed(status: Status, detail: str = "", raw: str = "", yes_no_mass: float | None = None) -> Verdict:
    """A failed verdict."""
    return Verdict(status, None, raw, (), yes_no_mass, detail)
