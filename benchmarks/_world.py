"""The instruments of world_study.py: what is measured on held-out questions and on a run's rollouts. No model is run here.

The judge here is the rule without noise, and better means of higher true quality, whatever a run was trained on. A pair is
counted right when a rubric gives the better answer the higher score; an invalid rubric and a tie are wrong (`accuracy`), or half
right (`with ties`: 0.5 is what a rubric that knows nothing gets).
Axes: Q questions, A answers and R rubrics of a question, C cycles (0 is the start).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from coevo_jax.config import DataConfig, RubricConfig
from coevo_jax.data import read_chat, read_pairs, read_prompts
from coevo_jax.judges.base import JudgeItem
from coevo_jax.judges.world import OracleJudge, Property, make_question, read_question, true_quality
from coevo_jax.methods.rewards import margin_reward
from coevo_jax.records.rollouts import read_rollouts, rollout_files
from coevo_jax.rubrics import Criterion, Rubric

QUESTIONS_SEED = 977_001
SamplePair = tuple[str, str]  # the better answer first
Written = list[list[Any]] | None  # [text, weight] of each criterion; None for an invalid rubric


@dataclasses.dataclass(frozen=True)
class Texts:
    """What a run's weights wrote at the end of each cycle: answers[C][Q][A], rubrics[C][Q][R]."""

    questions: list[str]
    answers: list[list[list[str]]]
    rubrics: list[list[list[Written]]]

    @property
    def cycles(self) -> range:
        return range(len(self.answers))


@functools.cache
def heldout_questions(count: int) -> tuple[str, ...]:
    """Questions that no prompt, pair or example of the small world has."""
    seen = {r["prompt"] for r in read_prompts(DataConfig(prompts="tiny")).records}
    seen |= {r["prompt"] for r in read_pairs("tiny", key="pairs").records}
    for record in read_chat("tiny").records:
        seen |= {record["question"]} if "question" in record else {m["content"] for m in record["messages"]}
    rng, found = random.Random(QUESTIONS_SEED), dict[str, None]()
    while len(found) < count:
        question, _ = make_question(rng)
        if question not in seen:
            found[question] = None
    return tuple(found)


# -------------------------------------------------------------------------------------------------------------- scoring


def ideal_rubric(question: str) -> list[list[Any]]:
    """The question's own requirements under the true quality's weights: the best a generator could write."""
    props: tuple[Property, ...] = read_question(question)
    total = sum(p.weight for p in props)
    return [[p.criterion, p.weight / total] for p in props]


class Scorer:
    """A rule judge's score of an answer under a rubric. It asks the judge for each criterion once and weighs the parts as the
    judge does, so that scores are equal to the last bit, and ties are ties."""

    def __init__(self, judge: OracleJudge = OracleJudge()):
        self.judge = judge
        self._parts: dict[tuple[str, str, str], float] = {}

    def __call__(self, question: str, written: Sequence[Sequence[Any]], answer: str) -> float:
        total = sum(weight for _, weight in written)
        return min(max(sum(weight * self._part(question, text, answer) for text, weight in written) / total, 0.0), 1.0)

    def _part(self, question: str, text: str, answer: str) -> float:
        key = (question, text, answer)
        if key not in self._parts:
            (verdict,) = self.judge.judge([JudgeItem(question, Rubric((Criterion(text, 1.0),)), answer, 0)], 0)
            (self._parts[key],) = verdict.parts
        return self._parts[key]


@functools.lru_cache(maxsize=1 << 18)
def quality(question: str, answer: str) -> float:
    return true_quality(question, answer)


# ---------------------------------------------------------------------------------------------------------------- pairs


def ordered(question: str, one: str, other: str) -> SamplePair | None:
    """The better answer first; None for equal quality."""
    a, b = quality(question, one), quality(question, other)
    return None if a == b else (one, other) if a > b else (other, one)


def pairs_of(texts: Texts, cycle: int) -> list[list[SamplePair]]:
    """By question: the disjoint pairs of answers of one policy whose true quality differs."""
    out = []
    for question, answers in zip(texts.questions, texts.answers[cycle]):
        found = (ordered(question, a, b) for a, b in zip(answers[::2], answers[1::2]))
        out.append([pair for pair in found if pair is not None])
    return out


def aged_pairs(texts: Texts, cycle: int, age: int) -> list[list[SamplePair]]:
    """By question: pairs of an answer of the policy and one of itself `age` cycles ago, where their true quality differs."""
    old = texts.answers[cycle - age]
    out = []
    for question, new, former in zip(texts.questions, texts.answers[cycle], old):
        found = (ordered(question, a, b) for a, b in zip(new[::2], former[1::2]))
        out.append([pair for pair in found if pair is not None])
    return out


def temporal_pairs(texts: Texts, cycle: int) -> list[list[SamplePair]]:
    """By question: an answer of the policy and one of a cycle before, the newer first as in training, whichever is better."""
    return [list(zip(new, old)) for new, old in zip(texts.answers[cycle], texts.answers[cycle - 1])]


def true_gap(texts: Texts, cycle: int) -> float:
    """True quality of the newer answers of `temporal_pairs` minus that of the older ones."""
    return mean_quality(texts, cycle) - mean_quality(texts, cycle - 1)


def pooled(sets: Iterable[list[list[SamplePair]]]) -> list[list[SamplePair]]:
    """The union of sets of pairs, question by question."""
    return [list(itertools.chain(*rows)) for rows in zip(*sets)]


