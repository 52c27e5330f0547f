"""Reading what a model wrote. Every reader returns a `Parsed`: a typed value, or a failure that says why; never a default number.

One strict grammar (design.md 4.11): only what follows the last closing reasoning tag is read; the last verdict counts, and when
that one is unreadable an earlier one doesn't stand in for it; NaN, infinities, booleans and out-of-range numbers are failures.
JSON is not repaired. Time is linear in the text, and texts over MAX_CHARS are failures.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any, Generic, Literal, TypeVar

Status = Literal["ok", "parse_fail", "truncated", "timeout", "refused"]
T = TypeVar("T")

MAX_CHARS = 400_000  # about 100 thousand tokens, far over any verdict


@dataclasses.dataclass(frozen=True)
class Parsed(Generic[T]):
    """status 'ok' with a value, or a failure with value None. `detail` says what was wrong."""

    status: Status
    value: T | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"


def _fail(detail: str) -> Parsed[Any]:
    return Parsed("parse_fail", None, detail)


# ---------------------------------------------------------------------------------------------------- reasoning

_TAG = "think|thinking|thought|reasoning"
_CLOSE = re.compile(rf"</(?:{_TAG})>", re.IGNORECASE)
_OPEN = re.compile(rf"\s*<(?:{_TAG})>", re.IGNORECASE)


def split_reasoning(text: str, *, opened: bool = False) -> tuple[str, str, bool]:
    """(reasoning, what a reader sees, is the reasoning closed). `opened`: the prompt ended inside a reasoning block.

    A block opens at the very start only, so that an answer may mention the tag; the last closing tag ends it, with or without an
    opening one. Where it never closes nothing is seen.
    """
    end = 0
    for found in _CLOSE.finditer(text):
        end = found.end()
    rest = text[end:]
    if _OPEN.match(rest) or (opened and end == 0):
        return text, "", False
    return text[:end], rest, True


def strip_reasoning(text: str, *, opened: bool = False) -> str:
    """What a reader sees of a model's text; '' when its reasoning never closes."""
    return split_reasoning(text, opened=opened)[1]


def visible(text: str, *, truncated: bool = False, opened: bool = False) -> Parsed[str]:
    """The text after reasoning. truncated: the model was cut, so its last word is missing whatever the text looks like."""
    _, seen, closed = split_reasoning(text, opened=opened)
    if not closed:
        return Parsed("truncated", None, "the reasoning never closes")
    if truncated:
        return Parsed("truncated", None, "cut at the token limit")
    if len(seen) > MAX_CHARS:
        return _fail(f"{len(seen)} characters, more than {MAX_CHARS}")
    if not seen.strip():
        return _fail("empty")
    return Parsed("ok", seen)


# ---------------------------------------------------------------------------------------------------- JSON


class _Twice(ValueError):
    """A JSON object names a key twice, so it doesn't say one thing."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise _Twice("an object names a key twice")
    return out


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
_STARTS_JSON = re.compile(r"\{\s*[\"']")
MAX_BROKEN = 500  # broken objects of a text; each costs Python's decoder a pass over what stands before it


def _key(record: dict[str, Any], key: str) -> str | None:
    """The key as the record spells it. Case doesn't matter; two spellings in one record are none."""
    found = [k for k in record if k.casefold() == key.casefold()]
    return found[0] if len(found) == 1 else None


