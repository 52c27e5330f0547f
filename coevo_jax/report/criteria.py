"""The criteria of a rubric as a row of a rollout file holds it: rendered for the judge, or as the generator wrote it."""

from __future__ import annotations

import json
import re
from typing import Any

from coevo_jax.text.parse import strip_reasoning

_NUMBERED = re.compile(r"^\s*\d{1,3}[.)]\s+(?:\(weight (?P<weight>[-+.\deE]+)\)\s*)?(?P<text>.*\S)\s*$")
_TEXTS = ("criterion", "description", "item", "question", "title", "text")
_WEIGHTS = ("weight", "points")
Criterion = tuple[str, float | None]


def criteria_of(row: dict[str, Any]) -> list[Criterion]:
    """(text, weight or None) of each criterion of a row's rubric; none where there is no rubric or nothing reads as one."""
    if isinstance(row.get("rubric"), str):
        return numbered(row["rubric"])
    if "rubric_status" not in row and row.get("role") != "rubric":
        return []
    text = strip_reasoning(str(row.get("completion", "")))
    return written(text) or numbered(text)


def numbered(text: str) -> list[Criterion]:
    """Those of a numbered list, each on a line of its own."""
    found = (_NUMBERED.match(line) for line in text.splitlines())
    return [(m["text"], _number(m["weight"])) for m in found if m]


def written(text: str) -> list[Criterion]:
    """Those of a JSON list of objects, or of the first list in an object; none where it is no such JSON."""
    start, end = min((i for i in (text.find("{"), text.find("[")) if i >= 0), default=-1), max(text.rfind("}"), text.rfind("]"))
    try:
        value = json.loads(text[start : end + 1]) if 0 <= start < end else None
    except (ValueError, RecursionError):
        return []
    if isinstance(value, dict):
        value = next((v for v in value.values() if isinstance(v, list)), [])
    return [c for item in value if (c := _criterion(item)) is not None] if isinstance(value, list) else []


def _criterion(item: Any) -> Criterion | None:
    if isinstance(item, str):
        return item, None
    if not isinstance(item, dict):
        return None
    text = next((item[key] for key in _TEXTS if isinstance(item.get(key), str)), None)
    weight = next((item[key] for key in _WEIGHTS if isinstance(item.get(key), int | float)), None)
    return None if text is None else (text, None if weight is None or isinstance(weight, bool) else float(weight))


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
