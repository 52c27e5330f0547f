"""Packing: what stands where, determinism, few shapes, unpacking."""

import numpy as np
import pytest
from learn_support import some_samples

from coevo_jax.config import UpdateConfig
from coevo_jax.errors import UserError
from coevo_jax.learn.packing import Sample, first_fit, pack, unpack


def sample(prompt, completion, advantage=1.0, truncated=False):
    logp = -np.arange(1, len(completion) + 1, dtype=np.float32)
    return Sample(prompt, np.asarray(completion, np.int32), logp, advantage, 0, 0, truncated)


CFG = UpdateConfig(pack_length=12, max_segments=3, rows_per_micro=1)


def test_b39_b03_the_end_token_is_trained_and_masks_come_from_lengths():
    """Pad id, stop id and token 0 may all be one value: nothing is looked at but lengths."""
    batch = pack([sample([7, 0], [5, 0, 0]), sample([8], [9, 4], -2.0, truncated=True)], CFG)
    row = {name: getattr(batch, name)[0, 0].tolist() for name in ("tokens", "positions", "segment_ids", "targets", "mask")}
    assert row["tokens"] == [7, 0, 5, 0, 0, 8, 9, 4, 0, 0, 0, 0]
    assert row["positions"] == [0, 1, 2, 3, 4, 0, 1, 2, 0, 0, 0, 0]
    assert row["segment_ids"] == [1, 1, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0]
    assert row["targets"] == [0, 5, 0, 0, 0, 9, 4, 0, 0, 0, 0, 0]
    assert np.flatnonzero(row["mask"]).tolist() == [1, 2, 3, 5, 6]
    assert batch.sampler_logp[0, 0, [1, 2, 3, 5, 6]].tolist() == [-1, -2, -3, -1, -2]
    assert batch.advantage[0, 0, [1, 2, 3, 5, 6]].tolist() == [1, 1, 1, -2, -2]
    assert batch.truncated[0, 0].tolist() == [False, True, False] and batch.owner[0, 0].tolist() == [0, 1, -1]


def test_first_fit_decreasing():
    assert first_fit([3, 9, 5, 7, 1], 12, 3) == [[1, 0], [3, 2], [4]]
    assert first_fit([3, 8, 5, 7, 1], 12, 3) == [[1, 0, 4], [3, 2]]
    assert first_fit([2, 2, 2, 2], 12, 3) == [[0, 1, 2], [3]]  # no more than three in a row


@pytest.mark.parametrize("seed", range(3))
def test_every_token_lies_in_one_place_and_unpacks(seed):
    samples = some_samples(17, seed)
    cfg = UpdateConfig(pack_length=32, max_segments=3, rows_per_micro=2)
    batch = pack(samples, cfg)
    assert sorted(batch.owner[batch.owner >= 0].tolist()) == list(range(17))
    assert (batch.segment_ids > 0).sum() == sum(s.length for s in samples)
    for got, s in zip(unpack(batch.sampler_logp, batch), samples, strict=True):
        assert np.array_equal(got, s.sampler_logp)
    for got, s in zip(unpack(batch.targets, batch), samples, strict=True):
        assert np.array_equal(got, s.completion)
    again = pack(samples, cfg)
    assert all(np.array_equal(getattr(batch, n), getattr(again, n)) for n in ("tokens", "owner", "mask", "advantage"))


def test_few_shapes():
    ten = [sample([1] * 6, [2] * 6) for _ in range(10)]  # a row each
    cfg = UpdateConfig(pack_length=12, max_segments=3, rows_per_micro=2)
    assert {pack(ten[:n], cfg).tokens.shape for n in range(5, 9)} == {(4, 2, 12)}
    assert pack(ten[:1], cfg).tokens.shape == (1, 2, 12)
    assert {pack(ten[:n], cfg, rows=10).tokens.shape for n in range(1, 11)} == {(5, 2, 12)}
    assert pack(ten, cfg, rows=2).tokens.shape == (8, 2, 12)
    assert pack(ten[:1], cfg, devices=8).tokens.shape == (1, 8, 12)


def test_a_sample_longer_than_a_row_is_refused():
    with pytest.raises(UserError, match=r"13 tokens is longer than a packed row of 12") as error:
        pack([sample([1] * 4, [1] * 8), sample([1] * 6, [2] * 7)], CFG)
    assert "sample 1" in error.value.where and "update.pack_length" in error.value.where
    assert pack([sample([1] * 4, [1] * 8)], CFG).mask.sum() == 8


def test_broken_samples_are_refused():
    for broken in (sample([], [1]), sample([1], [])):
        with pytest.raises(ValueError, match="empty prompt or completion"):
            pack([broken], CFG)
    short = sample([1], [2, 3])
    short.sampler_logp = short.sampler_logp[:1]
    with pytest.raises(ValueError, match="1 log-probs for 2 completion tokens"):
        pack([short], CFG)
    with pytest.raises(ValueError, match="no samples"):
        pack([], CFG)
