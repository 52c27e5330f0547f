"""Every config has a plan or a reason why not, by arithmetic alone; who lives on a slice where there are several."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Any

import jax
import pytest
from train_support import REPO

from coevo_jax import aot
from coevo_jax.config.load import load_config
from coevo_jax.config.override import apply_overrides
from coevo_jax.config.validate import validate
from coevo_jax.cost.useful import head_parameters
from coevo_jax.errors import UserError
from coevo_jax.plan import cli
from coevo_jax.plan.calls import calls, has_steps
from coevo_jax.plan.cast import Slice, left_out, timed_judges
from coevo_jax.plan.estimate import estimate
from coevo_jax.plan.phases import at_a_time, beside, budget_of, residents
from coevo_jax.plan.programs import Planned, programs
from coevo_jax.plan.step import Workload, in_steps

GIB = 2**30
PATHS = sorted(p for d in ("evolm", "ablations", "baselines") for p in (REPO / "configs" / d).glob("[!_]*.py"))
PATHS = [p for p in PATHS if not p.stem.startswith(("arm_", "rubric_arm"))]  # Rubric-ARM's: plan/arm.py, test_plan_arm.py
RUNS = [p for p in PATHS if p.stem.startswith("transfer_") and "gpt41" not in p.stem]  # whose generator is another run's
ALIKE = re.compile(r"(k|gap|reward|signal|panel|rar|rrd|judge)_(?!three_families|32b|gpt41$|explicit)|frozen_3_policies$")


def cases() -> list[Any]:
    """Those that differ from another in what no plan sees are slow."""
    return [pytest.param(p, marks=[pytest.mark.slow] if ALIKE.match(p.stem) else [], id=p.stem) for p in PATHS if p not in RUNS]


def slice_of(name: str | pathlib.Path, *changes: str) -> Slice:
    """A config on 'v5p:2x2x2', whose devices are the 8 fake CPU ones."""
    path = name if isinstance(name, pathlib.Path) else REPO / "configs" / f"{name}.py"
    cfg = apply_overrides(load_config(str(path)), changes)
    validate(cfg)
    cfg = apply_overrides(cfg, ["sampler.attention=pallas_interpret"])  # which a CPU can run
    s = Slice(cfg, aot.Topology("v5p:2x2x2", aot.CHIPS["v5p"], 1, tuple(jax.devices())))
    s.check()
    return s


@pytest.mark.parametrize("path", cases())
def test_every_config_has_an_estimate_and_its_phases_add_up(path: pathlib.Path) -> None:
    s = slice_of(path)
    found, alive, made = estimate(s, Workload()), residents(s), programs(s)
    assert found.may_fit, (found.update_bytes / GIB, found.rollout_bytes / GIB)
    assert found.update_seconds > 0 and (found.decode_seconds > 0) == s.samples
    assert "policy update" in made and alive["policy parameters"] > GIB / 4
    for name in (n for n in made if n.endswith(" update")):  # what it takes is not counted beside it
        assert name.replace("update", "moments") not in beside(s, name, alive)
    assert {call.role for call in calls(s)} <= {name.split(" ")[0] for name in made}


@pytest.mark.parametrize("path", RUNS, ids=lambda p: p.stem)
def test_a_generator_of_another_run_is_named_for_a_plan(path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="reads no run") as caught:
        slice_of(path)
    assert caught.value.where == "generator.source" and "--config.generator.source=" in caught.value.expected
    s = slice_of(path, "generator.source=/models/Qwen3-8B")
    assert estimate(s, Workload()).may_fit and "rubric decode copy" in residents(s)


def test_judges_of_a_panel_are_all_there_and_those_of_a_curriculum_take_turns() -> None:
    panel = slice_of("ablations/panel_three_families")
    alive = residents(panel)
    weights = {name for name in alive if name.endswith("weights")}
    assert weights == {"judge weights", "judge_1 weights", "judge_2 weights"} <= set(beside(panel, "policy update", alive))
    assert {"judge prefill", "judge_1 decode", "judge_2 decode"} <= set(programs(panel))
    assert set(beside(panel, "judge_1 decode", alive)) >= {"judge weights", "judge_2 weights", "judge_1 layers for prefill"}
    titles = {call.title: call.counts for call in calls(panel)}
    assert titles["verdicts"] == titles["verdicts (judge_1)"] == (512, 1024)

    turns = slice_of("ablations/curriculum_judge_size")
    alive = residents(turns)
    assert alive["judge weights"] > alive["judge_1 weights"] > alive["judge_3 weights"]
    assert [n for n in at_a_time(turns, alive) if n.endswith("weights")] == ["judge weights"] and timed_judges(turns) == {"judge"}
    assert [n for n in at_a_time(turns, alive, "judge_2") if n.endswith("weights")] == ["judge_2 weights"]
    assert any("take turns" in line for line in left_out(turns))


def test_every_policy_that_trains_has_a_state_and_frozen_ones_a_copy() -> None:
    s = slice_of("ablations/coevolve_2")
    alive = residents(s)
    for role in ("policy", "policy_1", "rubric"):
        assert alive[f"{role} moments"] > alive[f"{role} reference"] > 0
    assert {"policy_1 update", "policy_1 decode"} <= set(programs(s)) and "rubric update" not in programs(
        s
    )  # shares the policy's
    assert {"policy moments", "rubric moments", "judge weights"} <= set(beside(s, "policy_1 update", alive))
    assert any("policy_1" in line for line in left_out(s))

    frozen = slice_of("ablations/frozen_3_policies")
    alive = residents(frozen)
    assert {f"frozen_{i} decode copy" for i in range(3)} <= set(alive) and "frozen_1 moments" not in alive
    assert "frozen_1 decode" in programs(frozen) and "frozen_0 decode" not in programs(frozen)  # frozen_0 runs the policy's
    assert sum(c.counts[1] for c in calls(frozen) if c.kind == "answer") == pytest.approx(128, abs=1)
    assert has_steps(frozen.cfg) == (False, True) and in_steps(frozen, "policy", (3.0, 5.0)) == (0, 5.0)


def test_a_critic_a_reward_model_and_rlcer() -> None:
    s = slice_of("baselines/rlcer_ppo")
    alive = residents(s)
    assert {"critic_policy values", "critic_policy update"} <= set(programs(s))
    assert alive["critic_policy moments"] == pytest.approx(alive["policy moments"], rel=0.1)
    assert {"policy moments", "policy decode copy"} <= set(beside(s, "critic_policy values", alive))
    assert "critic_policy moments" in beside(s, "policy update", alive)
    counts = {call.kind: call.counts for call in calls(s)}
    assert counts == {"answer": (256, 0), "rubric": (256, 0), "verdict": (256 * 8, 0)}
    assert in_steps(s, "policy", (3.0, 5.0)) == (8.0, 0.0)  # evolving: answers and rubrics in one step
    assert in_steps(slice_of("baselines/rlcer"), "policy", (3.0, 5.0)) == (3.0, 0.0)

    trains = slice_of("baselines/skywork_rm_train")
    assert list(programs(trains)) == ["policy update"] and set(residents(trains)) == {"policy parameters", "policy moments"}
    assert head_parameters(trains.policy) == 0 < head_parameters(s.policy)  # no vocabulary in its useful work
    judges = slice_of("baselines/skywork_rm")
    assert residents(judges)["judge weights"] > GIB and not any(name.startswith("judge") for name in programs(judges))
    assert any("reward model" in line for line in left_out(judges))


def test_programs_that_no_main_config_has_are_made_of_shapes() -> None:
    """Traced, not compiled: arguments of the right structure for the run's own functions."""
    small = ("update.pack_length=1024", "update.attention=xla", "sampler.attention=xla", "update.remat=full")
    for name, program in (("baselines/rlcer_ppo", "critic_policy update"), ("baselines/rlcer_ppo", "critic_policy values"),
                          ("baselines/skywork_rm_train", "policy update")):  # fmt: skip
        path = REPO / "configs" / f"{name}.py"
        cfg = apply_overrides(load_config(str(path)), [*small, "schedule.prompts=2", "reward.pairs=8", "reward.max_tokens=0"])
        s = Slice(cfg, aot.Topology("v5p:2x2x2", aot.CHIPS["v5p"], 1, tuple(jax.devices())), layers=1)
        planned = programs(s)[program]()
        assert isinstance(planned, Planned) and planned.name == program
        assert jax.eval_shape(planned.function, *planned.args) is not None
        assert (planned.donated > 0) == program.endswith("update")


