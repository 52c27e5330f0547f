"""What a run says on the console: stage marks, a line an update with rate and time left, a table a phase and one at the end."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from coevo_jax.records.console import Cell, Console
from coevo_jax.records.metrics import read_metrics

# Shown on the update's line and in the tables, as far as the role's rows have them.
LINE = {
    "reward": "reward/mean",
    "valid": "rubric/valid_share",
    "kept": "groups/kept",
    "kl": "kl",
    "tok/s": "sampler/tokens_per_second",
}
TABLE = {
    "reward": "reward/mean", "reward sd": "reward/std", "valid rubrics": "rubric/valid_share", "margin": "reward/margin/mean",
    "pair acc.": "rubric/pair_accuracy", "judge fail": "judge/failure_share", "groups kept": "groups/kept", "kl": "kl",
    "entropy": "entropy", "length": "completions/length/mean", "loss": "loss", "tok/s": "sampler/tokens_per_second",
    "s/update": "time/total",
}  # fmt: skip


class RunConsole:
    """Progress of a run. Stage marks ('mark batch 12') name what begins; `quiet_marks` hides them on a terminal."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console()
        self._last_progress = 0.0
        self._stage = ""

    def note(self, text: str) -> None:
        """A line that stays."""
        self.console.line(text)

    def mark(self, name: str, update: int) -> None:
        """A stage mark, for whoever watches the log (and for the kill test): printed where COEVO_MARKS is set."""
        if os.environ.get("COEVO_MARKS"):
            self.console.line(f"mark {name} {update}")

    def stage(self, name: str, cycle: int, updates: int, done: int, total: int) -> None:
        """A stage begins: `done` of all `total` updates of the run are finished."""
        self._stage = f"cycle {cycle + 1} {name}"
        self.console.line(f"-- {self._stage}: {updates} updates")
        self.console.phase("update", total, done)

    def progress(self, what: str, done: int, total: int) -> None:
        """Inside an update; at most a line every five seconds."""
        now = monotonic()
        if now - self._last_progress > 5.0 and done < total:
            self._last_progress = now
            self.console.line(f"   {what} {done}/{total}")

    def update(self, row: Mapping[str, Any], done: int) -> None:
        """An update is finished."""
        self.console.step(done, {"stage": self._stage, **_cells(row, LINE)})
        for name in row:
            if name.endswith("/alarm") and row[name]:
                part = name.removesuffix("/alarm")
                self.note(f"warning: {part}/failure_share is {row[f'{part}/failure_share']:.2f} in update {row['step']}")

    def summary(self, folder: Path, finished: bool) -> None:
        """The table per phase, peak memory and the run folder's path."""
        rows = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
        phases: dict[tuple[int, str], list[dict[str, Any]]] = {}
        for row in rows:
            phases.setdefault((row["cycle"], row["stage"]), []).append(row)
        if phases:
            table = [
                [f"cycle {cycle + 1} {stage}", len(group), *_means(group).values()] for (cycle, stage), group in phases.items()
            ]
            self.console.table(["phase", "updates", *TABLE], table, title="means per phase")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        self.console.line(f"peak memory {peak:.2f} GiB")
        self.console.line(f"{'finished' if finished else 'stopped; the same command goes on'}: {folder}")


def _cells(row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Cell]:
    return {short: row[name] for short, name in names.items() if row.get(name) is not None}


def _means(rows: list[dict[str, Any]]) -> dict[str, Cell]:
    out: dict[str, Cell] = {}
    for short, name in TABLE.items():
        values = [row[name] for row in rows if row.get(name) is not None]
        out[short] = sum(values) / len(values) if values else None
    return out
