"""The update: packing, accumulation and devices change nothing; lr 0; KL; donation; broken gradients; the optimizer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learn_support import PLAIN, SPEC, assert_close, experiment, mesh_of, params_on, program, some_samples, train

from coevo_jax.config import LossConfig, OptimizerConfig
from coevo_jax.errors import UserError
from coevo_jax.learn.losses import sft_loss
from coevo_jax.learn.packing import Sample, pack, unpack
from coevo_jax.learn.update import init_state, make_logprobs, make_optimizer

SAMPLES = some_samples()
LOSS = LossConfig(kl_weight=0.0, tis_cap=2.0, entropy_weight=0.01)
BASE = experiment(LOSS)


@pytest.fixture(scope="module")
def base():
    """Two updates in micro-batches of two rows, most of the micro-batches empty."""
    return train(BASE, SAMPLES, steps=2, rows=16)


# --------------------------------------------------------------------------------------- what must not change a result


def test_packed_rows_give_the_log_probs_of_single_ones():
    """B13, B34: a sample's log-probs don't know where it lies, nor what lies beside it."""
    logprobs = make_logprobs(SPEC, BASE)
    packed = pack(SAMPLES, BASE.update)
    alone = pack(SAMPLES, dataclasses.replace(BASE.update, max_segments=1), rows=1)
    assert (alone.segment_ids <= 1).all() and (packed.segment_ids > 1).any()
    params = params_on()
    first = unpack(logprobs(params, packed, 0.7), packed)
    assert_close(first, unpack(logprobs(params, alone, 0.7), alone))
    other = [*SAMPLES[:-1], dataclasses.replace(SAMPLES[-1], completion=SAMPLES[-1].completion[::-1] % 40 + 1)]
    second = pack(other, BASE.update)
    assert_close(first[:-1], unpack(logprobs(params, second, 0.7), second)[:-1], 1e-6)
    assert abs(first[0] - unpack(logprobs(params, packed, 1.0), packed)[0]).max() > 1e-2  # the temperature counts


@pytest.mark.parametrize("ratio", ["token", pytest.param("sequence", marks=pytest.mark.slow)])
def test_shared_heads_against_plain_rows(ratio):
    """Groups of one prompt share it: fewer rows, equal log-probs, equal parameters after two updates (models/prefix.py)."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, 48, 16) for _ in range(3)]
    samples = [dataclasses.replace(s, prompt=prompts[s.group], completion=s.completion[:5]) for s in some_samples(9)]
    samples = [dataclasses.replace(s, sampler_logp=s.sampler_logp[:5]) for s in samples]
    loss = dataclasses.replace(LOSS, ratio=ratio, aggregation="sequence")
    shared, plain = (experiment(loss, share_prefix=on, max_segments=4) for on in (True, False))
    with_heads, without = pack(samples, shared.update), pack(samples, plain.update)
    assert with_heads.parent_ids.any() and not without.parent_ids.any()
    assert (with_heads.segment_ids > 0).sum() < (without.segment_ids > 0).sum()
    logprobs, params = make_logprobs(SPEC, shared), params_on()
    assert_close(unpack(logprobs(params, with_heads, 0.7), with_heads), unpack(logprobs(params, without, 0.7), without), 1e-5)
    one, two = train(shared, samples, steps=2), train(plain, samples, steps=2)
    assert_close(one[0], two[0])
    assert one[1] == pytest.approx(two[1], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("rows_per_micro", "remat"), [(1, "none"), (8, "full")])
def test_accumulation_against_whole(base, rows_per_micro, remat):
    """Uneven lengths; empty micro-batches at the end; another remat choice."""
    params, metrics = train(experiment(LOSS, rows_per_micro=rows_per_micro, remat=remat), SAMPLES, steps=2)
    assert_close(params, base[0])
    assert metrics == pytest.approx(base[1], rel=1e-4, abs=1e-5)


def test_eight_devices_against_one(base):
    params, metrics = train(experiment(LOSS, remat="dots"), SAMPLES, steps=2, mesh=mesh_of(2, 2, 2))
    assert_close(params, base[0])
    assert metrics == pytest.approx(base[1], rel=1e-4, abs=1e-5)