def _last_object(text: str, key: str) -> Parsed[tuple[dict[str, Any], int]]:
    """The last whole top-level object that has `key`, and where it ends.

    Words in braces are prose. What starts like an object and isn't one is a broken object: objects inside it don't count (they
    are its parts), and one after the last whole object is a failure (the last verdict is the unreadable one).
    """
    found: tuple[dict[str, Any], int] | None = None
    broken, depth, counted, pos = False, 0, 0, 0  # depth: braces open since the broken object began, counted up to `counted`
    errors = 0
    while (candidate := _STARTS_JSON.search(text, pos)) is not None:
        start = candidate.start()
        if broken:
            depth += text.count("{", counted, start) - text.count("}", counted, start)
            counted = start
        try:
            value, end = _DECODER.raw_decode(text, start)
        except json.JSONDecodeError as error:
            if not broken or depth <= 0:
                broken, depth, counted = True, 0, start
            pos = max(error.pos, start + 1)  # what was read up to the error is inside the object
            errors += 1
            if errors > MAX_BROKEN:
                return _fail("JSON: too many broken objects")
            continue
        except (RecursionError, ValueError) as error:  # nested too deeply, a number of thousands of digits, a key twice
            return _fail(f"JSON: {str(error)[:100]}")
        pos = end
        if (broken and depth > 0) or _key(value, key) is None:
            continue
        if text[end : end + 64].lstrip()[:1] in (",", "}", "]"):  # a part of something larger
            broken, depth, counted = True, 0, end
        else:
            found, broken = (value, end), False
    if broken:
        return _fail("a JSON object that is broken or unfinished")
    return Parsed("ok", found) if found else _fail(f"no JSON object with the key {key!r}")


def last_json_object(text: str, key: str, *, truncated: bool = False, opened: bool = False) -> Parsed[dict[str, Any]]:
    """The last JSON object with `key` at its top level, in prose or code fences, after the reasoning."""
    seen = visible(text, truncated=truncated, opened=opened)
    if seen.value is None:
        return Parsed(seen.status, None, seen.detail)
    found = _last_object(seen.value, key)
    return Parsed("ok", found.value[0]) if found.value else Parsed(found.status, None, found.detail)


_FENCED = re.compile(r"\s*```(?:json)?[ \t]*\n(.*)\n[ \t]*```\s*", re.IGNORECASE | re.DOTALL)


def whole_json(text: str) -> Parsed[Any]:
    """A text that is nothing but one JSON value, in a code fence or not; a key named twice is a failure."""
    fenced = _FENCED.fullmatch(text)
    body = (fenced[1] if fenced else text).strip()
    try:
        value, end = _DECODER.raw_decode(body)
    except (RecursionError, ValueError) as error:
        return _fail(f"JSON: {str(error)[:100]}")
    return Parsed("ok", value) if end == len(body) else _fail("more than one JSON value")


# ---------------------------------------------------------------------------------------------------- numbers

_NUMBER = r"[-+]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][-+]?\d{1,3})?"
_AMOUNT = re.compile(rf"(?P<value>{_NUMBER})(?:\s{{0,3}}(?:/|out of)\s{{0,3}}(?P<of>{_NUMBER}))?")
# Not a number after all: a further digit or letter, a percentage, a second fraction, a range.
_SPOILED = re.compile(r"[\w%/]|\.\d|\s{0,3}(?:-|–|to\b|or\b)\s{0,3}[\d.]", re.IGNORECASE)
_SCORE_LABEL = re.compile(r"\b(?:score|rating|reward|grade)\b[\"'*_`\s]{0,8}[:=][\"'*_`\s]{0,8}", re.IGNORECASE)


