"""Iterated DPO: the policy's own answers, labelled by the run's frozen judge under rubrics that nothing here trains.

Each iteration labels (schedule.k updates) and trains on what was kept; its reference is the policy at its start (preferred.py).
The judge sees both answers side by side, in both orders (judge.pairs=pairwise), or scores each under the same rubric; equal
scores name no better answer.
"""

from __future__ import annotations

import heapq
from typing import Any

from coevo_jax.config import Experiment
from coevo_jax.errors import UserError
from coevo_jax.judges import JudgeItem
from coevo_jax.methods import preferred
from coevo_jax.methods.context import Context
from coevo_jax.methods.fixed_rubrics import check_records, fixed_rubric
from coevo_jax.methods.preferred import PairItem, PairLabel
from coevo_jax.methods.stage import Stage, Step
from coevo_jax.methods.written_rubrics import COUNTS, valid_rubrics
from coevo_jax.records.facts import Facts
from coevo_jax.records.verdicts import Verdict
from coevo_jax.rubrics import Rubric, render_rubric

CHECKED = 64  # of the longest questions, whose rubric prompts are made at the start


def stages(cfg: Experiment) -> list[Stage]:
    """schedule.cycles iterations."""
    return preferred.iterations(cfg, label)


def check(ctx: Context) -> None:
    """Every question has the rubric and the reference answer that the judge will need; the longest rubric prompts fit."""
    cfg, records = ctx.cfg, ctx.streams["policy"].prompts.records
    check_records(cfg, records)
    if cfg.rubric.source != "generator" or ctx.writer is not None:
        return
    longest = max(len(ctx.rubric_prompt(r["prompt"])) for r in heapq.nlargest(CHECKED, records, key=lambda r: len(r["prompt"])))
    if longest > cfg.sampler.max_prompt:
        raise UserError(f"a question makes a rubric prompt of {longest} tokens", where="sampler.max_prompt",
                        expected=f"at least {longest}, or a smaller data.max_prompt_tokens")  # fmt: skip


def label(ctx: Context, step: Step, items: list[PairItem], facts: Facts) -> list[PairLabel]:
    """One label a pair; without a winner where its question got no valid rubric."""
    rubrics = _rubrics(ctx, step, items, facts)
    judged = [item for item in items if (item.slot, item.attempt) in rubrics]
    found = iter(_judge(ctx, step, judged, rubrics))
    return [next(found) if (item.slot, item.attempt) in rubrics else PairLabel(None, None) for item in items]


def _rubrics(ctx: Context, step: Step, items: list[PairItem], facts: Facts) -> dict[tuple[int, int], Rubric]:
    """The rubric of each question, by (slot, attempt)."""
    counts = dict.fromkeys(COUNTS, 0)
    out: dict[tuple[int, int], Rubric] = {}
    for attempt in sorted({item.attempt for item in items}):
        records = {item.slot: item.record for item in items if item.attempt == attempt}
        if ctx.cfg.rubric.source == "generator":
            found = valid_rubrics(ctx, step, records, attempt, counts)
        else:
            parsed = {slot: fixed_rubric(ctx.cfg.rubric, record).value for slot, record in records.items()}
            found = {slot: rubric for slot, rubric in parsed.items() if rubric is not None}
        out |= {(slot, attempt): rubric for slot, rubric in found.items()}
    if ctx.cfg.rubric.source == "generator":
        facts.ratio("rubric/valid_share", counts["rubric/valid"], counts["rubric/written"])
        for name in ("rubric/retried", "rubric/prompts_dropped", "rubric/endpoint_failed"):
            facts.total(name, counts[name])
    return out


def _judge(ctx: Context, step: Step, items: list[PairItem], rubrics: dict[tuple[int, int], Rubric]) -> list[PairLabel]:
    judge, cfg = ctx.pair_judge or ctx.judge, ctx.cfg
    assert judge is not None
    calls = []
    for item in items:
        for reverse, (a, b) in enumerate(((item.first, item.second), (item.second, item.first))):
            other = b if ctx.pair_judge is not None else ""
            request, gold = item.request(bool(reverse)), item.record.get("reference", "")
            calls.append(JudgeItem(item.question, rubrics[item.slot, item.attempt], a, request, gold, other))
    with ctx.timed("judge"):
        verdicts = judge.judge(calls, step.update) if calls else []
    note = {"generator": cfg.generator.source if cfg.rubric.source == "generator" else "", "judge": cfg.judge.source}
    to_label = _side_by_side if ctx.pair_judge is not None else _by_scores
    return [
        to_label(one, two, render_rubric(rubrics[item.slot, item.attempt]), note)
        for item, one, two in zip(items, verdicts[::2], verdicts[1::2])
    ]


def _side_by_side(forward: Verdict, reverse: Verdict, rubric: str, note: dict[str, Any]) -> PairLabel:
    """Of samples and panels the mean says who won."""
    winners = [None if v.score is None else "A" if v.score > 0.5 else "B" if v.score < 0.5 else "tie" for v in (forward, reverse)]
    return PairLabel(winners[0], winners[1], (forward.raw, reverse.raw), rubric, note)


def _by_scores(first: Verdict, second: Verdict, rubric: str, note: dict[str, Any]) -> PairLabel:
    """Scores know no slot, so both orders agree."""
    raw = (first.raw, second.raw)
    if first.score is None or second.score is None:
        return PairLabel(None, None, raw, rubric, note)
    won = (first.score > second.score) - (first.score < second.score)
    return PairLabel({1: "A", 0: "tie", -1: "B"}[won], {1: "B", 0: "tie", -1: "A"}[won], raw, rubric, note)
