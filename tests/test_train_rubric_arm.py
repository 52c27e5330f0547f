"""Rubric-ARM through the whole loop in the small world: who learns when, disjoint parts, resume, lr 0, devices, the loader."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import pytest
from arm_support import arm
from train_support import Recorder, Run, prints, run, same_bits

from coevo_jax import trained
from coevo_jax.config import ModelConfig
from coevo_jax.errors import UserError
from coevo_jax.records.fingerprint import fingerprint
from coevo_jax.system import System

SHORT = (
    "arm.warmup_updates=1", "arm.part=8", "arm.test=4", "arm.cached=4", "arm.judge_updates=1", "arm.generator_updates=1",
    "arm.votes=2", "schedule.k=1", "run.save_every=3",
)  # fmt: skip
STAGES = [
    "measure_start", "warm_generator", "warm_judge", "measure_warm", *(["cache", "cache", "judge", "generator"] * 2), "measure",
    "policy",
]  # fmt: skip
LEARNS = {"warm_generator": "rubric", "generator": "rubric", "warm_judge": "judge", "judge": "judge", "policy": "policy"}


def watched(seen: list[dict[str, Any]]) -> Any:
    def hook(system: System, row: dict[str, Any], done: int) -> None:
        seen.append({"row": row, "prints": prints(system)})

    return hook


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, seen: list[dict[str, Any]]) -> Run:
    return run(tmp_path_factory.mktemp("whole") / "run", cfg=arm(*SHORT), hook=watched(seen))


def test_each_stage_trains_its_own_model_and_leaves_the_others_alone(whole: Run, seen: list[dict[str, Any]]) -> None:
    assert whole.finished and [step["row"]["stage"] for step in seen] == STAGES
    before = dict.fromkeys(("policy", "rubric", "judge"), fingerprint(trained.load(ModelConfig(source="tiny_arm")).params))
    for step in seen:
        row = step["row"]
        moved = {name for name, found in step["prints"].items() if found != before[name]}
        assert moved == ({LEARNS[row["stage"]]} if not row["update/skipped"] else set()), row["stage"]
        before = step["prints"]
    assert {LEARNS[s["row"]["stage"]] for s in seen if not s["row"]["update/skipped"]} >= {"rubric", "judge"}


def test_what_a_run_writes_down(whole: Run) -> None:
    rows = {row["stage"]: row for row in whole.rows}
    assert {"test/accuracy", "test/accuracy_both_orders", "test/vote_accuracy", "test/consistent_share"} <= set(rows["measure"])
    assert {"arm/accuracy", "arm/preferred_in_a_share", "judge/says_a", "judge/format_share"} <= set(rows["judge"])
    assert {"arm/accuracy", "rubric/valid_share", "rubric/hard_rules", "judge/failure_share"} <= set(rows["generator"])
    assert {"judge/order_flip_share", "arm/equals_greedy_share"} <= set(rows["policy"])
    judged = [row for row in whole.rollouts(role="judge") if "better_in" in row and "winner" in row]
    assert judged and all(row["rubric"] and len(row["answers"]) == 2 for row in judged)


def test_rounds_and_test_share_no_question(whole: Run) -> None:
    streams = whole.system.context.streams
    parts = [{r["prompt"] for r in streams[name].prompts.records} for name in ("arm_test", "arm_judge_0", "arm_judge_1")]
    assert sum(map(len, parts)) == len(set.union(*parts))
    for row in whole.rollouts():
        if row["cycle"] < 2 and row["role"] in ("judge", "rubric") and "votes" not in row:
            assert row["question"] in parts[1 + row["cycle"]]


def test_lists_are_those_of_the_round(whole: Run) -> None:
    kept = whole.system.context.stores["arm_lists"]
    assert {record["round"] for slot in range(4) for record in kept.of(slot)} == {1} and len(kept) == 8


def assert_same(resumed: Run, whole: Run) -> None:
    assert resumed.finished and resumed.comparable == whole.comparable and resumed.rollouts() == whole.rollouts()
    assert same_bits(jax.device_get(resumed.system.states), jax.device_get(whole.system.states))


@pytest.mark.slow
def test_stopped_between_two_updates_of_the_cache(whole: Run, tmp_path: pathlib.Path) -> None:
    first = run(tmp_path / "run", cfg=arm(*SHORT), stop_after=9)
    assert not first.finished
    assert_same(run(tmp_path / "run", cfg=arm(*SHORT)), whole)


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [n for n in range(1, len(STAGES)) if n != 9])
def test_stopped_after_any_update(stop_after: int, whole: Run, tmp_path: pathlib.Path) -> None:
    run(tmp_path / "run", cfg=arm(*SHORT), stop_after=stop_after)
    assert_same(run(tmp_path / "run", cfg=arm(*SHORT)), whole)


class Killed(BaseException):
    """The end of a process, as far as one process can have it."""


@pytest.mark.slow
@pytest.mark.parametrize("kill_after", [2, 5, 8, 11, 13])
def test_killed(kill_after: int, whole: Run, tmp_path: pathlib.Path) -> None:
    def kill(system: System, row: dict[str, Any], done: int) -> None:
        if done == kill_after:
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path / "run", cfg=arm(*SHORT), hook=kill)
    assert_same(run(tmp_path / "run", cfg=arm(*SHORT)), whole)


def test_weights_of_each_role_come_out(whole: Run) -> None:
    for name in ("judge", "rubric", "policy"):
        model = trained.load(ModelConfig(source=f"run:{whole.folder}#{name}"))
        assert same_bits(jax.device_get(model.params), whole.params[name])


@pytest.mark.slow
def test_a_frozen_generator_and_judge_of_another_run(whole: Run, tmp_path: pathlib.Path) -> None:
    """arm.rounds=0: the policy alone trains, on weights that have no optimizer and stay."""
    source = f"run:{whole.folder}"
    cfg = arm("arm.rounds=0", "schedule.k=2", "generator.frozen=true", f"generator.source={source}#rubric",
              f"arm.judge_source={source}#judge")  # fmt: skip
    done = run(tmp_path / "run", cfg=cfg)
    assert list(done.system.learners) == ["policy"] and set(done.system.frozen) == {"rubric", "judge"}
    assert done.system.frozen_fingerprints["judge"] == prints(whole.system)["judge"]
    assert [row["stage"] for row in done.rows] == ["policy"] * 2


def test_a_policy_by_iterated_dpo_on_the_runs_own_judge(tmp_path: pathlib.Path) -> None:
    """Both orders must name the same answer; the reference is the policy at the start of each iteration: ln 2."""
    cfg = arm("arm.rounds=0", "generator.frozen=true", "arm.policy=iterated_dpo", "schedule.cycles=2", "schedule.k=2",
              "dpo.pairs=4", "dpo.updates=2", "dpo.sft_weight=0.2", "dpo.keep_truncated=true", "dpo.answers=4")  # fmt: skip
    done = run(tmp_path / "run", cfg=cfg)
    assert [row["stage"] for row in done.rows] == ["label", "label", "dpo", "dpo"] * 2
    assert set(done.system.frozen) == {"rubric", "judge"}
    labelled = [row for row in done.rollouts() if row.get("what") == "labelled"]
    assert labelled and all(row["rubric"].startswith("1. ") for row in labelled if row["forward"])
    for row in labelled:
        assert row["agree"] == (row["forward"] is not None and {row["forward"], row["reverse"]} == {"A", "B"})
    for first in (2, 6):
        if done.rows[first]["pairs/trained"]:
            assert done.rows[first]["loss/preference"] == pytest.approx(0.693147, abs=1e-5)


@pytest.mark.slow
def test_lr_0_changes_nothing(tmp_path: pathlib.Path) -> None:
    cfg = arm("optimizer.lr=0", "arm.rounds=1", "arm.part=8", "arm.measure=none", "arm.judge_updates=2", "schedule.k=2")
    found: list[dict[str, Any]] = []
    done = run(tmp_path / "run", cfg=cfg, hook=watched(found))
    assert len({tuple(sorted(step["prints"].items())) for step in found}) == 1
    for row in done.rows:
        if not row["update/skipped"]:
            assert row["ratio/mean"] == 1.0 and abs(row["kl"]) < 1e-6 and row["logp_gap/max"] < 1e-4 and row["update_norm"] == 0


def test_test_questions_among_the_training_data_are_refused(tmp_path: pathlib.Path, whole: Run) -> None:
    prompts = tmp_path / "prompts.jsonl"
    question = whole.system.context.streams["arm_test"].prompts.records[0]["prompt"]
    prompts.write_text(f'{{"prompt": "{question}"}}\n{{"prompt": "write words with owl"}}\n')
    with pytest.raises(UserError, match=r"1 questions of the test pairs are in data\.prompts"):
        run(tmp_path / "run", cfg=arm(*SHORT, f"data.prompts={prompts}"))


@pytest.mark.slow
def test_the_other_order_and_rules(tmp_path: pathlib.Path) -> None:
    first = run(tmp_path / "one", cfg=arm(*SHORT, "arm.order=generator_first", "arm.policy=none"))
    assert [row["stage"] for row in first.rows][4:8] == ["generator", "cache", "cache", "judge"]
    rules = run(tmp_path / "two", cfg=arm(*SHORT[1:], "arm.judge=oracle"))
    assert "judge" not in rules.system.learners and rules.rows[-1]["judge/failure_share"] == 0


@pytest.mark.slow
def test_eight_devices_train_as_one_does(whole: Run, tmp_path: pathlib.Path) -> None:
    from coevo_jax.train import train

    cache, console = jax.config.jax_compilation_cache_dir, Recorder(stop_after=8)
    try:
        assert not train(arm(*SHORT), str(tmp_path / "run"), console)
    finally:
        jax.config.update("jax_compilation_cache_dir", cache)
    eight = Run(tmp_path / "run", False, console.notes, whole.system)
    assert any("'data': 8" in note for note in eight.notes)
    for ours, theirs in zip(whole.rows, eight.rows):
        assert ours["stage"] == theirs["stage"]
        for name in ("reward/mean", "grad_norm", "loss", "arm/accuracy", "test/accuracy"):
            assert theirs.get(name) == (pytest.approx(ours[name], rel=1e-3, abs=1e-5) if name in ours else None), name
