"""The loop on the small world: both roles learn, rows hold what they must, weights move where they may and nowhere else."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from train_support import Run, prints, run, same_bits, tiny

from coevo_jax.records.fingerprint import fingerprint
from coevo_jax.rubrics import parse_rubric


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What a hook saw after each update of `whole`."""
    return {"prints": [], "published": [], "trained": [], "compiled": []}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, seen: dict[str, Any]) -> Run:
    def hook(system: Any, row: dict[str, Any], done: int) -> None:
        learner = system.learners["policy"]
        seen["prints"].append(prints(system)["policy"])
        seen["published"].append(fingerprint(learner.published))
        seen["compiled"].append([len(engine.programs) for engine in system.engines])
        if done == 1:
            seen["reference"] = jax.device_get(learner.reference)

    return run(tmp_path_factory.mktemp("whole") / "run", hook=hook)


# ------------------------------------------------------------------------------------------------------------ both roles


def test_the_phases_come_in_their_order(whole: Run) -> None:
    assert whole.finished
    assert [row["role"] for row in whole.rows] == ["policy", "policy", "rubric", "rubric"] * 3
    assert [row["cycle"] for row in whole.rows] == [0] * 4 + [1] * 4 + [2] * 4
    assert [row["step"] for row in whole.rows] == list(range(12))
    assert [row["policy_updates"] for row in whole.rows] == [0, 1, 2, 2, 2, 3, 4, 4, 4, 5, 6, 6]


def test_in_both_roles_some_group_has_an_advantage_and_the_parameters_move(whole: Run, seen: dict[str, Any]) -> None:
    for row in whole.rows:
        trained = [r for r in whole.rollouts(row["step"], row["role"]) if r["trained"]]
        assert any(abs(r["advantage"]) > 0 for r in trained), row["step"]
        assert row["grad_norm"] > 0 and row["update_norm"] > 0 and row["update/skipped"] == 0
    assert len(set(seen["prints"])) == 12


def test_the_sampler_has_the_trainers_weights_after_every_update(seen: dict[str, Any], whole: Run) -> None:
    assert seen["published"] == seen["prints"]
    # and it drew from them: trainer and sampler agree on the log-prob of every token
    assert all(row["logp_gap/max"] < 1e-4 for row in whole.rows)
    assert all(row["ratio/mean"] == pytest.approx(1, abs=1e-6) for row in whole.rows)


def test_kl_is_measured_from_the_weights_at_the_start(whole: Run) -> None:
    assert abs(whole.rows[0]["kl"]) < 1e-6 < whole.rows[-1]["kl"]


def test_advantages_are_those_of_the_groups_rewards(whole: Run) -> None:
    for row in whole.rows:
        groups: dict[int, list[dict[str, Any]]] = {}
        for rollout in whole.rollouts(row["step"], row["role"]):
            groups.setdefault(rollout["group"], []).append(rollout)
        for group in groups.values():
            assert len({r["slot"] for r in group}) == len({r["question"] for r in group}) == 1
            rewards = np.asarray([r["reward"] for r in group])
            kept = rewards.max() > rewards.min()
            assert [r["trained"] for r in group] == [kept] * len(group)
            if kept:
                np.testing.assert_allclose([r["advantage"] for r in group], rewards - rewards.mean(), atol=1e-12)


def test_the_sampler_compiles_nothing_after_its_warm_up(seen: dict[str, Any], whole: Run) -> None:
    assert all(engine.programs.sealed for engine in whole.system.engines)
    assert len({tuple(n) for n in seen["compiled"]}) == 1


def test_the_reference_stays(seen: dict[str, Any], whole: Run) -> None:
    assert same_bits(seen["reference"], jax.device_get(whole.system.learners["policy"].reference))


@pytest.mark.slow
def test_a_reference_that_waits_in_host_memory_changes_nothing(whole: Run, tmp_path: pathlib.Path) -> None:
    done = run(tmp_path / "run", "update.reference=host", stop_after=2)
    held = jax.tree.leaves(done.system.learners["policy"].reference)
    assert held and {x.sharding.memory_kind for x in held} == {"pinned_host"}
    assert [row["kl"] for row in done.rows] == [row["kl"] for row in whole.rows[:2]] and done.rows[1]["kl"] > 0


