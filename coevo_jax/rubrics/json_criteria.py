"""The JSON schema of a rubric: {"criteria": [{"criterion", "weight", "scoring_levels"}]}.

Valid (format reward 1) means: a JSON object, at least `min_criteria` criteria with non-empty and distinct texts, weights that are
finite positive numbers, and their sum within `weight_tolerance` of 1 (EvoLM, released check; distinct and non-empty are ours).
Scoring levels are read where they are well formed and are no part of validity, as in the released check.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import unicodedata
from typing import Any

from coevo_jax.config import RubricConfig
from coevo_jax.text.parse import Parsed, last_json_object


@dataclasses.dataclass(frozen=True)
class Criterion:
    """One thing to check. levels: (score, description) pairs as written, best first where the writer put it first.
    title: a short name, where the schema has one."""

    text: str
    weight: float
    levels: tuple[tuple[str, str], ...] = ()
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Rubric:
    """A valid rubric, and the text it was read from."""

    criteria: tuple[Criterion, ...]
    raw: str = ""


def parse_rubric(text: str, cfg: RubricConfig, *, truncated: bool = False, opened: bool = False) -> Parsed[Rubric]:
    """A generator's text as a rubric. Not 'ok' is an outcome of the generator (format reward 0), and `detail` says why.

    truncated: the text was cut at its token limit. opened: its prompt ended inside a reasoning block.
    """
    found = last_json_object(text, "criteria", truncated=truncated, opened=opened)
    if found.value is None:
        return Parsed(found.status, None, found.detail)
    items = found.value.get("criteria")
    if not isinstance(items, list):
        return Parsed("parse_fail", None, "criteria is not a list")
    wrong = _wrong_number(len(items), cfg)
    if wrong:
        return Parsed("parse_fail", None, wrong)
    criteria = [_criterion(item) for item in items]
    wrongs = [f"criterion {i + 1}: {c}" for i, c in enumerate(criteria) if isinstance(c, str)]
    if wrongs:
        return Parsed("parse_fail", None, "; ".join(wrongs)[:500])
    good = tuple(c for c in criteria if isinstance(c, Criterion))
    wrong = _wrong_together(good, cfg)
    return Parsed("parse_fail", None, wrong) if wrong else Parsed("ok", Rubric(good, text))


def format_reward(parsed: Parsed[Rubric]) -> float:
    """1 for a valid rubric, 0 for anything else."""
    return 1.0 if parsed.status == "ok" else 0.0


def render_rubric(rubric: Rubric) -> str:
    """The rubric as a judge reads it: one numbered line a criterion with its weight, then its levels."""
    lines = []
    for i, criterion in enumerate(rubric.criteria, start=1):
        lines.append(f"{i}. (weight {criterion.weight:.4g}) {_line(criterion.text)}")
        lines += [f"   {score}: {_line(text)}" for score, text in criterion.levels]
    return "\n".join(lines)


def numbered(rubric: Rubric) -> str:
    """The criteria alone, one numbered line each, without weights and levels."""
    return "\n".join(f"{i}. {_line(criterion.text)}" for i, criterion in enumerate(rubric.criteria, start=1))


def rubric_stats(rubric: Rubric) -> dict[str, float]:
    """Shape of a rubric: criteria, words a criterion, levels a criterion, and the spread of its weights."""
    weights = [c.weight for c in rubric.criteria]
    total = math.fsum(weights)
    return {
        "criteria": float(len(weights)),
        "criterion_words": statistics.fmean(len(c.text.split()) for c in rubric.criteria),
        "criterion_chars": statistics.fmean(len(c.text) for c in rubric.criteria),
        "levels": statistics.fmean(len(c.levels) for c in rubric.criteria),
        "weight_max": max(weights),
        "weight_std": statistics.pstdev(weights),
        "weight_sum": total,
        "effective_criteria": total**2 / math.fsum(w * w for w in weights),  # n for equal weights, 1 for one that outweighs all
    }


# ---------------------------------------------------------------------------------------------------- validity


def _wrong_number(count: int, cfg: RubricConfig) -> str:
    if count < cfg.min_criteria:
        return f"{count} criteria, at least {cfg.min_criteria} are needed"
    return f"{count} criteria, at most {cfg.max_criteria} are allowed" if cfg.max_criteria and count > cfg.max_criteria else ""


def _criterion(item: Any) -> Criterion | str:
    """A criterion, or what is wrong with it."""
    if not isinstance(item, dict):
        return "not an object"
    text, weight = item.get("criterion"), item.get("weight")
    if not isinstance(text, str) or not normalise(text):
        return "no text"
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        return f"weight {str(weight)[:40]!r} is not a number" if "weight" in item else "no weight"
    if not 0 < weight < 1e6:  # False for NaN too; no sum of such weights is near 1
        return f"weight {str(weight)[:40]} is not a positive number"
    return Criterion(text.strip(), float(weight), _levels(item.get("scoring_levels")))


def _levels(levels: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(levels, dict):
        return ()
    return tuple((score.strip(), text.strip()) for score, text in levels.items() if isinstance(text, str) and text.strip())


def _wrong_together(criteria: tuple[Criterion, ...], cfg: RubricConfig) -> str:
    seen: dict[str, int] = {}
    for i, criterion in enumerate(criteria, start=1):
        first = seen.setdefault(normalise(criterion.text), i)
        if first != i:
            return f"criteria {first} and {i} are the same"
    total = math.fsum(c.weight for c in criteria)
    # The tolerance is meant as decimals are: 0.85 is within 0.15 of 1, whatever binary says.
    if abs(total - 1.0) > cfg.weight_tolerance + 1e-9:
        return f"weights add up to {total:.4g}, not within {cfg.weight_tolerance:g} of 1"
    return ""


def normalise(text: str) -> str:
    """Two criteria are the same when this is: case, spacing, punctuation at the ends and Unicode forms don't count."""
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return folded.strip(" \t\n\"'`*_.,;:!?()[]{}-")


def _line(text: str) -> str:
    return " ".join(text.split())
