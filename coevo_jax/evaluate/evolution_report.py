"""`--evolution=RUN`: evolution.csv, evolution.md, questions.md and a plot from a run's rollouts, or from a JSONL file of rubrics.

A file's rows have `completion` (or `generation` or `rubric`, the generator's text), `question` and, where there are several,
`update`: the rubrics-*.jsonl that an evaluation leaves is one.
"""

from __future__ import annotations

import csv
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from coevo_jax.config import Experiment, RubricConfig
from coevo_jax.data.readers import read_rows
from coevo_jax.errors import UserError
from coevo_jax.evaluate.evolution import NUMBERS, Point, Version, column, drift, histories, point
from coevo_jax.evaluate.report import num, table
from coevo_jax.records.console import Console
from coevo_jax.records.figures import pyplot, save_figure
from coevo_jax.records.files import disk_errors, write_atomic
from coevo_jax.records.rollouts import read_rollouts, rollout_files

Rows = list[dict[str, Any]]
SHOWN = 8  # questions of questions.md
LINES = 12  # updates of the tables in evolution.md
PANELS = {
    "valid share": ("valid_share",), "criteria": ("criteria",), "characters a criterion": ("chars",),
    "label-only": ("label_only",), "expected values": ("expected_value",), "constraints": ("constraint",),
    "negation and examples": ("negation", "example"), "top-1 share of the weight": ("top_1_share",),
    "judge": ("pair_accuracy", "longer_preferred", "tie_share"),
}  # fmt: skip


def read_source(source: pathlib.Path) -> tuple[dict[int, tuple[Rows, Rows]], RubricConfig]:
    """By update, the rows of the generator and of policies; and the schema of the rubrics. UserError: none there."""
    if source.is_file():
        updates: dict[int, tuple[Rows, Rows]] = {}
        for place, row in read_rows(str(source), "--evolution"):
            text = next((row[key] for key in ("completion", "generation", "rubric") if isinstance(row.get(key), str)), None)
            if text is None:
                raise UserError(
                    "the row has no rubric's text", where=place, expected="a text in completion, generation or rubric"
                )
            updates.setdefault(int(row.get("update", 0)), ([], []))[0].append({**row, "completion": text})
        return updates, RubricConfig()
    folder = source / "rollouts"
    if not folder.is_dir():
        raise UserError("no rollouts", where=str(source), expected="a run folder with rollouts/, or a JSONL file of rubrics")
    return _read_run(source, folder)


def _read_run(run: pathlib.Path, folder: pathlib.Path) -> tuple[dict[int, tuple[Rows, Rows]], RubricConfig]:
    from coevo_jax.config.override import from_dict
    from coevo_jax.records.run_folder import read_config

    updates: dict[int, tuple[Rows, Rows]] = {}
    for update, role, _, _ in rollout_files(folder):
        rubrics, answers = updates.setdefault(update, ([], []))
        mine = rubrics if role == "rubric" else answers
        if not mine:  # parts of several processes are read together
            mine += read_rollouts(folder, update, role)
    if not any(rubrics for rubrics, _ in updates.values()):
        raise UserError("no rubrics of a generator in training", where=str(folder), expected="files update_N_rubric.jsonl")
    cfg = from_dict(Experiment, read_config(run), where=str(run / "config.json")) if (run / "config.json").is_file() else None
    return updates, cfg.rubric if cfg else RubricConfig()


def report(source: pathlib.Path, out: pathlib.Path, console: Console) -> list[Point]:
    """Write the tables and the plot into `out`; returns the points of updates that wrote rubrics."""
    updates, cfg = read_source(source)
    points: list[Point] = []
    answers: Rows = []
    for update, (rubrics, own) in sorted(updates.items()):
        answers += own
        if rubrics:  # the policy's updates since the last one show what its judge's rubrics did
            points.append(point(update, rubrics, answers, cfg))
            answers = []
    found = histories((row for rubrics, _ in updates.values() for row in rubrics), cfg)
    with disk_errors(out, "make the folder"):
        out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "evolution.csv", as_csv(points))
    write_atomic(out / "evolution.md", as_markdown(str(source), points, found))
    write_atomic(out / "questions.md", questions(found))
    names = ["evolution.csv", "evolution.md", "questions.md"]
    try:
        names += [path.name for path in plot(points, out)]
    except UserError as error:  # without matplotlib
        console.line(f"no plot: {error.what} ({error.expected})")
    console.line((out / "evolution.md").read_text(encoding="utf-8"))
    console.line(f"in {out}: {', '.join(names)}")
    return points