def number_in(value: Any, low: float, high: float) -> Parsed[float]:
    """A JSON value as a number in [low, high]: a number, or a string that is nothing but one ('0.7', '8/10'). No booleans."""
    if isinstance(value, str):
        found = _AMOUNT.fullmatch(value.strip())
        return _amount(found, low, high) if found else _fail(f"{value[:40]!r} is not a number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _fail(f"{type(value).__name__} is not a number")
    return _in_range(value, low, high)


def _in_range(value: float, low: float, high: float) -> Parsed[float]:
    if not low <= value <= high:  # False for NaN; exact for integers of any size
        return _fail(f"{str(value)[:40]} is outside [{low:g}, {high:g}]")
    return Parsed("ok", float(value)) if math.isfinite(value) else _fail("not finite")


def _amount(found: re.Match[str], low: float, high: float) -> Parsed[float]:
    """'8.5/10' on the unit scale is the share; on another scale the second number must be its top."""
    value, of = float(found["value"]), found["of"]
    if of is None:
        return _in_range(value, low, high)
    total = float(of)
    if (low, high) == (0.0, 1.0) and total > 0:
        return _in_range(value / total, low, high)
    return _in_range(value, low, high) if total == high else _fail(f"a share of {total:g} on a scale up to {high:g}")


def parse_score(
    text: str, *, key: str = "score", low: float = 0.0, high: float = 1.0, truncated: bool = False, opened: bool = False
) -> Parsed[float]:
    """The last score: a JSON object's `key`, 'Score: 0.8' or 'Final score: 8/10' in prose, or a text that is one number."""
    seen = visible(text, truncated=truncated, opened=opened)
    if seen.value is None:
        return Parsed(seen.status, None, seen.detail)
    body, record = seen.value, None
    if _STARTS_JSON.search(body):
        found = _last_object(body, key)
        if found.value is None:
            return Parsed(found.status, None, found.detail)
        record, body = found.value[0], body[found.value[1] :]
    labels = list(_SCORE_LABEL.finditer(body))
    if labels:  # after the JSON object, where there is one: the last verdict counts
        amount = _AMOUNT.match(body, labels[-1].end())
        if not amount or _SPOILED.match(body, amount.end()):
            return _fail("the last score is not a number")
        return _amount(amount, low, high)
    if record is not None:
        return number_in(record[_key(record, key) or key], low, high)
    amount = _AMOUNT.fullmatch(body.strip())
    return _amount(amount, low, high) if amount else _fail("no score")


def parse_rating(
    text: str, *, key: str = "rating", low: float = 1.0, high: float = 10.0, truncated: bool = False, opened: bool = False
) -> Parsed[float]:
    """A rating on a scale such as 1 to 10, as it stands (not normalised)."""
    return parse_score(text, key=key, low=low, high=high, truncated=truncated, opened=opened)


def parse_criteria_scores(
    text: str, count: int, *, key: str = "scores", truncated: bool = False, opened: bool = False
) -> Parsed[tuple[float, ...]]:
    """One score in [0, 1] for each of `count` criteria: {"scores": [..]} in their order, or {"scores": {"1": .., "2": ..}}.

    One bad or missing score fails the whole verdict: a mean over the rest would be of another rubric.
    """
    found = last_json_object(text, key, truncated=truncated, opened=opened)
    if found.value is None:
        return Parsed(found.status, None, found.detail)
    scores = found.value[_key(found.value, key) or key]
    if isinstance(scores, dict):
        wanted = [str(i + 1) for i in range(count)]
        if sorted(scores) != sorted(wanted):
            return _fail(f"scores of {sorted(scores)[:20]}, expected criteria 1 to {count}")
        scores = [scores[name] for name in wanted]
    if not isinstance(scores, list) or len(scores) != count:
        return _fail(f"{len(scores) if isinstance(scores, list) else 'no list of'} scores for {count} criteria")
    read = [number_in(score, 0.0, 1.0) for score in scores]
    bad = [f"criterion {i + 1}: {one.detail}" for i, one in enumerate(read) if one.value is None]
    return _fail("; ".join(bad)) if bad else Parsed("ok", tuple(one.value for one in read if one.value is not None))


# ---------------------------------------------------------------------------------------------------- verdicts in words

_MARKS = " \t\r\n\"'`*_.!,;:()[]{}<>"
_VERDICT_LABEL = re.compile(r"\b(?:verdict|answer|judg[e]?ment|decision|evaluation)\b[\"'*_`\s]{0,8}[:=]", re.IGNORECASE)
_LEADING = re.compile(r"[\s\"'`*_(\[]*(yes|no)\b[\"'`*_)\]]*(?:[.,:;!]|\s*\n|\s*$|\s+[-–—])", re.IGNORECASE)
_SENTENCE = re.compile(
    r"\b(?:is|are|was|were)(?P<neg>n't|n’t|\s+not)?\s+(?:entirely\s+|completely\s+|fully\s+)?(?P<word>correct|incorrect)$", re.I
)
_YES, _NO = {"yes", "correct"}, {"no", "incorrect", "not correct"}


def parse_yes_no(text: str, *, key: str = "answer", truncated: bool = False, opened: bool = False) -> Parsed[bool]:
    """A yes or no: a JSON object's `key`, 'Verdict: no', one word, a leading 'Yes, ...', a last word, or '... is (not) correct'.

    Whole words only. A leading and a last verdict that disagree are a failure.
    """
    seen = visible(text, truncated=truncated, opened=opened)
    if seen.value is None:
        return Parsed(seen.status, None, seen.detail)
    body = seen.value
    if _STARTS_JSON.search(body):
        return _yes_no_of_json(body, key)
    labels = list(_VERDICT_LABEL.finditer(body))
    said = body[labels[-1].end() :] if labels else body  # the last verdict counts
    votes = {vote for vote in (_word(said), _leading(said), _closing(body)) if vote is not None}
    if len(votes) == 1:
        return Parsed("ok", votes.pop())
    return _fail("yes and no" if votes else "neither yes nor no")


def _yes_no_of_json(body: str, key: str) -> Parsed[bool]:
    found = _last_object(body, key)
    if found.value is None:
        return Parsed(found.status, None, found.detail)
    value = found.value[0][_key(found.value[0], key) or key]
    said = value if isinstance(value, bool) else _word(value) if isinstance(value, str) else None
    return _fail(f"{str(value)[:40]!r} is neither yes nor no") if said is None else Parsed("ok", said)


def _word(text: str) -> bool | None:
    """The verdict of a text that is nothing but one."""
    if len(text) > 200:
        return None
    word = " ".join(text.strip(_MARKS).casefold().split())
    return True if word in _YES else False if word in _NO else None


def _leading(text: str) -> bool | None:
    found = _LEADING.match(text)
    return found[1].casefold() == "yes" if found else None


def _closing(text: str) -> bool | None:
    """The last word, where it is yes or no, or a closing '... is (not) correct'."""
    end = text.rstrip(_MARKS)[-200:]
    last = re.search(r"(?:^|[\s\"'`*_(:])(yes|no)$", end, re.IGNORECASE)
    if last:
        return last[1].casefold() == "yes"
    found = _SENTENCE.search(end)
    if not found:
        return None
    positive = found["word"].casefold() == "correct"
    if found["neg"]:
        return False if positive else None  # 'is not incorrect' says neither
    return positive


def parse_winner(
    text: str, *, labels: tuple[str, ...] = ("A", "B"), ties: bool = False, truncated: bool = False, opened: bool = False
) -> Parsed[str]:
    """The last winner: 'Winner: Response B' (with or without markdown), or a JSON object's 'winner'. 'tie' where `ties`."""
    seen = visible(text, truncated=truncated, opened=opened)
    if seen.value is None:
        return Parsed(seen.status, None, seen.detail)
    body, said = seen.value, None
    if _STARTS_JSON.search(body):
        found = _last_object(body, "winner")
        if found.value is None:
            return Parsed(found.status, None, found.detail)
        said = found.value[0][_key(found.value[0], "winner") or "winner"]
        body = body[found.value[1] :]
    marks = list(re.finditer(r"\bwinner\b[\"'*_`\s]{0,8}(?:[:=]|\bis\b)", body, re.IGNORECASE))
    if marks:
        said = body[marks[-1].end() :].lstrip(_MARKS).split("\n")[0]
    return _winner(said[:200] if isinstance(said, str) else said, labels, ties)


def _winner(said: Any, labels: tuple[str, ...], ties: bool) -> Parsed[str]:
    if not isinstance(said, str):
        return _fail("no winner")
    names = "|".join(map(re.escape, labels)) + ("|tie" if ties else "")
    # After the name: the end, a stop or a mark; never 'A or B', 'A and B', 'A clear'.
    start = rf"[{re.escape(_MARKS)}]*(?:the\s+)?(?:response|answer|assistant)?[\s\"'*_`]*"
    found = re.match(rf"{start}({names})[\"'*_`)\]\s]*(?:$|[.,;:!(])", said, re.IGNORECASE)
    if not found:
        return _fail(f"the last winner {said[:40]!r} is none of {', '.join(labels)}")
    return Parsed("ok", next((label for label in labels if label.casefold() == found[1].casefold()), "tie"))
