"""Progress on the console: one live line a phase on a terminal, plain lines elsewhere, and a table when a phase ends."""

from __future__ import annotations

import collections
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

Cell = str | float | int | None


class Console:
    """phase() starts a phase, step() reports in it, table() closes it. The clock only feeds what is printed."""

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic, window: int = 8):
        self._stream = stream or sys.stdout
        self._live = bool(getattr(self._stream, "isatty", lambda: False)())
        self._clock = clock
        self._marks: collections.deque[tuple[int, float]] = collections.deque(maxlen=window + 1)
        self._name, self._total, self._shown = "", 0, 0

    def phase(self, name: str, total: int, done: int = 0) -> None:
        """Start a phase of `total` steps, `done` of which an earlier process did."""
        self._end_line()
        self._name, self._total = name, total
        self._marks.clear()
        self._marks.append((done, self._clock()))

    def step(self, done: int, values: Mapping[str, Cell] | None = None) -> None:
        """`done` steps of the phase are done; `values` are shown after rate and time left."""
        self._marks.append((done, self._clock()))
        rate = self.rate
        parts = [f"{self._name} {done}/{self._total}"]
        if rate:
            unit = f"{rate:.2f} steps/s" if rate >= 1 else f"{1 / rate:.1f} s/step"
            parts += [unit, f"ETA {duration((self._total - done) / rate)}"]
        parts += [f"{name} {number(value)}" for name, value in (values or {}).items()]
        self._show(" | ".join(parts))

    @property
    def rate(self) -> float:
        """Steps a second over the last few steps; 0 while unknown."""
        (first, start), (last, end) = self._marks[0], self._marks[-1]
        return (last - first) / (end - start) if end > start and last > first else 0.0

    def line(self, text: str) -> None:
        """A line that stays."""
        self._end_line()
        print(text, file=self._stream, flush=True)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Cell]], title: str = "") -> None:
        """A table that stays."""
        self.line((f"{title}\n" if title else "") + format_table(header, rows))

    def _show(self, text: str) -> None:
        if not self._live:
            print(text, file=self._stream, flush=True)
            return
        print("\r" + text.ljust(self._shown), end="", file=self._stream, flush=True)
        self._shown = len(text)

    def _end_line(self) -> None:
        if self._shown:
            print(file=self._stream)
            self._shown = 0


def format_table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    cells = [list(header)] + [[number(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def number(value: Cell) -> str:
    """A short form: whole numbers whole, others to three or four digits, '-' for none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, str | int):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
    return f"{value:.2e}"


def duration(seconds: float) -> str:
    """'42 s', '3 min 05 s', '2 h 07 min'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
