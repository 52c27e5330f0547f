"""The small world: a language of 32 nouns in which the true quality of an answer is known, and the judge that knows it.

A question lists requirements ("write 5 words with owl without fox first ant sorted"), an answer is a row of nouns. A requirement
is a `Property` that rules check; so is a rubric's criterion ("includes owl"), when it is one the world knows. The true quality
never reads a rubric, so that it measures what a learned rubric is worth. Graded checks leave something to improve.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import pathlib
import random
import re
from collections.abc import Iterable, Sequence

from coevo_jax.errors import UserError
from coevo_jax.judges.base import JudgeItem
from coevo_jax.records.verdicts import Status, Verdict, failed

MODEL_FOLDER = pathlib.Path(__file__).parent / "tiny_world" / "model"

WORDS: tuple[str, ...] = (
    *("ant", "bee", "cat", "cow", "dog", "elk", "fig", "fox", "goat", "hen", "ibis", "jay", "kite", "lamb", "leaf", "mole"),
    *(
        "moon",
        "newt",
        "oak",
        "owl",
        "pear",
        "pine",
        "quail",
        "rain",
        "rose",
        "seal",
        "star",
        "sun",
        "toad",
        "vine",
        "wolf",
        "yak",
    ),
)  # in alphabetical order
LENGTHS = (3, 4, 5, 6)  # words a question may ask for
USELESS: tuple[str, ...] = ("is nice", "is clear", "is kind", "is neat", "reads well", "sounds good")  # criteria no rule knows
NEUTRAL = 0.5  # what such a criterion is worth for every answer: it never discriminates

# Kind -> its clause in a question, its text as a criterion, its weight in the true quality. The order is that of the clauses.
KINDS: dict[str, tuple[str, str, float]] = {
    "count": ("write {number} words", "has {number} words", 1.0),
    "includes": ("with {word}", "includes {word}", 2.0),
    "avoids": ("without {word}", "avoids {word}", 1.0),
    "begins": ("first {word}", "begins with {word}", 2.0),
    "ends": ("last {word}", "ends with {word}", 2.0),
    "sorted": ("sorted", "is sorted", 1.0),
    "distinct": ("once", "repeats no word", 1.0),
}
RUBRIC_ONLY = {"at_most": "has at most {number} words", "at_least": "has at least {number} words"}


@dataclasses.dataclass(frozen=True)
class Property:
    """Something that rules can check on an answer. `word` or `number` where the kind needs one."""

    kind: str
    word: str = ""
    number: int = 0

    @property
    def clause(self) -> str:
        """Its text in a question."""
        return KINDS[self.kind][0].format(word=self.word, number=self.number)

    @property
    def criterion(self) -> str:
        """Its text in a rubric."""
        pattern = RUBRIC_ONLY.get(self.kind) or KINDS[self.kind][1]
        return pattern.format(word=self.word, number=self.number)

    @property
    def weight(self) -> float:
        """Its weight in the true quality of an answer to a question that asks for it."""
        return KINDS[self.kind][2]


def check(prop: Property, answer: str) -> float:
    """How far the answer has the property, in [0, 1]. An empty answer has none, or silence would avoid every word."""
    words = answer.lower().split()
    if not words:
        return 0.0
    n = len(words)
    if prop.kind == "includes":
        return float(prop.word in words)
    if prop.kind == "avoids":
        return float(prop.word not in words)
    if prop.kind == "begins":
        return float(words[0] == prop.word)
    if prop.kind == "ends":
        return float(words[-1] == prop.word)
    if prop.kind == "sorted":
        return sum(a <= b for a, b in itertools.pairwise(words)) / (n - 1) if n > 1 else 1.0
    if prop.kind == "distinct":
        return len(set(words)) / n
    over = {"count": abs(n - prop.number), "at_most": n - prop.number, "at_least": prop.number - n}[prop.kind]
    return max(0.0, 1.0 - max(over, 0) / max(prop.number, 1))


# ---------------------------------------------------------------------------------------------------- questions


def write_question(props: Iterable[Property]) -> str:
    """The question that asks for `props`, its clauses in the order of KINDS."""
    order = list(KINDS)
    props = sorted(props, key=lambda p: order.index(p.kind))
    head = [] if props and props[0].kind == "count" else ["write words"]
    return " ".join(head + [p.clause for p in props])


def read_question(question: str) -> tuple[Property, ...]:
    """The requirements of a question. UserError where it is none of the small world's."""
    wrong = UserError(f"{question!r} is not a question of the small world", expected="such as 'write 5 words with owl last ant'")
    head = re.match(r"write(?: (\d+))? words(?: |$)", question)
    if not head:
        raise wrong
    props = [Property("count", number=int(head[1]))] if head[1] else []
    by_clause = {KINDS[kind][0].split()[0]: kind for kind in KINDS if kind != "count"}
    words = iter(question[head.end() :].split())
    for word in words:
        kind = by_clause.get(word)
        argument = next(words, "") if kind in ("includes", "avoids", "begins", "ends") else ""
        if kind is None or (argument not in WORDS and kind not in ("sorted", "distinct")):
            raise wrong
        props.append(Property(kind, argument))
    return tuple(props)


