"""What the main loop runs: a Stage names the trained role, the number of updates, how to make a batch and which loss to take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from coevo_jax.methods.context import Context
from coevo_jax.records.facts import Facts


@dataclasses.dataclass(frozen=True)
class Step:
    """Where the run stands. `update` counts all updates and keys every draw; `policy`: whose answers the batch holds;
    `policy_updates`: that policy's, the clock of its answers' age; `within`: updates of the stage that are done."""

    update: int
    policy_updates: int
    cycle: int
    role: str
    policy: str = "policy"
    within: int = 0


class Behind:
    """For a metric, the rows that drive it: (size, name), the largest few."""

    SHOWN = 3

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[float, str]]] = {}

    def add(self, metric: str, rows: Iterable[tuple[float, str]]) -> None:
        """Join rows; those of size 0 drive nothing."""
        found = [*self.rows.get(metric, []), *((float(size), name) for size, name in rows if size > 0)]
        self.rows[metric] = sorted(found, key=lambda row: -row[0])[: self.SHOWN]

    def join(self, other: Mapping[str, Iterable[tuple[float, str]]]) -> None:
        """Join those of another part or process."""
        for metric, rows in other.items():
            self.add(metric, rows)


@dataclasses.dataclass(frozen=True)
class Part:
    """Samples of a further optimizer step of the same update, of the weights of `role`. name: before its metrics."""

    name: str
    role: str
    samples: list[Any]
    rollouts: list[dict[str, Any]]
    temperature: float


@dataclasses.dataclass
class Batch:
    """One update's training samples, what its metrics are made of, and the rows of its rollout file: of this process's slots.
    behind: the rows that a metric against reward hacking comes from. then: further optimizer steps, as many on every process."""

    samples: list[Any]  # learn.packing.Sample, learn.reward_model.PairSample or learn.preference.PreferenceSample
    facts: Facts
    rollouts: list[dict[str, Any]]
    behind: Behind = dataclasses.field(default_factory=Behind)
    then: tuple[Part, ...] = ()

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of what this process made."""
        return self.facts.row()


@dataclasses.dataclass(frozen=True)
class Stage:
    """`loss`: 'policy' (cfg.loss), 'sft', 'reward' or 'dpo' (pairs). `counts_as_policy`: do its updates age the stored answers?
    `policy`: whose answers its batches hold. Loss 'none' trains nothing: its updates make what others use (Context.stores).

    fresh: the role's optimizer begins anew with the stage. temperature: of the distribution that its completions are drawn from,
    where it isn't that of its role (rubric_sampling, answer). most: samples an update may have, 0: prompts x group ('dpo': pairs
    of a process, 0: its part of dpo.pairs)."""

    name: str
    role: str
    cycle: int
    updates: int
    make_batch: Callable[[Context, Step], Batch]
    loss: str = "policy"
    counts_as_policy: bool = False
    then_role: str = ""  # whom a second optimizer step of its updates trains
    fresh: bool = False
    temperature: float | None = None
    most: int = 0
    policy: str = "policy"
