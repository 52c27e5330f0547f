"""DynamicRubric (arXiv 2607.20083): a list of yes/no items with whole weights from 1 to 5, {"items": [{"item", "weight"}]}.

An item must be answerable with yes or no for a single answer; whether it is can't be seen from its form, and a verifier that
answers it badly is what training has to notice. Limits, merging and what is invalid are ours (docs/dynamic_rubric.md): 2 to 12
items, duplicates merged before scoring, since a repeated item would only inflate its weight.
"""

from __future__ import annotations

import json
import re
from typing import Any

from coevo_jax.config import RubricConfig
from coevo_jax.rubrics.json_criteria import Criterion, Rubric, normalise
from coevo_jax.text.parse import Parsed, last_json_object

MIN_ITEMS, MAX_ITEMS, MOST_WEIGHT = 2, 12, 5
MOST_CHARACTERS = 500  # of an item: the verifier reads it once for every answer


def parse_rubric(text: str, cfg: RubricConfig, *, truncated: bool = False, opened: bool = False) -> Parsed[Rubric]:
    """A generator's text as weighted items. Not 'ok' is an outcome of the generator, and `detail` says why.

    cfg.max_criteria (0 = 12) bounds the items as written, cfg.min_criteria those that are left when duplicates are merged.
    """
    found = last_json_object(text, "items", truncated=truncated, opened=opened)
    if found.value is None:
        return Parsed(found.status, None, found.detail)
    items = found.value.get("items")
    if not isinstance(items, list):
        return Parsed("parse_fail", None, "items is not a list")
    most = cfg.max_criteria or MAX_ITEMS
    if len(items) > most:
        return Parsed("parse_fail", None, f"{len(items)} items, at most {most} are allowed")
    read = [_item(item) for item in items]
    wrongs = [f"item {i}: {one}" for i, one in enumerate(read, 1) if isinstance(one, str)]
    if wrongs:
        return Parsed("parse_fail", None, "; ".join(wrongs)[:500])
    merged = merge([one for one in read if isinstance(one, Criterion)])
    if len(merged) < cfg.min_criteria:
        return Parsed("parse_fail", None, f"{len(merged)} different items, at least {cfg.min_criteria} are needed")
    return Parsed("ok", Rubric(merged, text))


def _item(item: Any) -> Criterion | str:
    """An item, or what is wrong with it."""
    if not isinstance(item, dict):
        return "not an object"
    text, weight = item.get("item"), item.get("weight")
    if not isinstance(text, str) or not normalise(text):
        return "no text"
    if len(text) > MOST_CHARACTERS:
        return f"{len(text)} characters, more than {MOST_CHARACTERS}"
    if isinstance(weight, bool) or not isinstance(weight, int) or not 1 <= weight <= MOST_WEIGHT:
        return f"weight {str(weight)[:40]!r} is no whole number from 1 to {MOST_WEIGHT}" if "weight" in item else "no weight"
    return Criterion(" ".join(text.split()), float(weight))


def merge(items: list[Criterion]) -> tuple[Criterion, ...]:
    """Items that are the same but for case, spaces and marks count once, with the largest of their weights; the first one's text
    and place stay."""
    found: dict[str, Criterion] = {}
    for item in items:
        first = found.setdefault(normalise(item.text), item)
        if item.weight > first.weight:
            found[normalise(item.text)] = Criterion(first.text, item.weight)
    return tuple(found.values())


def write_rubric(items: list[tuple[str, int]]) -> str:
    """Items and weights as a generator writes them."""
    return json.dumps({"items": [{"item": text, "weight": weight} for text, weight in items]}, ensure_ascii=False)


# Words of items that look at the surface of an answer: what splits any set of answers, whatever they say.
SURFACE = re.compile(
    r"""\b(?: words? | sentences? | paragraphs? | characters? | lines? | length | long(?:er)? | short(?:er)? | brief | concise
      | bullets? | bulleted | list | format(?:ted|ting)? | markdown | headings? | bold | punctuation | commas? | dash(?:es)?
      | capital(?:s|ised|ized)? | emojis? | numbered )\b""",
    re.IGNORECASE | re.VERBOSE,
)


def mentions_surface(text: str) -> bool:
    """Does an item mention length or format? By a word list, which finds neither all nor only such items: for a metric."""
    return SURFACE.search(text) is not None
