"""Evaluation while a run trains: held-out prompts and a preference probe, at every so many updates (config record EvalConfig).

It draws with noise of its own role, takes nothing from the prompt streams or the replay buffer and throws its counts of the
engines away, so the training's rows are the same with and without it. Each process judges its share of the examples; process 0
writes the numbers, eval/..., into the update's row. Noise is the same at every look: two looks differ by the weights alone.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np

from coevo_jax.bench import Seat
from coevo_jax.distributed import any_process, own, to_first
from coevo_jax.errors import UserError
from coevo_jax.evaluate import rules_pairs as rp
from coevo_jax.evaluate.benchmarks import Benchmark, benchmark_of
from coevo_jax.evaluate.readers import read_examples
from coevo_jax.evaluate.records import Example, Judged
from coevo_jax.evaluate.rules import choices_of
from coevo_jax.evaluate.runner import choose
from coevo_jax.evaluate.store import content_of
from coevo_jax.evaluate.systems import RubricSystem, reads_rubric
from coevo_jax.evaluate.writers import (
    GENERIC,
    NONE,
    Fixed,
    ModelWriter,
    RemoteWriter,
    Writer,
    digest,
    number,
    shows_candidates,
    unknown_slots,
)
from coevo_jax.learn.verifiers import resolve_verifier
from coevo_jax.methods.context import Context
from coevo_jax.records.facts import Facts
from coevo_jax.records.files import write_atomic
from coevo_jax.records.run_folder import Input
from coevo_jax.rubrics import rar
from coevo_jax.sampler import Request
from coevo_jax.system import System
from coevo_jax.trained import BEST

ROLE = "evaluation/answer"  # of the noise
KEY = "evaluate.pairs"
HELD_OUT = Benchmark("heldout", "list", benchmark_of("listwise").source, benchmark_of("listwise").score)


class Evaluation:
    """What a run measures beside its training. UserError at the start for data that isn't there."""

    def __init__(self, system: System):
        self.system, self.cfg = system, system.cfg.evaluate
        self.prompts: list[dict[str, Any]] = []
        self.probe: list[Example] = []
        self.benchmark = benchmark_of(self.cfg.benchmark)
        self.best: dict[str, Any] = {}  # update and value
        if not self.cfg.every:
            return
        stream = system.context.streams.get("policy")
        if stream is not None and self.cfg.prompts:
            self.prompts = list(stream.prompts.heldout)[: self.cfg.prompts]
        if self.cfg.pairs:
            if self.benchmark.kind != "pair":
                raise UserError(f"the benchmark {self.cfg.benchmark!r} has no pairs", where="evaluate.benchmark",
                                expected="pairs, llmbar, pandalm, ...")  # fmt: skip
            self.probe = choose(read_examples(self.cfg.pairs, self.benchmark.source), self.cfg.probe)
            system.inputs[KEY] = Input(digest([content_of(e) for e in self.probe]), f"{KEY}={self.cfg.pairs}")

    def due(self, updates: int, total: int) -> bool:
        """Is it time after so many updates?"""
        return bool(self.cfg.every) and (updates % self.cfg.every == 0 or updates == total)

    def look(self, updates: int, total: int) -> dict[str, float]:
        """The row's part, on process 0; {} where it isn't time. All processes call it together."""
        if not self.due(updates, total):
            return {}
        start, context = perf_counter(), self.system.context
        facts = Facts()
        with context.watchdog.stage("evaluate"):
            if self.prompts:
                self._held_out(context, facts)
            if self.probe:
                self._probe(context, facts)
        # What the engines and endpoints counted here is nobody's metric.
        self.system.take_sampler_facts()
        for endpoint in self.system.endpoints.values():
            endpoint.take_stats()
        context.seconds = {}
        with context.watchdog.meeting("evaluate"):
            row = Facts.joined(to_first("eval", facts.state())).row()
        return row | {"time/evaluate": perf_counter() - start}

    # ---- the best checkpoint ------------------------------------------------------------------------------------------

    def improved(self, row: dict[str, Any], updates: int) -> bool:
        """Is this row's metric better than any before? The first look that has one is. All processes get the same answer."""
        value, better = row.get(self.cfg.best) if self.cfg.best else None, False
        if isinstance(value, int | float) and np.isfinite(value):
            known = self.best.get("value")
            better = known is None or (value > known if self.cfg.best_is == "max" else value < known)
        if not self.cfg.best or not any_process(better):
            return False
        self.best = {"metric": self.cfg.best, "value": value, "update": updates}
        return True

    def write_best(self, folder: pathlib.Path) -> None:
        """best.json, which names the update of the best checkpoint: run:FOLDER@UPDATE, or run:FOLDER@best."""
        if self.best:
            write_atomic(folder / BEST, json.dumps(self.best) + "\n")

    # ---- what is measured ---------------------------------------------------------------------------------------------

    def _held_out(self, context: Context, facts: Facts) -> None:
        """Answers to held-out prompts: their lengths, and their scores under rubrics of now."""
        records = [self.prompts[i] for i in own(len(self.prompts))]
        voice, sampling = context.voices["policy"], self.cfg.answer
        requests = [
            Request(np.asarray(context.answer_prompt(r["prompt"]), np.int32), 1, ROLE, 0, number(r["id"]), sampling)
            for r in records
        ]
        drawn = voice.engine.generate(voice.weights(), requests) if requests else []
        answers = [context.text(completion.tokens) for (completion,) in drawn]
        facts.mean("eval/completions/length/mean", [len(c.tokens) for (c,) in drawn])
        facts.share("eval/completions/truncated_share", [c.finish == "length" for (c,) in drawn])
        if (scores := self._scores(context, records, answers, facts)) is not None:
            facts.mean_std("eval/score", [s for s in scores if s is not None])
            facts.share("eval/failure_share", [s is None for s in scores])

    def _scores(
        self, context: Context, records: Sequence[dict[str, Any]], answers: Sequence[str], facts: Facts
    ) -> list[float | None] | None:
        if context.judge is None:
            if context.cfg.schedule.mode != "verifiable":
                return None
            verifier = resolve_verifier(context.cfg.schedule.verifier)
            return [float(verifier(r, text)) for r, text in zip(records, answers)]
        if shows_candidates(context.cfg.rubric.prompt):  # those of a single answer would be no choice
            return None
        if (system := self._rubric_system(context, context.judge, None)) is None:
            return None
        examples = [
            Example(str(r["id"]), r["prompt"], (text,), reference=str(r.get("reference", "")))
            for r, text in zip(records, answers)
        ]
        judged = system.judge(examples, HELD_OUT)
        self._rubrics(judged, facts, "eval/rubric/valid_share")
        return [one.games[0][0] for one in judged]

    def _probe(self, context: Context, facts: Facts) -> None:
        """Preference accuracy of the generator's rubrics with the run's judge."""
        examples = [self.probe[i] for i in own(len(self.probe))]
        if context.judge is None or (system := self._rubric_system(context, context.judge, context.pair_judge)) is None:
            return
        judged = system.judge(examples, self.benchmark)
        rows = list(zip(examples, judged))
        choices, rule = choices_of(rows, 0.0), self.benchmark.rule()
        facts.mean("eval/probe/accuracy", _known([rp.game_credit(c, e.label, rule.ties) for c, e in zip(choices, examples)]))
        facts.mean("eval/probe/strict", [rp.game_credit(c, e.label, "wrong") for c, e in zip(choices, examples)])
        every = [choice for own_ in choices for choice in own_]
        facts.share("eval/probe/failure_share", [choice is None for choice in every])
        facts.share("eval/probe/tie_share", [choice == "tie" for choice in every if choice is not None])
        self._rubrics(judged, facts, "eval/probe/valid_share")

    def _rubrics(self, judged: Sequence[Judged], facts: Facts, name: str) -> None:
        written = [one.rubric_status == "ok" for one in judged if one.rubric_status]
        if written:
            facts.share(name, written)

    def _rubric_system(self, context: Context, judge: Any, pairs: Any) -> RubricSystem | None:
        """The run's generator of now and its judge."""
        writer = _writer(context, self.cfg.rubric)
        return None if writer is None else RubricSystem(writer, Seat("judge", context.cfg.judge, judge, pairs=pairs))


def _writer(context: Context, sampling: Any) -> Writer | None:
    """Where the run's rubrics come from; None where each prompt brings its own or the writer sees what an example has not."""
    cfg = dataclasses.replace(context.cfg, rubric_sampling=sampling)
    if not reads_rubric(cfg.judge):
        return Fixed("none", NONE)
    if cfg.rubric.source != "generator":
        return {"none": Fixed("none", GENERIC), "predefined": Fixed("predefined", rar.PREDEFINED)}.get(cfg.rubric.source)
    if unknown_slots(cfg.rubric.prompt):  # such as RLCER's, whose writer sees an answer
        return None
    if context.writer is not None:
        return RemoteWriter("generator", cfg, context.writer.endpoint)
    voice = context.voices["rubric"]
    return ModelWriter("generator", cfg, voice.engine, voice.weights(), voice.tokenizer, "")


def _known(values: Sequence[float]) -> list[float]:
    return [v for v in values if not np.isnan(v)]
