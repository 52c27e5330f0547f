"""What a run says on the console: stage marks, a line an update with rate and time left, a table a phase and one at the end."""

from __future__ import annotations

import io
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, TextIO, cast

from coevo_jax.config import ControlConfig, RunConfig
from coevo_jax.learn.control import alarms
from coevo_jax.methods.stage import Behind
from coevo_jax.records.console import Cell, Console
from coevo_jax.records.metrics import read_metrics

# Shown on the update's line and in the tables, as far as the role's rows have them.
LINE = {
    "reward": "reward/mean",
    "acc": "reward_model/accuracy",
    "valid": "rubric/valid_share",
    "kept": "groups/kept",
    "kl": "kl",
    "tok/s": "sampler/tokens_per_second",
    "occ": "sampler/occupancy",
}
TABLE = {
    "reward": "reward/mean", "reward sd": "reward/std", "valid rubrics": "rubric/valid_share", "margin": "reward/margin/mean",
    "pair acc.": "rubric/pair_accuracy", "accuracy": "reward_model/accuracy", "held out": "heldout/accuracy",
    "eval": "eval/score/mean", "probe acc.": "eval/probe/accuracy",
    "judge fail": "judge/failure_share", "groups kept": "groups/kept", "kl": "kl",
    "entropy": "entropy", "length": "completions/length/mean", "loss": "loss", "tok/s": "sampler/tokens_per_second",
    "s/update": "time/total",
}  # fmt: skip

SHOWN = 48  # characters of a text in a table of completions
FEW = 100  # updates of a run too short to show more than movement
NOISE = """
So few updates show movement and no more: differences between phases are mostly noise (compare them with the reward's sd), and
scores of the run's own judge, a small one above all, prove no gain in quality."""


class RunConsole:
    """Progress of a run."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console()
        self._last_progress = 0.0
        self._stage = ""
        self._alarms: dict[str, set[str]] = {}  # by role, those that are on

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

    def alarms(self, row: Mapping[str, Any], behind: Behind, cfg: ControlConfig) -> None:
        """A line for each alarm of a row that was off in the last row of its role, with the rows behind it."""
        on = {alarm.name: alarm for alarm in alarms(row, cfg) if alarm.on}
        shown = {
            name: f"{a.metric} is {row[a.metric]:.2f} ({'below' if a.low else 'above'} {a.limit:g})" for name, a in on.items()
        }
        if row.get("judge/alarm"):
            shown["judge/alarm"] = f"judge/failure_share is {row['judge/failure_share']:.2f}"
        for name in sorted(shown.keys() - self._alarms.get(row["role"], set())):
            rows = _rows_behind(row, behind, on[name].metric if name in on else "")
            self.note(f"warning: {shown[name]} in update {row['step']}{rows}")
        self._alarms[row["role"]] = set(shown)

    def completions(self, rows: Sequence[Mapping[str, Any]], update: int, cfg: RunConfig) -> None:
        """Every run.show_every updates a table of a few completions, the highest, the lowest and between, with their rewards."""
        if cfg.show_every == 0 or update % cfg.show_every or not rows:
            return
        ranked = sorted((row for row in rows if row.get("reward") is not None), key=lambda row: -row["reward"]) or list(rows)
        count = min(cfg.show, len(ranked))
        picked = [ranked[round(i * (len(ranked) - 1) / max(count - 1, 1))] for i in range(count)]
        parts = sorted({name for row in picked for name in row.get("parts", {})})
        header = ["question", "completion", "reward", *parts, "advantage", "finish"]
        table = [
            [_line(row.get("question", "")), _line(row.get("completion", "")), row.get("reward"),
             *(row.get("parts", {}).get(name) for name in parts), row.get("advantage"), row.get("finish", "")]
            for row in picked
        ]  # fmt: skip
        self.console.table(header, table, title=f"completions of update {update}")

    def end_stage(self, metrics: Path, name: str, cycle: int) -> None:
        """A stage ends: its table, which counts the updates of earlier processes too."""
        self._table([row for row in read_metrics(metrics) if (row["cycle"], row["stage"]) == (cycle, name)])

    def summary(self, folder: Path, finished: bool) -> None:
        """The table of all phases and how to read it, peak memory and the run folder's path."""
        rows = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
        if len(rows) < FEW and any("judge/score/mean" in row for row in rows):
            self.note(NOISE)
        self._table(rows, "means per phase")
        self.console.line(f"peak memory {peak_gib():.2f} GiB")
        self.console.line(f"{'finished' if finished else 'stopped; the same command goes on'}: {folder}")

    def _table(self, rows: list[dict[str, Any]], title: str = "") -> None:
        """A line a phase; a column that no phase has is left out."""
        phases: dict[tuple[int, str], list[dict[str, Any]]] = {}
        for row in rows:
            phases.setdefault((row["cycle"], row["stage"]), []).append(row)
        means = {key: _means(group) for key, group in phases.items()}
        columns = [name for name in TABLE if any(cells[name] is not None for cells in means.values())]
        table = [
            [f"cycle {cycle + 1} {stage}", len(phases[cycle, stage]), *(cells[name] for name in columns)]
            for (cycle, stage), cells in means.items()
        ]
        if table:
            self.console.table(["phase", "updates", *columns], table, title=title)


class _Prefixed(io.TextIOBase):
    """Standard output with a process's number before each line."""

    def __init__(self, prefix: str):
        self.prefix, self.fresh = prefix, True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            sys.stdout.write(self.prefix + line if self.fresh else line)
            self.fresh = line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()


def console_of(process: int, verbose: bool = False) -> RunConsole:
    """The console of one of several processes: those other than 0 are silent, or mark their lines."""
    if process == 0:
        return RunConsole()
    stream = _Prefixed(f"[process {process}] ") if verbose else open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    return RunConsole(Console(cast(TextIO, stream)))


def peak_gib() -> float:
    """Peak resident memory of this process in GiB; macOS counts it in bytes, Linux in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def _line(text: str, width: int = SHOWN) -> str:
    """The beginning of a text on one line; characters that would move the terminal's cursor as spaces."""
    plain = "".join(c if c.isprintable() else " " for c in str(text)[: 4 * width])
    plain = " ".join(plain.split())
    return plain if len(plain) <= width else plain[: width - 1] + "\u2026"


def _rows_behind(row: Mapping[str, Any], behind: Behind, metric: str) -> str:
    rows = [f"{name}: {size:.2g}" for size, name in behind.rows.get(metric, [])]
    return f"; in rollouts/update_{row['step']:06d}_{row['role']}.jsonl {', '.join(rows)}" if rows else ""


def _cells(row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Cell]:
    return {short: row[name] for short, name in names.items() if row.get(name) is not None}


def _means(rows: list[dict[str, Any]]) -> dict[str, Cell]:
    out: dict[str, Cell] = {}
    for short, name in TABLE.items():
        values = [row[name] for row in rows if row.get(name) is not None]
        out[short] = sum(values) / len(values) if values else None
    return out
