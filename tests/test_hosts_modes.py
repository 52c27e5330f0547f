"""Two real processes against one: a reward model's pairs and PPO's critic give the same metrics and weights but for rounding."""

from __future__ import annotations

import pathlib

import pytest
from test_hosts_runs import rows_of, whole_run

pytestmark = pytest.mark.slow

REWARD = ("schedule.mode=reward", "reward.pairs=8", "schedule.cycles=1", "schedule.k=3", "update.pack_length=64")
PPO = ("advantage.kind=gae", "critic.head_std=0.1", "schedule.cycles=1", "schedule.order=policy_only")


@pytest.mark.parametrize("mode", [REWARD, PPO], ids=["reward", "ppo"])
def test_two_processes_equal_one(mode: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    one, two = (rows_of(whole_run(tmp_path / str(count), count, *mode)) for count in (1, 2))
    assert len(one) == len(two) > 0
    for name in sorted(set(one[0]) & set(two[0])):
        value, other = one[0][name], two[0][name]
        assert other == (pytest.approx(value, rel=1e-3, abs=1e-4) if isinstance(value, float) else value), name
    assert {"loss", "grad_norm"} <= set(one[0]) and set(one[0]) == set(two[0])
    assert two[-1]["param_norm"] == pytest.approx(one[-1]["param_norm"], rel=1e-4)


ARM = (
    "schedule.mode=rubric_arm", "policy.source=tiny_arm", "generator.mode=two", "data.pairs=tiny", "rubric.prompt=world_rules",
    "rubric.schema=numbered_rules", "schedule.cycles=1", "schedule.k=1", "rubric_sampling.max_new_tokens=40",
    "update.pack_length=288", "sampler.max_new=160", "arm.rounds=1", "arm.part=8", "arm.test=4", "arm.cached=4",
    "arm.judge_prompts=4", "arm.judge_group=4", "arm.judge_updates=1", "arm.judge_prompt=world_comparison", "arm.votes=2",
    "arm.judge_sampling.max_new_tokens=160", "arm.generator_prompts=4", "arm.generator_group=4", "arm.generator_updates=1",
    "arm.warmup_updates=1", "arm.demonstrations=tiny", "arm.policy=iterated_dpo", "warmup.batch=4", "dpo.pairs=4",
)  # fmt: skip


def test_every_stage_of_rubric_arm_on_two_processes(tmp_path: pathlib.Path) -> None:
    one, two = (rows_of(whole_run(tmp_path / str(count), count, *ARM)) for count in (1, 2))
    assert [row["stage"] for row in one] == [row["stage"] for row in two] and len(one) > 8
    for mine, other in zip(one, two):
        for name in ("reward/mean", "loss", "test/accuracy", "arm/accuracy", "rubric/valid_share", "pairs/kept", "pairs/trained"):
            assert (name in mine) == (name in other), (mine["stage"], name)
            if name in mine:
                assert other[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-4), (mine["stage"], name)
