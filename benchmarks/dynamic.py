"""Run configs/dynamic_rubric_smollm2.py and compare both ends on the test part of its rankings.

    python benchmarks/dynamic.py --workdir=runs/dynamic_rubric_smollm2 [--config.KEY=VALUE ...] [--samples=2] [--docs=docs]

Start: the weights after the warm-up (the stored reference); end: the last checkpoint. For each test prompt (dynamic.test_share,
by prompt): K answers of the starting policy, --samples rubrics of each generator over them, and under each valid rubric the share
of differently ranked pairs of labelled answers that E orders alike (a tie counts a half), Kendall's tau, and the discriminability
of the K answers. Then both policies: 2 answers of each stand in one set, and E of the end's less E of the start's is taken under
the end's rubric. Intervals are 95 % of the paired bootstrap over prompts. The same command goes on with a run that stopped;
results.json comes at the end.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import numpy as np
from _results import machine, put_between
from learning import REPO, Evaluator, both_ends, compare, overrides_of, text_of

from coevo_jax.cli import Flags, resolve
from coevo_jax.config import Experiment
from coevo_jax.config.override import to_dict
from coevo_jax.data import read_rankings
from coevo_jax.data.rankings import split, why_unusable
from coevo_jax.errors import UserError
from coevo_jax.judges.verifier import Asked, Votes, items_of, verify
from coevo_jax.learn import dynamic
from coevo_jax.methods.dynamic_rubric import shuffled
from coevo_jax.modes import MODES
from coevo_jax.progress import RunConsole
from coevo_jax.records.checkpoint import Checkpoints
from coevo_jax.records.metrics import read_metrics
from coevo_jax.records.run_folder import config_differences, read_config
from coevo_jax.rubrics import Rubric, parse_rubric
from coevo_jax.train import train

METRICS = ("pair accuracy", "kendall tau", "discriminability")


def total_updates(cfg: Experiment) -> int:
    return cfg.warmup.updates + sum(stage.updates for stage in MODES[cfg.schedule.mode].stages(cfg))


def finished(cfg: Experiment, folder: pathlib.Path) -> bool:
    """Does the folder hold a whole run of this config?"""
    if not (folder / "config.json").exists() or not (folder / "metrics.jsonl").exists():
        return False
    saved = Checkpoints(folder / "checkpoints").latest_step()
    return not config_differences(read_config(folder), to_dict(cfg)) and saved == total_updates(cfg)


def test_rankings(cfg: Experiment, most: int) -> list[dict[str, Any]]:
    """The test part of data.rankings and of what joins it."""
    out = []
    for source in filter(None, (cfg.data.rankings, *cfg.dynamic.new_rankings)):
        found = split(read_rankings(source, key="data.rankings").records, cfg.dynamic.test_share)[1]
        out += [r for r in found if not why_unusable(r, cfg.dynamic.min_anchors, cfg.dynamic.min_characters)]
    if not out:
        raise UserError("no ranking is set aside", where="dynamic.test_share", expected="above 0")
    return out[:most] if most else out


def answers(ev: Evaluator, name: str, params: Any, records: list[dict[str, Any]], n: int, first: int) -> list[list[str]]:
    """n answers to each prompt."""
    ctx = ev.system.context
    prompts = [ctx.answer_prompt(r["prompt"]) for r in records]
    drawn = ev.draw(f"answers, {name}", params, prompts, n, ev.cfg.answer, first=first)
    return [[ctx.text(c.tokens) for c in row] for row in drawn]


def rubrics(
    ev: Evaluator, name: str, params: Any, records: list[dict[str, Any]], sets: list[list[str]], samples: int
) -> list[list[Rubric | None]]:
    """`samples` rubrics of each set, None for an invalid one; those of both ends see the same orders."""
    ctx, prompts = ev.system.context, []
    for i, (record, texts) in enumerate(zip(records, sets)):
        for s in range(samples):
            prompts.append(ctx.set_prompt(record["prompt"], [texts[j] for j in shuffled((i, s), len(texts))]))
    limit = ev.cfg.sampler.max_prompt
    if (longest := max(map(len, prompts))) > limit:
        raise UserError(f"a generator's prompt has {longest} tokens", where="sampler.max_prompt", expected=f"at least {longest}")
    drawn = ev.draw(f"rubrics, {name}", params, prompts, 1, ev.cfg.rubric_sampling, first=1 << 22)
    read = [parse_rubric(ctx.raw(c.tokens, "rubric"), ev.cfg.rubric, truncated=c.finish == "length").value for (c,) in drawn]
    return [read[i * samples : (i + 1) * samples] for i in range(len(records))]


def judged(ev: Evaluator, records: list[dict[str, Any]], items: list[tuple[str, ...]], texts: list[list[str]]) -> list[Votes]:
    """Votes of each prompt's items on its texts."""
    asked = [
        Asked(r["prompt"], own, tuple(t), tuple(range(i << 8, (i << 8) + len(t))))
        for i, (r, own, t) in enumerate(zip(records, items, texts))
    ]
    assert ev.system.context.judge is not None
    ev.console.note(f"verifier: {sum(len(a.items) * len(a.answers) for a in asked)} judgements")
    return verify(ev.system.context.judge, asked, 0, ev.cfg.dynamic.yes_above)[0]