def test_other_signals_sample_other_texts() -> None:
    inferred = {c.kind: c.counts for c in calls(slice_of("ablations/signal_inferred"))}
    assert inferred["answer"] == (512, 128) and inferred["question"] == (0, 64)
    assert {c.kind: c.counts for c in calls(slice_of("ablations/signal_dataset"))}["answer"] == (512, 0)
    assert {c.kind: c.counts for c in calls(slice_of("ablations/signal_conditioned"))}["rubric"] == (64, 576)
    assert {c.kind for c in calls(slice_of("ablations/judge_gpt41"))} == {"answer", "rubric"}
    each = {c.kind: c.counts for c in calls(slice_of("baselines/rar_explicit"), criteria=7)}
    assert each["verdict"] == (512 * 7, 0)
    once = slice_of("evolm/qwen3_8b", "judge.pairs=pairwise", "judge.order=random")
    assert {c.kind: c.counts for c in calls(once)}["verdict"] == (512, 512)


def test_the_estimate_of_the_command_line(capsys, monkeypatch) -> None:
    s = slice_of("evolm/qwen3_8b")
    monkeypatch.setattr(aot, "topology", lambda name: s.topology)
    monkeypatch.setattr(aot, "require_libtpu", lambda: None)
    flags = ["--topology=v5p:2x2x2", "--estimate", "--config.sampler.attention=xla"]
    assert cli.main([f"--config={REPO}/configs/ablations/panel_mean.py", *flags]) == 0
    out = capsys.readouterr().out
    assert "nothing was compiled" in out and "judge_1 weights" in out and "may fit: yes" in out
    tight = dataclasses.replace(s.topology, chip=aot.CHIPS["v5e"])
    monkeypatch.setattr(aot, "topology", lambda name: tight)
    assert cli.main([f"--config={REPO}/configs/ablations/panel_mean.py", *flags]) == 1
    assert budget_of(tight.chip) < budget_of(s.topology.chip) and "may fit: NO" in capsys.readouterr().out
    assert cli.main([f"--config={REPO}/configs/ablations/transfer_qwen3_4b.py", *flags]) == 2
    assert "reads no run" in capsys.readouterr().err
