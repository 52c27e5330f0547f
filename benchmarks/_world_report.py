"""From texts and rollouts to the results of world_study.py and its tables.

results.json: runs by name, each with its numbers by cycle (0 is the start); what is said of several seeds is made here from it.
Accuracy is a triple: share right, with ties and invalid rubrics as half, of valid rubrics alone (`_world.py`).
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from _world import (
    SamplePair,
    Scorer,
    Texts,
    Written,
    accuracy,
    aged_pairs,
    covered_share,
    judge_strength,
    mean_quality,
    pairs_of,
    pooled,
    relevant_share,
    temporal_pairs,
    true_gap,
    valid_share,
)

from coevo_jax.judges.world import OracleJudge
from coevo_jax.sweep.table import Summary, summarize

MAIN, FROZEN, BINARY, FAST = "world_main", "world_frozen", "world_binary", "world_fast"
NOISE = "world_noise_"
ARMS = (
    (MAIN, "main"),
    (BINARY, "binary reward"),
    (FROZEN, "frozen generator"),
    (FAST, "three times the learning rate, 8 cycles"),
)
KINDS = ("accuracy", "with ties", "valid")
AGES = (1, 3)  # cycles between the two answers of an aged pair, or as many as there were
Run = dict[str, Any]
Value = Callable[[Run], float]
Rubrics = list[list[Written]]  # by question
Pairs = list[list[SamplePair]]
Results = dict[str, Any]


# ------------------------------------------------------------------------------------------------------------ measuring


def measure(texts: Texts, training: list[dict[str, float]], noise: float, seed: int, main: Texts | None) -> Run:
    """Everything that is said of one run. training: its `training_pairs`. main: the texts of the main arm's run of the same seed,
    whose pairs are the fixed ones and whose generator is compared on this run's pairs; None: this run stands in for it."""
    main, end = main or texts, texts.cycles[-1]
    fixed, start = pooled(pairs_of(main, c) for c in main.cycles), pairs_of(main, 0)
    own = [pairs_of(texts, c) for c in texts.cycles]
    found: Run = {
        "seed": seed, "noise": noise, "strength": judge_strength(texts, noise, seed),
        "pairs": [sum(map(len, pairs)) for pairs in own], "fixed pairs": sum(map(len, fixed)),
        "training": training,
    }  # fmt: skip
    for name, look in OF_A_CYCLE.items():
        found[name] = [look(texts, c) for c in texts.cycles]
    judge = Scorer()

    def triples(rubrics: Sequence[Rubrics], pairs: Sequence[Pairs]) -> list[list[float]]:
        return [triple_of(texts.questions, *both, judge) for both in zip(rubrics, pairs)]

    stays = [texts.rubrics[0] for _ in texts.cycles]
    found |= {
        "fixed": triples(texts.rubrics, [fixed for _ in texts.cycles]),
        "start": triples(texts.rubrics, [start for _ in texts.cycles]),
        "own": triples(texts.rubrics, own), "frozen on own": triples(stays, own), "main on own": triples(main.rubrics, own),
        "judged by training judge": triple_of(texts.questions, texts.rubrics[end], fixed, Scorer(OracleJudge(noise, seed=seed))),
    }  # fmt: skip
    later = texts.cycles[1:]
    temporal = [temporal_pairs(texts, c) for c in later]
    found["temporal gap"] = [true_gap(texts, c) for c in later]
    found["temporal margin"] = margins(texts, texts.rubrics[1:], temporal, judge)
    found["temporal margin, frozen"] = margins(texts, stays[1:], temporal, judge)
    found["fixed margin"] = margins(texts, texts.rubrics, [fixed for _ in texts.cycles], judge)
    for age in AGES:
        aged = [aged_pairs(texts, c, min(age, c)) for c in texts.cycles]
        found |= {f"aged {age}": triples(texts.rubrics, aged), f"frozen on aged {age}": triples(stays, aged)}
    return found


def margins(texts: Texts, rubrics: Sequence[Rubrics], pairs: Sequence[Pairs], judge: Scorer) -> list[float]:
    """Mean margin of valid rubrics, the first answer of a pair minus the second."""
    return [accuracy(texts.questions, *both, judge)["margin"] for both in zip(rubrics, pairs)]


OF_A_CYCLE = {"quality": mean_quality, "valid": valid_share, "relevant": relevant_share, "covered": covered_share}


def triple_of(questions: Sequence[str], rubrics: Rubrics, pairs: Pairs, judge: Scorer) -> list[float]:
    found = accuracy(questions, rubrics, pairs, judge)
    return [found[kind] for kind in KINDS]


