"""What makes a pair of answers useless: texts that are the same, an answer that repeats the rubric it was shown."""

from __future__ import annotations

import re


def same_text(a: str, b: str) -> bool:
    """Are two texts the same but for spacing and case?"""
    return " ".join(a.split()).casefold() == " ".join(b.split()).casefold()


def words_of(text: str) -> list[str]:
    """Its words, without case, punctuation and the marks of JSON."""
    return re.findall(r"[^\W_]+", text.casefold())


def runs(text: str, n: int) -> set[tuple[str, ...]]:
    """Every n words in a row."""
    words = words_of(text)
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def leaked(answer: str, rubric: str, question: str, n: int) -> bool:
    """Does the answer hold n words in a row of the rubric that the question does not hold? n = 0: not asked."""
    return n > 0 and not (runs(answer, n) & runs(rubric, n)).issubset(runs(question, n))
