"""The Bradley-Terry loss against NumPy, packed pairs, several devices; the small world's pairs; a head's place in files."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from learn_support import SPEC, experiment, mesh_of, params_on

from coevo_jax.config import RewardConfig, UpdateConfig
from coevo_jax.data import read_pairs
from coevo_jax.errors import UserError
from coevo_jax.judges.world import true_quality
from coevo_jax.learn.reward_model import (
    PairSample,
    described,
    make_reward_update,
    pack_pairs,
    preference_loss,
    segment_values,
)
from coevo_jax.learn.update import init_state, make_optimizer
from coevo_jax.mesh import param_shardings
from coevo_jax.models.forward import param_shapes
from coevo_jax.models.scalar import fresh_head, scalar_values

SCALAR = dataclasses.replace(SPEC, scalar=True)


def some_pairs(n=7, seed=0):
    rng = np.random.default_rng(seed)
    return [
        PairSample(*(rng.integers(1, 48, rng.integers(2, 14)).astype(np.int32) for _ in range(2)), margin=0.1 * i)
        for i in range(n)
    ]


def one_row(pairs, values):
    """A batch of one micro-batch whose segments hold `values` by pair: chosen and rejected of each in a row of its own."""
    batch = jax.tree.map(
        lambda x: x[0], pack_pairs(pairs, UpdateConfig(pack_length=16, max_segments=2, rows_per_micro=2 * len(pairs)))
    )
    out = np.zeros(batch.last.shape, np.float32)
    for b, s in np.argwhere(batch.chosen):
        ids = batch.tokens[b][batch.segment_ids[b] == s + 1]
        i = next(i for i, p in enumerate(pairs) if np.array_equal(p.chosen, ids))
        out[b, s], out[b + batch.partner_rows[b, s], batch.partner[b, s]] = values[i]
    return batch, out


@pytest.mark.parametrize("center", [0.0, 0.01])
def test_the_loss_by_hand(center):
    pairs = some_pairs(5)
    values = np.random.default_rng(1).normal(0, 2, (5, 2)).astype(np.float32)
    batch, placed = one_row(pairs, values)
    loss, metrics = preference_loss(placed, batch, np.float32(5), RewardConfig(center=center))
    gap = values[:, 0].astype(float) - values[:, 1]
    margins = np.asarray([p.margin for p in pairs])
    wanted = np.mean(np.log1p(np.exp(-(gap - margins)))) + center * np.mean(values.sum(1, dtype=float) ** 2)
    assert float(loss) == pytest.approx(wanted, rel=1e-5)
    found = described({name: float(x) for name, x in metrics.items()})
    assert found["reward_model/accuracy"] == pytest.approx(np.mean(gap > 0)) and found["reward_model/margin"] == pytest.approx(
        gap.mean(), rel=1e-5
    )
    lengths = np.asarray([[len(p.chosen), len(p.rejected)] for p in pairs])
    assert found["reward_model/length_correlation"] == pytest.approx(np.corrcoef(values.ravel(), lengths.ravel())[0, 1], abs=1e-4)
    assert found["reward_model/std"] == pytest.approx(values.std(), rel=1e-4)


def test_the_golden_pair():
    """M18, Bradley-Terry of r = (1.5, 0.5): log(1 + exp(-1))."""
    pair = PairSample(np.asarray([3, 4]), np.asarray([5]))
    batch, placed = one_row([pair], np.asarray([[1.5, 0.5]], np.float32))
    assert float(preference_loss(placed, batch, np.float32(1), RewardConfig())[0]) == pytest.approx(0.3132617, abs=1e-6)
    assert float(preference_loss(placed, with_margin(batch, 1.0), np.float32(1), RewardConfig())[0]) == pytest.approx(np.log(2))


def with_margin(batch, margin):
    return batch.replace(margin=np.full_like(batch.margin, margin))


def test_packing_keeps_both_sides_of_a_pair_in_one_micro_batch_and_every_token():
    pairs = some_pairs(23, seed=3)
    cfg = UpdateConfig(pack_length=32, max_segments=3, rows_per_micro=3)
    batch = pack_pairs(pairs, cfg, most=23)
    assert batch.tokens.shape == (23, 3, 32)
    found = {}
    for m, b, s in np.argwhere(batch.chosen):
        r, o = b + batch.partner_rows[m, b, s], batch.partner[m, b, s]
        sides = [batch.tokens[m, row][batch.segment_ids[m, row] == seg + 1] for row, seg in ((b, s), (r, o))]
        assert [batch.tokens[m, row, batch.last[m, row, seg]] for row, seg in ((b, s), (r, o))] == [x[-1] for x in sides]
        found[tuple(sides[0])] = tuple(sides[1])
    assert found == {tuple(p.chosen): tuple(p.rejected) for p in pairs}
    assert (batch.segment_ids > 0).sum() == sum(len(p.chosen) + len(p.rejected) for p in pairs)
    with pytest.raises(UserError, match="two rows of one micro-batch"):
        pack_pairs(pairs, dataclasses.replace(cfg, rows_per_micro=1))
    with pytest.raises(UserError, match="longer than a packed row"):
        pack_pairs(pairs, dataclasses.replace(cfg, pack_length=8))


def trained(mesh=None, rows=4, steps=1, **update):
    cfg = dataclasses.replace(experiment(rows_per_micro=rows, **update), reward=RewardConfig(margin=0.0))
    params, _ = fresh_head(params_on(), SPEC, 0.1, seed=5)
    params = jax.device_put(params, jax.devices()[0] if mesh is None else param_shardings(param_shapes(SCALAR), mesh))
    optimizer = make_optimizer(cfg.optimizer)
    state = init_state(params, optimizer)
    batch = pack_pairs(some_pairs(6), cfg.update, devices=1 if mesh is None else 4, most=6)
    update_fn = make_reward_update(SCALAR, optimizer, cfg, mesh)
    for _ in range(steps):
        state, metrics = update_fn(state, batch)
    return jax.device_get(state.params), {name: float(x) for name, x in metrics.items()}


@pytest.mark.slow
def test_the_update_is_that_of_unpacked_pairs_whatever_the_micro_batches_and_devices():
    params, metrics = trained(rows=2)
    again, found = trained(rows=12, pack_length=16, mesh=mesh_of(2, 2, 2))
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)
    assert found["loss"] == pytest.approx(metrics["loss"], rel=1e-4) and found["grad_norm"] > 0


def test_a_segments_value_is_the_one_that_the_judge_reads():
    cfg, pairs = experiment(), some_pairs(4)
    params, spec = fresh_head(params_on(), SPEC, 0.5, seed=1)
    assert spec == SCALAR and sorted(params) == ["embed", "final_norm", "layers", "score"]
    batch = jax.tree.map(lambda x: x[0], pack_pairs(pairs, dataclasses.replace(cfg.update, rows_per_micro=8)))
    values = np.asarray(segment_values(params, SCALAR, batch, cfg))
    rows, last = np.zeros((4, 32), np.int32), [32 * i + len(p.chosen) - 1 for i, p in enumerate(pairs)]
    for row, pair in zip(rows, pairs):
        row[: len(pair.chosen)] = pair.chosen
    alone = scalar_values(
        params, SCALAR, rows, np.tile(np.arange(32, dtype=np.int32), (4, 1)), np.ones_like(rows), np.asarray(last)
    )
    for b, s in np.argwhere(batch.chosen):
        ids = batch.tokens[b][batch.segment_ids[b] == s + 1]
        i = next(i for i, p in enumerate(pairs) if np.array_equal(p.chosen, ids))
        assert values[b, s] == pytest.approx(float(alone[i]), abs=1e-5)


def test_the_small_worlds_pairs_prefer_the_better_answer():
    rows = read_pairs("tiny").records
    assert len(rows) == 200 and len({r["id"] for r in rows}) == 200
    for row in rows:
        gap = true_quality(row["prompt"], row["chosen"]) - true_quality(row["prompt"], row["rejected"])
        assert gap == pytest.approx(row["margin"], abs=1e-4) and gap > 0
