"""Figures for papers: every metric of one or several runs as SVG, PNG and CSV."""

from __future__ import annotations

import csv
import io
import pathlib
import re
from collections.abc import Sequence

from coevo_jax.records.figures import pyplot, save_figure
from coevo_jax.records.files import write_atomic
from coevo_jax.report.collect import RunData

SIZE = (4.2, 2.8)  # inches: a column of a two-column page
WEIGHT = 0.6  # of the exponential smoothing, like the page's
SKIPPED = ("cycle", "policy_updates")
Line = tuple[str, list[int], list[float]]  # label, steps, values


def write_plots(runs: Sequence[RunData], folder: pathlib.Path) -> list[pathlib.Path]:
    """A figure and a table for each numeric metric, named as it is. UserError without matplotlib."""
    plt = pyplot()
    out: list[pathlib.Path] = []
    for name in sorted({name for run in runs for name in run.columns} - set(SKIPPED)):
        lines = lines_of(runs, name)
        if not lines:
            continue
        figure, axes = plt.subplots(figsize=SIZE, layout="constrained")
        for index, (label, steps, values) in enumerate(lines):
            axes.plot(steps, values, color=f"C{index % 10}", alpha=0.25, linewidth=0.8)
            axes.plot(steps, smoothed(values, WEIGHT), color=f"C{index % 10}", linewidth=1.2, label=label)
        axes.set_xlabel("update")
        axes.set_ylabel(name)
        axes.grid(linewidth=0.3)
        axes.legend(fontsize=7)
        stem = re.sub(r"[^\w.-]+", "_", name)
        out += save_figure(figure, folder, stem)
        out.append(folder / f"{stem}.csv")
        write_atomic(out[-1], table(lines))
    return out


def lines_of(runs: Sequence[RunData], name: str) -> list[Line]:
    """A line for each run and role that has numbers of the metric."""
    out = []
    for run in runs:
        roles, values = run.columns.get("role", []), run.columns.get(name, [])
        for role in sorted({str(role) for role in roles}):
            own = [(s, v) for s, r, v in zip(run.steps, roles, values) if r == role and isinstance(v, int | float)]
            if own:
                label = f"{run.name} {role}" if len(runs) > 1 else role
                out.append((label, [s for s, _ in own], [float(v) for _, v in own]))
    return out


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Exponential mean without the start's bias: sum_i w^(t-i) v_i / sum_i w^(t-i)."""
    total = norm = 0.0
    out = []
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        out.append(total / norm)
    return out


def table(lines: Sequence[Line]) -> str:
    """line,update,value as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["line", "update", "value"])
    writer.writerows([label, step, repr(value)] for label, steps, values in lines for step, value in zip(steps, values))
    return text.getvalue()
