"""Programs and texts of DPO: the update on pairs, the pass that gives the reference's log-probs, what a labelling step samples.

Axes: M micro-batches, B rows of one, T tokens of a row, S segments of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from coevo_jax.config import Experiment
from coevo_jax.config.check_dpo import ALONE, ITERATED
from coevo_jax.learn.preference import PreferenceBatch, make_preference_update, make_reference_logps
from coevo_jax.learn.update import make_optimizer, rows_devices
from coevo_jax.models.spec import ModelSpec
from coevo_jax.plan.cast import Slice
from coevo_jax.plan.programs import Planned, publish_program, train_state, trained_params


def on_pairs(cfg: Experiment) -> bool:
    """Does the run train by DPO alone?"""
    return cfg.schedule.mode in ALONE


def preference_batch(s: Slice, pairs: int) -> PreferenceBatch:
    """Packed pairs [M,B,T] as Learner.update makes them."""
    u, spread = s.cfg.update, NamedSharding(s.mesh, PartitionSpec(None, s.rules.batch))
    devices = rows_devices(s.mesh, s.rules)
    B = -(-u.rows_per_micro // devices) * devices
    M = max(-(-pairs // (B // 2)), 1)
    kinds = {"mask": np.bool_, "chosen": np.bool_, "reference": np.float32}
    widths = dict.fromkeys(("owner", "reference", "chosen", "partner_rows", "partner"), u.max_segments)
    names = ("tokens", "positions", "segment_ids", "parent_ids", "targets", "mask", *widths)
    shapes = {n: (M, B, widths.get(n, u.pack_length)) for n in names}
    return PreferenceBatch(**{n: jax.ShapeDtypeStruct(shapes[n], kinds.get(n, np.int32), sharding=spread) for n in names})


def preference_programs(s: Slice, role: str, spec: ModelSpec) -> dict[str, Callable[[], Planned]]:
    """The update and the reference pass; where the policy samples, its copy for that."""

    def update() -> Planned:
        optimizer = make_optimizer(s.cfg.optimizer, 1)
        jitted = make_preference_update(spec, optimizer, s.cfg, s.mesh)
        return Planned(f"{role} update", jitted, (train_state(s, spec), preference_batch(s, s.cfg.dpo.pairs)), donate=(0,))

    def logps() -> Planned:
        rows = preference_batch(s, pairs_a_label(s.cfg) if s.samples else s.cfg.dpo.pairs)
        return Planned(f"{role} pair log-probs", make_reference_logps(spec, s.cfg, s.mesh), (trained_params(s, spec), rows))

    out: dict[str, Callable[[], Planned]] = {f"{role} update": update, f"{role} pair log-probs": logps}
    if s.samples:
        out[f"{role} publish"] = functools.partial(publish_program, s, spec, role)
    return out


def pairs_a_label(cfg: Experiment) -> int:
    """Pairs that an update of a labelling stage makes."""
    return cfg.schedule.prompts * (cfg.dpo.answers // 2)


def update_runs(cfg: Experiment) -> float:
    """Updates a step. A step of iterated DPO is one of labelling and the training that its pairs fill, all of them kept."""
    if cfg.schedule.mode != ITERATED:
        return 1.0 if on_pairs(cfg) else cfg.update.inner_iterations
    return pairs_a_label(cfg) / cfg.dpo.pairs


def passes(cfg: Experiment, kind: str) -> float:
    """Runs of a program a step: of given pairs the reference is computed once a run, not in a step."""
    if kind == "pair log-probs":
        return float(cfg.schedule.mode == ITERATED)
    return update_runs(cfg) if kind == "update" else 1.0
