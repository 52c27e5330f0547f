"""The judges of a run: which of them serve in a cycle, loaded when their turn comes and let go after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from coevo_jax.config import Experiment, JudgeConfig
from coevo_jax.config.several import all_judges, judge_name, serving
from coevo_jax.judges import Judge
from coevo_jax.judges.several import Panel
from coevo_jax.sampler import Engine


@dataclasses.dataclass(frozen=True)
class Seat:
    """A judge that serves. params: its weights, None for one without; engine: None where no engine runs it."""

    name: str
    cfg: JudgeConfig
    judge: Judge
    params: Any = None
    engine: Engine | None = None
    pairs: Judge | None = None  # judge.pairs=pairwise: the same model, asked about two answers side by side


class Bench:
    """The judges by number (config/several.py). `make(number)` loads one."""

    def __init__(self, cfg: Experiment, make: Callable[[int], Seat]):
        self.cfg, self._make = cfg, make
        self.seats: dict[int, Seat] = {}

    def changes(self, cycle: int) -> bool:
        """Do other judges serve in `cycle` than those seated?"""
        return set(self.seats) != set(serving(self.cfg.panel, cycle))

    def sit(self, cycle: int) -> list[Seat]:
        """Let those go that serve no more, then load those whose cycle has come; returns the newly seated."""
        wanted = serving(self.cfg.panel, cycle)
        self.seats = {number: seat for number, seat in self.seats.items() if number in wanted}
        new = [number for number in wanted if number not in self.seats]
        for number in new:
            self.seats[number] = self._make(number)
        return [self.seats[number] for number in new]

    @property
    def serving(self) -> list[Seat]:
        """The judges that serve, by number."""
        return [self.seats[number] for number in sorted(self.seats)]

    @property
    def judge(self) -> Judge:
        """The judge that serves, or the panel of those that do."""
        return self._joined([seat.judge for seat in self.serving])

    @property
    def pair_judge(self) -> Judge | None:
        """That of pairs side by side, where the judges that serve judge them so."""
        pairs = [seat.pairs for seat in self.serving if seat.pairs is not None]
        return self._joined(pairs) if pairs else None

    def _joined(self, judges: list[Judge]) -> Judge:
        if len(judges) == 1:
            return judges[0]
        how = self.cfg.panel.aggregate
        # Answers have no pair and so no margin: under margin_kappa_format their scores are averaged.
        return Panel(tuple(judges), "mean" if how == "margin_kappa_format" else how, tuple(seat.name for seat in self.serving))

    @property
    def weights(self) -> dict[str, Any]:
        """Weights of the judges that serve, by name."""
        return {seat.name: seat.params for seat in self.serving if seat.params is not None}

    def later(self, cycle: int) -> list[tuple[str, str]]:
        """(name, source) of the judges that do not serve in `cycle`."""
        now = serving(self.cfg.panel, cycle)
        return [(judge_name(i), judge.source) for i, judge in enumerate(all_judges(self.cfg)) if i not in now]
