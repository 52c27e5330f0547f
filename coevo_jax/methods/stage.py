"""What the main loop runs: a Stage names the trained role, the number of updates, how to make a batch and which loss to take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from coevo_jax.learn.packing import Sample
from coevo_jax.methods.context import Context


@dataclasses.dataclass(frozen=True)
class Step:
    """Where the run stands. `update` counts all updates and keys every draw; `policy_updates` is the clock of answers' age."""

    update: int
    policy_updates: int
    cycle: int
    role: str


@dataclasses.dataclass
class Batch:
    """One update's training samples, its metrics and the rows of its rollout file."""

    samples: list[Sample]
    metrics: dict[str, float]
    rollouts: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Stage:
    """`loss`: 'policy' (cfg.loss) or 'sft'. `counts_as_policy`: do its updates age the stored answers?"""

    name: str
    role: str
    cycle: int
    updates: int
    make_batch: Callable[[Context, Step], Batch]
    loss: str = "policy"
    counts_as_policy: bool = False
