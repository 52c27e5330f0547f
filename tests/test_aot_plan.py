"""The plan's programs compiled for slices that nobody owns: memory, aliasing and collectives at two layers, one at full depth."""

from __future__ import annotations

import importlib.util

import pytest
from train_support import REPO

from coevo_jax import aot
from coevo_jax.config.load import load_config
from coevo_jax.config.override import apply_overrides
from coevo_jax.plan.compiled import compile_one
from coevo_jax.plan.phases import budget_of, phases
from coevo_jax.plan.programs import Slice, device_bytes, train_state
from coevo_jax.plan.step import Workload, model_step, packed_rows, splash_kernels, text_lengths

pytestmark = [pytest.mark.tpu_aot]
GIB, MIB = 2**30, 2**20


def slice_of(topology: str, *changes: str, layers: int = 2, config: str = "evolm/qwen3_8b") -> Slice:
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    cfg = apply_overrides(load_config(str(REPO / "configs" / f"{config}.py")), changes)
    return Slice(cfg, aot.topology(topology), layers)


@pytest.mark.slow
def test_an_update_gathers_the_head_once_and_writes_its_state_in_place(tmp_path):
    s = slice_of("v4:2x2x4")
    update = compile_one(s, "policy update", tmp_path, full=True)
    assert update.in_place and update.memory.alias >= device_bytes(train_state(s, s.policy)) and not update.warnings
    found = aot.collectives(update.parts[0].read(), aot.hosts_of(s.mesh))
    inner = [c for c in found if len(c.loops.bodies) > 1]  # inside a micro-batch: layers and chunks of time
    weights = 2 * 3 * s.policy.hidden_size * s.policy.mlp_size  # bytes of a layer's feed-forward in bfloat16
    assert inner and max(c.bytes for c in inner) <= weights  # neither the head (1.2 GB) nor its gradient is moved there
    assert not [c for c in found if c.kind == "all-reduce" and c.bytes > 32 * MIB and len(c.loops.bodies) > 1]
    assert update.memory.peak < 6.25 * GIB
    again = compile_one(s, "policy update", tmp_path, full=True)  # from the figures that were kept
    assert again.memory == update.memory and again.parts[0].text == update.parts[0].text


def test_published_weights_travel_in_bfloat16(tmp_path):
    s = slice_of("v4:2x2x4")
    publish = compile_one(s, "policy publish", tmp_path, full=True)
    text = publish.parts[0].read()
    copy = 2 * (2 * 151_936 * 4096 + 2 * 192_946_432) / 4  # bytes on a device: both tables and two layers
    assert copy <= publish.memory.outputs < 1.02 * copy
    moved = sum(c.bytes * c.loops.runs for c in aot.collectives(text, aot.hosts_of(s.mesh)))
    assert moved < 2.5 * copy  # float32 would take twice of it
    assert publish.memory.peak < 2.6 * copy + device_bytes(train_state(s, s.policy).params)


@pytest.mark.slow
def test_the_judge_decodes_on_its_own_host_and_a_plan_adds_up(tmp_path):
    s = slice_of("v5p:2x2x2", "judge.length_classes=4,6144;2,40960", "schedule.prompts=8")
    decode = compile_one(s, "judge decode", tmp_path, full=False)
    assert decode.exact and decode.in_place  # two layers alone need no line
    assert not [c for c in aot.collectives(decode.parts[0].read(), aot.hosts_of(s.mesh)) if c.crosses_hosts is not False]
    made = {"judge decode": decode}
    (phase,) = phases(s, made)
    assert phase.budget == budget_of(s.topology.chip) and phase.peak > decode.memory.peak + sum(phase.beside.values()) - 1
    step = model_step(s, made, Workload(answer=200, rubric=100, verdict=50))
    assert step.parts["verdicts: decode"][1] > step.parts["verdicts: decode"][0] > 0
    assert 0 <= step.decode_collectives < 1 and step.programs["judge decode"].crossing_bytes == 0


@pytest.mark.slow
def test_the_main_update_at_full_depth_fits_v4(tmp_path):
    """36 layers, rows of 20,480 tokens on 16 chips of 32 GiB: an MFU above one half by the model (docs/performance.md)."""
    from coevo_jax.cost import Network, mfu, program_cost, useful_update_flops

    s = slice_of("v4:2x2x4", layers=0)
    update = compile_one(s, "policy update", tmp_path, full=True)
    (phase,) = phases(s, {"policy update": update})
    assert update.in_place and not update.warnings
    assert update.memory.peak < 26.5 * GIB and phase.over < 0
    rows = packed_rows(s, text_lengths(s, Workload(), "answer", 512))
    network = Network.of(list(s.mesh.devices.flat), s.topology.chip)
    cost = program_cost(update.parts[0].read(), s.topology.chip, aot.hosts_of(s.mesh), network=network,
                        trips=(rows.micro_batches,), kernels=splash_kernels(rows.visited))  # fmt: skip
    assert not cost.unknown_kernels and not cost.unknown_loops
    share = mfu(useful_update_flops(s.policy, rows.tokens), cost.seconds, 16, s.topology.chip.bf16_flops)
    assert share > 0.5 and cost.exposed_seconds < 0.1 * cost.seconds


@pytest.mark.slow
def test_with_full_rematerialisation_it_takes_less_than_the_first_probe(tmp_path):
    """17.1 GiB was the first probe's peak."""
    s = slice_of("v4:2x2x4", "update.remat=full", layers=0)
    update = compile_one(s, "policy update", tmp_path, full=True)
    assert update.in_place and not update.warnings and update.memory.peak < 13.5 * GIB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "program"),
    [("ablations/panel_mean", "judge_1 prefill"), ("ablations/panel_mean", "judge_1 decode"),
     ("baselines/skywork_rm_train", "policy update"), ("baselines/rlcer_ppo", "critic_policy update")],
)  # fmt: skip
def test_programs_of_further_models_compile(config, program, tmp_path):
    """A second judge of another family, a reward model and a critic: one layer, to see that the shapes are the run's."""
    s = slice_of("v4:2x2x4", layers=1, config=config)
    s.check()
    made = compile_one(s, program, tmp_path, full=True)
    assert made.in_place and made.memory.peak < 4 * GIB