def as_csv(points: Sequence[Point]) -> str:
    """A line an update: counts, then each number by both definitions, then the judge's."""
    judge = list(points[0].judge) if points else []
    head = ["update", "rubrics", "valid_share", *(f"paper/{n}" for n in NUMBERS), *(f"valid/{n}" for n in NUMBERS)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*head, *(f"judge/{n}" for n in judge)])
    for p in points:
        cells = [*(p.paper[n] for n in NUMBERS), *(p.valid[n] for n in NUMBERS), *(p.judge[n] for n in judge)]
        writer.writerow([p.update, p.rubrics, p.valid_share, *("" if c is None else repr(float(c)) for c in cells)])
    return text.getvalue()


def as_markdown(source: str, points: Sequence[Point], found: Mapping[str, Sequence[Version]]) -> str:
    """Tables of at most LINES updates, spread over the run, by both definitions."""
    shown = _spread(points)
    head = ["update", "rubrics", "valid", *NUMBERS]
    lines = [f"# How rubrics evolved: {source}", "", "Means over rubrics; shares are of a rubric's criteria. By the paper's "
             "definitions (a rubric that can't be read counts as zeros):", ""]  # fmt: skip
    lines += table(
        head, [[str(p.update), str(p.rubrics), num(p.valid_share), *(num(p.paper[n]) for n in NUMBERS)] for p in shown]
    )
    lines += ["", "Over valid rubrics alone:", ""]
    lines += table(
        head, [[str(p.update), str(p.rubrics), num(p.valid_share), *(num(p.valid[n]) for n in NUMBERS)] for p in shown]
    )
    names = [n for n in (points[0].judge if points else ()) if any(p.judge[n] is not None for p in points)]
    if names:
        lines += ["", "The judge under them (since the update before):", ""]
        lines += table(["update", *names], [[str(p.update), *(num(p.judge[n]) for n in names)] for p in shown])
    inside, between = zip(*(drift(v) for v in found.values())) if found else ((), ())
    several = sum(len(v) > 1 for v in found.values())
    words = f"{len(found)} questions, {several} of them in more than one update. Likeness of a question's rubrics (shared words "
    words += f"over all words): {num(_mean(inside))} inside an update, {num(_mean(between))} from one to the next."
    lines += ["", words]
    return "\n".join(lines) + "\n"


def _spread(points: Sequence[Point]) -> list[Point]:
    if len(points) <= LINES:
        return list(points)
    return [points[round(i * (len(points) - 1) / (LINES - 1))] for i in range(LINES)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def questions(found: Mapping[str, Sequence[Version]]) -> str:
    """The rubrics of the questions that came back most often, over time: the first valid one of each update."""
    lines = ["# The same questions over time", ""]
    for question, versions in list(found.items())[:SHOWN]:
        lines += [f"## {' '.join(question.split())[:200]}", ""]
        for v in versions[:: max(1, len(versions) // LINES)]:
            head = f"- update {v.update}, {len(v.rubrics)} of {v.written} valid"
            first = (
                "; ".join(f"{' '.join(text.split())} ({weight:.2g})" for text, weight in v.rubrics[0]) if v.rubrics else "none"
            )
            lines.append(f"{head}: {first}")
        lines.append("")
    return "\n".join(lines)


def plot(points: Sequence[Point], folder: pathlib.Path) -> list[pathlib.Path]:
    """evolution.svg and evolution.png: solid over valid rubrics, dashed by the paper's definition."""
    plt = pyplot()
    figure, axes = plt.subplots(3, 3, figsize=(10, 7), dpi=90, layout="constrained")
    for panel, (title, names) in zip(axes.flat, PANELS.items()):
        for color, name in enumerate(names):
            for values, style in _lines(points, name):
                if values:
                    panel.plot(*zip(*values), style, color=f"C{color}", linewidth=1, label=name if style == "-" else None)
        panel.set_title(title, fontsize=8)
        panel.tick_params(labelsize=7)
        if len(names) > 1 and panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=6)
    figure.supxlabel("update; solid: valid rubrics, dashed: the paper's definition", fontsize=8)
    return save_figure(figure, folder, "evolution")


def _lines(points: Sequence[Point], name: str) -> list[tuple[list[tuple[int, float]], str]]:
    if name == "valid_share":
        return [(column(points, lambda p: p.valid_share), "-")]
    if name in NUMBERS:
        return [(column(points, lambda p: p.valid[name]), "-"), (column(points, lambda p: p.paper[name]), "--")]
    return [(column(points, lambda p: p.judge.get(name)), "-")]
