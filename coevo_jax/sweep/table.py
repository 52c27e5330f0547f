"""From metrics files to one table: a number a run and metric, then mean and interval over the seeds of a config.

Intervals are over seeds, the runs of one config being draws of one distribution:
t          mean -+ t(n - 1, (1 + level) / 2) s / sqrt(n), s the sample's standard deviation (n - 1 below); Student, 1908
bootstrap  percentiles of the means of 10,000 samples with replacement (Efron, 1979); too narrow for few seeds
"""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coevo_jax.errors import UserError, nearest
from coevo_jax.records.console import number

INTERVALS = ("t", "bootstrap")
REDUCTIONS = ("last", "first", "mean", "min", "max")  # and lastN
DEFAULT = (
    "reward/mean@policy", "reward/mean@rubric", "rubric/valid_share@rubric", "rubric/pair_accuracy@rubric",
    "judge/failure_share", "kl@policy", "completions/length/mean@policy",
)  # fmt: skip
DRAWS = 10_000


@dataclasses.dataclass(frozen=True)
class Metric:
    """NAME[@ROLE][:HOW] of the command line. role: the rows' role or stage, '' = all rows; how: what makes one number of them."""

    name: str
    role: str = ""
    how: str = "last10"

    @property
    def text(self) -> str:
        return self.name + (f"@{self.role}" if self.role else "") + f":{self.how}"


def parse_metric(text: str) -> Metric:
    """UserError for a reduction that does not exist."""
    head, colon, how = text.strip().partition(":")
    name, _, role = head.partition("@")
    how = how if colon else Metric.how
    if not name:
        raise UserError(
            f"{text!r} names no metric", where="--metrics", expected="NAME[@ROLE][:HOW], as reward/mean@policy:last10"
        )
    if how not in REDUCTIONS and not re.fullmatch(r"last[1-9]\d*", how):
        raise UserError(
            f"unknown reduction {how!r}",
            where=f"--metrics, {text}",
            expected=f"one of {', '.join(REDUCTIONS)}, or lastN: the mean of the last N rows",
            nearest=nearest(how, (*REDUCTIONS, "last10")),
        )
    return Metric(name, role, how)


def value_of(rows: Sequence[Mapping[str, Any]], metric: Metric) -> float | None:
    """The metric's number of a run, from those rows of its role that have it; None when none has. Not finite: as if absent."""
    rows = [row for row in rows if metric.role in ("", row.get("role"), row.get("stage"))]
    values = [float(row[metric.name]) for row in rows if isinstance(row.get(metric.name), int | float)]
    if not values:
        return None
    how = metric.how
    if how.startswith("last"):
        return float(np.mean(values[-int(how.removeprefix("last") or 1) :]))
    return {"first": values[0], "mean": float(np.mean(values)), "min": min(values), "max": max(values)}[how]


@dataclasses.dataclass(frozen=True)
class Summary:
    """Over the `n` seeds that have a value. low and high: None for fewer than two."""

    n: int
    mean: float
    sd: float | None = None
    low: float | None = None
    high: float | None = None


def summarize(values: Sequence[float], kind: str = "t", level: float = 0.95) -> Summary | None:
    """Mean and interval (formulas at the top); None without values."""
    x = np.asarray(values, np.float64)
    if not x.size:
        return None
    mean = float(x.mean())
    if x.size == 1:
        return Summary(1, mean)
    sd = float(x.std(ddof=1))
    if kind == "bootstrap":
        picks = np.random.RandomState(0).randint(x.size, size=(DRAWS, x.size))
        low, high = np.percentile(x[picks].mean(axis=1), [50 * (1 - level), 50 * (1 + level)])
        return Summary(x.size, mean, sd, float(low), float(high))
    from scipy.special import stdtrit  # of SciPy, which JAX needs too

    half = float(stdtrit(x.size - 1, (1 + level) / 2)) * sd / float(np.sqrt(x.size))
    return Summary(x.size, mean, sd, mean - half, mean + half)


@dataclasses.dataclass(frozen=True)
class RunValues:
    """What the table knows of a run."""

    name: str
    group: str
    seed: int
    state: str  # finished | failed | stopped | not run | unknown (a run that this sweep did not start)
    updates: int
    values: tuple[float | None, ...]  # by metric


