"""Every loss option against NumPy in float64; golden values; masks; a researcher's own loss."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learn_support import PLAIN, Tokens, experiment, mesh_of, reference_loss, some_samples, train

from coevo_jax.config import CompatConfig, LossConfig, UpdateConfig
from coevo_jax.errors import UserError
from coevo_jax.learn.losses import (
    aggregate,
    clipped,
    clipped_surrogate,
    count,
    drop_truncated,
    importance_weights,
    kl_estimate,
    policy_loss,
    resolve_loss,
    sft_loss,
)
from coevo_jax.learn.packing import Sample, pack
from coevo_jax.learn.update import loss_config
from coevo_jax.models.logprobs import token_logprobs
from coevo_jax.models.spec import ModelSpec

SIZES = UpdateConfig(pack_length=32, max_segments=3, rows_per_micro=2)


def cases(n=11, with_old=True, seed=3):
    """Packed batch with random log-probs [M,B,T], the same values by sample. Noise in padding must not matter."""
    rng = np.random.default_rng(seed)
    samples = some_samples(n, seed)
    batch = pack(samples, SIZES)
    shape = batch.tokens.shape
    draw = {name: rng.normal(-3, s, shape).astype(np.float32) for name, s in (("logp", 0.3), ("old", 0.3), ("ref", 0.3))}
    draw["entropy"] = rng.uniform(0, 3, shape).astype(np.float32)
    batch = batch.replace(
        old_logp=draw["old"] if with_old else None, ref_logp=draw["ref"],
        sampler_logp=np.where(batch.mask, batch.sampler_logp + 1, 0).astype(np.float32),
    )  # fmt: skip
    tokens = []
    for i, s in enumerate(samples):
        m, b, k = np.argwhere(batch.owner == i)[0]
        at = batch.mask[m, b] & (batch.segment_ids[m, b] == k + 1)
        x = {name: a[m, b][at].astype(np.float64) for name, a in draw.items()}
        sampler = batch.sampler_logp[m, b][at].astype(np.float64)
        advantage = float(np.float32(s.advantage))
        old = x["old"] if with_old else None
        tokens.append(Tokens(x["logp"], old, sampler, x["ref"], x["entropy"], advantage, s.truncated, m * shape[1] + b))
    return batch, draw["logp"], draw["entropy"], tokens


def whole_loss(logp, entropy, batch, cfg, loss=policy_loss):
    """Sum over micro-batches, as the update does it."""
    batch = jax.tree.map(jnp.asarray, batch)
    batch = drop_truncated(batch) if cfg.mask_truncated else batch
    denominators = count(batch)
    total, metrics = 0.0, {}
    for m in range(batch.tokens.shape[0]):
        part, found = loss(logp[m], entropy[m], jax.tree.map(lambda x, m=m: x[m], batch), denominators, cfg)
        total = total + part
        for name, x in found.items():
            metrics[name] = jnp.maximum(metrics.get(name, -jnp.inf), x) if name.endswith("/max") else metrics.get(name, 0.0) + x
    return total, metrics


OPTIONS = list(
    itertools.product(("token", "sequence", "constant", "pack"), ("token", "sequence"), ("k1", "k2", "k3"), (False, True))
)


@pytest.mark.parametrize(("aggregation", "ratio", "kl", "masks"), OPTIONS)
def test_every_option_against_numpy(aggregation, ratio, kl, masks):
    cfg = LossConfig(
        aggregation=aggregation, constant_length=13, ratio=ratio, clip_low=0.05, clip_high=0.08, kl_weight=0.3,
        kl_estimator=kl, tis_cap=1.3, entropy_weight=0.07, mask_truncated=masks,
    )  # fmt: skip
    batch, logp, entropy, tokens = cases()
    expected, means = reference_loss(tokens, cfg)
    loss, metrics = whole_loss(jnp.asarray(logp), jnp.asarray(entropy), batch, cfg)
    np.testing.assert_allclose(float(loss), expected, rtol=2e-5)
    for name, value in means.items():
        np.testing.assert_allclose(float(metrics[name]), value, rtol=2e-5, atol=1e-6, err_msg=name)
    assert 0 < means["clip_fraction/low"] + means["clip_fraction/high"] < 1


@pytest.mark.parametrize("change", [{"tis_cap": 0.0}, {"kl_weight": 0.0}, {"entropy_weight": 0.0}, {"clip_high": 0.5}, {}])
def test_switches_against_numpy(change):
    cfg = LossConfig(**{"kl_weight": 0.2, "entropy_weight": 0.1, "tis_cap": 2.0, **change})
    for with_old in (True, False):
        batch, logp, entropy, tokens = cases(with_old=with_old)
        loss, metrics = whole_loss(jnp.asarray(logp), jnp.asarray(entropy), batch, cfg)
        np.testing.assert_allclose(float(loss), reference_loss(tokens, cfg)[0], rtol=2e-5)
        assert ("kl" in metrics) == (cfg.kl_weight > 0)
        if not with_old:
            assert float(metrics["ratio/mean"]) == pytest.approx(1.0, abs=1e-6) and float(metrics["ratio/max"]) == 1.0


@pytest.mark.parametrize(
    ("aggregation", "ratio", "kl"), list(itertools.product(("token", "sequence"), ("token", "sequence"), ("k2", "k3")))
)
def test_gradients_against_finite_differences(aggregation, ratio, kl):
    """With given old log-probs the loss is a plain function of logp, so its slope in NumPy is the gradient."""
    cfg = LossConfig(aggregation=aggregation, ratio=ratio, kl_weight=0.3, kl_estimator=kl, tis_cap=1.3)
    batch, logp, entropy, tokens = cases(5)
    grad = np.asarray(jax.grad(lambda x: whole_loss(x, jnp.asarray(entropy), batch, cfg)[0])(jnp.asarray(logp)))
    assert not grad[~batch.mask].any()
    for i, sample in enumerate(tokens):
        m, b, k = np.argwhere(batch.owner == i)[0]
        got = grad[m, b][batch.mask[m, b] & (batch.segment_ids[m, b] == k + 1)]
        for t in range(len(sample.logp)):
            slope = 0.0
            for step in (1e-5, -1e-5):
                moved = sample.logp.copy()
                moved[t] += step
                changed = tokens[:i] + [dataclasses.replace(sample, logp=moved)] + tokens[i + 1 :]
                slope += np.sign(step) * reference_loss(changed, cfg)[0] / 2e-5
            np.testing.assert_allclose(got[t], slope, rtol=1e-3, atol=1e-6)


def test_without_old_log_probs_the_gradient_is_the_policy_gradient():
    """d loss / d logp = -advantage x weight / tokens: neither the ratio's value nor the weight carries a gradient."""
    cfg = LossConfig(kl_weight=0.0, tis_cap=1.3)
    batch, logp, entropy, _ = cases(with_old=False)
    grad = jax.grad(lambda x: whole_loss(x, jnp.asarray(entropy), batch, cfg)[0])(jnp.asarray(logp))
    weight = np.minimum(np.exp(logp.astype(np.float64) - batch.sampler_logp), 1.3)
    expected = np.where(batch.mask, -batch.advantage * weight / batch.mask.sum(), 0)
    np.testing.assert_allclose(np.asarray(grad), expected, rtol=1e-4, atol=1e-7)