def weights(rubric: Rubric) -> np.ndarray:
    return np.asarray([c.weight for c in rubric.criteria])


def generator_figures(
    ev: Evaluator, records: list[dict[str, Any]], sets: list[list[str]], written: dict[str, list[list[Rubric | None]]]
) -> dict[str, Any]:
    """Each metric of both ends, over the prompts where both have a valid rubric; the valid share over all."""
    items = [items_of([r for rows in written.values() for r in rows[i] if r is not None]) for i in range(len(records))]
    votes = judged(ev, records, items, [own + r["answers"] for own, r in zip(sets, records)])
    table: dict[str, dict[str, list[float]]] = {m: {end: [] for end in written} for m in METRICS}
    for i, (record, own) in enumerate(zip(records, sets)):
        if not all(any(r is not None for r in rows[i]) for rows in written.values()):
            continue
        for end, rows in written.items():
            found: dict[str, list[float]] = {m: [] for m in METRICS}
            for rubric in filter(None, rows[i]):
                v, w = votes[i].of(rubric), weights(rubric)
                scores = dynamic.scores(v[:, len(own) :], w)
                if not np.isnan(scores).any():
                    found["pair accuracy"].append(dynamic.pair_accuracy(scores, record["scores"]))
                    found["kendall tau"].append(np.nan_to_num(dynamic.kendall_tau(scores, record["scores"])))
                found["discriminability"].append(dynamic.discriminability(v[:, : len(own)], w))
            for m in METRICS:
                table[m][end].append(float(np.mean(found[m])))
    out: dict[str, Any] = {}
    for m in filter(lambda m: table[m]["start"], METRICS):
        out[m] = compare(np.asarray(table[m]["start"]), np.asarray(table[m]["end"]))
    valid = {end: np.asarray([np.mean([r is not None for r in row]) for row in rows]) for end, rows in written.items()}
    out["valid share"] = compare(valid["start"], valid["end"])
    out["prompts with both"] = len(table["pair accuracy"]["start"])
    return out