# ---------------------------------------------------------------------------------------------------------- aggregating


def runs_of(results: Results, arm: str) -> list[Run]:
    """The arm's runs, by seed."""
    return sorted((run for run in results["runs"].values() if run["arm"] == arm), key=lambda run: run["seed"])


def noise_arms(results: Results) -> list[str]:
    """The main arm and those of weaker judges, the best judge first."""
    found = {run["arm"]: run["noise"] for run in results["runs"].values() if run["arm"] == MAIN or run["arm"].startswith(NOISE)}
    return sorted(found, key=lambda arm: found[arm])


def over_seeds(runs: Sequence[Run], value: Value) -> Summary | None:
    """Mean and 95 % t-interval over seeds of a number a run; NaN is left out."""
    return summarize([v for run in runs if (v := value(run)) == v])


def curve(runs: Sequence[Run], values: Callable[[Run], Sequence[float]]) -> list[Summary | None]:
    """By cycle: mean and interval over seeds."""
    return [summarize([v for v in column if v == v]) for column in zip(*(values(run) for run in runs))]


def right(name: str, kind: str = "accuracy", cycle: int = -1) -> Value:
    """One number of a triple: right('fixed') is a run's last accuracy on the fixed pairs."""
    return lambda run: run[name][cycle][KINDS.index(kind)]


def at(name: str, cycle: int = -1) -> Value:
    """A number that a run has for each cycle: quality, valid, relevant, covered."""
    return lambda run: run[name][cycle]


def trained(name: str, cycle: int = -1) -> Value:
    """One of `training_pairs`, which has no cycle 0."""
    return lambda run: run["training"][cycle][name]


def trained_mean(name: str) -> Value:
    return lambda run: float(np.mean([row[name] for row in run["training"]]))


def minus(one: Value, other: Value) -> Value:
    """The difference inside a run."""
    return lambda run: one(run) - other(run)


def text_of(found: Summary | None, sign: bool = False) -> str:
    """'0.512 [0.480, 0.544]'."""
    if found is None:
        return "-"
    spec = "+.3f" if sign else ".3f"
    if found.low is None or found.high is None:
        return f"{found.mean:{spec}}"
    return f"{found.mean:{spec}} [{found.low:{spec}}, {found.high:{spec}}]"


# --------------------------------------------------------------------------------------------------------------- tables


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def cells(runs: Sequence[Run], values: Sequence[Value], differences: Sequence[Value]) -> list[str]:
    return [text_of(over_seeds(runs, v)) for v in values] + [text_of(over_seeds(runs, d), sign=True) for d in differences]


def tables(results: Results) -> dict[str, str]:
    """Markdown tables by the claim they belong to; those whose runs are there."""
    return {name: text for name, make in TABLES.items() if (text := make(results))}


WORDS = dict(zip(KINDS, ("right", "right, ties and invalid half", "right, valid alone")))


def _coevolution(results: Results) -> str:
    runs, rows = runs_of(results, MAIN), []
    if not runs:
        return ""
    for pairs, words in (("fixed", "all cycles' policies"), ("start", "the start's policy")):
        for kind in KINDS:
            first, last = right(pairs, kind, 0), right(pairs, kind)
            rows.append([words, WORDS[kind], *cells(runs, [first, last], [minus(last, first)])])
    for name, words in (
        ("valid", "valid rubrics"), ("relevant", "weight of valid rubrics on what is asked"),
        ("covered", "what is asked that valid rubrics name"), ("quality", "true quality of answers"),
    ):  # fmt: skip
        rows.append(["", words, *cells(runs, [at(name, 0), at(name)], [minus(at(name), at(name, 0))])])
    return table(["pairs of", "measure", "start", "end", "difference"], rows)


def _frozen(results: Results) -> str:
    main, frozen, rows = runs_of(results, MAIN), runs_of(results, FROZEN), []
    if not main:
        return ""
    sets = [("the co-evolved policy", main, "own", "frozen on own")]
    sets += [("the policy under the frozen generator", frozen, "main on own", "own")] if frozen else []
    sets += [
        (f"the co-evolved policy, {age} cycle{'s' * (age > 1)} apart", main, f"aged {age}", f"frozen on aged {age}")
        for age in AGES
    ]
    for words, runs, moving, still in sets:
        for kind in KINDS:
            first, last, other = right(still, kind, 1), right(still, kind), right(moving, kind)
            rows.append([words, WORDS[kind], *cells(runs, [first, last, other], [minus(last, first), minus(last, other)])])
    header = ["pairs of", "measure", "frozen, pairs of cycle 1", "frozen, pairs of the end", "co-evolved, pairs of the end",
              "frozen: end - cycle 1", "frozen - co-evolved"]  # fmt: skip
    return table(header, rows)


