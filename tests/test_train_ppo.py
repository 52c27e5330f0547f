"""PPO with a critic through the whole loop: it learns, a kill costs nothing, the critic is in the checkpoint and comes out."""

from __future__ import annotations

import pathlib

import jax
import numpy as np
import pytest
from train_support import run, same_bits

from coevo_jax.config import ModelConfig
from coevo_jax.export import export_run
from coevo_jax.models.load import load_scalar

pytestmark = pytest.mark.slow

VERIFIER = "def score(record, text):\n    return min(len(text.split()), 5) / 5\n"
MODE = ("schedule.mode=verifiable", "schedule.verifier=ppo_verifier:score", "schedule.cycles=1", "advantage.kind=gae")


@pytest.fixture(autouse=True)
def verifier(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ppo_verifier.py").write_text(VERIFIER)
    monkeypatch.syspath_prepend(str(tmp_path))


class Killed(BaseException):
    """The end of a process, as far as one process can have it."""


def test_a_run_survives_a_kill_with_its_critic(tmp_path: pathlib.Path) -> None:
    cfg = (*MODE, "schedule.k=4", "run.save_every=2", "critic.warmup_updates=1", "critic.lr=3e-3", "update.inner_iterations=2")
    whole = run(tmp_path / "whole", *cfg)
    assert [row["critic/alone"] for row in whole.rows] == [1, 0, 0, 0]
    assert "loss" not in whole.rows[0] and all("loss" in row and row["critic/grad_norm"] > 0 for row in whole.rows[1:])
    assert abs(whole.rows[1]["ratio/max"] - 1) > 1e-6  # the second pass is off the policy that drew
    learner = whole.system.learners["policy"]
    assert learner.critic is not None and int(learner.critic.state.step) == 8 and int(learner.state.step) == 6

    def kill(system, row, done):
        if done == 3:
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path / "run", *cfg, hook=kill)
    again = run(tmp_path / "run", *cfg)
    assert again.comparable == whole.comparable and again.rollouts() == whole.rollouts()
    assert same_bits(jax.device_get(again.system.states), jax.device_get(whole.system.states))
    export_run(tmp_path / "run", tmp_path / "critic", "critic_policy")
    critic = load_scalar(ModelConfig(source=str(tmp_path / "critic")))
    assert same_bits(jax.device_get(critic.params), jax.device_get(learner.critic.state.params))
    export_run(tmp_path / "run", tmp_path / "policy")


def test_it_learns(tmp_path: pathlib.Path) -> None:
    """To write more words, and what an answer will be worth."""
    cfg = (*MODE, "schedule.k=16", "schedule.prompts=8", "critic.lr=3e-3", "critic.lam=0.95", "optimizer.lr=2e-3")
    rows = run(tmp_path / "run", *cfg).rows
    first, last = (np.mean([row["reward/mean"] for row in part]) for part in (rows[:4], rows[-4:]))
    assert last > first + 0.05, (first, last)
    assert np.mean([row["critic/loss"] for row in rows[-4:]]) < 0.5 * rows[0]["critic/loss"]


def test_both_roles_of_evolm_and_a_model_each(tmp_path: pathlib.Path) -> None:
    two = run(tmp_path / "two", "advantage.kind=gae", "schedule.cycles=1", "schedule.k=1", "generator.mode=two")
    assert [row["role"] for row in two.rows] == ["policy", "rubric"] and all(row["critic/grad_norm"] > 0 for row in two.rows)
    assert set(two.system.states) == {"policy", "rubric", "critic_policy", "critic_rubric"}
    export_run(tmp_path / "two", tmp_path / "out", "critic_rubric")
