"""The planner without a compile: shapes by name, what lives in each phase, advice, the modelled step, flags, JSON."""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib

import jax
import numpy as np
import pytest
from train_support import REPO

from coevo_jax import aot
from coevo_jax.config.load import load_config
from coevo_jax.config.override import apply_overrides
from coevo_jax.cost import Network
from coevo_jax.errors import UserError
from coevo_jax.models.forward import param_shapes
from coevo_jax.models.known import KNOWN, known_spec
from coevo_jax.plan import cli, estimate, report, search
from coevo_jax.plan.compiled import Compiled, Program
from coevo_jax.plan.lengths import Lengths, drain_of
from coevo_jax.plan.phases import Phase, advice, beside, budget_of, phases, residents
from coevo_jax.plan.programs import Slice, batch, programs
from coevo_jax.plan.step import Workload, drain_on_host, model_step, packed_rows, text_lengths

GIB = 2**30
MAIN = str(REPO / "configs" / "evolm" / "qwen3_8b.py")
TEXT = """HloModule m, num_partitions=8

ENTRY %main (p: bf16[1024,1024]) -> bf16[1024,1024] {
  %p = bf16[1024,1024]{1,0} parameter(0)
  ROOT %d = bf16[1024,1024]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def slice_of(*changes: str, layers: int = 0) -> Slice:
    """A config on 'v5p:2x2x2', whose devices are the 8 fake CPU ones."""
    cfg = apply_overrides(load_config(MAIN), ["sampler.attention=pallas_interpret", *changes])
    return Slice(cfg, aot.Topology("v5p:2x2x2", aot.CHIPS["v5p"], 1, tuple(jax.devices())), layers)


def compiled(tmp_path: pathlib.Path, name: str, layers: int, peak: int, donated: int = 0) -> Compiled:
    text = tmp_path / f"{name}{layers}.gz"
    with gzip.open(text, "wt") as file:
        file.write(TEXT)
    return Compiled(name, layers, aot.Memory(peak, peak, 0, donated, 0, peak), text, donated, (), 0.0)


def test_published_sizes_by_name():
    """Parameters as the models' pages give them (Qwen3 technical report, table 1: 0.6B, 1.7B, 4.0B, 8.2B, 14.8B, 32.8B; Llama
    8.0B and 1.2B, the reward model with the vocabulary's head of its base; Mistral 7.2B; OLMo 3 7.3B)."""
    counts = {}
    for name, spec in KNOWN.items():
        infos = jax.tree.leaves(param_shapes(spec), is_leaf=lambda x: hasattr(x, "axes"))
        counts[name] = sum(float(np.prod(i.shape)) for i in infos) / 1e9
    assert [round(n, 1) for n in counts.values()] == [0.6, 1.7, 4.0, 8.2, 14.8, 32.8, 8.0, 8.0, 1.2, 8.0, 7.2, 7.3]
    assert known_spec("/models/Qwen3-8B", "policy.source") == KNOWN["Qwen3-8B"]
    with pytest.raises(UserError, match="Qwen3-9B") as error:
        known_spec("/models/Qwen3-9B", "judge.source")
    assert error.value.where == "judge.source" and error.value.nearest == "Qwen3-8B"


def test_a_single_model_has_one_update_and_two_models_of_one_size_share_it():
    kinds = ["update", "reference log-probs", "publish", "prefill", "decode"]
    assert list(programs(slice_of())) == [*(f"policy {k}" for k in kinds), "judge prefill", "judge decode"]
    two = slice_of("generator.mode=two")
    assert list(programs(two)) == list(programs(slice_of())) and list(two.trained) == ["policy", "rubric"]
    other = slice_of("generator.mode=two", "generator.source=/models/Qwen3-4B", "update.inner_iterations=2")
    assert "rubric update" in programs(other) and "policy old log-probs" in programs(other)
    assert "judge scoring" in programs(slice_of("judge.protocol=criterion_logits"))