def test_sft_is_the_mean_cross_entropy():
    batch, logp, entropy, _ = cases()
    loss, metrics = whole_loss(jnp.asarray(logp), jnp.asarray(entropy), batch, PLAIN, sft_loss)
    np.testing.assert_allclose(float(loss), -logp[batch.mask].astype(np.float64).mean(), rtol=1e-5)
    np.testing.assert_allclose(float(metrics["entropy"]), entropy[batch.mask].astype(np.float64).mean(), rtol=1e-5)


# ----------------------------------------------------------------------------------------------------------- golden values


def test_m15_clipped_surrogate():
    ratio, advantage = jnp.asarray([1.5, 0.5, 1.5, 0.5]), jnp.asarray([1.0, 1.0, -1.0, -1.0])
    np.testing.assert_allclose(clipped_surrogate(ratio, advantage, 0.2, 0.28), [-1.28, -0.5, 1.5, 0.8], rtol=1e-6)
    low, high = clipped(ratio, advantage, 0.2, 0.28)
    assert low.tolist() == [0, 0, 0, 1] and high.tolist() == [1, 0, 0, 0]


def test_b11_kl_estimators():
    for name, value, slope in (("k1", 0.1, 1.0), ("k2", 0.005, 0.1), ("k3", 0.0048374, 1 - np.exp(-0.1))):
        np.testing.assert_allclose(kl_estimate(jnp.float32(0.1), name), value, rtol=1e-4)
        np.testing.assert_allclose(jax.grad(kl_estimate)(jnp.float32(0.1), name), slope, rtol=1e-5)
        assert float(jax.grad(kl_estimate)(jnp.float32(0.0), name)) == (1.0 if name == "k1" else 0.0)
        assert np.isfinite(kl_estimate(jnp.float32(-1e4), name))
    assert float(kl_estimate(jnp.float32(-0.1), "k3")) > 0 > float(kl_estimate(jnp.float32(-0.1), "k1"))


