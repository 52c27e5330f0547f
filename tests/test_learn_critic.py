"""PPO's critic: GAE against a loop over samples, the clipped value loss, whitening, an update of packed rows against NumPy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learn_support import SPEC, assert_close, experiment, mesh_of, params_on, some_samples
from train_support import tiny

from coevo_jax.adapters import Tuning
from coevo_jax.config import AdvantageConfig, CriticConfig, MeshConfig
from coevo_jax.critic import Critic
from coevo_jax.errors import UserError
from coevo_jax.learn.advantages import group_advantages
from coevo_jax.learn.critic import ValueBatch, gae, make_critic_update, make_estimate, token_values, value_loss, whitened
from coevo_jax.learn.packing import pack, unpack
from coevo_jax.learn.reward_model import PairSample, pack_pairs, segment_values
from coevo_jax.learn.update import init_state, make_optimizer, rows_devices
from coevo_jax.mesh import param_shardings
from coevo_jax.models.forward import param_shapes
from coevo_jax.models.scalar import fresh_head

SCALAR = dataclasses.replace(SPEC, scalar=True)


def by_hand(reward, values, gamma, lam):
    """(advantages, returns) of one sample from the definition: sums of discounted temporal differences."""
    n = len(values)
    delta = [gamma * values[t + 1] - values[t] if t + 1 < n else reward - values[t] for t in range(n)]
    advantages = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
    return np.asarray(advantages), np.asarray(advantages) + values


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.5), (1.0, 0.0), (0.99, 0.95)])
def test_gae_by_hand(gamma, lam):
    samples = some_samples(9, seed=2)
    batch = pack(samples, experiment().update)
    values = np.random.default_rng(3).normal(size=batch.tokens.shape).astype(np.float32)
    run = jax.jit(jax.vmap(lambda r, v, m, s: gae(r, v, m, s, gamma, lam)))
    advantages, returns = run(batch.advantage, values, batch.mask, batch.segment_ids)
    assert not np.asarray(advantages)[~batch.mask].any() and not np.asarray(returns)[~batch.mask].any()
    found = zip(samples, unpack(values, batch), unpack(advantages, batch), unpack(returns, batch))
    for sample, v, a, r in found:
        wanted = by_hand(sample.advantage, v.astype(float), gamma, lam)
        np.testing.assert_allclose(a, wanted[0], atol=2e-5)
        np.testing.assert_allclose(r, wanted[1], atol=2e-5)
        if gamma == lam == 1.0:
            np.testing.assert_allclose(r, sample.advantage, atol=2e-5)  # the return of every token is the sample's reward


def test_what_follows_in_a_row_is_another_samples():
    """Trained positions that touch: the end of a sample looks at nothing behind it."""
    values, rewards = jnp.asarray([[0.5, 0.25, 4.0, 8.0]]), jnp.asarray([[1.0, 1.0, 2.0, 2.0]])
    advantages, _ = gae(rewards, values, jnp.ones((1, 4), bool), jnp.asarray([[1, 1, 2, 2]]), 1.0, 0.0)
    np.testing.assert_allclose(advantages, [[0.25 - 0.5, 1 - 0.25, 8 - 4, 2 - 8]])


def test_whitening_is_over_trained_positions_alone():
    mask = np.asarray([[True, True, False, True]])
    out = np.asarray(whitened(jnp.asarray([[1.0, 2.0, 99.0, 6.0]]), mask))
    np.testing.assert_allclose(out[mask], (np.asarray([1, 2, 6]) - 3) / np.std([1, 2, 6]), rtol=1e-5)
    assert out[0, 2] == 0 and not np.asarray(whitened(jnp.full((1, 4), 3.0), mask)).any()


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_the_value_loss_by_hand(clip):
    rng = np.random.default_rng(0)
    values, old, returns = rng.normal(size=(3, 2, 8)).astype(np.float32)
    mask = rng.random((2, 8)) < 0.6
    zeros = np.zeros((2, 8), np.int32)
    loss, metrics = value_loss(values, ValueBatch(zeros, zeros, zeros, mask, returns, old), np.float32(mask.sum()), clip)
    errors, hits = [], 0
    for v, o, r in zip(values[mask].astype(float), old[mask].astype(float), returns[mask].astype(float)):
        held = min(max(v, o - clip), o + clip)
        errors.append(max((v - r) ** 2, (held - r) ** 2) if clip else (v - r) ** 2)
        hits += clip > 0 and (held - r) ** 2 > (v - r) ** 2
    assert float(loss) == pytest.approx(0.5 * np.mean(errors), rel=1e-5)
    assert float(metrics["critic/clip_fraction"]) == pytest.approx(hits / mask.sum(), abs=1e-6)


def test_without_a_group_every_sample_trains_on_its_reward():
    rewards, groups = np.asarray([1.0, 1.0, 0.5, 7.0, 0.2]), np.asarray([0, 0, 1, 2, 2])
    found = group_advantages(rewards, groups, np.asarray([True, True, True, False, False]), AdvantageConfig(kind="gae"))
    assert found.values.tolist() == [1, 1, 0.5, 0, 0] and found.keep.tolist() == [True, True, True, False, False]
    assert found.zero_variance.tolist() == [0] and found.dropped.tolist() == [2]


@pytest.mark.slow
def test_a_critic_learns_the_rewards_and_leaves_padding_alone():
    """Values from 0 towards the rewards; the pass before an update gives their advantages."""
    cfg = dataclasses.replace(experiment(rows_per_micro=8), critic=CriticConfig(clip=0.0, whiten=False, head_std=0.0))
    params, _ = fresh_head(params_on(), SPEC, 0.0, seed=1)
    optimizer = make_optimizer(dataclasses.replace(cfg.optimizer, lr=3e-2))
    state, update = init_state(params, optimizer), make_critic_update(SCALAR, optimizer, cfg)
    critic = Critic(cfg, SCALAR, state, make_estimate(SCALAR, cfg), update, Tuning(SCALAR))
    samples = [dataclasses.replace(s, advantage=float(s.group)) for s in some_samples(6)]
    rows = pack(samples, cfg.update)
    losses = []
    for _ in range(12):
        valued, fit, metrics = critic.estimate(rows)
        losses.append(float(critic.fit(fit)["critic/loss"]))
        if len(losses) == 1:
            wanted = np.concatenate([np.full(len(s.completion), s.advantage) for s in samples])
            assert losses[0] == pytest.approx(0.5 * np.mean(wanted**2), rel=1e-5) and float(metrics["critic/value"]) == 0
            for sample, advantage in zip(samples, unpack(valued.advantage, rows)):
                assert advantage == pytest.approx(sample.advantage)
    assert losses[-1] < 0.5 * losses[0]
    assert float(metrics["critic/explained_variance"]) > 0.2
    assert not np.asarray(valued.advantage)[~rows.mask].any()


@pytest.mark.slow
def test_eight_devices_equal_one():
    found = []
    for mesh in (None, mesh_of(2, 2, 2)):
        cfg = dataclasses.replace(experiment(rows_per_micro=4), critic=CriticConfig(lam=0.9))
        params, _ = fresh_head(params_on(), SPEC, 0.5, seed=1)
        place = jax.devices()[0] if mesh is None else param_shardings(param_shapes(SCALAR), mesh)
        optimizer = make_optimizer(cfg.optimizer)
        state = init_state(jax.device_put(params, place), optimizer)
        update = make_critic_update(SCALAR, optimizer, cfg, mesh)
        critic = Critic(cfg, SCALAR, state, make_estimate(SCALAR, cfg, mesh), update, Tuning(SCALAR))
        valued, fit, metrics = critic.estimate(pack(some_samples(9), cfg.update, devices=rows_devices(mesh)))
        found.append((jax.device_get((valued.advantage, metrics, critic.fit(fit))), jax.device_get(critic.state.params)))
    assert_close(*found, tolerance=2e-5)


@pytest.mark.slow
def test_values_where_chips_share_a_rows_time():
    """The kernel sees positions in another order then; values, and the ends of conversations, are where they were."""
    params, _ = fresh_head(params_on(), SPEC, 0.5, seed=1)
    cfg = experiment(pack_length=256, max_segments=8, rows_per_micro=2)
    along = dataclasses.replace(
        cfg, mesh=MeshConfig(1, 1, 2, "context"), update=dataclasses.replace(cfg.update, attention="splash_interpret")
    )
    rows = jax.tree.map(lambda x: x[0], pack(some_samples(12), dataclasses.replace(cfg.update, share_prefix=False)))
    rng = np.random.default_rng(0)
    pairs = [PairSample(*(rng.integers(1, 48, rng.integers(2, 60)).astype(np.int32) for _ in range(2))) for _ in range(5)]
    ends = jax.tree.map(lambda x: x[0], pack_pairs(pairs, cfg.update))
    mesh, head = mesh_of(1, 1, 2), jax.device_get(params)
    for function, batch, where in ((token_values, rows, rows.mask), (segment_values, ends, ends.last > 0)):
        plain = np.asarray(function(params, SCALAR, batch, cfg))
        shared = np.asarray(jax.jit(lambda p, b, f=function: f(p, SCALAR, b, along, mesh))(head, batch))
        np.testing.assert_allclose(shared[where], plain[where], atol=1e-5)
        assert np.ptp(plain[where]) > 0.1


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["critic.lr=1"], "critic settings would be ignored"),
        (["advantage.kind=gae", "schedule.mode=sft", "warmup.updates=1"], "no rewards in schedule.mode=sft"),
        (["advantage.kind=gae", "critic.source=api:m"], "is an endpoint"),
        (["advantage.kind=gae", "critic.lam=1.5"], "out of range"),
    ],
)
def test_refused(overrides, what):
    with pytest.raises(UserError, match=what):
        tiny(*overrides)
