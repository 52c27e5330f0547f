"""How rubrics evolve: what their criteria say and weigh, update by update, from a run's rollouts. EvoLM's statistics and ours.

Per rubric, over the texts of its criteria; then the mean over rubrics (shares are a rubric's, not pooled). Two definitions:

paper   the released extraction: the first balanced {...} with `criteria`, else pairs of criterion and weight found in the text. A
        rubric from which nothing can be read counts as zeros in every mean, so a generator that learns the form alone seems to
        write more and longer criteria.
valid   rubrics that are valid by the run's own schema; others are counted in valid_share and enter no mean.

The released word lists of negation, examples, correctness and completeness are not public in what we read: those are ours.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from coevo_jax.config import RubricConfig
from coevo_jax.judges.agreement import pearson
from coevo_jax.learn.control import centred
from coevo_jax.rubrics import parse_rubric
from coevo_jax.rubrics.json_criteria import normalise
from coevo_jax.text.parse import strip_reasoning

LABEL_CHARS = 40  # a criterion of at most so many characters is a label


def _words(*stems: str) -> re.Pattern[str]:
    """Stems at the beginning of a word."""
    return re.compile(r"\b(?:" + "|".join(stems) + ")", re.IGNORECASE)


PATTERNS: dict[str, re.Pattern[str]] = {
    "expected_value": re.compile(r"\d|= |\b(?:equals|formula|equation|code|pattern|exact|verbatim)\b", re.IGNORECASE),
    "constraint": _words(
        "avoid", "exclud", r"keyword\b", r"must not\b", r"should not\b", r"do not\b", "prohibit", "restrict", "forbid"
    ),
    "negation": _words(r"not\b", r"no\b", r"never\b", r"without\b", r"none\b", r"nor\b", r"\w+n't\b"),
    "example": _words(r"examples?\b", r"for instance\b", r"such as\b", r"e\.g\.", "illustrat"),
    "correctness": _words("correct", "accura", "factual", r"true\b", "error", "valid"),
    "completeness": _words("complete", "comprehensive", "thorough", r"all\b", r"every\b", "cover"),
}  # fmt: skip
SHARES = ("label_only", *PATTERNS)
NUMBERS = (*SHARES, "chars", "criteria", "max_weight", "top_1_share", "weight_std")
Criteria = Sequence[tuple[str, float]]  # text and weight of each


def flags(text: str) -> dict[str, bool]:
    """What a criterion's text is, by name."""
    return {"label_only": len(text) <= LABEL_CHARS} | {name: bool(p.search(text)) for name, p in PATTERNS.items()}


def numbers(criteria: Criteria) -> dict[str, float]:
    """A rubric's statistics: shares of its criteria in [0, 1], mean characters, count, largest weight, its share of all weight,
    the population standard deviation of the weights. All 0 without criteria."""
    if not criteria:
        return dict.fromkeys(NUMBERS, 0.0)
    found = [flags(text) for text, _ in criteria]
    weights = [weight for _, weight in criteria]
    total = math.fsum(weights)
    return {
        **{name: statistics.fmean(f[name] for f in found) for name in SHARES},
        "chars": statistics.fmean(len(text) for text, _ in criteria),
        "criteria": float(len(criteria)),
        "max_weight": max(weights),
        "top_1_share": max(weights) / total if total > 0 else 0.0,
        "weight_std": statistics.pstdev(weights),
    }


# ---------------------------------------------------------------------------------------------------------- extraction

_PAIR = re.compile(r'"criterion"\s*:\s*"((?:[^"\\]|\\.)*)"[^{}]*?"weight"\s*:\s*([-+]?\d+(?:\.\d+)?)', re.DOTALL)


def released_criteria(text: str, opened: bool = False) -> list[tuple[str, float]]:
    """Criteria as the released statistics read them from a generator's text; [] where nothing can be read."""
    seen = strip_reasoning(text, opened=opened)
    block = _first_balanced(seen)
    if block is not None:
        try:
            items = json.loads(block)["criteria"]
            return [(str(item["criterion"]), float(item["weight"])) for item in items]
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
    return [(found, float(weight)) for found, weight in _PAIR.findall(seen)]


def _first_balanced(text: str) -> str | None:
    """From the first brace to the one that closes it; braces inside texts count, as there."""
    start, depth = text.find("{"), 0
    for at in range(start, len(text)) if start >= 0 else ():
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[start : at + 1]
    return None


def valid_criteria(row: Mapping[str, Any], cfg: RubricConfig, opened: bool = False) -> list[tuple[str, float]] | None:
    """Criteria of a rollout row whose rubric is valid, else None."""
    truncated = row.get("finish") == "length" or row.get("status") == "truncated"
    parsed = parse_rubric(str(row.get("completion", "")), cfg, truncated=truncated, opened=opened)
    return None if parsed.value is None else [(c.text, c.weight) for c in parsed.value.criteria]


# ------------------------------------------------------------------------------------------------------------- updates


@dataclasses.dataclass(frozen=True)
class Point:
    """An update's rubrics. paper, valid: means by the two definitions; judge: how the judge used them (None: not known)."""

    update: int
    rubrics: int
    valid_share: float
    paper: Mapping[str, float]
    valid: Mapping[str, float | None]
    judge: Mapping[str, float | None]


