"""Against reward hacking: what changes a reward, and what shows that one is being gamed. Plain functions, on the host.

Axes: G samples of a group, N tokens of a completion.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coevo_jax.config import ControlConfig


def soft_overlong(length: int, longest: int, buffer: int) -> float:
    """0 up to longest - buffer tokens, then falling to -1 at `longest` and beyond (DAPO, arXiv 2503.14476, equation 13)."""
    return float(min(0.0, max(-1.0, (longest - buffer - length) / buffer)))


def repeated_ngrams(tokens: Sequence[int] | np.ndarray, n: int) -> tuple[int, int]:
    """(n-grams that stood earlier in the completion, all n-grams)."""
    ids = np.asarray(tokens, np.int64)
    if len(ids) < n:
        return 0, 0
    windows = np.lib.stride_tricks.sliding_window_view(ids, n)
    return len(windows) - len(np.unique(windows, axis=0)), len(windows)


# What a judge writes and an answer has no reason to: scores, winners, checklists of its form, and orders to whoever reads.
VERDICTS = re.compile(
    r"""
      ["'](?:score|rating|judge?ment|verdict|final_score)["']\s*:
    | \[\[\s*(?:[AB](?:\s*[<>=]{1,2}\s*[AB])?|tie|\d+(?:\.\d+)?)\s*\]\]
    | \bwinner\s*(?:is|:)\s*\**\s*(?:response|answer|assistant)?\s*[AB]\b
    | \b(?:final\s+|overall\s+)?(?:score|rating|verdict)\s*[:=]\s*\**\s*\d+(?:\.\d+)?\s*(?:/|out\s+of)\s*\d+
    | \b(?:final|overall)\s+(?:score|rating|verdict)\s*[:=]
    | \b(?:this|the)\s+(?:response|answer)\s+(?:fully\s+)?(?:meets|satisfies|fulfil+s)\s+(?:all|every)\b.{0,20}\bcriteri
    | \b(?:ignore|disregard)\s+(?:all\s+|any\s+)?(?:the\s+)?(?:previous|prior|above|other)\s+(?:instructions?|criteria|rubric)
    | \b(?:give|award|assign)\s+(?:this|me|it)\b.{0,20}\b(?:full|maximum|highest|perfect)\s+(?:score|marks|points|rating)
    """,
    re.IGNORECASE | re.VERBOSE,
)


def verdict_like(text: str) -> str:
    """The first part of an answer that reads like a verdict or an order to the judge, or ''."""
    found = VERDICTS.search(text)
    return found[0] if found else ""


def centred(values_G: Sequence[float]) -> np.ndarray:
    """Values of a group around their mean."""
    x = np.asarray(values_G, np.float64)
    return x - x.mean() if x.size else x


def concordance(a_G: Sequence[float], b_G: Sequence[float]) -> list[float]:
    """For each pair of samples: 1 where both judges order it alike, 0 where they don't, a half where one of them sees a tie."""
    a, b = np.asarray(a_G, np.float64), np.asarray(b_G, np.float64)
    i, j = np.triu_indices(len(a), 1)
    product = np.sign(a[i] - a[j]) * np.sign(b[i] - b[j])
    return list(0.5 + 0.5 * product)


def kept_criteria(count: int, share: float, uniforms: np.ndarray) -> list[int]:
    """Which of `count` criteria stay when each is left out at chance `share`; the one that came closest where none would."""
    kept = [i for i in range(count) if uniforms[i] >= share]
    return kept or [int(np.argmax(uniforms[:count]))]


# (metric, its limit in the config, is it an alarm to be below it). A name that ends in '/' stands for all that begin so.
LIMITS = (
    ("control/length_correlation", "length_correlation", False),
    ("control/repeated_ngrams", "repeated_ngrams", False),
    ("control/verdict_like_share", "verdict_like", False),
    ("control/part_share/", "part_share", False),
    ("control/judge_gap", "judge_gap", False),
    ("control/judge_agreement", "judge_agreement", True),
    ("dynamic/length_correlation", "length_correlation", False),
    ("dynamic/score_gap", "score_gap", True),
    ("dynamic/surface_share", "surface_items", False),
    ("entropy", "entropy_high", False),
    ("entropy", "entropy_low", True),
    ("kl", "kl", False),
)


@dataclasses.dataclass(frozen=True)
class Alarm:
    """A limit of a metric; `on`: the metric is beyond it. `low`: that is below it. least: what an interval of the metric surely
    reaches, where it has one (a correlation of few samples is large by chance): that counts then."""

    metric: str
    value: float
    limit: float
    low: bool
    least: float | None = None

    @property
    def on(self) -> bool:
        return self.value < self.limit if self.low else (self.value if self.least is None else self.least) > self.limit

    @property
    def name(self) -> str:
        """Of its mark in the row."""
        return f"{self.metric}/low/alarm" if self.low and self.metric == "entropy" else f"{self.metric}/alarm"


def alarms(row: Mapping[str, Any], cfg: ControlConfig) -> list[Alarm]:
    """An Alarm for each metric of a row that has a limit above 0. Signs don't count, but for KL's."""
    out = []
    for key, value in row.items():
        if not isinstance(value, float | int) or not np.isfinite(value) or key.endswith("/alarm"):
            continue
        for prefix, field, low in LIMITS:
            if key == prefix or (prefix.endswith("/") and key.startswith(prefix)):
                value = value if key == "kl" else abs(value)
                out.append(Alarm(key, value, getattr(cfg, field), low, row.get(f"{key}/least")))
    return [alarm for alarm in out if alarm.limit > 0]
