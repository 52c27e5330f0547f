"""Systems that judge: a writer of rubrics and a judge of single answers or of pairs side by side.

A judge is asked about all units of an example under its one rubric. Of a pair in two games, the second game asks again: side by
side with the answers' places changed, alone with noise of its own (a judge without noise would say the same and isn't asked).
Lists are rated by their scores alone, or by Copeland's rule over both orders of every two answers. A yes/no criterion of the
data is asked by itself; under another rubric the answer's score stands for each of its criteria.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coevo_jax.bench import Seat
from coevo_jax.config import JudgeConfig, api_model
from coevo_jax.config.check_modes import RUBRIC_FREE
from coevo_jax.config.override import to_dict
from coevo_jax.errors import UserError
from coevo_jax.evaluate.benchmarks import Benchmark
from coevo_jax.evaluate.records import Example, Judged, Scores
from coevo_jax.evaluate.rules_lists import copeland
from coevo_jax.evaluate.writers import FromData, Writer, Written, number
from coevo_jax.judges import JUDGE_PROMPTS, MODEL_FREE, JudgeItem, pairwise
from coevo_jax.records.verdicts import Verdict
from coevo_jax.rubrics import Rubric
from coevo_jax.text.prompts import template_identity

CALLS = 1024  # of an example and game; part of a request's identity
NOTE = 400  # characters of a judge's text that a row keeps of each call


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a judge: which example and game, and what its verdict is about: a unit, or (i, j) side by side."""

    example: int
    game: int
    about: tuple[int, ...]
    item: JudgeItem


@dataclasses.dataclass(frozen=True)
class RubricSystem:
    """A writer and a judge. weights: the identity of the judge's weights, '' for one without."""

    writer: Writer
    seat: Seat
    weights: str = ""

    @property
    def name(self) -> str:
        return f"{self.writer.name} + {self.seat.name}"

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"writer": dict(self.writer.identity), "judge": judge_identity(self.seat, self.weights)}

    @property
    def side_by_side(self) -> bool:
        """Is the judge asked about two answers at once?"""
        return self.seat.pairs is not None

    def judge(self, examples: Sequence[Example], benchmark: Benchmark) -> list[Judged]:
        """One record an example, in their order."""
        if self.seat.cfg.protocol == "likert_reference" and (bare := next((e for e in examples if not e.reference), None)):
            raise UserError(f"the example {bare.id!r} has no reference", where="judge.protocol=likert_reference",
                            expected="a data set with references, or another protocol")  # fmt: skip
        return self.under(self.writer.write(examples), examples, benchmark)

    def under(self, written: Sequence[Written], examples: Sequence[Example], benchmark: Benchmark) -> list[Judged]:
        """One record an example under rubrics that are there."""
        calls = [
            call
            for number_, (example, own) in enumerate(zip(examples, written))
            if own.rubric is not None
            for call in self._calls(number_, example, own.rubric, benchmark)
        ]
        verdicts = self._ask([call.item for call in calls])
        by_example: dict[int, list[tuple[Call, Verdict]]] = {}
        for call, verdict in zip(calls, verdicts):
            by_example.setdefault(call.example, []).append((call, verdict))
        return [
            self._judged(example, own, by_example.get(i, []), benchmark)
            for i, (example, own) in enumerate(zip(examples, written))
        ]

    # ---- calls --------------------------------------------------------------------------------------------------------

    def _ask(self, items: list[JudgeItem]) -> list[Verdict]:
        judge = self.seat.pairs if self.seat.pairs is not None else self.seat.judge
        return judge.judge(items, 0) if items else []

    def _calls(self, where: int, example: Example, rubric: Rubric, benchmark: Benchmark) -> list[Call]:
        pairs = self.side_by_side and len(example.answers) > 1
        out = []
        for game in range(self._games(benchmark)):
            abouts = self._abouts(example, benchmark, game, pairs)
            if len(abouts) > CALLS:
                raise UserError(
                    f"the example {example.id!r} needs {len(abouts)} calls", where="--data", expected=f"at most {CALLS}"
                )
            for place, about in enumerate(abouts):
                request = (number(example.id) << 1 | game) * CALLS + place
                out.append(Call(where, game, about, self._item(example, rubric, about, benchmark, request, pairs)))
        return out

    def _games(self, benchmark: Benchmark) -> int:
        return 1 if not self.side_by_side and noiseless(self.seat.cfg) else benchmark.games

    def _abouts(self, example: Example, benchmark: Benchmark, game: int, pairs: bool) -> list[tuple[int, ...]]:
        if benchmark.kind == "criteria":
            return [(i,) for i in range(len(example.criteria))] if self._by_criterion else [(0,)]
        if not pairs:
            return [(i,) for i in range(len(example.answers))]
        if benchmark.kind == "pair":
            return [(0, 1) if game == 0 else (1, 0)]
        return list(itertools.permutations(range(len(example.answers)), 2))

    @property
    def _by_criterion(self) -> bool:
        return isinstance(self.writer, FromData)

    def _item(
        self, example: Example, rubric: Rubric, about: tuple[int, ...], benchmark: Benchmark, request: int, pairs: bool
    ) -> JudgeItem:
        if benchmark.kind == "criteria":
            own = Rubric((rubric.criteria[about[0]],)) if self._by_criterion else rubric
            return JudgeItem(example.prompt, own, example.answers[0], request, example.reference)
        other = example.answers[about[1]] if pairs else ""
        return JudgeItem(example.prompt, rubric, example.answers[about[0]], request, example.reference, other)

    # ---- verdicts -----------------------------------------------------------------------------------------------------

    def _judged(self, example: Example, written: Written, found: Sequence[tuple[Call, Verdict]], benchmark: Benchmark) -> Judged:
        size = len(example.criteria) if benchmark.kind == "criteria" else len(example.answers)
        games = [self._scores([(c, v) for c, v in found if c.game == g], size, benchmark) for g in range(self._games(benchmark))]
        if written.rubric is None:
            games = [(None,) * size]
        games = games if len(games) == benchmark.games else games * benchmark.games
        failures: Counter[str] = Counter(verdict.status for _, verdict in found if verdict.status != "ok")
        notes = tuple(_note(call, verdict) for call, verdict in found)
        text = written.text if written.rubric is None else written.text or " | ".join(c.text for c in written.rubric.criteria)
        return Judged(example.id, tuple(games), len(found), dict(failures), text, written.status, written.detail, notes)

    def _scores(self, found: Sequence[tuple[Call, Verdict]], size: int, benchmark: Benchmark) -> Scores:
        """A game's scores from its verdicts."""
        if not found:
            return (None,) * size
        if benchmark.kind == "criteria" and not self._by_criterion:
            return (found[0][1].score,) * size
        if len(found[0][0].about) == 1:
            return tuple(verdict.score for _, verdict in found)
        if benchmark.kind == "pair":
            ((call, verdict),) = found
            if verdict.score is None:
                return (None, None)
            own = (verdict.score, 1.0 - verdict.score)
            return own if call.about == (0, 1) else own[::-1]
        wins = np.full((size, size), np.nan)
        for call, verdict in found:
            wins[call.about] = np.nan if verdict.score is None else verdict.score
        return copeland(wins)


