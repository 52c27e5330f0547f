"""Rubric-ARM in the small world, where labels are true: does it recover the order of answers, and which phase should come first?

    python benchmarks/arm_world.py [--workdir=DIR] [--seeds=1,2,3] [--json]      # about 15 minutes alone on 2 cores

Three runs a seed from the same weights, data and budget: judge first, generator first, and rules in place of the judge. Outcome:
accuracy of generator and judge on 48 test pairs whose questions nothing trains on, before and after. Gradient variance: total
variance of the batch gradient over the squared norm of its mean, both without the noise of the mean, from --draws batches at
learning rate 0, at three places: the judge under kept lists and the generator under the judge of the start (the first phase of
either order), and the generator under a judge that has had one phase (its place in the paper's order).

The same command goes on with what stopped. results.json, a table and plot.png come into --workdir; --json prints results.json.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time
from typing import Any

REPO = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax  # noqa: E402
import numpy as np  # noqa: E402
from _results import machine  # noqa: E402

from coevo_jax.config import Experiment  # noqa: E402
from coevo_jax.config.load import load_config  # noqa: E402
from coevo_jax.config.override import apply_overrides  # noqa: E402
from coevo_jax.config.validate import validate  # noqa: E402
from coevo_jax.errors import UserError  # noqa: E402
from coevo_jax.progress import RunConsole  # noqa: E402
from coevo_jax.records.figures import pyplot, save_figure  # noqa: E402
from coevo_jax.records.metrics import read_metrics  # noqa: E402
from coevo_jax.train import train  # noqa: E402

BASE = (
    "arm.rounds=2", "arm.part=64", "arm.test=48", "arm.cached=64", "arm.votes=3", "arm.judge_prompts=8", "arm.judge_group=8",
    "arm.judge_updates=8", "arm.generator_prompts=8", "arm.generator_group=8", "arm.generator_updates=8", "arm.policy=none",
    "schedule.prompts=8", "schedule.group=8", "sampler.slots=64", "update.rows_per_micro=8", "run.save_every=10", "run.keep=1",
)  # fmt: skip
RUNS = {"judge first": (), "generator first": ("arm.order=generator_first",), "rules": ("arm.judge=oracle",)}
FIGURES = ("test/accuracy", "test/accuracy_both_orders", "test/vote_accuracy", "test/consistent_share")
STILL = ("optimizer.lr=0", "optimizer.b1=0", "optimizer.grad_clip=0", "arm.rounds=1", "arm.measure=none")


class Quiet(RunConsole):
    """A line a stage; keeps the first moments after each update, which are the gradient at b1 = 0."""

    def __init__(self, roles: tuple[str, ...] = ()):
        super().__init__()
        self.roles = roles
        self.system: Any = None
        self.gradients: dict[str, list[np.ndarray]] = {role: [] for role in roles}

    def note(self, text: str) -> None:
        pass

    def progress(self, what: str, done: int, total: int) -> None:
        pass

    def end_stage(self, metrics: pathlib.Path, name: str, cycle: int) -> None:
        print(f"    {name} {cycle + 1}", file=sys.stderr, flush=True)

    def summary(self, folder: pathlib.Path, finished: bool) -> None:
        pass

    def update(self, row: Any, done: int) -> None:
        role = {"judge": "judge", "generator": "rubric"}.get(row["stage"])
        if role not in self.roles or row["update/skipped"]:
            return
        assert self.system is not None
        (moments,) = [x for x in jax.tree.leaves(self.system.learners[role].state.opt_state, is_leaf=_is_adam) if _is_adam(x)]
        leaves = jax.device_get(jax.tree.leaves(moments.mu))
        self.gradients[role].append(np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in leaves]))


def _is_adam(x: Any) -> bool:
    return hasattr(x, "mu") and hasattr(x, "nu")


def config(seed: int, *overrides: str) -> Experiment:
    """The small world's config at this benchmark's size."""
    cfg = apply_overrides(load_config(str(REPO / "configs" / "tiny_arm.py")), (*BASE, f"seed={seed}", *overrides))
    validate(cfg)
    return cfg


def outcome(folder: pathlib.Path, seed: int, overrides: tuple[str, ...]) -> dict[str, Any]:
    """One run's figures before and after, and its training curve."""
    if not train(config(seed, *overrides), str(folder), Quiet()):
        raise KeyboardInterrupt
    rows = read_metrics(folder / "metrics.jsonl")
    looks = [row for row in rows if row["stage"].startswith("measure")]
    out: dict[str, Any] = {name: [looks[0][name], looks[-1][name]] for name in FIGURES}
    for stage in ("judge", "generator"):
        found = [row["arm/accuracy"] for row in rows if row["stage"] == stage and "arm/accuracy" in row]
        kept = [row["groups/zero_variance_share"] for row in rows if row["stage"] == stage]
        out[stage] = {"accuracy": found, "zero_variance_share": float(np.mean(kept)) if kept else None}
    out["format_share"] = [look.get("test/judge/format_share") for look in (looks[0], looks[-1])]
    out["valid_lists"] = [look["test/rubric/valid_share"] for look in (looks[0], looks[-1])]
    return out