def test_what_lives_on_a_device():
    """Qwen3-8B over 8 chips: float32 parameters and two moments, the reference's matrices in bfloat16, a decode copy over 4."""
    alive, n = residents(slice_of()), 8.19e9
    assert alive["policy parameters"] == pytest.approx(4 * n / 8, rel=2e-3)
    assert alive["policy moments"] == pytest.approx(8 * n / 8, rel=2e-3)
    assert alive["policy reference"] == pytest.approx(2 * n / 8, rel=2e-3)
    assert alive["policy decode copy"] == pytest.approx(2 * n / 4, rel=2e-3)
    assert alive["judge weights"] == pytest.approx(2 * 1.72e9 / 4, rel=2e-3)
    int8 = residents(slice_of("judge.weights=int8"))["judge weights"]
    assert 0.5 < int8 / alive["judge weights"] < 0.52
    two = residents(slice_of("generator.mode=two", "loss.kl_weight=0", "optimizer.mu_dtype=bfloat16"))
    assert two["rubric moments"] == pytest.approx(6 * n / 8, rel=2e-3) and "policy reference" not in two
    held = slice_of("generator.mode=two", "generator.source=/models/Qwen3-4B", "generator.frozen=true")
    assert [name for name in residents(held) if name.startswith("rubric")] == ["rubric decode copy"]
    assert [name for name in programs(held) if name.startswith("rubric")] == ["rubric prefill", "rubric decode"]
    assert batch(slice_of(), ("ref_logp",)).tokens.shape == (256, 2, 20480)


def test_each_phase_counts_what_its_program_does_not_take():
    s = slice_of()
    alive = residents(s)
    assert set(beside(s, "policy update", alive)) == {"policy reference", "judge weights"}
    assert set(beside(s, "policy reference log-probs", alive)) == set(alive) - {"policy reference"}
    assert set(beside(s, "policy publish", alive)) == {"policy moments", "policy reference", "judge weights"}
    decode = beside(s, "policy decode", alive)
    assert decode["policy layers for prefill"] < alive["policy decode copy"] and "policy decode copy" not in decode
    assert "shared heads" not in decode and decode["policy moments"] == alive["policy moments"]
    assert decode["prefilled, not admitted"] == 2 * 4096 * 36 * 1024  # of the largest prefill
    shared = slice_of("sampler.share_heads=true", "sampler.heads=2")
    assert beside(shared, "policy decode", alive)["shared heads"] == 2 * 3072 * 36 * 1024
    judging = beside(s, "judge prefill", alive)
    assert judging["policy decode copy"] and "judge weights" not in judging
    positions = (96 * 6144 + 32 * 12288 + 16 * 40960) // 2
    assert judging["slots"] == pytest.approx(positions * 28 * 1024, rel=0.01)
    two = slice_of("generator.mode=two")
    assert {"rubric moments", "rubric decode copy"} <= set(beside(two, "policy update", residents(two)))


def test_phases_add_up_and_say_what_to_change(tmp_path):
    s = slice_of()
    budget = budget_of(s.topology.chip)
    assert budget == int(0.97 * s.topology.chip.hbm_program)
    made = {name: Program(name, 36, (compiled(tmp_path, name, 36, 5 * GIB),)) for name in programs(s)}
    found = phases(s, made)
    assert [p.name for p in found][:2] == ["rollout: prefill (policy)", "rollout: decode (policy)"]
    assert found[-1].name == "publish (policy)" and all(p.peak == 5 * GIB + sum(p.beside.values()) for p in found)
    assert all(p.over <= 0 for p in found)
    over = Phase("rollout: decode (policy)", "policy decode", budget, {"x": GIB}, budget)
    lines = advice(s, over)
    assert lines and any("fewer slots in sampler.length_classes" in line for line in lines)
    assert any("judge.weights=int8" in line for line in lines) and any("optimizer.mu_dtype=bfloat16" in line for line in lines)
    update = advice(slice_of("update.remat=attention"), dataclasses.replace(over, program="policy update"))
    assert any("update.remat=full" in line for line in update)