def _note(call: Call, v: Verdict) -> dict[str, Any]:
    """What a row keeps of a call."""
    about = {"game": call.game, "about": list(call.about)}
    return about | {"status": v.status, "score": v.score, "raw": v.raw[:NOTE], "detail": v.detail[:NOTE]}


def noiseless(cfg: JudgeConfig) -> bool:
    """Would the judge of single answers say the same when it is asked again? So does an endpoint: its replies are by content."""
    quiet = cfg.protocol in ("criterion_logits", "scalar", *MODEL_FREE)
    return quiet or (cfg.sampling.temperature == 0 and cfg.samples == 1) or bool(api_model(cfg.source))


def judge_identity(seat: Seat, weights: str) -> dict[str, Any]:
    """All that a judge's verdicts depend on, but for the items."""
    cfg = {
        key: value
        for key, value in to_dict(seat.cfg).items()
        if key not in ("endpoint", "alarm_failure_share", "length_classes", "source", "sha256", "order")
    }
    names = [JUDGE_PROMPTS.get(seat.cfg.protocol, "")] + ([pair_template(seat.pairs)] if seat.pairs is not None else [])
    remote = {"model": api_model(seat.cfg.source), "extra": seat.cfg.endpoint.extra_body} if api_model(seat.cfg.source) else {}
    return {"settings": cfg, "weights": weights, "templates": [template_identity(n)[0] for n in names if n], **remote}


def pair_template(judge: Any) -> str:
    """The template of a judge of pairs, from inside what asks it several times."""
    while hasattr(judge, "inner"):
        judge = judge.inner
    return str(getattr(judge, "template", pairwise.TEMPLATE))


def reads_rubric(cfg: JudgeConfig) -> bool:
    """Does the judge read a rubric? Side by side it always does."""
    return cfg.pairs != "scores" or cfg.protocol not in RUBRIC_FREE