def point(update: int, rubrics: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]], cfg: RubricConfig,
          opened: bool = False) -> Point:  # fmt: skip
    """The numbers of an update from its rollout rows of the generator and, where it has some, of a policy."""
    found = [valid_criteria(row, cfg, opened) for row in rubrics]
    good = [numbers(criteria) for criteria in found if criteria]
    paper = [numbers(released_criteria(str(row.get("completion", "")), opened)) for row in rubrics]
    return Point(
        update,
        len(rubrics),
        len(good) / len(rubrics) if rubrics else 0.0,
        {name: _mean([p[name] for p in paper]) or 0.0 for name in NUMBERS},
        {name: _mean([g[name] for g in good]) for name in NUMBERS},
        judge_numbers(rubrics, answers),
    )


def judge_numbers(rubrics: Iterable[Mapping[str, Any]], answers: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """How the judge decided under an update's rubrics.

    pair_accuracy: share of margins above 0; tie_share: of 0; longer_preferred: share of margins that name the longer answer,
    beside accepted_longer, how often the accepted one is;
    length_correlation: of an answer's characters with its reward, inside groups.
    Side by side: slot_a_share and order_flip_share. Several judges: all_agree; a held-out judge: heldout_agreement.
    """
    rubrics, answers = list(rubrics), list(answers)
    margins = [(row["parts"]["margin"], row.get("pair") or {}) for row in rubrics if "margin" in row.get("parts", {})]
    sized = [(m, len(pair["accepted"]) - len(pair["rejected"])) for m, pair in margins if "accepted" in pair]
    decided = [(m > 0) == (size > 0) for m, size in sized if m != 0 and size != 0]
    calls = [call for row in rubrics for call in row.get("judge_pair", ()) if call.get("score") not in (None, 0.5)]
    votes = [row["margins"] for row in rubrics if len(row.get("margins", ())) > 1]
    both = [
        (row["parts"]["judge"], row["parts"]["heldout"]) for row in answers if {"judge", "heldout"} <= set(row.get("parts", {}))
    ]
    return {
        "pair_accuracy": _mean([m > 0 for m, _ in margins]),
        "tie_share": _mean([m == 0 for m, _ in margins]),
        "longer_preferred": _mean(decided),
        "accepted_longer": _mean([size > 0 for _, size in sized if size != 0]),
        "length_correlation": length_correlation(answers),
        "slot_a_share": _mean([call["score"] > 0.5 for call in calls]),
        "order_flip_share": _mean([row["flipped"] for row in rubrics if "flipped" in row]),
        "all_agree": _mean([len({(m > 0) - (m < 0) for m in own}) == 1 for own in votes]),
        "heldout_agreement": pearson([a for a, _ in both], [b for _, b in both]) if len(both) > 1 else None,
    }


def length_correlation(answers: Iterable[Mapping[str, Any]]) -> float | None:
    """Correlation of characters and reward over answers, each around the mean of its group."""
    groups: dict[Any, list[tuple[int, float]]] = {}
    for row in answers:
        if row.get("reward") is not None:
            groups.setdefault((row.get("update"), row.get("group")), []).append((len(row["completion"]), float(row["reward"])))
    lengths = [x for own in groups.values() for x in centred([size for size, _ in own])]
    rewards = [x for own in groups.values() for x in centred([reward for _, reward in own])]
    return pearson(lengths, rewards) if len(lengths) > 2 else None


def _mean(values: Sequence[float | bool]) -> float | None:
    return statistics.fmean(map(float, values)) if values else None


# ----------------------------------------------------------------------------------------------------------- questions


@dataclasses.dataclass(frozen=True)
class Version:
    """The rubrics that a question got in an update: criteria with weights of the valid ones, and how many were written."""

    update: int
    written: int
    rubrics: tuple[tuple[tuple[str, float], ...], ...]


def histories(rows: Iterable[Mapping[str, Any]], cfg: RubricConfig, opened: bool = False) -> dict[str, list[Version]]:
    """Versions of each question's rubrics, those of most updates first."""
    found: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for row in rows:
        if "question" in row:
            found.setdefault(row["question"], {}).setdefault(int(row.get("update", 0)), []).append(row)
    out = {}
    for question, updates in found.items():
        out[question] = [
            Version(update, len(own), tuple(tuple(c) for row in own if (c := valid_criteria(row, cfg, opened))))
            for update, own in sorted(updates.items())
        ]
    return dict(sorted(out.items(), key=lambda item: (-len(item[1]), item[0])))


def likeness(a: Criteria, b: Criteria) -> float:
    """Of two rubrics: shared words of their criteria over all their words (Jaccard), 1 for the same words."""
    left, right = ({word for text, _ in rubric for word in normalise(text).split()} for rubric in (a, b))
    return len(left & right) / len(left | right) if left | right else 1.0


def drift(versions: Sequence[Version]) -> tuple[float | None, float | None]:
    """Mean likeness of a question's rubrics inside an update, and between an update and the next one that has some."""
    inside = [
        likeness(a, b) for v in versions for i, a in enumerate(v.rubrics) for b in v.rubrics[:i]
    ]  # samples of the same weights
    with_some = [v for v in versions if v.rubrics]
    between = [likeness(a, b) for v, w in itertools.pairwise(with_some) for a in v.rubrics for b in w.rubrics]
    return _mean(inside), _mean(between)


def column(points: Sequence[Point], get: Callable[[Point], float | None]) -> list[tuple[int, float]]:
    """(update, value) of the points that have one."""
    return [(p.update, value) for p in points if (value := get(p)) is not None]
