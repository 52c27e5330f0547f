"""Where the rubric of an example comes from: nobody, RaR's four generic items, the data, a model of ours, an endpoint.

One rubric an example, the same for all its answers and both orders. The prompt is the deployed one, rendered as in training
(design.md 4.10); where its template shows candidate answers, the generator sees those of the example (DynamicRubric). An invalid
rubric is asked for again, colder each time; one that never becomes valid is the example's failure.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from coevo_jax.config import Experiment, Sampling
from coevo_jax.config.override import to_dict
from coevo_jax.evaluate.checking import shown_order
from coevo_jax.evaluate.records import Example
from coevo_jax.remote import Ask, Endpoint
from coevo_jax.rubrics import Criterion, Rubric, parse_rubric
from coevo_jax.sampler import Engine, Request
from coevo_jax.text.chat import ChatTokenizer
from coevo_jax.text.parse import Parsed
from coevo_jax.text.prompts import prompt_slots, render_prompt, template_identity

ROLE = "evaluation/rubric"  # of the noise: no draw of a training is repeated
CANDIDATES = ("candidates", "candidate_lines")  # slots of DynamicRubric's templates (text/candidates.py)
NONE = Rubric(())  # of judges that read none
# No rubric, for a judge that reads one: the whole of what is asked, in one criterion.
GENERIC = Rubric((Criterion("The answer is correct, complete and helpful", 1.0),))


@dataclasses.dataclass(frozen=True)
class Written:
    """A rubric, or why there is none. text: as written; status '': nobody was asked to write it."""

    rubric: Rubric | None
    text: str = ""
    status: str = ""
    detail: str = ""


class Writer(Protocol):
    """identity: all that its rubrics depend on, as JSON values."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> Mapping[str, Any]: ...

    def write(self, examples: Sequence[Example]) -> list[Written]:
        """One rubric an example, in their order."""
        ...


def digest(*parts: Any) -> str:
    """A hash of JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:16]


def number(*parts: Any) -> int:
    """A whole number below 2**44 that names `parts` in the noise of a draw."""
    return int(digest(*parts)[:11], 16)


@dataclasses.dataclass(frozen=True)
class Fixed:
    """The same rubric for every example."""

    name: str
    rubric: Rubric

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"fixed": [[c.text, c.weight] for c in self.rubric.criteria]}

    def write(self, examples: Sequence[Example]) -> list[Written]:
        """One rubric an example."""
        return [Written(self.rubric) for _ in examples]


@dataclasses.dataclass(frozen=True)
class FromData:
    """The example's own rubric; criteria that come without weights weigh the same."""

    cfg: Experiment
    name: str = "data"

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"data": self.cfg.rubric.schema}

    def write(self, examples: Sequence[Example]) -> list[Written]:
        """One rubric an example."""
        return [self._of(example) for example in examples]

    def _of(self, example: Example) -> Written:
        if example.criteria:
            return Written(Rubric(tuple(Criterion(text, 1.0) for text in example.criteria)))
        if example.rubric is None:
            return Written(None, "", "parse_fail", "the data has no rubric")
        text = example.rubric if isinstance(example.rubric, str) else json.dumps(example.rubric, ensure_ascii=False)
        one = dataclasses.replace(self.cfg.rubric, min_criteria=1)
        parsed = parse_rubric(text, one)
        return Written(parsed.value, text, parsed.status, parsed.detail)


def rubric_identity(cfg: Experiment) -> dict[str, Any]:
    """What the settings say about a written rubric."""
    rubric = {k: v for k, v in to_dict(cfg)["rubric"].items() if k not in ("source", "reward", "alpha", "separation_weight")}
    sampling = to_dict(cfg)["rubric_sampling"]
    return {
        "rubric": rubric, "sampling": sampling, "thinking": cfg.generator.thinking, "seed": cfg.seed,
        "template": template_identity(cfg.rubric.prompt)[0],
    }  # fmt: skip


def shows_candidates(template: str) -> bool:
    """Does the generator see candidate answers beside the question?"""
    return bool(prompt_slots(template) & set(CANDIDATES))


def unknown_slots(template: str) -> list[str]:
    """What the template shows and an example has not."""
    return sorted(prompt_slots(template) - {"question", "reference", "question_line", *CANDIDATES})


