"""The schema of Rubrics as Rewards (RaR, arXiv 2507.17746): [{"title", "description", "weight"}], 7 to 20 items.

A description begins with its category. Only the category weighs: Essential 1.0, Important 0.7, Optional 0.3, Pitfall 0.9 (0.8 in
the paper's first version). The item's own number (1 to 5, -1 or -2 for a pitfall) must be there and is used for nothing: with
negative weights the denominator can reach 0. Pitfalls are worded positively ("does not ..."), so a satisfied one is good.
"""

from __future__ import annotations

import re
from typing import Any

from coevo_jax.config import RubricConfig
from coevo_jax.rubrics.json_criteria import Criterion, Rubric, normalise
from coevo_jax.text.parse import Parsed, last_json_object, visible, whole_json

MIN_ITEMS, MAX_ITEMS = 7, 20
KEY = "items"  # of the object that holds the list, where it doesn't stand alone
PITFALL_V1 = 0.8
CATEGORIES = {"essential": 1.0, "important": 0.7, "optional": 0.3, "pitfall": 0.9}
_CATEGORY = re.compile(rf"[\s\"'*_(\[]*({'|'.join(CATEGORIES)})\b", re.IGNORECASE)

# RaR-predefined: four generic items of equal weight, the same for every question.
PREDEFINED = Rubric(
    (
        Criterion("The answer is correct: what it states and concludes is true", 1.0, title="Correct"),
        Criterion("The answer is complete: it leaves out nothing that the question asks for", 1.0, title="Complete"),
        Criterion("The answer is concise: it holds nothing that the question doesn't call for", 1.0, title="Concise"),
        Criterion("The answer is helpful: the asker can act on it", 1.0, title="Helpful"),
    )
)


def parse_rubric(text: str, cfg: RubricConfig, *, truncated: bool = False, opened: bool = False) -> Parsed[Rubric]:
    """A writer's text as a rubric: a JSON list that is the whole text (a code fence may surround it), or {"items": [...]}."""
    seen = visible(text, truncated=truncated, opened=opened)
    if seen.value is None:
        return Parsed(seen.status, None, seen.detail)
    alone = whole_json(seen.value)
    if isinstance(alone.value, list):
        return rubric_of(alone.value, text, cfg.pitfall_weight)
    found = last_json_object(text, KEY, truncated=truncated, opened=opened)
    if found.value is None:
        return Parsed(found.status, None, found.detail)
    return rubric_of(found.value.get(KEY), text, cfg.pitfall_weight)


def rubric_of(items: Any, raw: str = "", pitfall_weight: float = CATEGORIES["pitfall"]) -> Parsed[Rubric]:
    """A list of items, from a model or a data set, as a rubric whose criteria weigh what their categories do."""
    if not isinstance(items, list) or not MIN_ITEMS <= len(items) <= MAX_ITEMS:
        what = f"{len(items)} items" if isinstance(items, list) else "no list of items"
        return Parsed("parse_fail", None, f"{what}, {MIN_ITEMS} to {MAX_ITEMS} are needed")
    read = [_criterion(item, pitfall_weight) for item in items]
    wrongs = [f"item {i + 1}: {c}" for i, c in enumerate(read) if isinstance(c, str)]
    if wrongs:
        return Parsed("parse_fail", None, "; ".join(wrongs)[:500])
    criteria = tuple(c for c in read if isinstance(c, Criterion))
    texts = [normalise(c.text) for c in criteria]
    for i, text in enumerate(texts):
        if text in texts[:i]:
            return Parsed("parse_fail", None, f"items {texts.index(text) + 1} and {i + 1} are the same")
    return Parsed("ok", Rubric(criteria, raw))


def category_of(description: str) -> str | None:
    """The category that a description begins with, in lower case."""
    found = _CATEGORY.match(description)
    return found[1].lower() if found else None


def _criterion(item: Any, pitfall_weight: float) -> Criterion | str:
    """A criterion, or what is wrong with the item."""
    if not isinstance(item, dict):
        return "not an object"
    title, description, weight = item.get("title"), item.get("description"), item.get("weight")
    if not isinstance(title, str) or not title.strip():
        return "no title"
    if not isinstance(description, str) or (category := category_of(description)) is None:
        return f"no description that begins with one of {', '.join(c.capitalize() for c in CATEGORIES)}"
    low, high = (-2, -1) if category == "pitfall" else (1, 5)
    if isinstance(weight, bool) or not isinstance(weight, int) or not low <= weight <= high:
        return f"weight {str(weight)[:40]!r} is not a whole number from {low} to {high}"
    return Criterion(description.strip(), pitfall_weight if category == "pitfall" else CATEGORIES[category], title=title.strip())