# ------------------------------------------------------------------------------------------------------------------ rows

EVERY_ROW = """
step cycle role reward/mean reward/std advantage/std groups/dropped_share rubric/valid_share rubric/criteria
rubric/criterion_words judge/failure_share judge/tie_share kl entropy clip_fraction/low clip_fraction/high ratio/mean ratio/max
logp_gap/mean logp_gap/max grad_norm lr tokens/trained tokens/completion tokens/sampled tokens/prefilled
sampler/tokens_per_second time/sample time/judge time/update time/publish time/total loss completions/length/mean
"""
RUBRIC_ROW = """
reward/margin/mean reward/margin/std reward/format/mean reward/format/std pairs/share_temporal pairs/share_inferred
pairs/share_conditioned pairs/gap_mean pairs/gap_min pairs/gap_max pairs/fallback_share pairs/missing_share rubric/pair_accuracy
"""
POLICY_ROW = "reward/judge/mean reward/judge/std rubric/retried rubric/prompts_dropped buffer/entries"


def test_a_metrics_row_has_every_field(whole: Run) -> None:
    for row in whole.rows:
        wanted = (EVERY_ROW + (RUBRIC_ROW if row["role"] == "rubric" else POLICY_ROW)).split()
        assert [name for name in wanted if not isinstance(row.get(name), int | float | str)] == []
        assert "nonfinite" not in row
        assert row["time/total"] >= row["time/sample"] + row["time/update"]


def test_a_policy_rollout_has_every_field(whole: Run) -> None:
    for row in whole.rollouts(0, "policy"):
        assert row["question"] in row["prompt"]
        assert row["completion_ids"] and row["prompt_ids"] and row["rubric"].startswith("1. (weight ")
        assert row["judge"]["status"] == "ok" and row["judge"]["raw"]
        assert row["parts"] == {"judge": row["reward"]} and isinstance(row["advantage"], float)
        assert {"update", "cycle", "role", "slot", "group", "sample", "record", "finish", "trained"} <= row.keys()


def test_a_rubric_rollout_has_every_field(whole: Run) -> None:
    cfg = tiny()
    rows = whole.rollouts(2, "rubric")
    assert {r["rubric_status"] == "ok" for r in rows} == {True, False}  # the small world starts in the middle
    for row in rows:
        assert row["pair"]["source"] == "temporal" and row["pair"]["gap"] >= 1
        assert row["pair"]["accepted_ids"] and row["pair"]["accepted"] != row["pair"]["rejected"]
        valid = parse_rubric(row["completion"], cfg.rubric, truncated=row["finish"] == "length").status == "ok"
        assert valid == (row["rubric_status"] == "ok") == (row["parts"]["format"] == 1.0)
        if valid:
            assert row["judge_accepted"]["raw"] and row["judge_rejected"]["raw"]
            margin = row["judge_accepted"]["score"] - row["judge_rejected"]["score"]
            assert row["reward"] == pytest.approx(0.7 * margin + 0.3)
        else:  # an outcome, not a failure: it stays in its group with reward 0, and the judge is not asked
            assert row["reward"] == 0.0 and "judge_accepted" not in row and "margin" not in row["parts"]


def test_the_replay_buffer_is_counted_in_every_row(whole: Run) -> None:
    for row in whole.rows:
        answers = [r for r in whole.rollouts(role="policy") if r["update"] <= row["step"] and r["sample"] == 0]
        updates = sum(r["role"] == "policy" for r in whole.rows[: row["step"] + 1])
        assert row["buffer/entries"] == row["buffer/added"] == 4 * updates
        assert row["buffer/added"] + row["buffer/surplus"] >= len(answers) and row["buffer/evicted"] == 0
        assert row["buffer/bytes"] > 0 and row["buffer/fallback"] == row["buffer/dropped"] == 0
    drawn = [row["buffer/drawn"] for row in whole.rows]
    assert drawn == sorted(drawn) and drawn[1] == 0 < drawn[2]


def test_an_answer_over_the_buffers_room_is_evicted_and_counted(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path / "run", "pairs.max_gap=1", "pairs.per_slot=1", "schedule.cycles=1")
    assert done.rows[-1]["buffer/entries"] == 4 and done.rows[-1]["buffer/evicted"] == 4


