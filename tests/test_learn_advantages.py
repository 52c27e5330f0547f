"""Group advantages: golden values, failures, equal rewards, order."""

import numpy as np
import pytest

from coevo_jax.config import AdvantageConfig
from coevo_jax.learn.advantages import group_advantages

STD = AdvantageConfig(kind="group_std", ddof=0, epsilon=0.0)


def advantages(rewards, groups=None, valid=None, cfg=STD):
    n = len(rewards)
    groups = np.zeros(n, np.int64) if groups is None else np.asarray(groups)
    return group_advantages(np.asarray(rewards), groups, np.ones(n, bool) if valid is None else np.asarray(valid), cfg)


def test_m14_sample_and_population_std():
    sample = advantages([1.0, 0, 0, 1], cfg=AdvantageConfig(kind="group_std", ddof=1, epsilon=1e-4))
    np.testing.assert_allclose(sample.values, [0.8658754, -0.8658754, -0.8658754, 0.8658754], atol=1e-7)
    np.testing.assert_allclose(advantages([1.0, 0, 0, 1]).values, [1, -1, -1, 1], atol=1e-12)


def test_mean_and_leave_one_out():
    np.testing.assert_allclose(advantages([1.0, 0, 0.5], cfg=AdvantageConfig(kind="mean")).values, [0.5, -0.5, 0])
    rloo = advantages([1.0, 0, 0, 1], cfg=AdvantageConfig(kind="leave_one_out"))
    np.testing.assert_allclose(rloo.values, [2 / 3, -2 / 3, -2 / 3, 2 / 3])  # 1 - (0 + 0 + 1) / 3


@pytest.mark.parametrize("rewards", [np.full(7, 0.6, np.float32), np.full(3, 0.1)])  # the std of the second is 1.4e-17
@pytest.mark.parametrize("kind", ["group_std", "mean", "leave_one_out"])
def test_b08_equal_rewards_give_exactly_zero(kind, rewards):
    dropped = advantages(rewards, cfg=AdvantageConfig(kind=kind, epsilon=1e-8))
    assert not dropped.values.any() and not dropped.keep.any()
    assert dropped.zero_variance.tolist() == [0] and dropped.dropped.tolist() == [0]
    kept = advantages(rewards, cfg=AdvantageConfig(kind=kind, epsilon=1e-8, drop_zero_variance=False))
    assert not kept.values.any() and kept.keep.all() and kept.zero_variance.tolist() == [0] and not kept.dropped.size


def test_nearly_equal_rewards_are_not_equal():
    out = advantages([0.5, 0.5 + 1e-12], cfg=AdvantageConfig(kind="mean"))
    assert out.keep.all() and not out.zero_variance.size and out.values[1] > 0 > out.values[0]


def test_b09_groups_are_ids_and_not_positions():
    out = advantages([1.0, 0, 0, 0], [0, 1, 0, 1], cfg=AdvantageConfig(kind="group_std", drop_zero_variance=False))
    assert out.values[0] > 0 > out.values[2] and out.values[1] == out.values[3] == 0
    assert out.zero_variance.tolist() == [1]


@pytest.mark.parametrize("kind", ["group_std", "mean", "leave_one_out"])
def test_permuting_a_batch_changes_no_bit_of_an_advantage(kind):
    rng = np.random.default_rng(0)
    rewards, groups, valid = rng.random(60), rng.integers(0, 9, 60) * 7 - 3, rng.random(60) > 0.2
    cfg = AdvantageConfig(kind=kind)
    whole = advantages(rewards, groups, valid, cfg)
    for _ in range(5):
        order = rng.permutation(60)
        again = advantages(rewards[order], groups[order], valid[order], cfg)
        assert np.array_equal(again.values, whole.values[order]) and np.array_equal(again.keep, whole.keep[order])


def test_b22_failed_samples_leave_the_statistics():
    out = advantages([1.0, 0.0, 0.0, 1.0], valid=[True, False, True, True], cfg=AdvantageConfig(kind="mean"))
    np.testing.assert_allclose(out.values, [1 / 3, 0, -2 / 3, 1 / 3])
    assert out.keep.tolist() == [True, False, True, True]
    filled = advantages([1.0, 55.0, 0.0, 1.0], valid=[True, False, True, True], cfg=AdvantageConfig(kind="mean"))
    assert np.array_equal(filled.values, out.values)  # whatever stands in a failed sample's place
    nan = advantages([1.0, np.nan, 0.0, 1.0], valid=[True, False, True, True], cfg=AdvantageConfig(kind="mean"))
    assert np.array_equal(nan.values, out.values)


@pytest.mark.parametrize("valid", [[False] * 4, [True, False, False, False]])
def test_b22_a_group_below_two_survivors_is_dropped(valid):
    rewards, groups = [1.0, 0, 0, 1, 1, 0], [5, 5, 5, 5, 6, 6]
    out = advantages(rewards, groups, valid + [True, True])
    assert out.dropped.tolist() == [5] and out.keep.tolist() == [False] * 4 + [True] * 2 and not out.values[:4].any()
    assert not out.zero_variance.size


def test_stats():
    stats = advantages([1.0, 0, 1, 1, 0, 1], [0, 0, 1, 1, 2, 2], [True] * 5 + [False], AdvantageConfig(kind="mean")).stats
    assert stats == {"dropped_share": 2 / 3, "zero_variance_share": 1 / 3, "mean": 0.0, "std": 0.5}
    assert advantages([1.0, 1]).stats == {"dropped_share": 1.0, "zero_variance_share": 1.0}


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="never a reward"):
        advantages([1.0, np.nan])
    with pytest.raises(ValueError, match="integers"):
        advantages([1.0, 0.0], [0.0, 0.0])
    with pytest.raises(ValueError, match="one length"):
        group_advantages(np.zeros(3), np.zeros(2, int), np.ones(3, bool), STD)