def test_empty_micro_batches_are_exact(base):
    """What fills an empty micro-batch is never looked at."""
    batch = pack(SAMPLES, BASE.update, rows=16)
    used = int((batch.segment_ids.max((1, 2)) > 0).sum())
    assert used < 8
    batch.tokens[used:] = 7
    batch.advantage[used:] = np.nan
    params, metrics = train(BASE, batch, steps=2)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(base[0])))
    assert metrics == base[1]


def test_lr_zero_leaves_parameters_and_ratio_one():
    """With several passes a batch the old log-probs come from a pass of their own."""
    cfg = dataclasses.replace(experiment(LOSS), optimizer=OptimizerConfig(lr=0.0))
    start = jax.device_get(params_on())
    params, metrics = train(cfg, SAMPLES, steps=2)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(start)))
    assert metrics["ratio/max"] == 1.0 and metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["update_norm"] == 0.0 and metrics["grad_norm"] > 0.0 and metrics["lr"] == 0.0


# --------------------------------------------------------------------------------------------------------- what it does


def test_old_log_probs_of_a_pass_give_ratio_one_then_move():
    """inner_iterations > 1: the first pass is on the policy, the second off it. Right sampler log-probs leave no gap (B05)."""
    batch = pack(SAMPLES, BASE.update)
    old = make_logprobs(SPEC, BASE)(params_on(), batch, 1.0)
    batch = batch.replace(old_logp=np.asarray(old), sampler_logp=np.where(batch.mask, np.asarray(old), 0))
    _, first = train(BASE, batch)
    _, second = train(BASE, batch, steps=2)
    assert first["ratio/max"] == pytest.approx(1.0, abs=1e-4) and second["ratio/max"] > 1.001
    for metrics in (first, second):
        assert metrics["logp_gap/max"] < 1e-4 and metrics["importance_weight/mean"] == pytest.approx(1.0, abs=1e-4)


def test_b11_kl_falls_from_a_perturbed_policy():
    cfg = experiment(LossConfig(kl_weight=1.0, kl_estimator="k3", tis_cap=0.0))
    batch = pack([dataclasses.replace(s, advantage=0.0) for s in SAMPLES], cfg.update)
    batch = batch.replace(ref_logp=np.asarray(make_logprobs(SPEC, cfg)(params_on(), batch, 1.0)))
    rng = np.random.default_rng(1)
    perturbed = jax.tree.map(
        lambda p: jnp.asarray(p + rng.normal(0, 0.1, p.shape).astype(np.float32)), jax.device_get(params_on())
    )
    _, first = train(cfg, batch, params=jax.tree.map(jnp.copy, perturbed))
    _, last = train(cfg, batch, steps=10, params=perturbed)
    assert first["kl"] > 0.02 and last["kl"] < first["kl"] / 2
    assert first["loss"] == pytest.approx(first["kl"])
    _, same = train(cfg, batch)
    assert same["kl"] == pytest.approx(0.0, abs=1e-6) and same["grad_norm"] < 1e-3


@pytest.mark.slow
def test_supervised_updates_in_bfloat16_learn():
    """Parameters and first moments keep their dtype."""
    cfg = dataclasses.replace(experiment(PLAIN), optimizer=OptimizerConfig(lr=3e-2, mu_dtype="bfloat16"))
    batch = pack(SAMPLES, cfg.update)
    start = params_on(dtype=jnp.bfloat16)
    logp = np.asarray(make_logprobs(SPEC, cfg)(start, batch, 1.0))
    _, first = train(cfg, batch, loss=sft_loss, params=jax.tree.map(jnp.copy, start))
    params, last = train(cfg, batch, loss=sft_loss, params=start, steps=12)
    assert first["loss"] == pytest.approx(-logp[batch.mask].mean(), rel=1e-4)
    assert last["loss"] < first["loss"] - 0.5 and first["tokens/trained"] == batch.mask.sum()
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(params))


