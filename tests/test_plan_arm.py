"""Rubric-ARM's plan without a compile: who lives on a device, what each phase writes, hours of the schedule."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from train_support import REPO

from coevo_jax import aot
from coevo_jax.config.load import load_config
from coevo_jax.config.override import apply_overrides
from coevo_jax.errors import UserError
from coevo_jax.plan.arm import ArmSlice, Text, hours, lengths_of, planned, texts
from coevo_jax.plan.phases import residents
from coevo_jax.plan.programs import programs
from coevo_jax.plan.step import Workload

MAIN = str(REPO / "configs" / "rubric_arm_qwen3_8b.py")


def slice_of(*changes: str) -> ArmSlice:
    cfg = apply_overrides(load_config(MAIN), ["sampler.attention=pallas_interpret", *changes])
    return ArmSlice(planned(cfg), aot.Topology("v5p:2x2x2", aot.CHIPS["v5p"], 1, tuple(jax.devices())), 0)


def test_three_models_share_programs_and_all_of_them_live_on_the_devices() -> None:
    s, n = slice_of("update.reference=device"), 8.19e9
    s.check()
    kinds = ["update", "reference log-probs", "old log-probs", "publish", "prefill", "decode"]
    assert list(programs(s)) == [f"policy {kind}" for kind in kinds]
    alive = residents(s)
    for role in ("policy", "rubric", "judge"):
        assert alive[f"{role} parameters"] == pytest.approx(4 * n / 8, rel=2e-3)
        assert alive[f"{role} moments"] == pytest.approx(8 * n / 8, rel=2e-3) and alive[f"{role} reference"] > 0
    assert not any("reference" in name for name in residents(slice_of()))  # update.reference=host


def test_an_untrained_judge_is_held_for_decoding_alone() -> None:
    alive = residents(slice_of("arm.rounds=0", "arm.warmup_updates=0", "generator.frozen=true"))
    assert "judge moments" not in alive and alive["judge decode copy"] > 0 and alive["policy moments"] > 0


def test_models_of_two_architectures_have_no_plan() -> None:
    with pytest.raises(UserError, match="several architectures"):
        slice_of("arm.judge_source=/models/Qwen3-4B").check()


def test_what_each_phase_writes() -> None:
    """Batches of the paper: 224 judgements, 288 lists with a verdict each, 288 answers with two verdicts and a greedy one."""
    found = texts(load_config(MAIN))
    assert found["judge"] == [Text("judgement", 224, 32, True)]
    assert found["generator"] == [Text("list", 288, 48, True), Text("judgement", 288, 288, False)]
    assert found["policy"] == [Text("list", 48, 48, False), Text("answer", 336, 48, True), Text("judgement", 576, 576, False)]
    cfg = planned(load_config(MAIN))
    assert cfg.schedule.prompts * cfg.schedule.group >= 288
    lengths = lengths_of(cfg, Workload(), "judgement", 64)
    assert lengths.completions.max() <= 1024 and lengths.prompts.max() <= cfg.sampler.max_prompt


def test_hours_of_the_schedule() -> None:
    cfg = load_config(MAIN)
    seconds = {"judge": {"a": 10.0, "b": 2.0}, "generator": {"a": 20.0}, "policy": {"a": 30.0}}
    rounds = 3 * (372 * 12 + 248 * 20)
    assert hours(cfg, seconds) == pytest.approx((rounds + 500 * 30) / 3600)
    alone = dataclasses.replace(cfg, arm=dataclasses.replace(cfg.arm, policy="none"))
    assert hours(alone, seconds) == pytest.approx(rounds / 3600)