def accuracy(
    questions: Sequence[str], rubrics: Sequence[Sequence[Written]], pairs: Sequence[Sequence[SamplePair]], score: Scorer
) -> dict[str, float]:
    """Over all (pair, rubric): the two shares of the file's head, that of valid rubrics alone, the mean margin of those."""
    right: list[float] = []
    half: list[float] = []
    margins: list[float] = []
    for question, written, own in zip(questions, rubrics, pairs):
        for (better, worse), rubric in itertools.product(own, written):
            if rubric is None:
                right.append(0.0)
                half.append(0.5)
                continue
            margin = score(question, rubric, better) - score(question, rubric, worse)
            margins.append(margin)
            right.append(float(margin > 0))
            half.append(0.5 if margin == 0 else float(margin > 0))
    mean: Callable[[list[float]], float] = lambda values: float(np.mean(values)) if values else float("nan")  # noqa: E731
    valid = mean([float(m > 0) for m in margins])
    return {"accuracy": mean(right), "with ties": mean(half), "valid": valid, "margin": mean(margins), "cases": len(right)}


def judge_strength(texts: Texts, noise: float, seed: int) -> float:
    """Accuracy of a judge under the ideal rubric, on the pairs of the start's policy: how strong it is."""
    rubrics: list[list[Written]] = [[ideal_rubric(q)] for q in texts.questions]
    return accuracy(texts.questions, rubrics, pairs_of(texts, 0), Scorer(OracleJudge(noise, seed=seed)))["accuracy"]


# ------------------------------------------------------------------------------------------------------ a run by itself


def mean_quality(texts: Texts, cycle: int) -> float:
    """True quality of the policy's answers."""
    return float(np.mean([quality(q, a) for q, row in zip(texts.questions, texts.answers[cycle]) for a in row]))


def valid_share(texts: Texts, cycle: int) -> float:
    return float(np.mean([r is not None for row in texts.rubrics[cycle] for r in row]))


def relevant_share(texts: Texts, cycle: int) -> float:
    """Weight that a valid rubric puts on what its question asks for, mean over rubrics."""
    shares = []
    for question, row in zip(texts.questions, texts.rubrics[cycle]):
        asked = {p.criterion for p in read_question(question)}
        for written in row:
            if written is not None:
                shares.append(sum(w for text, w in written if text in asked) / sum(w for _, w in written))
    return float(np.mean(shares)) if shares else float("nan")


def covered_share(texts: Texts, cycle: int) -> float:
    """Share (by weight) of what the question asks for that a valid rubric names, mean over rubrics."""
    shares = []
    for question, row in zip(texts.questions, texts.rubrics[cycle]):
        props = read_question(question)
        total = sum(p.weight for p in props)
        for written in row:
            if written is not None:
                named = {text for text, _ in written}
                shares.append(sum(p.weight for p in props if p.criterion in named) / total)
    return float(np.mean(shares)) if shares else float("nan")


# ------------------------------------------------------------------------------------------------------------- rollouts


def training_pairs(folder: pathlib.Path) -> list[dict[str, float]]:
    """By cycle, of a run's rubric phases: the pairs that it was trained on and its groups.

    true gap: true quality of the accepted answer minus that of the rejected one; better, worse: shares of pairs of true gap above
    and below 0; margin, pair accuracy: the training judge's under valid rubrics; usable margin, usable binary: share of groups
    whose rewards are not all equal, of the same groups under either reward with format, and `alone` without it. First attempts
    only: a group drawn again is one because the first was not usable.
    """
    cycles: dict[int, list[dict[str, Any]]] = {}
    for update, role, _, _ in rollout_files(folder / "rollouts"):
        if role == "rubric":
            for row in read_rollouts(folder / "rollouts", update, role):
                cycles.setdefault(row["cycle"], []).append(row)
    return [_cycle_facts(rows) for _, rows in sorted(cycles.items())]


REWARDS = {
    (name, how): RubricConfig(reward=name, alpha=alpha)
    for name in ("margin", "binary")
    for how, alpha in (("", RubricConfig().alpha), (" alone", 1.0))
}


def _cycle_facts(rows: list[dict[str, Any]]) -> dict[str, float]:
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row["group"] == row["slot"]:  # group = attempt * P + slot
            groups.setdefault((row["update"], row["group"]), []).append(row)
    gaps = [quality(g[0]["question"], g[0]["pair"]["accepted"]) - quality(g[0]["question"], g[0]["pair"]["rejected"])
            for g in groups.values()]  # fmt: skip
    margins = [row["parts"]["margin"] for g in groups.values() for row in g if "margin" in row["parts"]]
    out = {
        "true gap": float(np.mean(gaps)), "better": float(np.mean([x > 0 for x in gaps])),
        "worse": float(np.mean([x < 0 for x in gaps])), "margin": float(np.mean(margins or [np.nan])),
        "pair accuracy": float(np.mean([m > 0 for m in margins] or [np.nan])), "groups": len(gaps),
    }  # fmt: skip
    for (name, how), cfg in REWARDS.items():
        out[f"usable {name}{how}"] = float(np.mean([usable(g, cfg) for g in groups.values()]))
    return out


def usable(group: Sequence[dict[str, Any]], cfg: RubricConfig) -> bool:
    """Do the rewards of a group of rubrics differ? An invalid one has margin 0 and format 0; one whose judge failed has none."""
    rewards = [
        margin_reward(row["parts"].get("margin", 0.0), row["parts"]["format"], cfg) for row in group if row["reward"] is not None
    ]
    return len(rewards) > 1 and max(rewards) != min(rewards)
