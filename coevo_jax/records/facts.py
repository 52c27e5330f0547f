"""What an update's metrics are made of: numbers by name, kept apart until those of every process are there.

A mean of means is none: each process sends what it counted, and the reduction runs once, over all of it. The numbers of the
processes are joined in their order, so of contiguous slots, and a metric differs from that of one process by rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

Row = dict[str, float]
LEAST = 8  # rows below which a correlation is noise
NORMAL_95 = 1.959964  # of a standard normal number, 95 % lie between this and its negative


def _mean_std(name: str, v: np.ndarray) -> Row:
    return {f"{name}/mean": float(v.mean()), f"{name}/std": float(v.std())} if v.size else {}


def _ratio(v: np.ndarray, empty: float) -> float:
    """Of a list top, bottom, top, bottom, ..."""
    top, bottom = v[0::2].sum(), v[1::2].sum()
    return float(top / bottom) if bottom else empty


def _correlation(name: str, v: np.ndarray) -> Row:
    """Of values x, y, first, x, y, first, ... that lie around their groups' means already (first: 1 in a group's first row); none
    for few of them, or where one doesn't vary. `name`/least: the nearest to 0 that its interval of 95 % has (Fisher's z; each
    group's mean has cost a degree of freedom), 0 where that holds 0."""
    x, y, groups = v[0::3], v[1::3], v[2::3].sum()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    if len(x) < LEAST or scale <= 1e-12:
        return {}
    r, free = float(x @ y) / scale, len(x) - groups - 2
    size = min(abs(r), 1.0 - 1e-12)
    least = max(0.0, float(np.tanh(np.arctanh(size) - NORMAL_95 / np.sqrt(free)))) if free > 0 else 0.0
    return {name: r, f"{name}/least": least}


# kind -> (name, values) -> its part of a row. A kind without an entry for no values is left out of the row then.
KINDS: dict[str, Callable[[str, np.ndarray], Row]] = {
    "mean_std": _mean_std,
    "mean": lambda name, v: {name: float(v.mean())} if v.size else {},
    "share": lambda name, v: {name: float(v.mean()) if v.size else 0.0},
    "std": lambda name, v: {name: float(v.std()) if v.size else 0.0},
    "total": lambda name, v: {name: float(v.sum())},
    "ratio": lambda name, v: {name: _ratio(v, 0.0)},
    "ratio_if": lambda name, v: {name: _ratio(v, 0.0)} if v[1::2].sum() else {},
    "rest": lambda name, v: {name: 1.0 - _ratio(v, 0.0)},
    "over": lambda name, v: {name: float(v[0::2].mean() > v[1]) if v.size else 0.0},  # flag, limit, flag, limit, ...
    "correlation": _correlation,
    "least": lambda name, v: {name: float(v.min())} if v.size else {},
    "most": lambda name, v: {name: float(v.max())} if v.size else {},
}


class Facts:
    """Numbers by the name of the metric that they make. Adding to a name twice joins the numbers."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, list[float]]] = {}

    def add(self, kind: str, name: str, values: Iterable[float]) -> None:
        """kind: one of KINDS. ValueError where the name is of another kind."""
        kept = self._kept.setdefault(name, (kind, []))
        if kept[0] != kind or kind not in KINDS:
            raise ValueError(f"metric {name!r} is {kept[0]!r} already, not {kind!r}")
        kept[1].extend(float(value) for value in values)

    def mean_std(self, name: str, values: Iterable[float]) -> None:
        """`name`/mean and `name`/std (of the population); nothing for no values: a mean of nothing is not 0."""
        self.add("mean_std", name, values)

    def mean(self, name: str, values: Iterable[float]) -> None:
        """The mean; nothing for no values."""
        self.add("mean", name, values)

    def share(self, name: str, flags: Iterable[bool]) -> None:
        """Share of true flags, 0 for none."""
        self.add("share", name, flags)

    def alarm(self, name: str, flags: Iterable[bool], limit: float) -> None:
        """1 where the share of true flags is over the limit, else 0."""
        self.add("over", name, [value for flag in flags for value in (flag, limit)])

    def std(self, name: str, values: Iterable[float]) -> None:
        """Standard deviation of the population, 0 for none."""
        self.add("std", name, values)

    def total(self, name: str, value: float) -> None:
        """A sum."""
        self.add("total", name, [value])

    def ratio(self, name: str, top: float, bottom: float) -> None:
        """Sum of tops over sum of bottoms, 0 for none."""
        self.add("ratio", name, [top, bottom])

    def extend(self, other: Facts) -> None:
        """Join another process's or part's numbers behind these."""
        for name, (kind, values) in other._kept.items():
            self.add(kind, name, values)

    def prefixed(self, prefix: str) -> Facts:
        """The same numbers under names that begin with `prefix`/."""
        out = Facts()
        for name, (kind, values) in self._kept.items():
            out.add(kind, f"{prefix}/{name}", values)
        return out

    def row(self) -> Row:
        """The metrics."""
        out: Row = {}
        for name, (kind, values) in self._kept.items():
            out |= KINDS[kind](name, np.asarray(values, np.float64))
        return out

    def state(self) -> dict[str, Any]:
        """As JSON has it, to send."""
        return {name: [kind, values] for name, (kind, values) in self._kept.items()}

    @staticmethod
    def joined(states: Iterable[dict[str, Any]]) -> Facts:
        """What several processes sent, in their order."""
        facts = Facts()
        for state in states:
            for name, (kind, values) in state.items():
                facts.add(kind, name, values)
        return facts