def test_a_line_through_two_depths(tmp_path):
    parts = (compiled(tmp_path, "policy decode", 2, 3 * GIB), compiled(tmp_path, "policy decode", 4, 4 * GIB))
    program = Program("policy decode", 36, parts)
    assert program.memory.peak == 20 * GIB and not program.exact and program.in_place
    assert not Program("x", 2, (dataclasses.replace(parts[0], donated=1),)).in_place


def test_rows_drain_through_the_slots():
    lengths = Lengths(np.full(6, 10), np.full(6, 64), "")
    assert drain_of(((2, 128),), lengths, 6, 32, 0).dispatches == 6  # 3 rows after another, 2 dispatches each
    late = drain_of(((2, 128),), lengths, 6, 32, 1)
    assert late.dispatches == 8 and late.rows == pytest.approx(6 * 64 / (8 * 32))
    s, uneven = slice_of(), Lengths(np.full(256, 10), np.repeat([64, 640], 128), "")
    assert drain_on_host(s, s.engine, uneven, 256).dispatches >= 10  # the second host's share decides
    moved = drain_of(((2, 40), (1, 128)), lengths, 2, 32, 0)  # both outgrow their class; one waits for the other's place
    assert moved.dispatches == 5  # 30 steps to its end, 34 steps of one and then of the other


def test_packed_rows_make_whole_micro_batches():
    s = slice_of("mesh.train=fsdp", "update.pack_length=18944", "update.rows_per_micro=16")
    lengths = Lengths(np.full(512, 100), np.full(512, 4636), "")
    rows = packed_rows(s, lengths)  # 4 a row, 128 rows, 16 a micro-batch
    assert (rows.micro_batches, rows.tokens) == (8, [4736] * 512)
    own, met = 10 * 9 / 2 + 9.25, 3 * 9  # a quarter of a block is left over from one sample to the next, so blocks meet
    assert 4 * (own - 3) < rows.visited * 37 * 38 / 2 < 4 * own + met
    whole = packed_rows(s, Lengths(np.full(16, 100), np.full(16, 18844), ""))
    assert whole.visited == 1.0 and whole.micro_batches == 1
    assert packed_rows(s, Lengths(np.full(1, 100), np.full(1, 18844), "")).visited < 0.15  # 15 rows of padding cost nothing
    along = packed_rows(slice_of(), Lengths(np.full(2, 100), np.full(2, 20380), ""))  # 40 blocks of a row over 4 chips
    assert along.micro_batches == 1 and along.visited == pytest.approx(
        4 * sum(range(4, 41, 4)) / (40 * 41 / 2)
    )  # the last chip's
    work = Workload(answer=500)
    assert text_lengths(s, work, "answer", 4000).completions.mean() == pytest.approx(500, rel=0.1)
    assert text_lengths(s, work, "verdict", 4000).prompts.mean() == pytest.approx(400 + 200 + 500 + 1500, rel=0.1)


def test_the_plan_as_json_and_text(tmp_path, monkeypatch):
    monkeypatch.setattr(Network, "of", lambda devices, chip: None)  # nobody says where fake devices sit
    s, work = slice_of("schedule.prompts=8"), Workload(answer=200, rubric=100, verdict=50)
    made = {name: Program(name, 36, (compiled(tmp_path, name, 36, 5 * GIB),)) for name in programs(s)}
    found, step = phases(s, made), model_step(s, made, work)
    out = json.loads(json.dumps(report.as_json(s, found, step, work)))
    assert (
        out["fits"] is True and out["exact"] is True and set(out) >= {"programs", "phases", "step_seconds", "mfu", "chip_hours"}
    )
    assert {"name", "peak_bytes", "flops", "bytes", "collective_bytes", "seconds"} <= set(out["programs"][0])
    assert {"name", "peak_bytes", "budget_bytes"} <= set(out["phases"][0])
    by = {p["name"]: p for p in out["programs"]}
    assert by["policy update"]["flops"] == 2 * 1024**3 and by["policy publish"]["runs"] == {"policy": 1, "rubric": 1}
    policy, rubric = out["policy_step_seconds"], out["rubric_step_seconds"]
    assert out["step_seconds"] == pytest.approx((policy + rubric) / 2)
    assert policy == pytest.approx(sum(p["policy"] for p in out["step"].values()))
    assert out["chip_hours"] == pytest.approx(10 * 50 * (policy + rubric) * 8 / 3600)
    runs = by["judge prefill"]["runs"]
    assert runs["rubric"] > runs["policy"] > 0  # two answers a rubric
    text = report.as_text(s, found, step, work)
    assert "never run" in text and "every phase fits: yes" in text and "not measured" in text
    worse = [dataclasses.replace(p, budget=GIB) for p in found]
    assert report.as_json(s, worse, step, work)["fits"] is False and "DOES NOT FIT" in report.as_text(s, worse, step, work)