def variance(gradients: list[np.ndarray]) -> dict[str, float]:
    """Noise of the batch gradient: tr Cov / |mean|^2, the squared mean less its own noise (at least a hundredth of it)."""
    g = np.stack(gradients)
    mean = g.mean(axis=0)
    total = float(((g - mean) ** 2).sum() / (len(g) - 1))
    square = float(mean @ mean) - total / len(g)
    return {"variance": total, "mean_square": square, "relative": total / max(square, 0.01 * float(mean @ mean)), "draws": len(g)}


def still(folder: pathlib.Path, seed: int, draws: int, roles: tuple[str, ...], *overrides: str) -> dict[str, Any]:
    """Gradient variance of the roles at learning rate 0. A run that stopped begins anew: its gradients are kept nowhere."""
    import shutil

    from coevo_jax import train as train_module

    shutil.rmtree(folder, ignore_errors=True)
    console = Quiet(roles)
    real = train_module.assemble

    def keep(*args: Any, **kwargs: Any) -> Any:
        console.system = real(*args, **kwargs)
        return console.system

    train_module.assemble = keep  # type: ignore[assignment]
    try:
        cfg = config(seed, *STILL, f"arm.judge_updates={draws if 'judge' in roles else 0}", f"arm.generator_updates={draws}",
                     "run.save_every=1000", *overrides)  # fmt: skip
        if not train(cfg, str(folder), console):
            raise KeyboardInterrupt
    finally:
        train_module.assemble = real
    shutil.rmtree(folder, ignore_errors=True)
    return {role: variance(found) for role, found in console.gradients.items() if len(found) > 1}


def of_seed(folder: pathlib.Path, seed: int, draws: int) -> dict[str, Any]:
    """Everything of one seed; what is done is taken from result files."""
    out: dict[str, Any] = {}
    for name, overrides in RUNS.items():
        out[name] = _kept(folder / f"{name.replace(' ', '_')}_{seed}.json", f"seed {seed}, {name}",
                          lambda path, o=overrides: outcome(path, seed, o))  # fmt: skip
    start = _kept(folder / f"start_{seed}.json", f"seed {seed}, gradients at the start",
                  lambda path: still(path, seed, draws, ("judge", "rubric")))  # fmt: skip
    judged = folder / f"judge_alone_{seed}"
    alone = ("arm.rounds=1", "arm.generator_updates=0", "arm.measure=none")
    taught = _kept(
        folder / f"taught_{seed}.json", f"seed {seed}, gradients under a judge that has learned",
        lambda path: _taught(path, judged, seed, draws, alone),
    )  # fmt: skip
    out["gradients"] = {"judge, kept lists": start["judge"], "generator, judge of the start": start.get("rubric"),
                        "generator, judge after one phase": taught.get("rubric")}  # fmt: skip
    return out