def _quality(results: Results) -> str:
    rows = []
    for arm, words in ARMS:
        if runs := runs_of(results, arm):
            values = [at("quality"), at("valid"), right("fixed"), right("fixed", "valid")]
            rows.append([words, *cells(runs, values, [])])
    return table(["arm", "true quality", "valid rubrics", "fixed pairs right", "valid alone"], rows) if rows else ""


def _reward(results: Results) -> str:
    main, binary, rows = runs_of(results, MAIN), runs_of(results, BINARY), []
    if not main:
        return ""
    for where, how in (("mean of all cycles", trained_mean), ("last cycle", trained)):
        for words, suffix in (("with format", ""), ("without format", " alone")):
            margin, plain = how(f"usable margin{suffix}"), how(f"usable binary{suffix}")
            own = text_of(over_seeds(binary, plain))
            rows.append([where, words, *cells(main, [margin, plain], [minus(margin, plain)]), own])
    return table(["usable groups", "reward", "margin", "binary, same groups", "difference", "binary, its own runs"], rows)


def _curriculum(results: Results) -> str:
    runs, rows = runs_of(results, MAIN), []
    if not runs:
        return ""
    middle = len(runs[0]["training"]) // 2
    training = [("true gap", "true gap"), ("share truly better", "better"), ("share truly worse", "worse"), ("margin", "margin")]
    lines = [("pairs of training", words, [trained(name, c) for c in (0, middle, -1)]) for words, name in training]
    for words, name in (
        ("true gap", "gap"),
        ("margin, co-evolved generator", "margin"),
        ("margin, frozen generator", "margin, frozen"),
    ):
        lines.append(("held out, a cycle apart", words, [at(f"temporal {name}", c) for c in (0, middle, -1)]))
    lines.append(
        ("control: the fixed pairs", "margin, co-evolved generator", [at("fixed margin", c) for c in (1, middle + 1, -1)])
    )
    for pairs, words, values in lines:
        rows.append([pairs, words, *cells(runs, values, [minus(values[-1], values[0])])])
    return table(["pairs", "measure", "first cycle", "middle", "last cycle", "last - first"], rows)


def _judge(results: Results) -> str:
    arms, rows = noise_arms(results), []
    if len(arms) < 2:
        return ""
    values: list[Value] = [
        lambda run: run["strength"], right("fixed"), right("fixed", "with ties"), right("fixed", "valid"),
        lambda run: run["judged by training judge"][0], at("valid"), at("quality"),
    ]  # fmt: skip
    for arm in arms:
        runs = runs_of(results, arm)
        rows.append([f"{runs[0]['noise']:g}", *cells(runs, values, [])])
    header = ["noise", "judge's strength", "right", "ties and invalid half", "valid alone", "right, by the training judge",
              "valid rubrics", "true quality"]  # fmt: skip
    return table(header, rows)


def _collapse(results: Results) -> str:
    rows = []
    for arm, words in ((MAIN, "main"), (FAST, "fast")):
        for run in runs_of(results, arm):
            numbers = [run["quality"], [triple[0] for triple in run["fixed"]]]
            best = [f"{max(x):.3f} (cycle {int(np.argmax(x))}) | {x[-1]:.3f}" for x in numbers]
            last = run["training"][-1]
            rows.append([words, str(run["seed"]), *best, f"{last['pair accuracy']:.3f}", f"{last['true gap']:+.3f}"])
    header = ["arm", "seed", "best quality", "last quality", "best on fixed pairs", "last on fixed pairs",
              "pair accuracy in training, last cycle", "true gap of those pairs"]  # fmt: skip
    return table(header, rows) if runs_of(results, FAST) else ""


TABLES = {
    "coevolution": _coevolution, "frozen": _frozen, "quality": _quality, "reward": _reward, "curriculum": _curriculum,
    "judge": _judge, "collapse": _collapse,
}  # fmt: skip


def put_tables(path: pathlib.Path, found: Mapping[str, str]) -> None:
    """Put each table between its markers of the page, which stays as it is elsewhere."""
    text = path.read_text(encoding="utf-8")
    for name, body in found.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if begin in text and end in text:
            head, _, rest = text.partition(begin)
            text = head + begin + "\n" + body + "\n" + end + rest.partition(end)[2]
    path.write_text(text, encoding="utf-8")
