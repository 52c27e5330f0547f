"""The table as a figure: a panel a metric, a line a config with mean, interval and every seed."""

from __future__ import annotations

import pathlib
from typing import Any

from coevo_jax.records.figures import pyplot, save_figure
from coevo_jax.sweep.table import Table, interval_words

COLUMNS = 3  # panels side by side


def plot_table(table: Table, folder: pathlib.Path) -> list[pathlib.Path]:
    """plot.svg and plot.png in `folder`. UserError without matplotlib."""
    plt = pyplot()
    names = list(table.groups)
    rows = -(-len(table.metrics) // COLUMNS)
    columns = min(COLUMNS, len(table.metrics))
    size = (1.5 + 3.2 * columns, 0.7 + rows * (0.8 + 0.24 * len(names)))
    figure, axes = plt.subplots(rows, columns, figsize=size, dpi=90, sharey=True, squeeze=False, layout="constrained")
    for index, panel in enumerate(axes.flat):
        if index >= len(table.metrics):
            panel.set_axis_off()
            continue
        for line, name in enumerate(names):
            _draw(panel, table, index, line, name)
        panel.set_title(table.metrics[index].text, fontsize=8)
        panel.set_yticks(range(len(names)), names, fontsize=7)
        panel.tick_params(axis="x", labelsize=7)
        panel.grid(axis="x", linewidth=0.3)
    axes[0, 0].set_ylim(len(names) - 0.5, -0.5)  # the first config on top
    figure.supxlabel(f"mean and {interval_words(table.kind, table.level)}; grey: single seeds", fontsize=7)
    return save_figure(figure, folder, "plot")


def _draw(panel: Any, table: Table, index: int, line: int, name: str) -> None:
    found = table.summaries(name)[index]
    if found is None:
        return
    seeds = [value for run in table.groups[name] if (value := run.values[index]) is not None]
    panel.plot(seeds, [line] * len(seeds), "o", color="0.45", markersize=2.5, zorder=3)
    low, high = (found.mean if end is None else end for end in (found.low, found.high))
    panel.errorbar(found.mean, line, xerr=[[found.mean - low], [high - found.mean]], fmt="o", color="C0", markersize=4, capsize=2)