def test_importance_weights_are_capped():
    weight, capped = importance_weights(jnp.log(jnp.asarray([0.5, 1.9, 2.5])), 2.0)
    np.testing.assert_allclose(weight, [0.5, 1.9, 2.0], rtol=1e-6)
    assert capped.tolist() == [0, 0, 1]


def test_b05_temperature_is_part_of_the_log_prob():
    spec = ModelSpec("llama", 3, 1, 1, 1, 1, 1, 1, tied=True)
    params = {"embed": jnp.asarray([[2.0], [1.0], [0.0]])}
    hidden, target = jnp.ones((1, 1, 1)), jnp.zeros((1, 1), jnp.int32)
    scaled, raw = (token_logprobs(params, spec, hidden, target, t)[0] for t in (0.5, 1.0))
    np.testing.assert_allclose([scaled[0, 0], raw[0, 0]], [-0.142932, -0.407606], atol=1e-6)
    batch = pack([Sample([1], np.zeros(1, np.int32), np.asarray([-0.142932], np.float32), 1.0, 0, 0)], UpdateConfig(2, 2, 1, 1))
    for recorded, expected in ((scaled, 1.0), (raw, np.exp(-0.407606 + 0.142932))):
        logp = jnp.concatenate([recorded, jnp.zeros((1, 1))], axis=1)[None]
        _, metrics = whole_loss(logp, jnp.zeros_like(logp), batch, LossConfig(kl_weight=0.0, tis_cap=9.0))
        np.testing.assert_allclose(metrics["importance_weight/mean"], expected, rtol=1e-5)


# ------------------------------------------------------------------------------------------------- denominators and masks


def two_sequences(truncated=False):
    long = Sample([1, 2], np.arange(3, 11), np.zeros(8, np.float32), -1.0, 0, 1, truncated)
    return [Sample([1, 2], np.arange(3, 5), np.zeros(2, np.float32), 1.0, 0, 0), long]


@pytest.mark.parametrize("rows", [1, 2])
def test_b07_denominators_are_those_of_the_whole_batch(rows):
    batch = pack(two_sequences(), UpdateConfig(pack_length=11, max_segments=3, rows_per_micro=rows))
    logp = jnp.zeros(batch.tokens.shape)
    for aggregation, expected in (("token", 0.6), ("sequence", 0.0), ("constant", 0.3)):
        cfg = dataclasses.replace(PLAIN, aggregation=aggregation, constant_length=10)
        assert float(whole_loss(logp, logp, batch, cfg)[0]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("rows", "devices"), [(1, 1), (2, 2)])
def test_b07_through_the_update(rows, devices):
    cfg = experiment(pack_length=11, rows_per_micro=rows)
    _, metrics = train(cfg, two_sequences(), mesh=mesh_of(devices) if devices > 1 else None)
    assert metrics["loss"] == pytest.approx(0.6, abs=1e-6)