def messages_of(template: str, example: Example) -> list[dict[str, str]]:
    """The generator's prompt of an example; candidates, where the template shows them, in an order that belongs to its id."""
    if prompt_slots(template) <= {"question", "reference"}:
        given = {"question": example.prompt, "reference": example.reference}
        return render_prompt(template, **{name: given[name] for name in prompt_slots(template)})
    shown = [example.answers[i] for i in shown_order(example)]
    candidates: Any = importlib.import_module("coevo_jax.text.candidates")
    return candidates.generator_messages(template, example.prompt, shown)  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class ModelWriter:
    """A generator over our own engine. weights: the identity of its weights."""

    name: str
    cfg: Experiment
    engine: Engine
    params: Any
    tokenizer: ChatTokenizer
    weights: str

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"weights": self.weights, "tokenizer": self.tokenizer.hash, **rubric_identity(self.cfg)}

    def write(self, examples: Sequence[Example]) -> list[Written]:
        """One rubric an example."""
        prompts = [self._ids(example) for example in examples]
        out = [
            Written(None, "", "refused", f"a rubric prompt of {len(ids)} tokens, more than {self.engine.cfg.max_prompt}")
            for ids in prompts
        ]
        pending = [i for i, ids in enumerate(prompts) if len(ids) <= self.engine.cfg.max_prompt]
        for retry, sampling in enumerate(colder(self.cfg)):
            if not pending:
                break
            requests = [self._request(examples[i], prompts[i], sampling, retry) for i in pending]
            for i, (completion,) in zip(pending, self.engine.generate(self.params, requests)):
                out[i] = self._read(completion.tokens, completion.finish == "length")
            pending = [i for i in pending if out[i].rubric is None]
        return out

    def _ids(self, example: Example) -> list[int]:
        return self.tokenizer.render_messages(messages_of(self.cfg.rubric.prompt, example), thinking=self.cfg.generator.thinking)

    def _request(self, example: Example, ids: list[int], sampling: Sampling, retry: int) -> Request:
        request = number(example.id) << 8 | retry
        return Request(np.asarray(ids, np.int32), 1, ROLE, 0, request, sampling, grammar=self._grammar())

    def _grammar(self) -> Any:
        if not self.cfg.rubric.guided:
            return None
        from coevo_jax.sampler import guided  # loads a library that is optional

        guided.check_no_reasoning(self.tokenizer, self.cfg.generator.thinking, "rubric.guided")
        return guided.rubric_grammar(self.tokenizer, self.cfg.rubric)

    def _read(self, tokens: np.ndarray, truncated: bool) -> Written:
        text = self.tokenizer.decode(tokens.tolist())
        opened = self.tokenizer.opens_reasoning(self.cfg.generator.thinking)
        return _written(parse_rubric(text, self.cfg.rubric, truncated=truncated, opened=opened), text)


@dataclasses.dataclass(frozen=True)
class RemoteWriter:
    """A generator behind an endpoint. Its failure to reply is told from an invalid rubric by the status."""

    name: str
    cfg: Experiment
    endpoint: Endpoint

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"model": self.endpoint.model, "extra": self.cfg.generator.endpoint.extra_body, **rubric_identity(self.cfg)}

    def write(self, examples: Sequence[Example]) -> list[Written]:
        """One rubric an example."""
        out: list[Written] = [Written(None)] * len(examples)
        pending = list(range(len(examples)))
        for retry, sampling in enumerate(colder(self.cfg)):
            asks = [Ask(messages_of(self.cfg.rubric.prompt, examples[i]), sampling, retry) for i in pending]
            for i, reply in zip(pending, self.endpoint.ask(asks) if asks else []):
                if reply.status != "ok":
                    out[i] = Written(None, "", reply.status, reply.detail)
                else:
                    out[i] = _written(parse_rubric(reply.text, self.cfg.rubric, truncated=reply.truncated), reply.text)
            pending = [i for i in pending if out[i].status in ("parse_fail", "truncated")]
        return out


def colder(cfg: Experiment) -> list[Sampling]:
    """How a rubric is drawn first, and again where it is invalid."""
    temperatures = [t for t in cfg.rubric.retry_temperatures if t < cfg.rubric_sampling.temperature]
    return [cfg.rubric_sampling, *(dataclasses.replace(cfg.rubric_sampling, temperature=t) for t in temperatures)]


def _written(parsed: Parsed[Rubric], text: str) -> Written:
    return Written(parsed.value, text, parsed.status, parsed.detail)