def test_a_gradient_that_is_not_finite_changes_nothing():
    batch = pack(SAMPLES, BASE.update, rows=16)
    advantage = batch.advantage.copy()
    advantage[0][batch.mask[0]] = np.nan
    state = init_state(params_on(), make_optimizer(BASE.optimizer))
    start = jax.device_get(state)
    update = program(BASE, batch)
    state, metrics = update(state, batch.replace(advantage=advantage), 1.0)
    assert float(metrics["nonfinite"]) == 1.0 and int(state.step) == 0 and float(metrics["update_norm"]) == 0.0
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(jax.device_get(state))))
    state, metrics = update(state, batch, 1.0)
    assert float(metrics["nonfinite"]) == 0.0 and int(state.step) == 1


def test_the_state_is_donated():
    batch = pack(SAMPLES, BASE.update, rows=16)
    state = init_state(params_on(), make_optimizer(BASE.optimizer))
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    update = program(BASE, batch)
    assert update.memory_analysis().alias_size_in_bytes >= size
    new, _ = update(state, batch, 1.0)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params)) and not any(x.is_deleted() for x in jax.tree.leaves(new))


def test_one_program_for_any_number_of_samples():
    batches = [pack(some_samples(n), BASE.update, rows=16) for n in (2, 5, 9)]
    assert len({id(program(BASE, b)) for b in batches}) == 1
    for samples in (SAMPLES[:2], SAMPLES[:5]):
        assert np.isfinite(train(BASE, samples, rows=16)[1]["loss"])


# ------------------------------------------------------------------------------------------------------------- optimizer


def steps_of(cfg: OptimizerConfig, gradients: list, updates: int = 0):
    params = {"layers": {"q": jnp.ones((2, 3)), "attn_norm": jnp.ones((2, 3)), "q_bias": jnp.ones((2, 3))}}
    optimizer = make_optimizer(cfg, updates)
    state, out = optimizer.transform.init(params), []
    with jax.numpy_dtype_promotion("standard"):
        for g in gradients:
            change, state = optimizer.transform.update(jax.tree.map(lambda p, g=g: jnp.full_like(p, g), params), state, params)
            out.append({name: float(x[0, 0]) for name, x in change["layers"].items()})
    return out


def test_adamw_against_numpy_with_clip_and_decay():
    cfg = OptimizerConfig(lr=0.1, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.5, grad_clip=1.0)
    m = v = 0.0
    for t, (g, got) in enumerate(zip([0.1, 3.0], steps_of(cfg, [0.1, 3.0])), start=1):
        g = min(g, 1.0 / np.sqrt(18))  # 18 equal values: the global norm is g sqrt(18)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        adam = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
        assert got["q"] == pytest.approx(-0.1 * (adam + 0.5), rel=1e-4)
        assert got["attn_norm"] == got["q_bias"] == pytest.approx(-0.1 * adam, rel=1e-4)


def test_schedules():
    lr = make_optimizer(OptimizerConfig(lr=1.0, warmup_steps=4)).lr
    assert [float(lr(i)) for i in (0, 1, 3, 4, 99)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    cosine = make_optimizer(OptimizerConfig(lr=1.0, schedule="cosine", warmup_steps=2), updates=12).lr
    np.testing.assert_allclose([float(cosine(i)) for i in (0, 2, 7, 12, 20)], [0.5, 1.0, 0.5, 0.0, 0.0], atol=1e-6)
    with pytest.raises(UserError, match="number of updates"):
        make_optimizer(OptimizerConfig(schedule="cosine"))
    with pytest.raises(UserError, match="unknown optimizer"):
        make_optimizer(OptimizerConfig(name="sgd"))


def test_optimizer_states_have_one_structure():
    """The warm-up's optimizer takes over the loop's state and back."""
    params = params_on()
    plain, warm = (make_optimizer(OptimizerConfig(lr=lr, warmup_steps=w)) for lr, w in ((1e-6, 0), (1e-4, 10)))
    assert jax.tree.structure(plain.transform.init(params)) == jax.tree.structure(warm.transform.init(params))
    assert isinstance(plain.transform, optax.GradientTransformation)


def test_samples_of_one_token():
    """The shortest prompt and completion: one trained position."""
    batch = pack([Sample([3], np.asarray([4]), np.zeros(1, np.float32), 1.0, 0, 0)], BASE.update)
    assert batch.mask.sum() == 1 and batch.mask[0, 0, 0] and batch.targets[0, 0, 0] == 4