@dataclasses.dataclass(frozen=True)
class Table:
    """Runs and metrics; runs that are not finished or unknown are listed and enter no mean."""

    metrics: tuple[Metric, ...]
    runs: tuple[RunValues, ...]
    kind: str = "t"
    level: float = 0.95

    @property
    def groups(self) -> dict[str, list[RunValues]]:
        """Config name -> its runs that count."""
        found: dict[str, list[RunValues]] = {run.group: [] for run in self.runs}
        for run in self.runs:
            if counts(run):
                found[run.group].append(run)
        return found

    def summaries(self, group: str) -> list[Summary | None]:
        columns = zip(*(run.values for run in self.groups[group])) if self.groups[group] else [()] * len(self.metrics)
        return [summarize([v for v in column if v is not None], self.kind, self.level) for column in columns]


def counts(run: RunValues) -> bool:
    return run.state in ("finished", "unknown") and run.updates > 0


def known_metrics(metrics: Sequence[Metric], rows: Sequence[Sequence[Mapping[str, Any]]], asked: bool) -> tuple[Metric, ...]:
    """Those that a run has. UserError when one was `asked` for that no run has; defaults are left out instead."""
    names = {name for run in rows for row in run for name in row}
    found = tuple(metric for metric in metrics if any(value_of(run, metric) is not None for run in rows))
    for metric in metrics:
        if asked and names and metric not in found:
            close = nearest(metric.name, names) if metric.name not in names else ""
            raise UserError(
                f"no run has a number under {metric.text}",
                where="--metrics",
                expected="a name of the runs' metrics.jsonl" + (", in rows of that role" if metric.name in names else ""),
                nearest=close,
            )
    return found if asked or found else tuple(metrics)


# ----------------------------------------------------------------------------------------------------------------- files


def interval_words(kind: str, level: float) -> str:
    percent = f"{100 * level:g} %"
    if kind == "t":
        return f"{percent} Student's t interval over seeds (n - 1 degrees of freedom)"
    return f"{percent} bootstrap interval over seeds (percentiles of {DRAWS:,} means)"


def cell(summary: Summary | None) -> str:
    """'0.512 [0.480, 0.544]', without brackets for one seed, '-' for none."""
    if summary is None:
        return "-"
    if summary.low is None or summary.high is None:
        return number(summary.mean)
    return f"{number(summary.mean)} [{number(summary.low)}, {number(summary.high)}]"


def markdown(table: Table, title: str = "Sweep") -> str:
    """The table with what is needed to read it, and the runs that are not in it."""
    header = ["config", "seeds", "updates", *(metric.text for metric in table.metrics)]
    lines = [f"# {title}", "", f"Means; in brackets the {interval_words(table.kind, table.level)}. One seed has none.",
             "NAME@ROLE:lastN: a run's number is the mean over the last N updates of that role.", "",
             _row(header), _row(["---"] * len(header))]  # fmt: skip
    for group, runs in table.groups.items():
        planned = sum(run.group == group for run in table.runs)
        seeds = f"{len(runs)}" if len(runs) == planned else f"{len(runs)} of {planned}"
        updates = sorted({run.updates for run in runs})
        span = "-" if not updates else f"{updates[0]}" if len(updates) == 1 else f"{updates[0]} to {updates[-1]}"
        lines.append(_row([group, seeds, span, *map(cell, table.summaries(group))]))
    left_out = [f"- {run.name}: {run.state}" for run in table.runs if not counts(run)]
    unknown = [f"- {run.name}: {run.updates} updates" for run in table.runs if counts(run) and run.state == "unknown"]
    if left_out:
        lines += ["", "Not in the table:", "", *left_out]
    if unknown:
        lines += ["", "In the table, but not run by this sweep, which can't say whether they are finished:", "", *unknown]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"


def table_csv(table: Table) -> str:
    """A line a config and metric."""
    lines: list[Sequence[Any]] = [("config", "metric", "seeds", "mean", "sd", "low", "high", "interval", "level")]
    for group in table.groups:
        for metric, found in zip(table.metrics, table.summaries(group)):
            s = found or Summary(0, float("nan"))
            cells = ("" if v is None or v != v else repr(v) for v in (s.mean, s.sd, s.low, s.high))
            lines.append((group, metric.text, s.n, *cells, table.kind, table.level))
    return _csv(lines)


def runs_csv(table: Table) -> str:
    """A line a run, those that are not in the table too."""
    lines: list[Sequence[Any]] = [("run", "config", "seed", "state", "updates", *(metric.text for metric in table.metrics))]
    for run in table.runs:
        values = ("" if v is None else repr(v) for v in run.values)
        lines.append((run.name, run.group, run.seed, run.state, run.updates, *values))
    return _csv(lines)


def _csv(lines: Sequence[Sequence[Any]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()
