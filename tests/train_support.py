"""What the tests of the whole loop share: runs of the small world in this process, over one set of compiled programs.

A run loads, assembles, trains and saves as run.py does. Only compiled programs are shared between runs (engines and update
functions by everything they depend on), and the run sees one device unless it asks for more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np

from coevo_jax import learner as learner_module
from coevo_jax import loading as loading_module
from coevo_jax import train as train_module
from coevo_jax.assemble import assemble
from coevo_jax.config import Experiment
from coevo_jax.config.load import load_config
from coevo_jax.config.override import apply_overrides, get_at
from coevo_jax.config.validate import validate
from coevo_jax.methods.evolm import policy_batch, rubric_batch
from coevo_jax.methods.stage import Batch, Step
from coevo_jax.progress import RunConsole
from coevo_jax.records.fingerprint import fingerprint
from coevo_jax.records.metrics import comparable, read_metrics
from coevo_jax.records.rollouts import read_rollouts
from coevo_jax.system import System

REPO = pathlib.Path(__file__).resolve().parent.parent
TINY = str(REPO / "configs" / "tiny.py")
BATCHES = {"policy": policy_batch, "rubric": rubric_batch}
Hook = Callable[[System, dict[str, Any], int], None]


def tiny(*overrides: str) -> Experiment:
    """The small world's experiment with 'key=value' overrides, validated. One micro-batch an update, so one program."""
    cfg = apply_overrides(load_config(TINY), ("update.rows_per_micro=8", *overrides))
    validate(cfg)
    return cfg


