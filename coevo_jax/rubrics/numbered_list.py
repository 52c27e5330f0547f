"""The schema of OpenRubrics and Rubric-ARM (arXiv 2510.07743, 2602.01511): a numbered list, each item with its tag at the end.

    1. The response has at most two sentences. [Hard Rule]
    2. The response names the animal. [Principle]

Valid: every line is an item, numbered 1, 2, ... in order, with a text and one tag, at least `min_criteria` of them (at most
`max_criteria`), no two the same. The last item of a text that was cut at its limit is dropped unless its tag is there: half an
item is none. A hard rule weighs 3, a principle 1 (RUBRIC-ARROW, arXiv 2605.29156), where a judge adds points.
"""

from __future__ import annotations

import re
import statistics
import unicodedata
from collections.abc import Sequence

from coevo_jax.config import RubricConfig
from coevo_jax.rubrics.json_criteria import Criterion, Rubric, normalise
from coevo_jax.text.parse import Parsed, visible

HARD, PRINCIPLE = "Hard Rule", "Principle"
WEIGHTS = {HARD: 3.0, PRINCIPLE: 1.0}
SUBJECT = "the response"  # what an item is asked to begin with: a statistic, no part of validity
_TAG = rf"\[\s*({HARD}|{PRINCIPLE})\s*\]"
_ITEM = re.compile(rf"\s*(?:\*\*)?(\d{{1,3}})[.)](?:\*\*)?\s+(.*?)\s*(?:\*\*)?{_TAG}(?:\*\*)?[.\s]*", re.IGNORECASE)
_ANY_TAG = re.compile(_TAG, re.IGNORECASE)


def parse_rubric(text: str, cfg: RubricConfig, *, truncated: bool = False, opened: bool = False) -> Parsed[Rubric]:
    """A generator's text as a rubric. Not 'ok' is an outcome of the generator, and `detail` says why."""
    seen = visible(text, opened=opened)
    if seen.value is None:
        return Parsed("truncated" if truncated else seen.status, None, seen.detail)
    lines = [line for line in seen.value.splitlines() if line.strip()]
    if truncated and not _ITEM.fullmatch(lines[-1]):
        lines = lines[:-1]
    items = [_item(line, number) for number, line in enumerate(lines, start=1)]
    wrongs = [f"line {i}: {item}" for i, item in enumerate(items, start=1) if isinstance(item, str)]
    criteria = tuple(item for item in items if isinstance(item, Criterion))
    wrong = "; ".join(wrongs)[:500] or _wrong_together(criteria, cfg)
    if wrong:
        return Parsed("truncated" if truncated else "parse_fail", None, wrong)
    return Parsed("ok", Rubric(criteria, text))


def _item(line: str, number: int) -> Criterion | str:
    """A criterion, or what is wrong with its line."""
    found = _ITEM.fullmatch(line)
    if not found:
        return f"{line.strip()[:40]!r} is no item 'N. text [{HARD}]' or '[{PRINCIPLE}]'"
    if int(found[1]) != number:
        return f"item {found[1]}, expected {number}"
    text = found[2].strip(" *")
    if not normalise(text) or not any(unicodedata.category(c)[0] in "LN" for c in text):
        return "no text"
    if _ANY_TAG.search(text):
        return "more than one tag"
    tag = HARD if found[3].casefold() == HARD.casefold() else PRINCIPLE
    return Criterion(text, WEIGHTS[tag], title=tag)


def _wrong_together(criteria: Sequence[Criterion], cfg: RubricConfig) -> str:
    if len(criteria) < cfg.min_criteria:
        return f"{len(criteria)} items, at least {cfg.min_criteria} are needed"
    if cfg.max_criteria and len(criteria) > cfg.max_criteria:
        return f"{len(criteria)} items, at most {cfg.max_criteria} are allowed"
    first: dict[str, int] = {}
    for i, criterion in enumerate(criteria, start=1):
        if (other := first.setdefault(normalise(criterion.text), i)) != i:
            return f"items {other} and {i} are the same"
    return ""


def render(rubric: Rubric) -> str:
    """The list as a judge of this family reads it; parse_rubric reads it back."""
    return "\n".join(f"{i}. {' '.join(c.text.split())} [{tag(c)}]" for i, c in enumerate(rubric.criteria, start=1))


def tag(criterion: Criterion) -> str:
    """Hard Rule or Principle; of another schema's criterion, Principle."""
    return criterion.title if criterion.title in WEIGHTS else PRINCIPLE


def list_stats(rubric: Rubric) -> dict[str, float]:
    """Shape of a list: items, hard rules, words an item, share of items that begin as asked."""
    texts = [c.text for c in rubric.criteria]
    return {
        "criteria": float(len(texts)),
        "hard_rules": float(sum(tag(c) == HARD for c in rubric.criteria)),
        "criterion_words": statistics.fmean(len(text.split()) for text in texts),
        "subject_share": statistics.fmean(text.casefold().startswith(SUBJECT) for text in texts),
    }
