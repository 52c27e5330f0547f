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
