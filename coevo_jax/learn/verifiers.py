"""Verifiable rewards: a function of a prompt's record and the completion's text, `(record, text) -> float in [0, 1]`.

`schedule.verifier` names one as 'module:function'; '' or 'reasoning_gym' takes the score of the record's reasoning-gym task.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

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
