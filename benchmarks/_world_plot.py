"""The figure of world_study.py."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from _world_report import (
    BINARY,
    FAST,
    FROZEN,
    KINDS,
    MAIN,
    Results,
    Run,
    Value,
    at,
    curve,
    noise_arms,
    over_seeds,
    right,
    runs_of,
)

from coevo_jax.records.figures import pyplot, save_figure

Values = Callable[[Run], Sequence[float]]  # by cycle


def figure(results: Results, folder: pathlib.Path, stem: str) -> list[pathlib.Path]:
    """Six panels: means over seeds with 95 % t-intervals, and each seed as a dot."""
    plt = pyplot()
    fig, axes = plt.subplots(2, 3, figsize=(11.5, 6.4), dpi=90, layout="constrained")
    for panel, draw in zip(axes.flat, (_panel_fixed, _panel_moving, _panel_quality, _panel_usable, _panel_gap, _panel_judge)):
        draw(panel, results)
        panel.tick_params(labelsize=7)
        panel.grid(linewidth=0.3)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=6.5)
    fig.supxlabel("lines: means over seeds; bands: 95 % Student's t intervals, n - 1 degrees of freedom; dots: seeds", fontsize=7)
    return save_figure(fig, folder, stem, ("svg",))


def _draw(panel: Any, runs: Sequence[Run], values: Values, label: str, first: int = 0, **style: Any) -> None:
    found = curve(runs, values)
    points = [(first + i, s) for i, s in enumerate(found) if s is not None]
    if not points:
        return
    x = [i for i, _ in points]
    (line,) = panel.plot(x, [s.mean for _, s in points], label=label, linewidth=1.3, **style)
    ends = [(s.mean if s.low is None else s.low, s.mean if s.high is None else s.high) for _, s in points]
    panel.fill_between(x, *zip(*ends), color=line.get_color(), alpha=0.13, linewidth=0)
    for run in runs:
        panel.plot([first + i for i in range(len(found))], values(run), ".", color=line.get_color(), markersize=2)


def _titled(panel: Any, title: str, x: str, y: str, bottom: float | None = 0.0, top: float | None = None) -> None:
    panel.set_title(title, fontsize=9)
    if x == "cycle":
        panel.xaxis.get_major_locator().set_params(integer=True)
    panel.set_xlabel(x, fontsize=7)
    panel.set_ylabel(y, fontsize=7)
    panel.set_ylim(bottom, top)


def _column(name: str, which: str = "accuracy") -> Values:
    return lambda run: [triple[KINDS.index(which)] for triple in run[name]]


def _training(name: str) -> Values:
    return lambda run: [row[name] for row in run["training"]]


def _panel_fixed(panel: Any, results: Results) -> None:
    _draw(panel, runs_of(results, MAIN), _column("fixed"), "co-evolved")
    _draw(panel, runs_of(results, MAIN), _column("fixed", "valid"), "co-evolved, valid rubrics alone", linestyle=":")
    _draw(panel, runs_of(results, BINARY), _column("fixed"), "binary reward")
    _draw(panel, runs_of(results, FAST), _column("fixed"), "fast")
    _titled(panel, "generators of each cycle on the same pairs", "cycle", "pairs right")


def _panel_moving(panel: Any, results: Results) -> None:
    _draw(panel, runs_of(results, MAIN), _column("own"), "co-evolved")
    _draw(panel, runs_of(results, MAIN), _column("frozen on own"), "frozen")
    _draw(panel, runs_of(results, MAIN), _column("own", "valid"), "co-evolved, valid rubrics alone", linestyle=":")
    _draw(panel, runs_of(results, MAIN), _column("frozen on own", "valid"), "frozen, valid rubrics alone", linestyle=":")
    _titled(panel, "pairs of the policy of that cycle", "cycle", "pairs right")


def _panel_quality(panel: Any, results: Results) -> None:
    for arm, label in ((MAIN, "co-evolved"), (FROZEN, "frozen generator"), (FAST, "three times the learning rate")):
        _draw(panel, runs_of(results, arm), lambda run: run["quality"], label)
    _titled(panel, "true quality of answers", "cycle", "quality", 0.0, 1.0)


def _panel_usable(panel: Any, results: Results) -> None:
    _draw(panel, runs_of(results, MAIN), _training("usable margin"), "margin", first=1)
    _draw(panel, runs_of(results, MAIN), _training("usable binary"), "binary, the same groups", first=1)
    _draw(panel, runs_of(results, BINARY), _training("usable binary"), "binary, its own runs", first=1, linestyle="--")
    _titled(panel, "groups of rubrics whose rewards differ", "cycle", "share", 0.0, 1.0)


def _panel_gap(panel: Any, results: Results) -> None:
    runs = runs_of(results, MAIN)
    _draw(panel, runs, _training("true gap"), "pairs of training: true gap", first=1)
    _draw(panel, runs, _training("margin"), "pairs of training: margin", first=1)
    _draw(panel, runs, lambda run: run["fixed margin"][1:], "the fixed pairs: margin", first=1)
    _titled(panel, "margins of temporal pairs and of fixed ones", "cycle", "first minus second answer", None)


def _panel_judge(panel: Any, results: Results) -> None:
    arms = noise_arms(results)
    if len(arms) < 2:
        panel.set_axis_off()
        return
    values: tuple[tuple[str, Value], ...] = (
        ("rubrics right on the fixed pairs", right("fixed")),
        ("the same, valid rubrics alone", right("fixed", "valid")),
        ("true quality of answers", at("quality")),
    )
    for label, value in values:
        found = [
            (over_seeds(runs_of(results, arm), lambda run: run["strength"]), over_seeds(runs_of(results, arm), value))
            for arm in arms
        ]
        points = [(x.mean, y) for x, y in found if x is not None and y is not None]
        x, y = [p[0] for p in points], [p[1].mean for p in points]
        (line,) = panel.plot(x, y, label=label, linewidth=1.3)
        ends = [(s.mean if s.low is None else s.low, s.mean if s.high is None else s.high) for _, s in points]
        panel.fill_between(x, *zip(*ends), color=line.get_color(), alpha=0.13, linewidth=0)
        for arm in arms:
            for run in runs_of(results, arm):
                panel.plot(run["strength"], value(run), ".", color=line.get_color(), markersize=3)
    _titled(panel, "judges of six strengths, at the end", "judge's accuracy under ideal rubrics", "", 0.0, 1.0)
