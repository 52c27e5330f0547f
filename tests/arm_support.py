"""What the tests of Rubric-ARM share: its config in the small world, and roles that write what a test says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from train_support import REPO, Recorder, shared_programs

from coevo_jax.assemble import assemble
from coevo_jax.config import Experiment
from coevo_jax.config.load import load_config
from coevo_jax.config.override import apply_overrides
from coevo_jax.config.validate import validate
from coevo_jax.judges import comparison
from coevo_jax.rubrics import Criterion, Rubric
from coevo_jax.sampler import Completion, Request
from coevo_jax.system import System

LIST = "1. The response includes owl [Hard Rule]\n2. The response is nice [Principle]"
RUBRIC = Rubric((Criterion("The response includes owl", 3.0, title="Hard Rule"),
                 Criterion("The response is nice", 1.0, title="Principle")))  # fmt: skip
_SAID = {side: ["includes owl it meets this", "is nice it meets this"] for side in "AB"}


def judgement(winner: str) -> str:
    """A whole judgement under RUBRIC."""
    return comparison.write(RUBRIC, 1, _SAID, dict.fromkeys("AB", "it meets this"), f"{winner} it weighs more", winner)


def arm(*overrides: str) -> Experiment:
    """configs/tiny_arm.py with overrides, validated."""
    cfg = apply_overrides(load_config(str(REPO / "configs" / "tiny_arm.py")), ("update.rows_per_micro=8", *overrides))
    validate(cfg)
    return cfg


def arm_system(*overrides: str) -> System:
    """An assembled run, its weights published."""
    with shared_programs():
        system = assemble(arm(*overrides), Recorder(), warm_up=False)
    for learner in system.learners.values():
        learner.publish()
    return system


Says = Callable[[Request, int], str | tuple[str, str]]  # (request, sample) -> text, or (text, finish)


@contextlib.contextmanager
def says(system: System, **roles: Says) -> Iterator[list[Request]]:
    """Roles whose completions are the texts that a function gives; what they were asked is collected."""
    context, asked = system.context, list[Request]()
    real = context.generate

    def generate(role: str, requests: list[Request]) -> list[list[Completion]]:
        if role not in roles:
            return real(role, requests)
        asked.extend(requests)
        return [[_completion(system, role, roles[role](r, i)) for i in range(r.n)] for r in requests]

    context.generate = generate  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        del context.generate


def _completion(system: System, role: str, said: Any) -> Completion:
    text, finish = said if isinstance(said, tuple) else (said, "stop")
    tokenizer = system.context.voices[role].tokenizer
    ids = np.asarray([*tokenizer.encode(text), tokenizer.stop_ids[0]][: None if finish == "stop" else -1], np.int32)
    return Completion(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.float32), finish)


def shown(system: System, request: Request) -> str:
    """The text of a request's prompt."""
    return system.context.voices["judge"].tokenizer.decode(request.prompt.tolist(), keep_special=True)
