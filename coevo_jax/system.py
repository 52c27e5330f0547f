"""A run's parts together: what the loop asks of them between two batches. Built by assemble.py."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from coevo_jax.bench import Bench
from coevo_jax.compiling import judge_speakers
from coevo_jax.config import Experiment
from coevo_jax.errors import UserError
from coevo_jax.judges.several import members
from coevo_jax.learner import Learner
from coevo_jax.loading import HELDOUT, source_key
from coevo_jax.methods.context import Context
from coevo_jax.methods.prepared import Prepared
from coevo_jax.methods.stage import Stage
from coevo_jax.modes import MODES
from coevo_jax.progress import RunConsole
from coevo_jax.records.facts import Facts
from coevo_jax.records.fingerprint import fingerprint
from coevo_jax.records.run_folder import Input
from coevo_jax.remote import Endpoint
from coevo_jax.sampler import Engine


@dataclasses.dataclass
class System:
    """Everything of a run. `held`: weights that must never change beside those of judges; fingerprints: of all such, at start."""

    cfg: Experiment
    stages: list[Stage]
    learners: dict[str, Learner]
    context: Context
    engines: list[Engine]
    held: dict[str, Any]
    frozen_fingerprints: dict[str, str]
    compat: list[str]
    bench: Bench
    compile: Callable[[Iterable[Any]], None]  # the programs of (engine, weights, asks for probabilities) or a reward model
    endpoints: dict[str, Endpoint] = dataclasses.field(default_factory=dict)  # by role, where one is remote
    inputs: dict[str, Input] = dataclasses.field(default_factory=dict)  # what is read and the config only names
    began: dict[str, str] = dataclasses.field(default_factory=dict)  # fingerprints of trained weights as loaded (Mode.prepare)

    def learner_of(self, role: str) -> Learner:
        """The weights that a role trains."""
        return self.learners.get(role, self.learners["policy"])

    @property
    def states(self) -> dict[str, Any]:
        """What updates change, by name: of every learner, and of its critic."""
        critics = {f"critic_{name}": learner.critic for name, learner in self.learners.items() if learner.critic is not None}
        return {name: learner.state for name, learner in self.learners.items()} | {n: c.state for n, c in critics.items()}

    def take_states(self, states: dict[str, Any]) -> None:
        """Put back what `states` gave."""
        for name, learner in self.learners.items():
            learner.state = states[name]
            if learner.critic is not None:
                learner.critic.state = states[f"critic_{name}"]

    @property
    def frozen(self) -> dict[str, Any]:
        """All weights that must never change, by name."""
        return self.held | self.bench.weights

    def temperature(self, stage: Stage) -> float:
        """The temperature of the distribution that the stage's completions were drawn from (1 for supervised data)."""
        if stage.loss != "policy":
            return 1.0
        if stage.temperature is not None:
            return stage.temperature
        return (self.cfg.rubric_sampling if stage.role == "rubric" else self.cfg.answer).temperature

    def take_sampler_facts(self) -> Facts:
        """Counts of this process's engines since the last call."""
        used, facts = [engine.stats for engine in self.engines], Facts()
        facts.total("tokens/sampled", sum(s.tokens for s in used))
        facts.total("tokens/prefilled", sum(s.prefill_tokens for s in used))
        facts.total("sampler/dispatches", sum(s.dispatches for s in used))
        steps = sum(s.row_steps for s in used), sum(s.slot_steps for s in used)
        facts.add("ratio_if", "sampler/occupancy", steps)
        for stats in used:
            stats.reset()
        return facts

    def prepare(self, folder: pathlib.Path, updates: int, stopped: Callable[[], bool]) -> bool:
        """What the mode makes once before its first update, in the run folder. False: it was interrupted, and can go on."""
        prepare = MODES[self.cfg.schedule.mode].prepare
        return prepare is None or prepare(self.context, Prepared(folder, updates, self.began, stopped))

    def program_memory(self) -> dict[str, Any]:
        """Bytes of each sampler program, by engine."""
        return {f"engine {i}": engine.programs.memory() for i, engine in enumerate(self.engines)}

    def open_caches(self, folder: pathlib.Path) -> None:
        """Let the endpoints keep their replies in the run folder."""
        for endpoint in self.endpoints.values():
            endpoint.open_cache(folder)

    def close(self) -> None:
        """End what runs in the background."""
        for endpoint in self.endpoints.values():
            endpoint.close()

    def check_frozen(self) -> None:
        """The weights that the judge holds are those of the start (design.md 4.7). RuntimeError when they are not."""
        held = self.frozen
        for seat, judge in zip(self.bench.serving, members(self.context.judge) if self.context.judge is not None else ()):
            if (instrument := getattr(judge, "instrument", None)) is not None:
                held[seat.name] = instrument.params
        if (instrument := getattr(self.context.heldout, "instrument", None)) is not None:
            held[HELDOUT] = instrument.params
        for name, params in held.items():
            found = fingerprint(params)
            if found != self.frozen_fingerprints[name]:
                raise RuntimeError(f"the frozen {name} changed: fingerprint {found}, at start {self.frozen_fingerprints[name]}")

    def begin_cycle(self, cycle: int, console: RunConsole) -> None:
        """Seat the judges of a cycle, where others served before. UserError where one's weights are not those that the run has
        had for it."""
        if self.context.judge is None or not self.bench.changes(cycle):
            return
        self.context.judge = self.context.pair_judge = None  # their weights go before others come
        new = self.bench.sit(cycle)
        self.context.judge, self.context.pair_judge = self.bench.judge, self.bench.pair_judge
        for seat in new:
            console.note(f"cycle {cycle + 1}: {seat.name} {seat.cfg.source!r} serves")
        self.check_known({seat.name: fingerprint(seat.params) for seat in new if seat.params is not None})
        self.compile(judge_speakers(new))

    def check_known(self, prints: dict[str, str]) -> None:
        """Fingerprints of frozen weights, of this process or of a checkpoint, against those known before; new ones are kept."""
        for name, found in prints.items():
            if (known := self.frozen_fingerprints.setdefault(name, found)) != found:
                where = source_key(name)
                raise UserError(f"the frozen weights of {name} differ from those this run began with", where=where,
                                expected=f"fingerprint {known}, found {found}")  # fmt: skip


def optimizer_steps(cfg: Experiment, names: tuple[str, ...]) -> dict[str, int]:
    """Optimizer steps of the loop that train each of the weights `names`; the first ones play every role without its own."""
    steps = dict.fromkeys(names, 0)
    for stage in (stage for stage in MODES[cfg.schedule.mode].stages(cfg) if stage.loss != "none"):
        for role in filter(None, (stage.role, stage.then_role)):
            steps[role if role in steps else "policy"] += stage.updates
    return steps
