"""Labelled ranked answers as anchors: which rows serve, and a split by prompt into a part that trains and one that scores."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from coevo_jax.data.prompts import normalise_space
from coevo_jax.data.readers import Row

# Openings of answers that say nothing of their question (the paper removes refusals and greetings; the list is ours).
REFUSALS = ("i'm sorry", "i am sorry", "sorry,", "i cannot", "i can't", "i can not", "i'm unable", "i am unable", "as an ai")
GREETINGS = ("hello", "hi!", "hi,", "hey", "good morning", "thank you", "thanks")


def is_test(prompt: str, share: float) -> bool:
    """Does a prompt belong to the part that scores? By a hash of its words: the same in every file and any order of rows."""
    digest = hashlib.blake2b(normalise_space(prompt).casefold().encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 < share


def split(records: Iterable[Row], share: float) -> tuple[list[Row], list[Row]]:
    """(train, test): rankings of one prompt stay together."""
    train: list[Row] = []
    test: list[Row] = []
    for record in records:
        (test if is_test(record["prompt"], share) else train).append(record)
    return train, test


def why_unusable(record: Row, least_answers: int, least_characters: int) -> str:
    """Why a ranking can't be an anchor ('' where it can): few_answers, all_tied, short, refusal, greeting or degenerate."""
    answers, scores = record["answers"], record["scores"]
    if len(answers) < max(least_answers, 2):
        return "few_answers"
    if max(scores) == min(scores):
        return "all_tied"
    if not least_characters:
        return ""
    top = answers[scores.index(max(scores))].strip()
    if min(len(top), len(record["prompt"].strip())) <= least_characters:
        return "short"
    opening = top.casefold()[:40]
    if opening.startswith(REFUSALS):
        return "refusal"
    if opening.startswith(GREETINGS) and len(top) < 4 * least_characters:
        return "greeting"
    words = top.split()
    return "degenerate" if len(words) >= 20 and len(set(words)) < len(words) / 5 else ""


def best_first(scores: Sequence[float]) -> list[int]:
    """Places of the answers, the best one first; ties in their own order."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def as_pairs(record: Row) -> list[Row]:
    """The preference pairs {id, prompt, chosen, rejected, margin} of a ranking; ties make none."""
    out = []
    for i in (order := best_first(record["scores"])):
        for j in order:
            if (gap := record["scores"][i] - record["scores"][j]) > 0 and record["answers"][i] != record["answers"][j]:
                out.append({"id": f"{record['id']}/{i}-{j}", "prompt": record["prompt"], "chosen": record["answers"][i],
                            "rejected": record["answers"][j], "margin": gap})  # fmt: skip
    return out
