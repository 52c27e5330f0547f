"""Rules of pairs: what scores decide, what a decision is worth, JudgeBench's two games, agreement with several annotators.

A decision is 'A', 'B', 'tie' or None: one failed score leaves the pair undecided, whatever the other one is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from coevo_jax.evaluate.records import Scores
from coevo_jax.judges.agreement import cohen_kappa

Choice = str | None
CHOICES = ("A", "B", "tie")
TIES = ("half", "wrong", "leave_out")
SOURCES = {"mmlu-pro": "Knowledge", "livebench-reasoning": "Reasoning", "livebench-math": "Math", "livecodebench": "Coding"}


def choice_of(scores: Scores, margin: float = 0.0) -> Choice:
    """The better of two scores; scores that differ by at most `margin` tie, and a failed one decides nothing."""
    if len(scores) != 2:
        raise ValueError(f"{len(scores)} scores of a pair")
    a, b = scores
    if a is None or b is None:
        return None
    if abs(a - b) <= margin:
        return "tie"
    return "A" if a > b else "B"


def credit(choice: Choice, label: str, ties: str = "half") -> float:
    """What a decision is worth: 1 for the label; a tie on a label of A or B half a point ('half'), nothing ('wrong'), or NaN,
    which takes no part in a mean ('leave_out'). A failure is worth nothing."""
    if label not in CHOICES or ties not in TIES:
        raise ValueError(f"label {label!r} and rule {ties!r} for ties")
    if choice == label:
        return 1.0
    if choice != "tie":
        return 0.0
    return {"half": 0.5, "wrong": 0.0, "leave_out": float("nan")}[ties]


def game_credit(choices: Sequence[Choice], label: str, ties: str = "half") -> float:
    """Mean over the games; a judge that always says 'A' gets 1/2 in two games. NaN games are left out."""
    found = [credit(choice, label, ties) for choice in choices]
    known = [value for value in found if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


def vote(choices: Sequence[Choice], label: str) -> bool:
    """JudgeBench: +1 a game that names the label, -1 one that names the other answer, 0 for a tie or a failure; right above 0."""
    if label not in ("A", "B"):
        raise ValueError(f"label {label!r} of a pair without ties")
    return sum((choice == label) - (choice not in (label, "tie", None)) for choice in choices) > 0


def both_consistent(choices: Sequence[Choice], label: str) -> bool:
    """The stricter rule: every game names the label."""
    return bool(choices) and all(choice == label for choice in choices)


def category(source: str) -> str:
    """JudgeBench's category of a source, by its beginning; the source itself where none fits."""
    return next((name for start, name in SOURCES.items() if source.startswith(start)), source)


def order_share(games: Sequence[Sequence[Choice]]) -> float | None:
    """Share of the pairs whose two games decide differently, of those that both decide."""
    both = [g for g in games if len(g) == 2 and None not in g]
    return float(np.mean([a != b for a, b in both])) if both else None


def slot_share(games: Sequence[Sequence[Choice]]) -> float | None:
    """Share of the decisions that name the answer in slot A; 1/2 over both orders without a bias. In game 2 slot A holds B."""
    named = [choice == "AB"[number % 2] for g in games for number, choice in enumerate(g) if choice in ("A", "B")]
    return float(np.mean(named)) if named else None


# ---------------------------------------------------------------------------------------------------------- annotators


def macro_scores(choices: Sequence[Choice], labels: Sequence[str]) -> dict[str, float]:
    """Precision, recall and F1, each a mean over the classes A, B and tie that labels or decisions use. A failure is no class and
    is missed by its label's recall."""
    rows = []
    for name in CHOICES:
        right = sum(c == name == label for c, label in zip(choices, labels))
        said, true = sum(c == name for c in choices), sum(label == name for label in labels)
        if said or true:
            precision, recall = right / said if said else 0.0, right / true if true else 0.0
            total = precision + recall
            rows.append((precision, recall, 2 * precision * recall / total if total else 0.0))
    means = np.mean(rows, axis=0) if rows else np.zeros(3)
    return {"macro_precision": float(means[0]), "macro_recall": float(means[1]), "macro_f1": float(means[2])}


def annotator_agreement(choices: Sequence[Choice], annotators: Sequence[Sequence[str]]) -> float | None:
    """Mean over pairs of the share of annotators that say what was decided; a failure agrees with nobody."""
    shares = [sum(a == c for a in own) / len(own) for c, own in zip(choices, annotators) if own]
    return float(np.mean(shares)) if shares else None


def human_agreement(annotators: Sequence[Sequence[str]]) -> float | None:
    """The same number of one annotator held against the others: what people reach among themselves."""
    shares = [
        (Counter(own)[one] - 1) / (len(own) - 1) for own in annotators if len(own) > 1 for one in own
    ]  # one of `own` agrees with itself
    return float(np.mean(shares)) if shares else None


def kappa(choices: Sequence[Choice], labels: Sequence[str]) -> float | None:
    """Cohen's kappa of the decisions that were made and the labels."""
    known = [(choice, label) for choice, label in zip(choices, labels) if choice is not None]
    return cohen_kappa([c for c, _ in known], [label for _, label in known])


# -------------------------------------------------------------------------------------------------------------- length


def longer_share(choices: Sequence[Choice], lengths: Sequence[tuple[int, int]]) -> float | None:
    """Share of the decisions that name the longer answer, of those about answers of different lengths. Also of labels."""
    named = [(c == "A") == (a > b) for c, (a, b) in zip(choices, lengths) if c in ("A", "B") and a != b]
    return float(np.mean(named)) if named else None
