"""What a system is asked and what it says, as records and as JSON: one form for the library, the batch and the endpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from coevo_jax.config import RubricConfig, Sampling
from coevo_jax.errors import UserError
from coevo_jax.records.verdicts import Status, Verdict
from coevo_jax.rubrics import Criterion, Rubric, parse_rubric, render_rubric
from coevo_jax.rubrics.json_criteria import normalise

MAX_CRITERIA = 64
Winner = Literal["a", "b", "tie"]
Given = Rubric | str | Mapping[str, Any] | None  # a rubric as a caller may give it


# ------------------------------------------------------------------------------------------------------------- asked


@dataclasses.dataclass(frozen=True)
class RubricAsk:
    """Write a rubric. reference: an answer known to be good, for templates that show one."""

    question: str
    reference: str = ""
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class ScoreAsk:
    """Score each answer alone. rubric None: one is written first."""

    question: str
    answers: tuple[str, ...]
    rubric: Rubric | None = None
    reference: str = ""
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class CompareAsk:
    """Which of two answers is better, asked in both orders. rubric None: one is written first."""

    question: str
    a: str
    b: str
    rubric: Rubric | None = None
    reference: str = ""
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class ChatAsk:
    """n completions of a conversation by the weights of `model` ('generator', 'judge' or 'policy'). messages: (role, content)
    pairs; top_logprobs: of the first token, 0 = none."""

    model: str
    messages: tuple[tuple[str, str], ...]
    sampling: Sampling
    n: int = 1
    seed: int = 0
    logprobs: bool = False  # are the tokens to be listed?
    top_logprobs: int = 0


Ask = RubricAsk | ScoreAsk | CompareAsk | ChatAsk


def identity(*parts: Any) -> int:
    """The name of a request's noise, below 2**56: equal contents and seeds draw alike, on every machine and in any company."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


# -------------------------------------------------------------------------------------------------------------- said


@dataclasses.dataclass(frozen=True)
class Written:
    """A rubric, or why there is none. raw: the writer's last text; tries: how often it was asked (0: the rubric was given)."""

    question: str
    status: Status
    rubric: Rubric | None
    raw: str = ""
    tries: int = 0
    detail: str = ""

    @property
    def text(self) -> str:
        """As a judge reads it; '' without a rubric."""
        return render_rubric(self.rubric) if self.rubric is not None else ""

    def to_json(self) -> dict[str, Any]:
        rubric = rubric_json(self.rubric) if self.rubric is not None else None
        out = {"status": self.status, "rubric": rubric, "text": self.text, "raw": self.raw, "tries": self.tries}
        return out | {"detail": self.detail}


@dataclasses.dataclass(frozen=True)
class Scored:
    """The judge's verdict on one answer. A failure has no score (design.md 4.1). parts: a score for each criterion, where the
    protocol gives them; samples: those of judge.samples."""

    status: Status
    score: float | None
    parts: tuple[float, ...] = ()
    samples: tuple[float, ...] = ()
    raw: str = ""
    detail: str = ""
    yes_no_mass: float | None = None

    def to_json(self, rubric: Rubric | None) -> dict[str, Any]:
        names = [c.text for c in rubric.criteria] if rubric is not None else []
        out = dataclasses.asdict(self) | {"samples": list(self.samples)}
        del out["parts"]
        return out | {"criteria": [{"criterion": name, "score": part} for name, part in zip(names, self.parts)]}


@dataclasses.dataclass(frozen=True)
class ScoreResult:
    """One `Scored` an answer, in their order; none where no rubric could be had."""

    rubric: Written
    answers: tuple[Scored, ...]

    @property
    def scores(self) -> list[float | None]:
        """The score of each answer, None for a failure."""
        return [answer.score for answer in self.answers]

    @property
    def ok(self) -> bool:
        """Is every answer scored?"""
        return self.rubric.status == "ok" and all(answer.status == "ok" for answer in self.answers)

    def to_json(self) -> dict[str, Any]:
        return {"rubric": self.rubric.to_json(), "answers": [answer.to_json(self.rubric.rubric) for answer in self.answers]}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a comparison. first: the answer in slot A, or the one that was scored alone (then `score` is set and `winner`
    is not). raw: the judge's text, the evidence."""

    first: Literal["a", "b"]
    status: Status
    winner: Winner | None = None
    score: float | None = None
    raw: str = ""
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class CompareResult:
    """winner: the answer that both orders name; 'tie' where they differ or see none; None where a call failed. preference: of a,
    1/2 for each order that it wins and 1/4 for a tie (Rubric-ARM's reward); None likewise. flipped: did the order decide?"""

    rubric: Written
    method: Literal["pairwise", "scores"]
    status: Status
    winner: Winner | None = None
    preference: float | None = None
    flipped: bool | None = None
    calls: tuple[Call, ...] = ()

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def to_json(self) -> dict[str, Any]:
        out = {name: getattr(self, name) for name in ("method", "status", "winner", "preference", "flipped")}
        return {"rubric": self.rubric.to_json(), **out, "calls": [dataclasses.asdict(call) for call in self.calls]}