def true_quality(question: str, answer: str) -> float:
    """Weighted share of the question's requirements that the answer meets, in [0, 1]. UserError for another question."""
    props = read_question(question)
    total = sum(p.weight for p in props)
    return sum(p.weight * check(p, answer) for p in props) / total if total else 0.0


def make_question(rng: random.Random) -> tuple[str, str]:
    """A question of 3 to 5 requirements and an answer of true quality 1. Made backwards, from the answer, so that one exists."""
    words = rng.sample(WORDS, rng.choice(LENGTHS))
    in_order = rng.random() < 0.3
    if in_order:
        words.sort()
    spare = [w for w in WORDS if w not in words]
    inner = rng.sample(words[1:-1], min(2, len(words) - 2))
    options = [Property("includes", w) for w in inner]
    options += [Property("avoids", rng.choice(spare)), Property("count", number=len(words)), Property("distinct")]
    options += [Property("begins", words[0]), Property("ends", words[-1])]
    props = rng.sample(options, rng.randint(2, 4) if in_order else rng.randint(3, 5))
    if in_order:
        props.append(Property("sorted"))
    return write_question(props), " ".join(words)


# ---------------------------------------------------------------------------------------------------- rubrics

_PATTERNS = {
    kind: re.compile(pattern.replace("{word}", "(?P<word>[a-z]+)").replace("{number}", r"(?P<number>\d{1,3})"))
    for kind, pattern in [(kind, text) for kind, (_, text, _) in KINDS.items()] + list(RUBRIC_ONLY.items())
}


def read_criterion(text: str) -> Property | None:
    """The property that a criterion's text names, or None where no rule knows it. Case, spacing and a final stop don't matter."""
    plain = " ".join(text.lower().split()).rstrip(".").removeprefix("the response ")
    for kind, pattern in _PATTERNS.items():
        found = pattern.fullmatch(plain)
        if found:
            groups = found.groupdict()
            return Property(kind, groups.get("word") or "", int(groups.get("number") or 0))
    return None


def write_rubric(criteria: Sequence[tuple[str, float]]) -> str:
    """A rubric in the JSON schema of rubrics/json_criteria.py, spaced as the small world's tokenizer has it."""
    levels = {"1.0": "yes", "0.0": "no"}
    return json.dumps({"criteria": [{"criterion": c, "weight": w, "scoring_levels": levels} for c, w in criteria]})


# ---------------------------------------------------------------------------------------------------- the judge

FAILURES: tuple[Status, ...] = ("parse_fail", "truncated", "timeout", "refused")


@dataclasses.dataclass(frozen=True)
class OracleJudge:
    """Executes a rubric by rule: the mean of its criteria's checks under its weights. It knows the rubric, not the true quality.

    noise: share of the criterion checks that a coin decides, so 0 is a perfect judge and 1 a useless one. The coin belongs to
    (seed, question, criterion, answer): the same item always gets the same verdict.
    failure_rate: share of the verdicts that fail, by (seed, update, request), each time in the same way.
    """

    noise: float = 0.0
    failure_rate: float = 0.0
    seed: int = 0
    name: str = "oracle"

    def judge(self, items: list[JudgeItem], update: int) -> list[Verdict]:
        """One verdict an item, in their order."""
        return [self._verdict(item, update) for item in items]

    def _verdict(self, item: JudgeItem, update: int) -> Verdict:
        draw = _uniform(self.seed, "failure", update, item.request)
        if draw < self.failure_rate:
            status = FAILURES[int(draw / self.failure_rate * len(FAILURES))]
            return failed(status, "judge.oracle_failure_rate")
        criteria = item.rubric.criteria
        parts = tuple(self._check(item, criterion.text) for criterion in criteria)
        total = sum(criterion.weight for criterion in criteria)
        score = sum(criterion.weight * part for criterion, part in zip(criteria, parts)) / total
        return Verdict("ok", min(max(score, 0.0), 1.0), json.dumps({"scores": parts}), parts)

    def _check(self, item: JudgeItem, text: str) -> float:
        prop = read_criterion(text)
        if prop is None:
            return NEUTRAL
        if self.noise and _uniform(self.seed, "noise", item.question, text, item.answer) < self.noise:
            return float(_uniform(self.seed, "coin", item.question, text, item.answer) < 0.5)
        return check(prop, item.answer)


def _uniform(*identity: object) -> float:
    """A number in [0, 1) that depends on the identity alone."""
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
