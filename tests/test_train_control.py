"""Controls against reward hacking through the whole loop: rewards that change, a judge that is held out, alarms in the rows."""

from __future__ import annotations

import pathlib

import pytest
from train_support import run

from coevo_jax.learn.control import soft_overlong
from coevo_jax.rubrics import parse_rubric

pytestmark = pytest.mark.slow


def test_controls_in_a_run(tmp_path: pathlib.Path) -> None:
    done = run(
        tmp_path / "run", "schedule.cycles=1", "schedule.k=1", "control.overlong_buffer=6", "control.rubric_dropout=0.5",
        "heldout_judge.source=oracle", "heldout_judge.protocol=oracle", "heldout_judge.oracle_noise=1",
        "control.heldout_answers=3",
        "control.judge_agreement=0.99", "control.entropy_high=0.01", "control.part_share=0.01",
    )  # fmt: skip
    policy, rubric = done.rows
    for row in done.rollouts(0, "policy"):
        cost = soft_overlong(len(row["completion_ids"]), 12, 6)
        assert row["parts"]["overlong"] == cost and row["reward"] == pytest.approx(row["judge"]["score"] + cost)
        assert ("heldout" in row["parts"]) == (row["sample"] < 3)
    assert 0 < policy["control/dropped_criteria_share"] < 1
    assert policy["control/judge_agreement"] < 0.99 and policy["control/judge_agreement/alarm"] == 1.0
    assert policy["entropy/alarm"] == rubric["entropy/alarm"] == 1.0
    assert rubric["control/part_share/format/alarm"] == float(abs(rubric["control/part_share/format"]) > 0.01)
    assert "control/judge_gap" not in rubric and policy["reward/heldout/mean"] >= 0
    warnings = [note for note in done.notes if note.startswith("warning: control/judge_agreement")]
    assert len(warnings) == 1 and "update_000000_policy.jsonl group " in warnings[0]
    seen = {row["group"]: row["rubric"] for row in done.rollouts(0, "policy")}
    assert all(rubric.count("weight") >= 1 for rubric in seen.values()) and parse_rubric is not None


def test_a_model_that_is_held_out_keeps_its_bytes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from coevo_jax.judges import criterion_logits

    monkeypatch.setattr(criterion_logits, "yes_no_forms", lambda tokenizer: ([2], [57, 58, 14, 12]))
    done = run(
        tmp_path / "run", "schedule.cycles=1", "schedule.k=1", "schedule.order=policy_only", "heldout_judge.source=tiny",
        "heldout_judge.protocol=criterion_logits", "heldout_judge.min_yes_no_mass=0", "sampler.max_prompt=256",
        "update.pack_length=320", "optimizer.lr=1e-2",
    )  # fmt: skip
    assert list(done.system.frozen_fingerprints) == ["heldout_judge"]
    assert "control/judge_gap" in done.rows[0] and {len(r["parts"]) for r in done.rollouts()} == {1, 2}
    done.system.check_frozen()
