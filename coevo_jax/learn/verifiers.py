"""Verifiable rewards: a function of a prompt's record and the completion's text, `(record, text) -> float in [0, 1]`.

`schedule.verifier` names one as 'module:function'; '' or 'reasoning_gym' takes the score of the record's reasoning-gym task.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

from coevo_jax.errors import UserError
from coevo_jax.learn.dotted import resolve_function

Verifier = Callable[[dict[str, Any], str], float]

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def resolve_verifier(path: str) -> Verifier:
    """The verifier that `path` names, its result checked. UserError when it can't be imported."""
    verifier = reasoning_gym if path in ("", "reasoning_gym") else resolve_function(path, "schedule.verifier")

    @functools.wraps(verifier)
    def checked(record: dict[str, Any], text: str) -> float:
        score = float(verifier(record, text))
        if not 0.0 <= score <= 1.0:  # also false for NaN
            raise ValueError(f"verifier {path or 'reasoning_gym'!r} gave {score} for record {record.get('id')!r}, not in [0, 1]")
        return score

    return checked


def reasoning_gym(record: dict[str, Any], text: str) -> float:
    """The task's own score of the answer in `text`. UserError when the package is missing (extra 'eval')."""
    from coevo_jax.data.reasoning import score_answer

    return score_answer(record, extract_answer(text))


def exact_answer(record: dict[str, Any], text: str) -> float:
    """1 where the answer equals the record's reference: equal numbers, or texts alike but for spacing, case and TeX.

    The answer stands after the reasoning: in the last \\boxed{...}, else where extract_answer finds it."""
    last = text.rpartition("</think>")[2]
    said = "" if "<think>" in last else boxed(last)
    return float(_plain_answer(said or extract_answer(text)) == _plain_answer(record["reference"]))


exact_answer.needs = ("reference",)  # type: ignore[attr-defined]  # columns that every record must have


def check_needs(verifier: Verifier, records: Iterable[Mapping[str, Any]], source: str) -> None:
    """UserError for the first record without a column that the verifier reads."""
    for record in records:
        for name in getattr(verifier, "needs", ()):
            if not str(record.get(name, "")).strip():
                raise UserError(f"the prompt {record['id']!r} has no {name}", where=f"schedule.verifier, data.prompts={source}",
                                expected=f"a {name} in every record ('FILE?{name}=COLUMN' names its column)")  # fmt: skip


def boxed(text: str) -> str:
    """What stands in the last \\boxed{...} whose braces close, or ''."""
    for start in reversed([found.end() for found in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end].strip()
    return ""


def _plain_answer(text: str) -> str | Fraction:
    """A number, or the text without what doesn't count."""
    text = text.strip().strip("$").strip().rstrip(".").strip()
    text = re.sub(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\(?:left|right|,|;|!|\s)|\\[dt]?frac(?=\{)", lambda m: "\\frac" if "frac" in m[0] else "", text)
    number = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", text.removeprefix("\\$").removesuffix("%").removesuffix("\\"))
    number = re.sub(r"^(-?)\\frac\{(-?\d+)\}\{(\d+)\}$", r"\1\2/\3", number.replace(" ", ""))
    try:
        return Fraction(number)
    except (ValueError, ZeroDivisionError):
        return " ".join(text.casefold().split())


def extract_answer(text: str) -> str:
    """What stands between the last <answer> tags after the reasoning, or else the last line that isn't empty."""
    text = text.rpartition("</think>")[2]
    if "<think>" in text:  # never closed: there is no answer yet
        return ""
    tagged = ANSWER.findall(text)
    if tagged:
        return tagged[-1].strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
