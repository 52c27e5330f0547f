"""What the main loop runs: a Stage names the trained role, the number of updates, how to make a batch and which loss to take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from coevo_jax.methods.context import Context
from coevo_jax.records.facts import Facts


@dataclasses.dataclass(frozen=True)
class Step:
    """Where the run stands. `update` counts all updates and keys every draw; `policy_updates` is the clock of answers' age."""

    update: int
    policy_updates: int
    cycle: int
    role: str


@dataclasses.dataclass
class Batch:
    """One update's training samples, what its metrics are made of, and the rows of its rollout file: of this process's slots."""

    samples: list[Any]  # learn.packing.Sample, or learn.reward_model.PairSample
    facts: Facts
    rollouts: list[dict[str, Any]]

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of what this process made."""
        return self.facts.row()


@dataclasses.dataclass(frozen=True)
class Stage:
    """`loss`: 'policy' (cfg.loss), 'sft' or 'reward' (pairs). `counts_as_policy`: do its updates age the stored answers?"""

    name: str
    role: str
    cycle: int
    updates: int
    make_batch: Callable[[Context, Step], Batch]
    loss: str = "policy"
    counts_as_policy: bool = False
