"""Rubric-ARM's judge as a method asks it: of the run's own weights, or the small world's rules.

Frozen, it gives one greedy verdict; one that can't be read is asked for again at temperature 1 (arm.retries), and what still
fails is a failure, never half a reward. In training its text is an outcome, whatever it says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from coevo_jax.config import Sampling
from coevo_jax.judges import JudgeItem, comparison, make_pair_judge
from coevo_jax.judges.base import RETRIED
from coevo_jax.judges.comparison import Judgement
from coevo_jax.methods.context import Context, request_id
from coevo_jax.preference.buffer import hashed
from coevo_jax.records.facts import Facts
from coevo_jax.records.verdicts import STATUSES, Verdict, failed
from coevo_jax.rubrics import Rubric
from coevo_jax.sampler import Completion, Request
from coevo_jax.text.prompts import render_prompt

ROLE = "judge"
RETRY_BIT = 45  # of a request id: above the lowest bit of its number of the retry, which may name the order of a pair


def better_slot(seed: int, round_: int, record_id: str) -> str:
    """The slot of the preferred answer, by (seed, round, pair): 'A' or 'B'."""
    return "AB"[hashed("arm slot", seed, round_, record_id) % 2]


def pair_item(question: str, rubric: Rubric, better: str, worse: str, slot: str, request: int) -> JudgeItem:
    """An item with the better answer in `slot`."""
    first, second = (better, worse) if slot == "A" else (worse, better)
    return JudgeItem(question, rubric, first, request, other=second)


def prompt(ctx: Context, item: JudgeItem) -> list[int]:
    """The judge's prompt: one function for its training and its use."""
    messages = render_prompt(ctx.cfg.arm.judge_prompt, **comparison.slots(item))
    return ctx.voices[ROLE].tokenizer.render_messages(messages, thinking=False)


def read(ctx: Context, completion: Completion, rubric: Rubric) -> Judgement:
    """What a completion of the judge says."""
    opened = ctx.voices[ROLE].tokenizer.opens_reasoning(False)
    return comparison.read(ctx.raw(completion.tokens, ROLE), rubric, completion.finish == "length", opened)


def room(ctx: Context) -> int:
    """Longest prompt that the judge's engine takes."""
    return ctx.voices[ROLE].engine.cfg.max_prompt


@dataclasses.dataclass(frozen=True)
class ArmJudge:
    """A Judge of pairs (judges/base.py): item.answer sits in slot A, item.other in B; score 1 where A wins, 0 where B does."""

    ctx: Context
    name: str = "comparison"

    def judge(self, items: list[JudgeItem], update: int) -> list[Verdict]:
        """One verdict an item, in their order."""
        if not items:
            return []
        with self.ctx.timed("judge"):
            if self.ctx.cfg.arm.judge == "oracle":
                return _by_rules(self.ctx, items, update)
            prompts = [prompt(self.ctx, item) for item in items]
            limit = room(self.ctx)
            verdicts = [failed("refused", f"a prompt of {len(p)} tokens" if len(p) > limit else "") for p in prompts]
            pending = [i for i, verdict in enumerate(verdicts) if not verdict.detail]
            for attempt in range(self.ctx.cfg.arm.retries + 1):
                for i, completion in zip(pending, self._ask(items, prompts, pending, update, attempt)):
                    verdicts[i] = read(self.ctx, completion, items[i].rubric).verdict()
                pending = [i for i in pending if verdicts[i].status in RETRIED]
            return verdicts

    def _ask(
        self, items: list[JudgeItem], prompts: list[list[int]], pending: list[int], update: int, attempt: int
    ) -> list[Completion]:
        """A completion of each pending item: greedy at first, where equal prompts are asked once."""
        sampling = dataclasses.replace(self.ctx.cfg.arm.judge_sampling, temperature=float(attempt > 0), top_p=1.0, top_k=0)
        owner: dict[object, int] = {}
        for i in pending:
            owner.setdefault(i if attempt else tuple(prompts[i]), i)
        asked = sorted(owner.values(), key=lambda i: items[i].request)
        out = self.ctx.generate(ROLE, [_request(prompts[i], items[i].request, 1, update, attempt, sampling) for i in asked])
        found = {i: completion for i, (completion,) in zip(asked, out)}
        return [found[owner[i if attempt else tuple(prompts[i])]] for i in pending]


def _request(ids: list[int], request: int, n: int, update: int, attempt: int, sampling: Sampling) -> Request:
    return Request(np.asarray(ids, np.int32), n, ROLE, update, request + (attempt << RETRY_BIT), sampling)


def judgements(
    ctx: Context, update: int, prompts: Sequence[list[int]], requests: Sequence[int], n: int
) -> list[list[Completion]]:
    """n judgements of each prompt as the judge in training draws them."""
    sampling = ctx.cfg.arm.judge_sampling
    return ctx.generate(ROLE, [_request(p, r, n, update, 0, sampling) for p, r in zip(prompts, requests)])


def _by_rules(ctx: Context, items: list[JudgeItem], update: int) -> list[Verdict]:
    """judge.oracle_noise and .oracle_failure_rate hold. A list that can't tell the answers apart names no winner (1/2)."""
    cfg = dataclasses.replace(ctx.cfg.judge, source="oracle", protocol="oracle", pairs="pairwise")
    judge = make_pair_judge(cfg, None, None, None, ctx.cfg.seed)
    assert judge is not None
    return judge.judge(items, update)


def winner(verdict: Verdict) -> str | None:
    """'A', 'B', 'tie' (of rules alone), or None where the judge failed."""
    return None if verdict.score is None else {1.0: "A", 0.0: "B"}.get(verdict.score, "tie")


def add_verdicts(facts: Facts, verdicts: Sequence[Verdict], most_failures: float, own: bool = True) -> None:
    """Failures of the frozen judge, with an alarm, and how often it names slot A. own: the share of failures too, where none else
    counts it."""
    bad = [v.status != "ok" for v in verdicts]
    if own:
        facts.share("judge/failure_share", bad)
    facts.total("judge/verdicts", len(verdicts))
    facts.alarm("judge/alarm", bad, most_failures)
    for status in STATUSES[1:]:
        facts.share(f"judge/{status}_share", [v.status == status for v in verdicts])
    facts.mean("judge/says_a", [v.score for v in verdicts if v.score is not None])
    facts.mean("judge/tie_share", [v.score == 0.5 for v in verdicts if v.score is not None])


def add_slots(facts: Facts, found: Sequence[tuple[str, bool]]) -> None:
    """Of (slot of the preferred answer, was it named): how often it sat in A, and accuracy by slot."""
    facts.share("arm/preferred_in_a_share", [slot == "A" for slot, _ in found])
    facts.mean("arm/accuracy", [hit for _, hit in found])
    for slot in "AB":
        facts.mean(f"arm/accuracy_{slot.lower()}", [hit for where, hit in found if where == slot])


def judge_request(slot: int, attempt: int, sample: int) -> int:
    """Identity of a question to the judge in an update."""
    return request_id("judge", slot, attempt, sample)