def load_program() -> Any:
    """run.py as a module."""
    spec = importlib.util.spec_from_file_location("coevo_run", REPO / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Recorder(RunConsole):
    """A silent console that keeps what it is told, and may interrupt the run after an update as a SIGTERM would."""

    def __init__(self, stop_after: int = 0, hook: Hook | None = None):
        super().__init__()
        self.stop_after, self.hook = stop_after, hook
        self.notes: list[str] = []
        self.system: System | None = None

    def note(self, text: str) -> None:
        self.notes.append(text)

    def mark(self, name: str, update: int) -> None:
        self.notes.append(f"mark {name} {update}")

    def stage(self, name: str, cycle: int, updates: int, done: int, total: int) -> None:
        self.notes.append(f"stage {name} cycle {cycle}: {updates}")

    def progress(self, what: str, done: int, total: int) -> None:
        pass

    def update(self, row: Any, done: int) -> None:
        if self.hook is not None:
            assert self.system is not None
            self.hook(self.system, dict(row), done)
        if done == self.stop_after:
            signal.raise_signal(signal.SIGTERM)

    def end_stage(self, metrics: pathlib.Path, name: str, cycle: int) -> None:
        self.notes.append(f"end of {name}")

    def summary(self, folder: pathlib.Path, finished: bool) -> None:
        self.notes.append(f"summary {finished}")


@dataclasses.dataclass
class Run:
    """What is left of a run."""

    folder: pathlib.Path
    finished: bool
    notes: list[str]
    system: System

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def comparable(self) -> list[dict[str, Any]]:
        return [comparable(row) for row in self.rows]

    def rollouts(self, update: int | None = None, role: str | None = None) -> list[dict[str, Any]]:
        return read_rollouts(self.folder / "rollouts", update, role)

    @property
    def params(self) -> dict[str, Any]:
        """The weights by learner, on the host."""
        return {name: jax.device_get(learner.state.params) for name, learner in self.system.learners.items()}


def run(
    folder: pathlib.Path, *overrides: str, stop_after: int = 0, hook: Hook | None = None, cfg: Experiment | None = None
) -> Run:
    """Train the small world in `folder`; stop_after: SIGTERM after that update."""
    console = Recorder(stop_after, hook)
    with shared_programs(), mock.patch.object(train_module, "assemble", _kept(console)):
        finished = train_module.train(cfg or tiny(*overrides), str(folder), console)
    assert console.system is not None
    return Run(folder, finished, console.notes, console.system)


def system_of(*overrides: str, cfg: Experiment | None = None) -> System:
    """An assembled run of the small world, its weights published: for tests of one batch."""
    with shared_programs():
        system = assemble(cfg or tiny(*overrides), Recorder())
    for learner in system.learners.values():
        learner.publish()
    return system


def make_batch(system: System, role: str, update: int, policy_updates: int) -> Batch:
    return BATCHES[role](system.context, Step(update, policy_updates, 0, role))


def _kept(console: Recorder) -> Callable[..., System]:
    def keep(*args: Any, **kwargs: Any) -> System:
        console.system = assemble(*args, **kwargs)
        return console.system

    return keep


# --------------------------------------------------------------------------------------------------------- shared programs

_engines: dict[Any, Any] = {}
_functions: dict[Any, Any] = {}
UPDATE_KEYS = (
    "optimizer",
    "warmup.lr",
    "warmup.schedule",
    "warmup.warmup_steps",
    "loss",
    "update",
    "compat",
    "policy.dtype",
    "schedule.cycles",
    "schedule.k",
)


@contextlib.contextmanager
def shared_programs() -> Iterator[None]:
    """Engines and update functions are made once for all runs; one device; the compile cache's place is put back."""
    cache = jax.config.jax_compilation_cache_dir
    try:
        with (
            mock.patch.object(loading_module, "Engine", _engine(loading_module.Engine)),
            mock.patch.object(learner_module, "make_update", _update(learner_module.make_update)),
            mock.patch.object(learner_module, "make_logprobs", _logprobs(learner_module.make_logprobs)),
            mock.patch.object(learner_module, "make_preference_update", _pairs(learner_module.make_preference_update, 1)),
            mock.patch.object(learner_module, "make_preference_scores", _pairs(learner_module.make_preference_scores)),
            mock.patch.object(learner_module, "make_reference_logps", _pairs(learner_module.make_reference_logps)),
            mock.patch.object(jax, "device_count", lambda: 1),
        ):
            yield
    finally:
        jax.config.update("jax_compilation_cache_dir", cache)


def _engine(make: Any) -> Any:
    def shared(spec: Any, cfg: Any, stop_ids: Any, mesh: Any = None, seed: int = 0) -> Any:
        key = (spec, cfg, stop_ids, mesh)
        if key not in _engines:
            _engines[key] = make(spec, cfg, stop_ids, mesh=mesh, seed=seed)
        _engines[key].seed = seed  # no program depends on it
        return _engines[key]

    return shared


def _update(make: Any) -> Any:
    def shared(spec: Any, optimizer: Any, loss: Any, cfg: Experiment, mesh: Any = None) -> Any:
        key = (
            "update",
            spec,
            loss,
            mesh,
            float(optimizer.lr(0)),
            float(optimizer.lr(3)),
            *(get_at(cfg, name) for name in UPDATE_KEYS),
        )
        if key not in _functions:
            _functions[key] = make(spec, optimizer, loss, cfg, mesh)
        return _functions[key]

    return shared


def _logprobs(make: Any) -> Any:
    def shared(spec: Any, cfg: Experiment, mesh: Any = None) -> Any:
        key = ("logprobs", spec, mesh, cfg.update, cfg.policy.dtype)
        if key not in _functions:
            _functions[key] = make(spec, cfg, mesh)
        return _functions[key]

    return shared


def _pairs(make: Any, optimizers: int = 0) -> Any:
    """Of programs of preference pairs, which take (spec, [optimizer], cfg, mesh)."""

    def shared(spec: Any, *rest: Any) -> Any:
        cfg, mesh = rest[optimizers], rest[optimizers + 1]
        loss = tuple(getattr(cfg.dpo, name) for name in ("loss", "beta", "label_smoothing", "sft_weight"))
        key = (make.__name__, spec, mesh, cfg.optimizer, cfg.update, cfg.policy.dtype, loss)
        if key not in _functions:
            _functions[key] = make(spec, *rest)
        return _functions[key]

    return shared


# --------------------------------------------------------------------------------------------------------------- comparing


def prints(system: System) -> dict[str, str]:
    """Fingerprint of each learner's weights."""
    return {name: fingerprint(learner.state.params) for name, learner in system.learners.items()}


def same_bits(a: Any, b: Any) -> bool:
    """Are two trees of arrays equal, bit by bit?"""
    left, right = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(left) == len(right) and all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(left, right))


def files_of(folder: pathlib.Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes, to show that nothing was written over."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
