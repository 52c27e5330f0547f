"""Does the loop teach? Train a config by run.py's own loop and compare its start with its end on held-out questions.

    python benchmarks/learning.py --what=rubrics    [--workdir=DIR] [--config.rubric.alpha=0] [--json]
    python benchmarks/learning.py --what=verifiable [--workdir=DIR] [--config.KEY=VALUE ...] [--json]

rubrics (configs/smollm2_learn.py): valid share of --samples rubrics a question at temperature 1, and, under --judged of them a
question, margin and accuracy on pairs in which an answer of the start loses to one of the end. verifiable
(configs/smollm2_verifiable.py): greedy accuracy. Intervals are 95 % of the paired bootstrap over questions.
The same command goes on with a run that stopped; results.json, a row of docs/results.md and a plot come at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

REPO = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np  # noqa: E402
from _results import add_row, learning_plot, machine  # noqa: E402

from coevo_jax.assemble import assemble  # noqa: E402
from coevo_jax.cli import Flags, resolve  # noqa: E402
from coevo_jax.config import DataConfig, Experiment, Sampling  # noqa: E402
from coevo_jax.config.override import to_dict  # noqa: E402
from coevo_jax.data import read_prompts  # noqa: E402
from coevo_jax.errors import UserError  # noqa: E402
from coevo_jax.judges import JudgeItem  # noqa: E402
from coevo_jax.learn.verifiers import resolve_verifier  # noqa: E402
from coevo_jax.models.load import load_model  # noqa: E402
from coevo_jax.progress import RunConsole  # noqa: E402
from coevo_jax.records.checkpoint import Checkpoints  # noqa: E402
from coevo_jax.records.metrics import read_metrics  # noqa: E402
from coevo_jax.records.run_folder import config_differences, read_config  # noqa: E402
from coevo_jax.rubrics import Rubric, parse_rubric  # noqa: E402
from coevo_jax.sampler import Completion, Request  # noqa: E402
from coevo_jax.system import System  # noqa: E402
from coevo_jax.train import train  # noqa: E402

CONFIGS = {"rubrics": "configs/smollm2_learn.py", "verifiable": "configs/smollm2_verifiable.py"}
ROLE = "evaluation"  # part of the noise's identity: no draw of the training is repeated or disturbed
HELDOUT_SEED = 1_000_003  # a reasoning-gym instance is seeded with seed + number, so the two ranges don't meet


# ------------------------------------------------------------------------------------------------------------- training


def finished(cfg: Experiment, folder: pathlib.Path) -> bool:
    """Does the folder hold a whole run of this config?"""
    if not (folder / "config.json").exists() or not (folder / "metrics.jsonl").exists():
        return False
    rows, saved = len(read_metrics(folder / "metrics.jsonl")), Checkpoints(folder / "checkpoints").latest_step()
    return not config_differences(read_config(folder), to_dict(cfg)) and rows == saved == total_updates(cfg)


def check_same(cfg: Experiment, folder: pathlib.Path) -> None:
    """UserError when the folder holds no run of this config."""
    differences = config_differences(read_config(folder), to_dict(cfg))
    if differences:
        raise UserError(
            "the run is of another config: " + "; ".join(differences), where=str(folder), expected="the same overrides"
        )


def total_updates(cfg: Experiment) -> int:
    phases = 2 if cfg.schedule.mode == "evolm" and cfg.schedule.order == "alternate" else 1
    if cfg.schedule.order == "generator_first" and cfg.schedule.mode == "evolm":
        phases = 2
    return cfg.warmup.updates + cfg.schedule.cycles * cfg.schedule.k * phases


Weights = dict[str, Any]  # by role: policy, rubric (the same ones in single-model mode)


def both_ends(cfg: Experiment, folder: pathlib.Path, console: RunConsole) -> tuple[System, Weights, Weights]:
    """The system, the weights before the loop (after the warm-up) and those of the last checkpoint."""
    system = assemble(cfg, console)
    learners = system.learners
    checkpoints = Checkpoints(folder / "checkpoints", keep=cfg.run.keep)
    try:
        restored = checkpoints.restore_latest({name: learner.state for name, learner in learners.items()})
        if restored is None:
            raise UserError("the run has no checkpoint", where=str(folder), expected="a run that finished")
        if cfg.warmup.updates:
            if cfg.loss.kl_weight <= 0:
                raise UserError("the starting point is the stored reference", where="loss.kl_weight", expected="above 0")
            start = {name: checkpoints.load_reference(x.state.params, f"reference_{name}") for name, x in learners.items()}
        else:
            start = {"policy": load_model(cfg.policy).params}
        end = {name: restored.state[name].params for name in learners}
        return system, {"rubric": start["policy"], **start}, {"rubric": end["policy"], **end}
    finally:
        checkpoints.close()


# ----------------------------------------------------------------------------------------------------------- evaluation


class Evaluator:
    """Draws under an identity of its own, with progress on the console."""

    def __init__(self, system: System, console: RunConsole):
        self.system, self.console, self.cfg = system, console, system.cfg

    def draw(
        self, name: str, params: Any, prompts: list[list[int]], n: int, sampling: Sampling, first: int = 0
    ) -> list[list[Completion]]:
        """`n` completions of each prompt; `first` sets apart the draws of different texts."""
        begin, shown = time.monotonic(), [time.monotonic()]

        def progress(done: int, total: int) -> None:
            now = time.monotonic()
            if now - shown[0] > 10 and done:
                shown[0] = now
                self.console.note(f"   {name}: {done}/{total}, ETA {(now - begin) / done * (total - done):.0f} s")

        requests = [Request(np.asarray(ids, np.int32), n, ROLE, 0, first + i, sampling) for i, ids in enumerate(prompts)]
        return self.system.context.voices["policy"].engine.generate(params, requests, progress=progress)


def rubrics_of(ev: Evaluator, name: str, params: Any, questions: list[str], samples: int) -> list[list[Rubric | None]]:
    """`samples` rubrics a question, None for an invalid one."""
    ctx = ev.system.context
    drawn = ev.draw(f"rubrics, {name}", params, [ctx.rubric_prompt(q) for q in questions], samples, ev.cfg.rubric_sampling)
    return [
        [parse_rubric(ctx.raw(c.tokens, "rubric"), ev.cfg.rubric, truncated=c.finish == "length").value for c in row]
        for row in drawn
    ]


def answers_of(ev: Evaluator, name: str, params: Any, questions: list[str]) -> list[str]:
    ctx = ev.system.context
    drawn = ev.draw(f"answers, {name}", params, [ctx.answer_prompt(q) for q in questions], 1, ev.cfg.answer, first=1 << 20)
    return [ctx.text(row[0].tokens) for row in drawn]


def margins(
    ev: Evaluator, questions: list[str], rubrics: list[list[Rubric | None]], pairs: list[tuple[str, str]], judged: int
) -> dict[int, list[float]]:
    """Judge's score of the winning answer minus the losing one's, by question, under its first `judged` valid rubrics.

    Pairs of equal texts and failed verdicts leave no margin.
    """
    items: list[JudgeItem] = []
    owners: list[int] = []
    for i, (question, written, pair) in enumerate(zip(questions, rubrics, pairs)):
        if pair[0].split() == pair[1].split():
            continue
        for rubric in [r for r in written if r is not None][:judged]:
            owners.append(i)
            items += [JudgeItem(question, rubric, answer, len(items) + side) for side, answer in enumerate(pair)]
    assert ev.system.context.judge is not None
    verdicts = ev.system.context.judge.judge(items, 0)
    out: dict[int, list[float]] = {}
    for owner, wins, loses in zip(owners, verdicts[::2], verdicts[1::2]):
        if wins.score is not None and loses.score is not None:
            out.setdefault(owner, []).append(wins.score - loses.score)
    return out


def evaluate_rubrics(ev: Evaluator, start: Weights, end: Weights, samples: int, judged: int) -> dict[str, Any]:
    cfg = ev.cfg
    questions = [r["prompt"] for r in read_prompts(DataConfig(prompts="demo_heldout")).records]
    ends = {"start": start, "end": end}
    written = {name: rubrics_of(ev, name, params["rubric"], questions, samples) for name, params in ends.items()}
    valid = {name: np.asarray([np.mean([r is not None for r in row]) for row in rows]) for name, rows in written.items()}
    out: dict[str, Any] = {"questions": len(questions), "samples": samples, "judged": judged, "alpha": cfg.rubric.alpha}
    out["valid share"] = compare(valid["start"], valid["end"])
    ev.console.note(f"valid share: {text_of(out['valid share'])}")
    texts = {name: answers_of(ev, name, params["policy"], questions) for name, params in ends.items()}
    pairs = list(zip(texts["end"], texts["start"]))
    ev.console.note("judging the pairs")
    found = {name: margins(ev, questions, rows, pairs, judged) for name, rows in written.items()}
    both = sorted(found["start"].keys() & found["end"].keys())
    out["pairs judged"] = {name: len(rows) for name, rows in found.items()} | {"both": len(both)}
    if both:
        of: Callable[[str, Callable[[float], float]], np.ndarray] = lambda name, f: np.asarray(  # noqa: E731
            [np.mean([f(m) for m in found[name][i]]) for i in both]
        )
        out["margin"] = compare(of("start", float), of("end", float))
        out["pair accuracy"] = compare(of("start", lambda m: float(m > 0)), of("end", lambda m: float(m > 0)))
    counts = {name: [len(r.criteria) for row in rows for r in row if r is not None] for name, rows in written.items()}
    out["criteria a valid rubric"] = {name: float(np.mean(n)) if n else None for name, n in counts.items()}
    distinct = {
        name: {c.text for row in rows for r in row if r is not None for c in r.criteria} for name, rows in written.items()
    }
    out["distinct criteria"] = {name: len(distinct[name]) / max(sum(counts[name]), 1) for name in written}
    return out


def heldout_source(source: str) -> str:
    """The task with the held-out seed and room for instances that the training set has too."""
    head, _, query = source.partition("?")
    kept = [o for o in query.split("&") if o and not o.startswith(("seed=", "size="))]
    return f"{head}?{'&'.join([*kept, 'size=2000', f'seed={HELDOUT_SEED}'])}"


def evaluate_verifiable(ev: Evaluator, start: Weights, end: Weights, instances: int) -> dict[str, Any]:
    """Greedy accuracy on `instances` questions whose text is not among the training prompts."""
    cfg, ctx = ev.cfg, ev.system.context
    seen = {r["prompt"] for r in read_prompts(cfg.data).records}
    fresh = {
        r["prompt"]: r for r in read_prompts(dataclasses.replace(cfg.data, prompts=heldout_source(cfg.data.prompts))).records
    }
    records = [r for text, r in fresh.items() if text not in seen and len(ctx.answer_prompt(text)) <= cfg.data.max_prompt_tokens]
    if len(records) < instances:
        raise UserError(
            f"{len(records)} held-out instances", where="data.prompts", expected=f"{instances} that are not trained on"
        )
    records = records[:instances]
    prompts = [ctx.answer_prompt(r["prompt"]) for r in records]
    greedy = dataclasses.replace(cfg.answer, temperature=0.0)
    verifier = resolve_verifier(cfg.schedule.verifier)
    out: dict[str, Any] = {"questions": instances, "task": cfg.data.prompts}
    scores, shown = {}, {}
    for name, params in (("start", start), ("end", end)):
        drawn = [ctx.text(row[0].tokens) for row in ev.draw(f"greedy, {name}", params["policy"], prompts, 1, greedy)]
        scores[name] = np.asarray([verifier(r, text) for r, text in zip(records, drawn)])
        shown[name] = drawn
    out["accuracy"] = compare(np.asarray(scores["start"] == 1.0, np.float64), np.asarray(scores["end"] == 1.0, np.float64))
    out["score"] = compare(scores["start"], scores["end"])
    out["examples"] = [
        {"question": r["prompt"], "reference": r.get("reference"), "start": a, "end": b}
        for r, a, b in list(zip(records, shown["start"], shown["end"]))[:5]
    ]
    return out


# ------------------------------------------------------------------------------------------------------------- intervals


def compare(start: np.ndarray, end: np.ndarray, draws: int = 10_000) -> dict[str, Any]:
    """Means of both ends over questions, their difference, and 95 % intervals of a paired bootstrap (percentiles)."""
    rng = np.random.RandomState(0)
    picks = rng.randint(len(start), size=(draws, len(start)))
    tables = {"start": start, "end": end, "difference": end - start}
    return {
        name: {"mean": float(x.mean()), "low": float(low), "high": float(high)}
        for name, x in tables.items()
        for low, high in [np.percentile(x[picks].mean(axis=1), [2.5, 97.5])]
    }


def text_of(found: dict[str, Any]) -> str:
    d = found["difference"]
    span = f"{d['mean']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}]"
    return f"{found['start']['mean']:.3f} -> {found['end']['mean']:.3f}, difference {span}"


# ------------------------------------------------------------------------------------------------------------------ main


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--what", choices=sorted(CONFIGS), required=True)
    parser.add_argument("--workdir", default="")
    parser.add_argument("--samples", type=int, default=4, help="rubrics a held-out question")
    parser.add_argument("--judged", type=int, default=1, help="valid rubrics a held-out question that judge its pair")
    parser.add_argument("--instances", type=int, default=200, help="held-out instances of the verifiable task")
    parser.add_argument("--docs", default=str(REPO / "docs"), help="folder of results.md and plots/; '' writes neither")
    parser.add_argument(
        "--as_is", action="store_true", help="train no further: measure the last checkpoint of a run that stopped"
    )
    parser.add_argument("--json", action="store_true")
    args, rest = parser.parse_known_args()
    try:
        return run(args, overrides_of(rest))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def overrides_of(words: list[str]) -> tuple[str, ...]:
    for word in words:
        if not word.startswith("--config."):
            raise UserError(f"unknown flag {word!r}", where="command line", expected="--config.KEY=VALUE")
    return tuple(word.removeprefix("--config.") for word in words)


def run(args: argparse.Namespace, overrides: tuple[str, ...]) -> int:
    cfg = resolve(Flags(str(REPO / CONFIGS[args.what]), overrides=overrides))
    workdir = pathlib.Path(args.workdir or f"runs/learning_{args.what}")
    folder, console, begin = workdir / "run", RunConsole(), time.monotonic()
    console.note(machine())
    if args.as_is:
        check_same(cfg, folder)
    elif not finished(cfg, folder) and not train(cfg, str(folder), console):
        return 130
    rows = read_metrics(folder / "metrics.jsonl")[: Checkpoints(folder / "checkpoints").latest_step()]
    trained = sum(row["time/total"] for row in rows)
    system, start, end = both_ends(cfg, folder, console)
    ev = Evaluator(system, console)
    if args.what == "rubrics":
        found = evaluate_rubrics(ev, start, end, args.samples, args.judged)
    else:
        found = evaluate_verifiable(ev, start, end, args.instances)
    found |= {
        "what": args.what, "config": cfg.name, "overrides": list(overrides), "seed": cfg.seed, "updates": len(rows),
        "planned updates": total_updates(cfg),
        "training minutes": trained / 60, "this command's minutes": (time.monotonic() - begin) / 60, "machine": machine(),
    }  # fmt: skip
    (workdir / "results.json").write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for name in ("valid share", "margin", "pair accuracy", "accuracy", "score"):
        if name in found:
            console.note(f"{name}: {text_of(found[name])}")
    if args.docs:
        learning_plot(pathlib.Path(args.docs) / "plots", found, rows)
        add_row(pathlib.Path(args.docs) / "results.md", found)
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