def test_the_estimate_and_the_variants():
    full = "update.remat=full"
    s, work = slice_of("schedule.prompts=8", full), Workload(answer=200, rubric=100, verdict=50)
    plain = estimate.estimate(s, work)
    assert plain.may_fit and plain.seconds > 0
    kept = estimate.estimate(slice_of("schedule.prompts=8", "update.remat=attention"), work)
    dots = estimate.estimate(slice_of("schedule.prompts=8", "update.remat=dots"), work)
    assert plain.update_bytes < kept.update_bytes < dots.update_bytes and plain.update_seconds > kept.update_seconds
    rows = estimate.estimate(slice_of("schedule.prompts=8", full, "mesh.train=fsdp"), work)
    assert plain.update_bytes < rows.update_bytes  # a quarter of a row's activations
    best = estimate.estimate(slice_of("schedule.prompts=8"), work)
    assert best.update_seconds < kept.update_seconds < plain.update_seconds
    variants = estimate.variants(s.cfg, 2, 8)
    assert len(variants) == len(set(variants)) > 50 and {v.mesh.tensor for v in variants} == {1, 2, 4}
    assert estimate.scaled(((96, 3072), (1, 9)), 0.5, 4) == ((48, 3072), (4, 9))
    changed = search.overrides(s.cfg, dataclasses.replace(s.cfg, update=dataclasses.replace(s.cfg.update, remat="dots")))
    assert changed == ["--config.update.remat=dots"]
    slots = dataclasses.replace(s.cfg.sampler, slots=6, length_classes=((4, 64), (2, 19456)))
    flags = search.overrides(s.cfg, dataclasses.replace(s.cfg, sampler=slots))
    assert flags == ["--config.sampler.slots=6", "--config.sampler.length_classes=4,64;2,19456"]  # as a command line takes them
    grown = search.grown(s.cfg, 8, 16)
    assert (grown.schedule.prompts, grown.update.rows_per_micro, grown.sampler.slots) == (16, 2, 384)
    with pytest.raises(UserError, match="do not grow"):
        search.grown(s.cfg, 7, 9)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--topology=v5p:2x2x2", "--config=configs/evolm/qwen3_9b.py"], "no config file"),
        (["--topology=v7p:2x2x2", f"--config={MAIN}"], "not the name of a TPU topology"),
        (["--topology=v5p:2x2x2", f"--config={MAIN}", "--confg.mesh.fsdp=2"], "unknown flag"),
        (["--topology=v5p:2x2x2", f"--config={MAIN}", "--config.mesh.train=both"], "unknown choice"),
        (["--topology=v5p:2x2x2", f"--config={MAIN}", "--config.mesh.fsdp=3"], "does not use 8 devices"),
        (["--topology=v5p:2x2x2", f"--config={MAIN}", "--config.judge.source=/models/judge"], "not known by name"),
        (["--topology=v5p:2x2x2", f"--config={MAIN}", "--config.schedule.mode=sft", "--config.warmup.updates=1"], "no plan"),
    ],
)
def test_bad_input_is_named_and_ends_with_2(argv, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(aot, "topology", lambda name: (aot.parse_name(name), slice_of().topology)[1])
    monkeypatch.setattr(aot, "require_libtpu", lambda: None)
    assert cli.main([*argv, f"--cache={tmp_path}"]) == 2
    assert message in capsys.readouterr().err
