"""The protocols over an endpoint (judge.source = 'api:MODEL'): the same prompts and the same reading as over our own engine.

What the endpoint failed to deliver is a failed verdict at once, since remote/ has tried again already; a text without
verdict is asked for again as a further attempt. Identity is the content: the update and the request id of an item change nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable

from coevo_jax.config import JudgeConfig
from coevo_jax.judges import criterion_logits, json_criteria, json_score, likert, points, rar_explicit
from coevo_jax.judges.aggregate import weighted_mean
from coevo_jax.judges.base import RETRIED, Judge, JudgeItem, check_items
from coevo_jax.records.verdicts import Verdict, failed
from coevo_jax.remote import Ask, Endpoint, Reply
from coevo_jax.text.prompts import render_prompt

MASS_TOLERANCE = 0.01  # probabilities of the listed tokens may add up to a little over 1 by rounding
SPELLING_MARKS = " \t\n\"'▁Ġ"


@dataclasses.dataclass(frozen=True)
class EndpointWritingJudge:
    """The protocols that write, over an endpoint."""

    name: str
    endpoint: Endpoint
    cfg: JudgeConfig
    slots: Callable[[JudgeItem], dict[str, str]]
    template: str
    read: Callable[[str, JudgeItem, bool, bool], Verdict]

    def judge(self, items: list[JudgeItem], update: int) -> list[Verdict]:
        """One verdict an item, in their order."""
        check_items(items)
        messages = [render_prompt(self.template, **self.slots(item)) for item in items]
        verdicts = [failed("refused") for _ in items]
        pending = list(range(len(items)))
        for attempt in range(self.cfg.retries + 1):
            numbers = [attempt + (self.cfg.retries + 1) * self._sample(items[i]) for i in pending]
            replies = self.endpoint.ask([Ask(messages[i], self.cfg.sampling, n) for i, n in zip(pending, numbers)])
            for i, reply in zip(pending, replies):
                verdicts[i] = self._verdict(items[i], reply)
            pending = [i for i, reply in zip(pending, replies) if reply.status == "ok" and verdicts[i].status in RETRIED]
            if not pending:
                break
        return verdicts

    def _sample(self, item: JudgeItem) -> int:
        """Which of judge.samples it is; without them the content alone is the identity."""
        return item.branch[0] if self.cfg.samples > 1 else 0

    def _verdict(self, item: JudgeItem, reply: Reply) -> Verdict:
        if reply.status != "ok":
            return failed(reply.status, reply.detail)
        return self.read(reply.text, item, reply.truncated, False)


@dataclasses.dataclass(frozen=True)
class EndpointCriterionLogits:
    """criterion_logits over an endpoint that lists top_logprobs. What it doesn't list counts as probability 0: yes and no
    together must reach cfg.min_yes_no_mass among what it lists."""

    endpoint: Endpoint
    cfg: JudgeConfig
    name: str = "criterion_logits"

    def judge(self, items: list[JudgeItem], update: int) -> list[Verdict]:
        """One verdict an item, in their order; a criterion's reply is asked for once an answer, whatever the rubric."""
        check_items(items)
        sampling = dataclasses.replace(self.cfg.sampling, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1, min_new_tokens=0)
        asks = [
            Ask(self._messages(item, criterion.text), sampling, 0, self.cfg.endpoint.top_logprobs)
            for item in items
            for criterion in item.rubric.criteria
        ]
        replies = iter(self.endpoint.ask(asks))
        return [self._verdict(item, [next(replies) for _ in item.rubric.criteria]) for item in items]

    def _messages(self, item: JudgeItem, criterion: str) -> list[dict[str, str]]:
        return render_prompt(criterion_logits.TEMPLATE, question=item.question, answer=item.answer, criterion=criterion)

    def _verdict(self, item: JudgeItem, replies: list[Reply]) -> Verdict:
        for reply in replies:
            if reply.status != "ok":
                return failed(reply.status, reply.detail)
        pairs = [yes_no(reply.top) for reply in replies]
        if not all(reply.top for reply in replies):
            return failed("parse_fail", "the endpoint lists no top_logprobs: judge.protocol = json_score or json_criteria for it")
        raw = json.dumps({"yes": [yes for yes, _ in pairs], "no": [no for _, no in pairs]})
        if any(math.fsum(math.exp(value) for _, value in reply.top) > 1 + MASS_TOLERANCE for reply in replies):
            return failed("parse_fail", "the listed probabilities add up to more than 1", raw)
        least, floor = min(yes + no for yes, no in pairs), self.cfg.min_yes_no_mass
        if least < floor or least <= 0:
            return failed("parse_fail", f"yes and no have {least:.3g} of the probability, less than {floor:g}", raw, least)
        parts = tuple(yes / (yes + no) for yes, no in pairs)
        return Verdict("ok", weighted_mean(item.rubric, parts), raw, parts, least)


def yes_no(top: tuple[tuple[str, float], ...]) -> tuple[float, float]:
    """Probability of the listed tokens that spell yes, and of those that spell no."""
    words = [(token.strip(SPELLING_MARKS).lower(), math.exp(value)) for token, value in top]
    return math.fsum(p for word, p in words if word == "yes"), math.fsum(p for word, p in words if word == "no")


def make(cfg: JudgeConfig, endpoint: Endpoint) -> Judge:
    """The judge of cfg.protocol over an endpoint."""
    if cfg.protocol == "rar_explicit":
        single = EndpointWritingJudge("yes_no", endpoint, cfg, rar_explicit.slots, rar_explicit.TEMPLATE, rar_explicit.read)
        return rar_explicit.PerCriterion("rar_explicit", single)
    if cfg.protocol in likert.RATINGS:
        template, slots = likert.RATINGS[cfg.protocol]
        return EndpointWritingJudge(cfg.protocol, endpoint, cfg, slots, template, likert.read)
    if cfg.protocol == "criterion_logits":
        return EndpointCriterionLogits(endpoint, cfg)
    if cfg.protocol == "points":
        return EndpointWritingJudge("points", endpoint, cfg, points.slots, points.TEMPLATE, points.read)
    template, read = {"json_score": ("judge_score", json_score.read), "json_criteria": ("judge_criteria", json_criteria.read)}[
        cfg.protocol
    ]
    return EndpointWritingJudge(cfg.protocol, endpoint, cfg, json_score.slots, template, read)
