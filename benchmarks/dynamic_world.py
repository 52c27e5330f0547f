"""DynamicRubric in the small world, where the true quality is known: the method against its ablations, over seeds.

    python benchmarks/dynamic_world.py --workdir=runs/dynamic_world [--seeds=1,2,3] [--variants=main,prompt_only] [--json]
        [--config.KEY=VALUE ...] [--docs=docs] [--read]

Variants: main; prompt_only (the generator sees no candidates); disc_only and anchor_only (one objective alone); static (the
generator frozen in round 2); untrained (it never trains). Each is run.py over configs/dynamic_tiny.py with two rounds of 10
generator and 10 policy updates; a run that stopped goes on, a finished one is read. From the rollouts, over the first and the
last quarter of each stage: the true quality of the policy's answers, Kendall's tau of the scores E with the true quality inside
groups (an E that ties all answers counts 0), discriminability, pair accuracy on labelled answers, valid share.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

REPO = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent), str(REPO)]

import numpy as np  # noqa: E402
from _results import machine, put_between  # noqa: E402

from coevo_jax.errors import UserError  # noqa: E402
from coevo_jax.judges.world import true_quality  # noqa: E402
from coevo_jax.learn.dynamic import kendall_tau  # noqa: E402
from coevo_jax.records.figures import pyplot, save_figure  # noqa: E402
from coevo_jax.records.metrics import read_metrics  # noqa: E402
from coevo_jax.records.rollouts import read_rollouts  # noqa: E402

UPDATES, ROUNDS = 10, 2
BASE = (
    f"schedule.k={UPDATES}", f"schedule.cycles={ROUNDS}", "schedule.prompts=12", "dynamic.group=8", "update.rows_per_micro=8",
    "sampler.slots=48", "sampler.prefill_tokens=2048", "run.save_every=10",
)  # fmt: skip
VARIANTS = {
    "main": (),
    "prompt_only": ("dynamic.conditioned=prompt_only",),
    "disc_only": ("dynamic.objectives=discriminability",),
    "anchor_only": ("dynamic.objectives=anchor",),
    "static": ("dynamic.static_from=2",),
    "untrained": ("dynamic.static_from=1",),
}
FIGURES = ("true quality", "tau", "discriminability", "pair accuracy", "valid share")


def expected_rows(variant: str) -> int:
    return {"static": 3, "untrained": 2}.get(variant, 4) * UPDATES


def finished(folder: pathlib.Path, variant: str) -> bool:
    """Does the folder hold a whole run?"""
    done = folder / "metrics.jsonl"
    return done.exists() and len(read_metrics(done)) == expected_rows(variant)


def run(folder: pathlib.Path, variant: str, seed: int, overrides: list[str]) -> None:
    """Finish the run in `folder`, where it isn't."""
    if finished(folder, variant):
        return
    settings = [*BASE, *VARIANTS[variant], f"seed={seed}", f"name=dynamic_world_{variant}", *overrides]
    command = [sys.executable, str(REPO / "run.py"), f"--config={REPO / 'configs' / 'dynamic_tiny.py'}", f"--workdir={folder}"]
    with open(f"{folder}.log", "a") as log:
        code = subprocess.run([*command, *(f"--config.{s}" for s in settings)], stdout=log, stderr=log).returncode
    if code:
        raise UserError(f"the run ended with code {code}", where=f"{folder}.log", expected="a run that finishes")


def by_update(folder: pathlib.Path) -> dict[str, dict[int, float]]:
    """Each figure by update."""
    out: dict[str, dict[int, float]] = {name: {} for name in FIGURES}
    for row in read_metrics(folder / "metrics.jsonl"):
        at = row["step"]
        if row["role"] == "rubric":
            out["pair accuracy"][at] = row["rubric/pair_accuracy"]
            out["discriminability"][at] = row["reward/disc/mean"]
            out["valid share"][at] = row["rubric/valid_share"]
            continue
        groups: dict[int, list[dict[str, Any]]] = {}
        for r in read_rollouts(folder / "rollouts", at, "policy"):
            groups.setdefault(r["group"], []).append(r)
        quality = [[true_quality(r["question"], r["completion"]) for r in group] for group in groups.values()]
        out["true quality"][at] = float(np.mean([q for group in quality for q in group]))
        taus = [
            np.nan_to_num(kendall_tau(np.asarray([r["reward"] for r in group]), q))
            for group, q in zip(groups.values(), quality) if max(q) > min(q) and all(r["reward"] is not None for r in group)
        ]  # fmt: skip
        out["tau"][at] = float(np.mean(taus))
    return out