def _taught(path: pathlib.Path, judged: pathlib.Path, seed: int, draws: int, alone: tuple[str, ...]) -> dict[str, Any]:
    """Gradients of the generator under a judge that one phase alone has trained."""
    if not train(config(seed, *alone), str(judged), Quiet()):
        raise KeyboardInterrupt
    return still(path, seed, draws, ("rubric",), f"arm.judge_source=run:{judged}#judge")


def _kept(path: pathlib.Path, what: str, make: Any) -> Any:
    """A result that is there, or made now."""
    if path.exists():
        return json.loads(path.read_text())
    begin = time.monotonic()
    print(what, file=sys.stderr, flush=True)
    found = make(path.with_suffix(""))
    path.write_text(json.dumps(found))
    print(f"  {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return found


# ------------------------------------------------------------------------------------------------------------- report


def table(found: dict[str, Any]) -> str:
    """Both tables in Markdown."""
    seeds = list(found["seeds"])
    names = " | ".join(name.removeprefix("test/") for name in FIGURES)
    lines = [f"| run | seed | {names} | whole judgements | valid lists |",
             "|" + " --- |" * (len(FIGURES) + 4)]  # fmt: skip
    for name in RUNS:
        for seed in seeds:
            one = found["seeds"][seed][name]
            cells = [f"{a:.2f} → {b:.2f}" for a, b in (one[figure] for figure in FIGURES)]
            cells += [
                "" if None in one[key] else f"{one[key][0]:.2f} → {one[key][1]:.2f}" for key in ("format_share", "valid_lists")
            ]
            lines.append(f"| {name} | {seed} | " + " | ".join(cells) + " |")
    lines += ["", "| gradient | " + " | ".join(f"seed {seed}" for seed in seeds) + " |", "|" + " --- |" * (len(seeds) + 1)]
    for place in ("judge, kept lists", "generator, judge of the start", "generator, judge after one phase"):
        values = [found["seeds"][seed]["gradients"].get(place) for seed in seeds]
        lines.append(
            f"| {place} | " + " | ".join("no group differed" if v is None else f"{v['relative']:.2f}" for v in values) + " |"
        )
    return "\n".join(lines)


def plot(found: dict[str, Any], folder: pathlib.Path) -> pathlib.Path:
    """Accuracy before and after by order, and the gradients' relative variance."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), dpi=90, layout="constrained")
    for i, name in enumerate(RUNS):
        for j, one in enumerate(found["seeds"].values()):
            left.plot([i - 0.2, i + 0.2], one[name]["test/accuracy"], marker="o", color=f"C{j}", linewidth=1)
    left.set_xticks(range(len(RUNS)), list(RUNS), fontsize=7)
    left.set_ylabel("accuracy on test pairs, before and after", fontsize=7)
    left.axhline(0.5, color="black", linewidth=0.5)
    places = list(next(iter(found["seeds"].values()))["gradients"])
    for j, one in enumerate(found["seeds"].values()):
        points = [(i, one["gradients"][p]["relative"]) for i, p in enumerate(places) if one["gradients"].get(p)]
        right.plot(*zip(*points), "o", color=f"C{j}")
    right.set_xticks(range(len(places)), [p.replace(", ", ",\n") for p in places], fontsize=6)
    right.set_yscale("log")
    right.set_ylabel("variance of a batch gradient / squared mean", fontsize=7)
    return save_figure(figure, folder, "arm_world", ("png",))[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/arm_world"))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.workdir.mkdir(parents=True, exist_ok=True)
    try:
        seeds = [int(seed) for seed in args.seeds.split(",")]
        found = {"machine": machine(), "seeds": {str(seed): of_seed(args.workdir, seed, args.draws) for seed in seeds}}
    except (UserError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 1
    (args.workdir / "results.json").write_text(json.dumps(found, indent=1))
    print(table(found), file=sys.stderr)
    print(plot(found, args.workdir), file=sys.stderr)
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
