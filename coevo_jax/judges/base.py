"""What all judge protocols share: items in, verdicts out in the same order, retries, and what counts as a failure.

A judge is deterministic: the noise of a request is named by (update, item.request, attempt), so a verdict depends neither on the
order of the items nor on which others are asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from coevo_jax.config import JudgeConfig
from coevo_jax.records.verdicts import Verdict, failed
from coevo_jax.rubrics import Rubric
from coevo_jax.text.chat import ChatTokenizer
from coevo_jax.text.prompts import render_prompt

if TYPE_CHECKING:
    from coevo_jax.sampler import Completion, Engine

ROLE = "judge"
MAX_ATTEMPTS = 256  # of one item; part of the identity of a request
RETRIED = ("parse_fail", "truncated", "timeout")  # a refused item would be refused again
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class JudgeItem:
    """One answer to be judged under one rubric. request: its identity in the update; with `branch` (which criterion, which sample
    of a judge) unique among the items of a call. reference: an answer known to be good, '' for none."""

    question: str
    rubric: Rubric
    answer: str
    request: int
    reference: str = ""
    other: str = ""  # pairwise: the answer in slot B; `answer` sits in A
    branch: tuple[int, ...] = ()


class Judge(Protocol):
    """Executes rubrics. Frozen: nothing that it is asked changes it."""

    @property
    def name(self) -> str:
        """The protocol."""
        ...

    def judge(self, items: list[JudgeItem], update: int) -> list[Verdict]:
        """One verdict an item, in their order; retries happen inside."""
        ...


def check_items(items: Sequence[JudgeItem]) -> None:
    """Two items of the same identity would share their noise."""
    if len({(item.request, item.branch) for item in items}) != len(items):
        raise ValueError("two judge items have the same request id")


@dataclasses.dataclass(frozen=True)
class Instrument:
    """A frozen model that judges: its weights, the engine that runs it, its tokenizer."""

    cfg: JudgeConfig
    engine: Engine
    params: Any
    tokenizer: ChatTokenizer

    def prompt(self, template: str, thinking: bool, **slots: str) -> list[int]:
        """Token ids of a judge's prompt."""
        return self.tokenizer.render_messages(render_prompt(template, **slots), thinking=thinking)

    def too_long(self, ids: Sequence[int]) -> str:
        """Why the engine would refuse the prompt, or ''."""
        limit = self.engine.cfg.max_prompt
        return f"a judge prompt of {len(ids)} tokens, more than {limit} (sampler.max_prompt)" if len(ids) > limit else ""

    def text(self, completion: Completion) -> str:
        """What the judge wrote, reasoning included."""
        return self.tokenizer.decode(completion.tokens.tolist())


@dataclasses.dataclass(frozen=True)
class WritingJudge:
    """A judge that writes its verdict: one completion an item, read by `read(text, item, truncated, opened)`.

    A failed verdict is asked for again with noise of its own, up to cfg.retries times; a truncated completion is a failure
    whatever its text.
    """

    name: str
    instrument: Instrument
    slots: Callable[[JudgeItem], dict[str, str]]
    template: str
    read: Callable[[str, JudgeItem, bool, bool], Verdict]
    criteria: Callable[[JudgeItem], int] = lambda item: 0  # scores that a verdict lists; 0: it has one score

    def judge(self, items: list[JudgeItem], update: int) -> list[Verdict]:
        """One verdict an item, in their order."""
        check_items(items)
        cfg, model = self.instrument.cfg, self.instrument
        prompts = [model.prompt(self.template, cfg.thinking, **self.slots(item)) for item in items]
        verdicts = [failed("refused", model.too_long(ids)) for ids in prompts]
        # In the order of identity: the engine then meets the same batch whatever order the items came in.
        pending = sorted((i for i, v in enumerate(verdicts) if not v.detail), key=lambda i: (items[i].request, items[i].branch))
        for attempt in range(cfg.retries + 1):
            if not pending:
                break
            for i, completion in zip(pending, self._ask(items, prompts, pending, update, attempt)):
                opened = model.tokenizer.opens_reasoning(cfg.thinking)
                verdicts[i] = self.read(model.text(completion), items[i], completion.finish == "length", opened)
            pending = [i for i in pending if verdicts[i].status in RETRIED]
        return verdicts

    def _ask(
        self, items: list[JudgeItem], prompts: list[list[int]], pending: list[int], update: int, attempt: int
    ) -> list[Completion]:
        from coevo_jax.sampler import Request

        model = self.instrument
        requests = [
            Request(
                prompt=np.asarray(prompts[i], np.int32),
                n=1,
                role="/".join([ROLE, *map(str, items[i].branch)]),
                update=update,
                request=items[i].request * MAX_ATTEMPTS + attempt,
                sampling=model.cfg.sampling,
                grammar=self._grammar(items[i]),
            )
            for i in pending
        ]
        return [completion for (completion,) in model.engine.generate(model.params, requests)]

    def _grammar(self, item: JudgeItem) -> Any:
        """judge.guided: the grammar of the item's verdict."""
        cfg, tokenizer = self.instrument.cfg, self.instrument.tokenizer
        if not cfg.guided:
            return None
        from coevo_jax.sampler import guided  # loads a library that is optional

        guided.check_no_reasoning(tokenizer, cfg.thinking, "judge.guided")
        return guided.verdict_grammar(tokenizer, self.criteria(item))
