"""The planner on DynamicRubric at 8B: two trained models and a scoring judge, what a step samples and judges, flags."""

from __future__ import annotations

import gzip
import json
import pathlib

import jax
import pytest
from train_support import REPO

from coevo_jax import aot
from coevo_jax.config.load import load_config
from coevo_jax.config.override import apply_overrides
from coevo_jax.cost import Network
from coevo_jax.plan import cli, report
from coevo_jax.plan.compiled import Compiled, Program
from coevo_jax.plan.dynamic import ITEM_TOKENS, ITEMS, updates
from coevo_jax.plan.phases import phases, residents
from coevo_jax.plan.programs import Slice, batch, programs
from coevo_jax.plan.step import Workload, calls, model_step, text_lengths

MAIN = str(REPO / "configs" / "dynamic_rubric_qwen3_8b.py")
GIB = 2**30


def slice_of(*changes: str) -> Slice:
    cfg = apply_overrides(load_config(MAIN), ["sampler.attention=pallas_interpret", *changes])
    return Slice(cfg, aot.Topology("v5p:2x2x2", aot.CHIPS["v5p"], 1, tuple(jax.devices())), 0)


def made(tmp_path: pathlib.Path, name: str) -> Program:
    text = tmp_path / f"{name}.gz"
    with gzip.open(text, "wt") as file:
        file.write("HloModule m\n\nENTRY %main (p: bf16[8,8]) -> bf16[8,8] {\n  %p = bf16[8,8]{1,0} parameter(0)\n"
                   "  ROOT %d = bf16[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}\n")  # fmt: skip
    memory = aot.Memory(5 * GIB, 5 * GIB, 0, 0, 0, 5 * GIB)
    return Program(name, 36, (Compiled(name, 36, memory, text, 0, (), 0.0),))


def test_every_program_of_both_stages_is_planned():
    s = slice_of()
    kinds = ["update", "reference log-probs", "publish", "prefill", "decode"]
    assert list(programs(s)) == [*(f"policy {k}" for k in kinds), "judge scoring"]  # one program serves both models of one size
    alive = residents(s)
    assert {
        f"{role} {what}" for role in ("policy", "rubric") for what in ("parameters", "moments", "reference", "decode copy")
    } <= set(alive)
    assert batch(s, ("ref_logp",)).tokens.shape[2] == 24576 + 8192
    never = residents(slice_of("dynamic.static_from=1"))
    assert "rubric moments" not in never and never["rubric decode copy"]


def test_what_a_step_samples_and_judges():
    s, work = slice_of("dynamic.candidates=4", "dynamic.group=16"), Workload(answer=500, question=300)
    by = {call.kind: call for call in calls(s)}
    assert by["answer"].counts == (256 * 8, 256 * 4) and by["rubric"].counts == (256, 256 * 16)
    assert by["rubric"].prompts == (256, 256 * 16) and by["judgement"].counts == (256 * 8, 256 * (4 + 7))
    assert {c.kind: c.prompts for c in calls(slice_of("dynamic.shuffle=group"))}["rubric"] == (256, 256)
    assert text_lengths(s, work, "rubric", 4000).prompts.mean() == pytest.approx(300 + 200 + 4 * 500, rel=0.1)
    policy, generator = (text_lengths(s, work, kind, 4000).prompts for kind in ("judgement", "items"))
    assert (generator - policy).tolist() == [15 * ITEMS * ITEM_TOKENS] * 4000
    blind = text_lengths(slice_of("dynamic.conditioned=prompt_only"), work, "rubric", 4000).prompts
    assert blind.mean() == pytest.approx(500, rel=0.1)
    assert updates(s.cfg) == (2 * 141, 2 * 94)
    assert updates(slice_of("dynamic.static_from=2").cfg) == (2 * 141, 94)
    assert updates(slice_of("schedule.order=generator_only").cfg) == (0, 2 * 94)


def test_the_plan_as_json(tmp_path, monkeypatch):
    monkeypatch.setattr(Network, "of", lambda devices, chip: None)  # nobody says where fake devices sit
    s, work = slice_of("schedule.prompts=8"), Workload(answer=200, rubric=100)
    compiled = {name: made(tmp_path, name) for name in programs(s)}
    step = model_step(s, compiled, work)
    out = json.loads(json.dumps(report.as_json(s, phases(s, compiled), step, work)))
    runs = {p["name"]: p["runs"] for p in out["programs"]}["judge scoring"]
    assert runs["rubric"] > runs["policy"] > 0
    policy, rubric = step.seconds
    assert out["chip_hours"] == pytest.approx((282 * policy + 188 * rubric) * 8 / 3600)
    assert "never run" in report.as_text(s, phases(s, compiled), step, work)


def test_the_command_takes_the_mode(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(aot, "topology", lambda name: slice_of().topology)
    monkeypatch.setattr(aot, "require_libtpu", lambda: None)
    argv = ["--topology=v5p:2x2x2", f"--config={MAIN}", f"--cache={tmp_path}"]
    assert cli.main([*argv, "--config.dynamic.objectives=both_of_them"]) == 2 and "unknown choice" in capsys.readouterr().err
    assert cli.config(*cli.parse(argv)).schedule.mode == "dynamic"