def test_temporal_pairs_put_the_fresh_answer_over_the_stored_one(whole: Run) -> None:
    answers = [r for r in whole.rollouts(role="policy") if r["sample"] == 0]
    stored = {(r["update"], tuple(r["completion_ids"])) for r in answers}
    updates = [row["step"] for row in whole.rows if row["role"] == "policy"]
    for row in whole.rows:
        for rollout in whole.rollouts(row["step"], "rubric") if row["role"] == "rubric" else []:
            made = updates[row["policy_updates"] - rollout["pair"]["gap"]]  # the policy update that the stored answer is of
            assert (made, tuple(rollout["pair"]["rejected_ids"])) in stored


def test_margins_and_shares_are_means_over_what_the_dump_shows(whole: Run) -> None:
    for row in whole.rows:
        rollouts = whole.rollouts(row["step"], row["role"])
        assert row["reward/mean"] == pytest.approx(np.mean([r["reward"] for r in rollouts]))
        name = {"policy": "judge", "rubric": "accepted"}[row["role"]]
        scores: dict[int, list[float]] = {}
        for r in rollouts:
            scores.setdefault(r["group"], []).extend([r["parts"][name]] if name in r["parts"] else [])
        assert row["judge/group_spread"] == pytest.approx(np.mean([np.std(own) for own in scores.values() if len(own) > 1]))
        verdicts = [r[k] for r in rollouts for k in ("judge", "judge_accepted", "judge_rejected") if k in r]
        assert row["judge/criterion_mean"] == pytest.approx(np.mean([p for v in verdicts for p in v["parts"]]))
        if row["role"] == "rubric":
            valid = [r for r in rollouts if r["rubric_status"] == "ok"]
            assert row["rubric/valid_share"] == pytest.approx(len(valid) / len(rollouts))
            assert row["reward/margin/mean"] == pytest.approx(np.mean([r["parts"]["margin"] for r in valid]))
            assert row["rubric/pair_accuracy"] == pytest.approx(np.mean([r["parts"]["margin"] > 0 for r in valid]))


# ------------------------------------------------------------------------------------------------------- the same again


def test_the_same_config_and_seed_give_the_same_bits(whole: Run, tmp_path: pathlib.Path) -> None:
    again = run(tmp_path / "run", "schedule.cycles=3")
    assert again.comparable == whole.comparable
    assert again.rollouts() == whole.rollouts()
    assert same_bits(again.params, whole.params)


def test_another_seed_gives_other_prompts_and_noise(whole: Run, tmp_path: pathlib.Path) -> None:
    other = run(tmp_path / "run", "seed=2", stop_after=1)
    ours = whole.rollouts(0)
    assert [r["question"] for r in other.rollouts(0)] != [r["question"] for r in ours]


def test_lr_0_changes_nothing(tmp_path: pathlib.Path) -> None:
    before: list[Any] = []

    def hook(system: Any, row: dict[str, Any], done: int) -> None:
        before.append(prints(system)["policy"])
        assert abs(row["kl"]) < 1e-6 and row["ratio/mean"] == row["ratio/max"] == 1.0
        assert row["logp_gap/max"] < 1e-4 and row["grad_norm"] > 0 and row["update_norm"] == 0

    done = run(tmp_path / "run", "optimizer.lr=0", "schedule.cycles=1", hook=hook)
    assert len(before) == 4 and len(set(before)) == 1
    assert same_bits(done.params["policy"], jax.device_get(done.system.learners["policy"].reference))


@pytest.mark.slow
def test_eight_devices_train_as_one_does(whole: Run, tmp_path: pathlib.Path) -> None:
    from train_support import Recorder

    from coevo_jax.train import train

    cache, console = jax.config.jax_compilation_cache_dir, Recorder(stop_after=3)
    try:
        assert not train(tiny(), str(tmp_path / "run"), console)
    finally:
        jax.config.update("jax_compilation_cache_dir", cache)
    eight = Run(tmp_path / "run", False, console.notes, whole.system)
    assert any("'data': 8" in note for note in eight.notes)
    for ours, theirs in zip(whole.rows, eight.rows):
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    assert [r["completion_ids"] for r in eight.rollouts(2)] == [r["completion_ids"] for r in whole.rollouts(2)]
