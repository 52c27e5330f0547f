"""What the learning benchmark leaves for a reader: the machine, a row of docs/results.md, a plot."""

from __future__ import annotations

import os
import pathlib
import platform
from typing import Any

import numpy as np

from coevo_jax.records.figures import pyplot, save_figure

HEADERS = {
    "rubrics": ["run", "seed", "updates", "valid share", "difference", "margin", "difference", "pair accuracy", "difference",
                "distinct criteria", "minutes", "machine"],
    "verifiable": ["run", "seed", "updates", "greedy accuracy", "difference", "task's score", "difference", "minutes", "machine"],
}  # fmt: skip
FIGURES = {"rubrics": ("valid share", "margin", "pair accuracy"), "verifiable": ("accuracy", "score")}
TREND = {"rubrics": "rubric/valid_share", "verifiable": "reward/mean"}


def machine() -> str:
    """Processor and the cores that this process may use."""
    name = platform.processor() or platform.machine()
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def run_name(found: dict[str, Any]) -> str:
    return found["config"] + "".join(f" {o}" for o in found["overrides"] if not o.startswith("seed="))


def table_row(found: dict[str, Any]) -> list[str]:
    done, planned = found["updates"], found["planned updates"]
    cells = [run_name(found), str(found["seed"]), str(done) if done == planned else f"{done} of {planned}"]
    for figure in FIGURES[found["what"]]:
        if figure not in found:
            cells += ["none judged", ""]
            continue
        x, d = found[figure], found[figure]["difference"]
        cells += [f"{x['start']['mean']:.3f} → {x['end']['mean']:.3f}", f"{d['mean']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}]"]
    if "distinct criteria" in found:
        cells.append(" → ".join(f"{found['distinct criteria'][end]:.2f}" for end in ("start", "end")))
    return [*cells, f"{found['training minutes']:.1f}", found["machine"]]


def add_row(path: pathlib.Path, found: dict[str, Any]) -> None:
    """Put the run's row between the markers of its table; a row of the same run and seed is replaced."""
    what, row = found["what"], table_row(found)
    begin, end = f"<!-- begin {what} -->", f"<!-- end {what} -->"
    text = path.read_text(encoding="utf-8") if path.exists() else "# Results\n"
    if begin not in text or end not in text:
        text += f"\n{begin}\n{end}\n"
    head, _, rest = text.partition(begin)
    inside, _, tail = rest.partition(end)
    table = [
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in inside.splitlines() if line.startswith("|")
    ]
    rows = [r for r in table[2:] if r[:2] != row[:2]] + [row]
    header = HEADERS[what]
    lines = ["| " + " | ".join(r) + " |" for r in [header, ["---"] * len(header), *rows]]
    path.write_text(head + begin + "\n" + "\n".join(lines) + "\n" + end + tail, encoding="utf-8")


def put_between(path: pathlib.Path, name: str, text: str) -> None:
    """Put a text between the markers `name` of a document, in the place of what stands there."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    whole = path.read_text(encoding="utf-8") if path.exists() else "# Results\n"
    if begin not in whole or end not in whole:
        whole += f"\n{begin}\n{end}\n"
    head, _, rest = whole.partition(begin)
    path.write_text(head + begin + "\n" + text.strip("\n") + "\n" + end + rest.partition(end)[2], encoding="utf-8")


def learning_plot(folder: pathlib.Path, found: dict[str, Any], rows: list[dict[str, Any]]) -> pathlib.Path:
    """Training curve at the left, both ends on held-out questions with their intervals at the right."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), dpi=90, width_ratios=(2, 1), layout="constrained")
    trend = TREND[found["what"]]
    for stage in dict.fromkeys(row["stage"] for row in rows):
        points = [(row["step"], row[trend]) for row in rows if row["stage"] == stage and row.get(trend) is not None]
        if points:
            left.plot(*zip(*points), marker=".", linewidth=1, label=f"{stage} updates")
    left.set(xlabel="update", ylabel=f"{trend} (training)", title=f"{run_name(found)}, seed {found['seed']}")
    left.title.set_fontsize(9)
    left.legend(fontsize=7)
    names = [name for name in FIGURES[found["what"]] if name in found]
    for offset, end in ((-0.17, "start"), (0.17, "end")):
        values = [found[name][end] for name in names]
        means = np.asarray([v["mean"] for v in values])
        spans = np.asarray([[v["mean"] - v["low"] for v in values], [v["high"] - v["mean"] for v in values]])
        right.bar(np.arange(len(names)) + offset, means, 0.32, yerr=spans, label=end, capsize=2)
    right.set_xticks(np.arange(len(names)), names, fontsize=7)
    right.set_title("held out, 95 %", fontsize=9)
    right.axhline(0, color="black", linewidth=0.5)
    right.legend(fontsize=7)
    words = [found["what"], *(o for o in found["overrides"] if not o.startswith("seed=")), f"seed{found['seed']}"]
    return save_figure(figure, folder, "_".join(words).replace("/", "-").replace("=", "-").replace(":", "-"), ("png",))[0]