def evaluate(ev: Evaluator, start: dict[str, Any], end: dict[str, Any], samples: int, most: int) -> dict[str, Any]:
    cfg = ev.cfg
    records, k = test_rankings(cfg, most), cfg.dynamic.candidates or cfg.schedule.group
    sets = answers(ev, "start", start["policy"], records, k, 0)
    ends = {"start": start, "end": end}
    written = {name: rubrics(ev, name, params["rubric"], records, sets, samples) for name, params in ends.items()}
    out: dict[str, Any] = {"prompts": len(records), "samples": samples} | generator_figures(ev, records, sets, written)

    half = k // 2
    fresh = answers(ev, "end", end["policy"], records, half, 1 << 20)
    mixed = [old[:half] + new for old, new in zip(sets, fresh)]
    last = rubrics(ev, "end, both policies", end["rubric"], records, mixed, 1)
    votes = judged(ev, records, [items_of([r for r in row if r is not None]) for row in last], mixed)
    pairs = []
    for v, (rubric,) in zip(votes, last):
        if rubric is not None and not np.isnan(s := dynamic.scores(v.of(rubric), weights(rubric))).any():
            pairs.append((float(s[:half].mean()), float(s[half:].mean())))
    if pairs:
        both = np.asarray(pairs)
        out["score inside mixed sets"] = compare(both[:, 0], both[:, 1])
        out["mixed sets"] = len(pairs)
    words = {"start": [t for s in sets for t in s[:half]], "end": [t for s in fresh for t in s]}
    out["words an answer"] = {name: float(np.mean([len(t.split()) for t in texts])) for name, texts in words.items()}
    examples = list(zip(records, sets))[:3]
    shown = [{end: [x.raw if x else None for x in rows[i]] for end, rows in written.items()} for i in range(len(examples))]
    out["examples"] = [{"prompt": r["prompt"], "set": s, "rubrics": x} for (r, s), x in zip(examples, shown)]
    return out


def text_table(found: dict[str, Any]) -> str:
    """Markdown: a row a metric, start, end and difference with its interval."""
    lines = ["| metric | start | end | difference, 95 % |", "|---|---|---|---|"]
    for name in (*METRICS, "valid share", "score inside mixed sets"):
        if name in found:
            x, d = found[name], found[name]["difference"]
            span = f"{d['mean']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}]"
            lines.append(f"| {name} | {x['start']['mean']:.3f} | {x['end']['mean']:.3f} | {span} |")
    words = found["words an answer"]
    lines.append(f"| words an answer | {words['start']:.1f} | {words['end']:.1f} | |")
    note = (f"{found['config']}{''.join(' ' + o for o in found['overrides'])}, seed {found['seed']}: {found['updates']} updates, "
            f"{found['training minutes']:.0f} minutes of training on {found['machine']}; {found['prompts']} test prompts, "
            f"{found['prompts with both']} with a valid rubric of both ends.")  # fmt: skip
    return "\n".join([*lines, "", note])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", default=str(REPO / "configs" / "dynamic_rubric_smollm2.py"))
    parser.add_argument("--workdir", default="runs/dynamic_rubric_smollm2")
    parser.add_argument("--samples", type=int, default=2, help="rubrics of each set")
    parser.add_argument("--most", type=int, default=0, help="test prompts, 0 = all")
    parser.add_argument("--docs", default="", help="folder of results.md; '' writes nothing")
    parser.add_argument("--json", action="store_true")
    args, rest = parser.parse_known_args(argv)
    cfg = resolve(Flags(args.config, overrides=overrides_of(rest)))
    folder, console, begin = pathlib.Path(args.workdir), RunConsole(), time.monotonic()
    if not finished(cfg, folder) and not train(cfg, str(folder), console):
        return 130
    rows = read_metrics(folder / "metrics.jsonl")
    system, start, end = both_ends(cfg, folder, console)
    found = evaluate(Evaluator(system, console), start, end, args.samples, args.most)
    found |= {
        "config": cfg.name, "overrides": rest, "seed": cfg.seed, "updates": len(rows), "machine": machine(),
        "training minutes": sum(row["time/total"] for row in rows) / 60,
        "this command's minutes": (time.monotonic() - begin) / 60,
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for name in (*METRICS, "valid share", "score inside mixed sets"):
        if name in found:
            console.note(f"{name}: {text_of(found[name])}")
    if args.docs:
        put_between(pathlib.Path(args.docs) / "results.md", "dynamic_rubric", text_table(found))
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