def test_b07_b10_a_masked_truncated_sample_leaves_numerator_and_denominator():
    cfg = dataclasses.replace(PLAIN, mask_truncated=True, constant_length=10)
    batch = pack(two_sequences(truncated=True), dataclasses.replace(SIZES, rows_per_micro=1, pack_length=11))
    logp = jnp.zeros(batch.tokens.shape)
    for aggregation, expected in (("token", -1.0), ("sequence", -1.0), ("constant", -0.2), ("pack", -1.0)):
        masked = dataclasses.replace(cfg, aggregation=aggregation)
        assert float(whole_loss(logp, logp, batch, masked)[0]) == pytest.approx(expected)
    assert int(batch.tokens[batch.owner[..., 0] == 1].max()) == 10  # ids are as sampled, nothing replaced by an end token
    kept = whole_loss(logp, logp, batch, dataclasses.replace(PLAIN, mask_truncated=False))[0]
    assert float(kept) == pytest.approx(0.6)


def test_all_truncated_gives_zero_and_not_nan():
    samples = [dataclasses.replace(s, truncated=True) for s in two_sequences()]
    batch = pack(samples, SIZES)
    logp = jnp.zeros(batch.tokens.shape)
    for aggregation in ("token", "sequence", "constant", "pack"):
        cfg = dataclasses.replace(PLAIN, mask_truncated=True, constant_length=10, aggregation=aggregation)
        assert float(whole_loss(logp, logp, batch, cfg)[0]) == 0.0


def test_pack_mean_is_a_compat_switch():
    cfg = dataclasses.replace(experiment(), compat=CompatConfig(pack_mean=True))
    assert loss_config(cfg).aggregation == "pack" and loss_config(experiment()).aggregation == "token"


def test_unknown_choices_raise():
    batch, logp, _, _ = cases()
    one = jax.tree.map(lambda x: jnp.asarray(x[0]), batch)
    with pytest.raises(ValueError, match="aggregation 'tokens'"):
        aggregate(jnp.asarray(logp[0]), one, count(jax.tree.map(jnp.asarray, batch)), LossConfig(aggregation="tokens"))
    with pytest.raises(ValueError, match="estimator 'k4'"):
        kl_estimate(jnp.zeros(1), "k4")


# ----------------------------------------------------------------------------------------------------- a researcher's loss

MINE = '''
import jax.numpy as jnp
from coevo_jax.learn.losses import aggregate, masked, token_mean

def reinforce(logp, entropy, batch, denominators, cfg):
    """Advantages above 0 alone."""
    gain = jnp.maximum(batch.advantage, 0.0) * logp
    return aggregate(-gain, batch, denominators, cfg), {
        "mine/logp": token_mean(logp, batch, denominators), "mine/gain/max": jnp.max(masked(batch.advantage, batch))}

CONSTANT = 3
'''


def test_a_loss_of_ones_own_by_config_alone(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    cfg = experiment(dataclasses.replace(PLAIN, function="my_losses:reinforce"))
    samples = some_samples()
    loss = resolve_loss(cfg.loss)
    _, first = train(cfg, samples, loss=loss)
    _, last = train(cfg, samples, loss=loss, steps=8)
    assert last["loss"] < first["loss"] and np.isfinite(first["mine/logp"])
    assert first["mine/gain/max"] == pytest.approx(max(s.advantage for s in samples))


def test_a_loss_that_can_not_be_imported(tmp_path, monkeypatch):
    (tmp_path / "their_losses.py").write_text(MINE)
    (tmp_path / "broken_losses.py").write_text("import no_such_package_of_theirs\n")
    monkeypatch.chdir(tmp_path)
    assert resolve_loss(LossConfig()) is policy_loss
    for path, near in (("their_losses:reinforse", "reinforce"), ("their_loses:reinforce", "their_losses")):
        with pytest.raises(UserError) as error:
            resolve_loss(LossConfig(function=path))
        assert error.value.nearest == near and error.value.where == "loss.function"
    with pytest.raises(UserError, match="no function 'CONSTANT'"):
        resolve_loss(LossConfig(function="their_losses:CONSTANT"))
    with pytest.raises(UserError) as error:
        resolve_loss(LossConfig(function="coevo_jax.learn.lossses:policy_loss"))
    assert error.value.nearest == "coevo_jax.learn.losses"
    with pytest.raises(ModuleNotFoundError, match="no_such_package_of_theirs"):
        resolve_loss(LossConfig(function="broken_losses:any"))  # a fault inside their file keeps its traceback