def stages_of(folder: pathlib.Path) -> list[tuple[str, list[int]]]:
    """('rubric 1', updates), ... in order."""
    found: dict[str, list[int]] = {}
    for row in read_metrics(folder / "metrics.jsonl"):
        found.setdefault(f"{row['role']} {row['cycle'] + 1}", []).append(row["step"])
    return list(found.items())


def summary(folder: pathlib.Path) -> dict[str, float]:
    """'true quality, policy 2, last' and so on: means over the first and last quarter of a stage."""
    figures, out = by_update(folder), {}
    for stage, updates in stages_of(folder):
        quarter = max(1, len(updates) // 4)
        for name, values in figures.items():
            if updates[0] in values:
                out[f"{name}, {stage}, first"] = float(np.mean([values[u] for u in updates[:quarter]]))
                out[f"{name}, {stage}, last"] = float(np.mean([values[u] for u in updates[-quarter:]]))
    return out


COLUMNS = {
    "runs": "", "true quality, start": "true quality, policy 1, first", "end": "true quality, policy 2, last",
    "tau, round 1": "tau, policy 1, last", "round 2": "tau, policy 2, last",
    "discriminability, round 1": "discriminability, rubric 1, last", "pair accuracy": "pair accuracy, rubric 1, last",
    "valid share": "valid share, rubric 1, last",
}  # fmt: skip


def text_table(found: dict[str, dict[str, list[float]]]) -> str:
    """Markdown: a row a variant, mean (least to greatest) over seeds; the generator's figures are of round 1."""
    lines = ["| variant | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for variant, figures in found.items():
        cells = [str(max(map(len, figures.values()), default=0))]
        for name in list(COLUMNS.values())[1:]:
            x = figures.get(name, [])
            cells.append(f"{np.mean(x):.3f} ({min(x):.3f} to {max(x):.3f})" if x else "")
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(out: pathlib.Path, folders: dict[str, list[pathlib.Path]]) -> pathlib.Path:
    """True quality of the policy's answers and tau by policy update, mean over the runs of each variant."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3), dpi=90, layout="constrained")
    for variant, own in folders.items():
        runs = [by_update(folder) for folder in own]
        for axis, name in zip(axes, ("true quality", "tau")):
            series = np.asarray([[r[name][u] for u in sorted(r[name])] for r in runs]).mean(axis=0)
            axis.plot(range(1, len(series) + 1), series, linewidth=1, label=variant)
    for axis, name in zip(axes, ("true quality of answers", "tau of E with true quality")):
        axis.set(xlabel="policy update", ylabel=name)
        axis.axvline(UPDATES + 0.5, color="black", linewidth=0.5)
    axes[0].legend(fontsize=7)
    return save_figure(figure, out, "dynamic_world", ("png",))[0]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--workdir", default="runs/dynamic_world")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--docs", default="", help="folder of results.md and plots/; '' writes neither")
    parser.add_argument("--read", action="store_true", help="train nothing: read the runs that are finished")
    parser.add_argument("--json", action="store_true")
    args, rest = parser.parse_known_args(argv)
    workdir, seeds, variants = pathlib.Path(args.workdir), [int(s) for s in args.seeds.split(",")], args.variants.split(",")
    if wrong := [v for v in variants if v not in VARIANTS]:
        raise UserError(f"no variant {wrong[0]!r}", where="--variants", expected=", ".join(VARIANTS))
    workdir.mkdir(parents=True, exist_ok=True)
    start, found = time.monotonic(), {v: dict[str, list[float]]() for v in variants}
    folders: dict[str, list[pathlib.Path]] = {v: [] for v in variants}
    for seed in seeds:
        for variant in variants:
            folder = workdir / f"{variant}_{seed}"
            if not args.read:
                run(folder, variant, seed, [word.removeprefix("--config.") for word in rest])
                print(f"seed {seed} {variant}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            if not finished(folder, variant):
                continue
            folders[variant].append(folder)
            for name, value in summary(folder).items():
                found[variant].setdefault(name, []).append(value)
    table = text_table(found)
    print(table)
    folders = {variant: own for variant, own in folders.items() if own}
    if args.docs and folders:
        put_between(pathlib.Path(args.docs) / "results.md", "dynamic_world", table)
        plot(pathlib.Path(args.docs) / "plots", folders)
    out = {"machine": machine(), "seeds": seeds, "variants": found}
    (workdir / "results.json").write_text(json.dumps(out, indent=2) + "\n")
    if args.json:
        print(json.dumps(out))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
