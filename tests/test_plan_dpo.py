"""Plans of DPO: its programs are made of the shapes that the run has, at 8B too; what a labelling step samples."""

from __future__ import annotations

import importlib.util

import jax
import numpy as np
import pytest

from coevo_jax import aot
from coevo_jax.config.load import load_config
from coevo_jax.config.override import apply_overrides
from coevo_jax.config.validate import validate
from coevo_jax.learn.preference import PreferenceBatch, PreferenceSample, pack_preferences
from coevo_jax.plan.calls import calls
from coevo_jax.plan.cast import Slice
from coevo_jax.plan.phases import beside, residents
from coevo_jax.plan.preference import passes, preference_batch
from coevo_jax.plan.programs import Planned, programs

MAIN = "configs/evolm/qwen3_8b.py"
OFFLINE = ("schedule.mode=dpo", "dpo.pairs=64", "dpo.sft_weight=0.2", "update.rows_per_micro=16")
ITERATED = ("schedule.mode=iterated_dpo", "dpo.pairs=32", "generator.mode=two", "update.rows_per_micro=16",
            "sampler.attention=xla")  # fmt: skip
SMALL = ("update.pack_length=1024", "update.attention=xla", "sampler.attention=xla", "update.remat=full", "dpo.pairs=8")


def slice_of(*overrides: str, topology: aot.Topology | None = None, layers: int = 1) -> Slice:
    cfg = apply_overrides(load_config(MAIN), overrides)
    fake = aot.Topology("v5p:2x2x2", aot.CHIPS["v5p"], 1, tuple(jax.devices()))
    return Slice(cfg, topology or fake, layers)


def test_given_pairs_need_the_weights_once() -> None:
    s = slice_of(*OFFLINE)
    s.check()
    alive = residents(s)
    assert list(programs(s)) == ["policy update", "policy pair log-probs"]
    assert set(alive) == {"policy parameters", "policy moments"}, "no reference is held"
    assert set(beside(s, "policy pair log-probs", alive)) == {"policy moments"}
    assert calls(s) == [] and (passes(s.cfg, "update"), passes(s.cfg, "pair log-probs")) == (1, 0)


def test_a_step_of_iterated_dpo_labels_and_trains() -> None:
    s = slice_of(*ITERATED)
    s.check()
    P = s.cfg.schedule.prompts
    assert {c.kind: c.counts for c in calls(s)} == {"answer": (2 * P, 0), "rubric": (P, 0), "verdict": (2 * P, 0)}
    assert not any(name.endswith("reference") for name in residents(s)) and "rubric moments" not in residents(s)
    assert {"policy update", "policy pair log-probs", "policy publish", "judge decode"} <= set(programs(s))
    assert (passes(s.cfg, "update"), passes(s.cfg, "pair log-probs")) == (P / 32, 1)
    validate(s.cfg)


@pytest.mark.parametrize("program", ["policy update", "policy pair log-probs"])
def test_the_programs_are_traced_over_the_runs_shapes(program: str) -> None:
    s = slice_of(*OFFLINE, *SMALL)
    planned = programs(s)[program]()
    assert isinstance(planned, Planned) and jax.eval_shape(planned.function, *planned.args) is not None
    assert (planned.donated > 0) == program.endswith("update")
    ids = np.ones(4, np.int32)
    made = pack_preferences([PreferenceSample(ids, ids, ids)], s.cfg.update, devices=len(jax.devices()), most=24)
    planned_batch = preference_batch(s, 24)
    assert isinstance(planned_batch, PreferenceBatch)
    like = jax.tree.map(lambda x: (x.shape, x.dtype), made)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), planned_batch) == like


@pytest.mark.tpu_aot
def test_dpo_compiles_at_8b_without_logits_of_a_row() -> None:
    """One layer of 36: the update's peak is far below float32 logits of its micro-batch, and the state is written in place."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    s = slice_of(*OFFLINE, topology=aot.topology("v5p:2x2x4"))
    for name, make in programs(s).items():
        planned = make()
        compiled = aot.compile_for(planned.function, planned.args, donate=planned.donate)
        found = aot.memory(compiled)
        tokens = s.cfg.update.pack_length * s.cfg.update.rows_per_micro // s.chips
        assert found.peak - found.arguments < tokens * s.policy.vocab_size * 4, name
        assert found.alias >= planned.donated