@dataclasses.dataclass(frozen=True)
class Token:
    """A drawn token. top: (text, log-prob) of the likeliest ones in its place, where they were asked for."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Said:
    """One completion. finish: stop | length; count: of its tokens, the stop included; tokens: where they were to be listed."""

    text: str
    finish: str
    count: int
    tokens: tuple[Token, ...] = ()


@dataclasses.dataclass(frozen=True)
class ChatResult:
    """The completions of a ChatAsk, and the tokens of its prompt."""

    choices: tuple[Said, ...]
    prompt_tokens: int


Result = Written | ScoreResult | CompareResult | ChatResult


def scored(verdict: Verdict, criteria: int, samples: int) -> Scored:
    """A verdict as a result. What its parts are depends on the judge: samples, or criteria."""
    parts = verdict.parts if samples == 1 and len(verdict.parts) == criteria else ()
    drawn = verdict.parts if samples > 1 else ()
    return Scored(verdict.status, verdict.score, parts, drawn, verdict.raw, verdict.detail, verdict.yes_no_mass)


# ----------------------------------------------------------------------------------------------------------- rubrics


def rubric_json(rubric: Rubric) -> dict[str, Any]:
    """A rubric as an object, of whatever schema it was written in; `read_rubric` takes it back."""
    return {
        "criteria": [
            {"criterion": c.text, "weight": c.weight, "title": c.title, "levels": [list(level) for level in c.levels]}
            for c in rubric.criteria
        ]
    }


def read_rubric(given: Given, cfg: RubricConfig, where: str = "rubric") -> Rubric | None:
    """A rubric that a caller gives: an object as `rubric_json` makes it, or a text in the schema of the config. UserError."""
    if given is None or isinstance(given, Rubric):
        return given
    if isinstance(given, str):
        parsed = parse_rubric(given, cfg)
        if parsed.value is None:
            raise UserError(f"no rubric of the schema {cfg.schema}: {parsed.detail}", where=where, expected="a valid rubric")
        return parsed.value
    items = given.get("criteria") if isinstance(given, Mapping) else None
    if not isinstance(items, Sequence) or isinstance(items, str) or not 1 <= len(items) <= MAX_CRITERIA:
        expected = f'{{"criteria": [...]}} of 1 to {MAX_CRITERIA} criteria, or a text'
        raise UserError("the rubric has no list of criteria", where=where, expected=expected)
    criteria = tuple(_criterion(item, f"{where}.criteria[{i}]", cfg) for i, item in enumerate(items))
    if len({normalise(c.text) for c in criteria}) < len(criteria):
        raise UserError("two criteria are the same", where=where, expected="distinct criteria")
    return Rubric(criteria, json.dumps(given, ensure_ascii=True))


def _criterion(item: Any, where: str, cfg: RubricConfig) -> Criterion:
    if not isinstance(item, Mapping):
        raise UserError("the criterion is no object", where=where, expected='{"criterion": "...", "weight": 0.5}')
    text, weight, title = item.get("criterion"), item.get("weight"), item.get("title", "")
    if not isinstance(text, str) or not normalise(text):
        raise UserError("the criterion has no text", where=f"{where}.criterion", expected="a text")
    number = float(weight) if isinstance(weight, int | float) and not isinstance(weight, bool) and abs(weight) < 1e6 else 0.0
    if not (number > 0 or (cfg.schema == "points" and number < 0)):
        raise UserError("the criterion has no weight", where=f"{where}.weight", expected="a number above 0")
    if not isinstance(title, str):
        raise UserError("the title is no text", where=f"{where}.title", expected="a text")
    return Criterion(text.strip(), number, _levels(item, where), title.strip())


def _levels(item: Mapping[str, Any], where: str) -> tuple[tuple[str, str], ...]:
    levels = item.get("levels", item.get("scoring_levels", ()))
    pairs = list(levels.items()) if isinstance(levels, Mapping) else levels
    good = isinstance(pairs, Sequence) and not isinstance(pairs, str) and len(pairs) <= MAX_CRITERIA
    if not good or not all(_is_pair(pair) for pair in pairs):
        raise UserError("the levels are no pairs of texts", where=f"{where}.levels", expected='{"1.0": "...", "0.0": "..."}')
    return tuple((pair[0].strip(), pair[1].strip()) for pair in pairs)


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2 and all(isinstance(x, str) for x in pair)
