"""Rubrics that an endpoint writes (generator.source = 'api:MODEL'): prompt and validity are those of our own generator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from coevo_jax.config import RubricConfig, Sampling
from coevo_jax.remote import Ask, Endpoint
from coevo_jax.rubrics import Rubric, parse_rubric
from coevo_jax.text.parse import Parsed
from coevo_jax.text.prompts import render_prompt


@dataclasses.dataclass(frozen=True)
class EndpointWriter:
    """A rubric generator that never trains. A question gets the same rubric whenever its reply is in the cache."""

    endpoint: Endpoint
    cfg: RubricConfig

    def start(self, questions: Sequence[str], sampling: Sampling, attempt: int = 0) -> Callable[[], list[Parsed[Rubric] | None]]:
        """Ask for a rubric for each question and return at once; the result gives them in order. None: the endpoint failed,
        which says nothing of the rubric. attempt: a further try of an invalid one."""
        collect = self.endpoint.start([Ask(render_prompt(self.cfg.prompt, question=q), sampling, attempt) for q in questions])

        def read() -> list[Parsed[Rubric] | None]:
            replies = collect()
            return [parse_rubric(r.text, self.cfg, truncated=r.truncated) if r.status == "ok" else None for r in replies]

        return read
