"""Preference losses against NumPy float64, packed pairs against separate ones, accumulation, several devices, the first step."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learn_support import SPEC, assert_close, experiment, mesh_of, params_on

from coevo_jax.config import DpoConfig, UpdateConfig
from coevo_jax.errors import UserError
from coevo_jax.learn.preference import (
    PreferenceSample,
    make_preference_scores,
    make_preference_update,
    make_reference_logps,
    pack_preferences,
)
from coevo_jax.learn.preference_losses import PairLogps, log_ratios, pair_losses, sft_losses
from coevo_jax.learn.update import init_state, make_optimizer

LN2 = np.log(2.0)


def some_pairs(n=7, seed=0):
    """Pairs of uneven lengths; a prompt of one token can't be shared."""
    rng = np.random.default_rng(seed)
    ids = lambda least, most: rng.integers(1, 48, rng.integers(least, most)).astype(np.int32)  # noqa: E731
    return [PreferenceSample(ids(1, 8), ids(1, 12), ids(1, 12), tuple(rng.normal(-20, 5, 2))) for _ in range(n)]


# ------------------------------------------------------------------------------------------------------- golden values


def logps(*rows):
    return PairLogps(*(jnp.asarray(x, jnp.float32) for x in np.asarray(rows, float).T))


def test_golden_values():
    """policy (-10, -14), reference (-11, -12), 4 and 5 tokens, beta 0.5: c = 1, r = -2, h = 1.5."""
    one = logps([-10, -14, -11, -12, 4, 5])
    c, r = log_ratios(one, "sigmoid")
    assert (float(c[0]), float(r[0])) == (1.0, -2.0)

    def of(loss, e=0.0, beta=0.5):
        return float(pair_losses(*log_ratios(one, loss), DpoConfig(loss=loss, beta=beta, label_smoothing=e))[0])

    wanted = {
        ("sigmoid", 0.0): 0.2014132779, ("sigmoid", 0.1): 0.3514132779, ("robust", 0.1): 0.0139132779,
        ("hinge", 0.0): 0.0, ("ipo", 0.0): 0.1225, ("sigmoid_norm", 0.0): 0.5437926040, ("sppo", 0.0): 1.0,
        ("apo_zero", 0.0): 0.6464820902,
    }  # fmt: skip
    for (loss, e), value in wanted.items():
        assert of(loss, e) == pytest.approx(value, abs=1e-6), loss
    assert of("hinge", beta=0.25) == pytest.approx(0.25)
    assert float(sft_losses(one)[0]) == 2.5


@pytest.mark.parametrize("loss", ["sigmoid", "sigmoid_norm", "robust"])
def test_at_the_reference_the_loss_is_ln_2(loss):
    same = logps([-137.5, -14, -137.5, -14, 40, 5])
    cfg = DpoConfig(loss=loss, label_smoothing=0.2 * (loss == "robust"))
    assert float(pair_losses(*log_ratios(same, loss), cfg)[0]) == np.float32(LN2)


def reference(loss, logps64, beta, e):
    """The definitions again, in NumPy float64."""
    chosen, rejected, ref_c, ref_r, n, m = np.asarray(logps64, np.float64).T
    c, r = chosen - ref_c, rejected - ref_r
    if loss in ("ipo", "sigmoid_norm"):
        c, r = c / n, r / m
    s = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    h = beta * (c - r)
    if loss == "sppo":
        return (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2
    if loss == "apo_zero":
        return 1 - s(beta * c) + s(beta * r)
    return {
        "sigmoid": -(1 - e) * np.log(s(h)) - e * np.log(s(-h)), "hinge": np.maximum(0, 1 - h),
        "sigmoid_norm": -(1 - e) * np.log(s(h)) - e * np.log(s(-h)), "ipo": (c - r - 0.5 / beta) ** 2,
        "robust": (-(1 - e) * np.log(s(h)) + e * np.log(s(-h))) / (1 - 2 * e),
    }[loss]  # fmt: skip


@pytest.mark.parametrize("loss", ["sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "sppo", "apo_zero"])
def test_every_loss_and_its_gradient_against_numpy(loss):
    """The gradient by finite differences of the float64 definition."""
    rng = np.random.default_rng(3)
    rows = np.column_stack([rng.normal(-20, 4, (6, 4)), rng.integers(1, 30, (6, 2))]).astype(np.float32).astype(np.float64)
    e = 0.1 if loss in ("sigmoid", "robust", "sigmoid_norm") else 0.0
    cfg = DpoConfig(loss=loss, beta=0.3, label_smoothing=e)

    def total(chosen, rejected):
        found = PairLogps(chosen, rejected, *(jnp.asarray(rows[:, i], jnp.float32) for i in range(2, 6)))
        return pair_losses(*log_ratios(found, loss), cfg)

    sides = [jnp.asarray(rows[:, i], jnp.float32) for i in (0, 1)]
    np.testing.assert_allclose(total(*sides), reference(loss, rows, 0.3, e), rtol=2e-5, atol=2e-6)
    for side, grad in enumerate(jax.grad(lambda *x: total(*x).sum(), (0, 1))(*sides)):
        step = np.zeros((6, 6))
        step[:, side] = 1e-5
        wanted = (reference(loss, rows + step, 0.3, e) - reference(loss, rows - step, 0.3, e)) / 2e-5
        np.testing.assert_allclose(grad, wanted, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------------------------------------- packing


def sides_of(batch, i):
    """(all tokens that the answer sees and its own, positions) of both answers of pair i, from the packed rows."""
    out = []
    for side in (0, 1):
        ((m, b, s),) = np.argwhere(batch.owner == 2 * i + side)
        own = batch.segment_ids[m, b] == s + 1
        parent = batch.parent_ids[m, b][own][0]
        seen = own | ((batch.segment_ids[m, b] == parent) & (parent > 0))
        masked = batch.mask[m, b] & own
        out.append((batch.tokens[m, b][seen], batch.positions[m, b][seen], batch.targets[m, b][masked], batch.reference[m, b, s]))
    return out


@pytest.mark.parametrize("share", [True, False])
def test_packing_keeps_pairs_together_and_trains_answers_with_their_end_token(share):
    pairs = some_pairs(23, seed=3)
    cfg = UpdateConfig(pack_length=32, max_segments=7, rows_per_micro=3, share_prefix=share)
    batch = pack_preferences(pairs, cfg, most=23)
    assert batch.tokens.shape == (23, 3, 32)
    for i, pair in enumerate(pairs):
        for answer, (tokens, positions, targets, logp) in zip((pair.chosen, pair.rejected), sides_of(batch, i)):
            assert tokens.tolist() == [*pair.prompt, *answer] and positions.tolist() == list(range(len(tokens)))
            assert targets.tolist() == answer.tolist()
            assert logp == np.float32(pair.reference[0 if answer is pair.chosen else 1])
    for m, b, s in np.argwhere(batch.chosen):
        r, o = b + batch.partner_rows[m, b, s], batch.partner[m, b, s]
        assert batch.owner[m, r, o] == batch.owner[m, b, s] + 1
    total = sum(2 * len(p.prompt) + len(p.chosen) + len(p.rejected) for p in pairs)
    saved = sum(len(p.prompt) - 1 for p in pairs) if share else 0
    assert (batch.segment_ids > 0).sum() == total - saved
    assert batch.mask.sum() == sum(len(p.chosen) + len(p.rejected) for p in pairs)
    with pytest.raises(UserError, match="two rows of one micro-batch"):
        pack_preferences(pairs, dataclasses.replace(cfg, rows_per_micro=1))
    with pytest.raises(UserError, match="longer than a packed row"):
        pack_preferences(pairs, dataclasses.replace(cfg, pack_length=8))


def test_as_many_micro_batches_as_the_longest_pairs_need():
    """Nothing shared, each answer a row: the promise of `most` holds in the worst case."""
    ids = np.ones(20, np.int32)
    pairs = [PreferenceSample(np.ones(10, np.int32), ids, ids)] * 9
    batch = pack_preferences(pairs, UpdateConfig(pack_length=32, rows_per_micro=4), most=9)
    assert batch.tokens.shape[0] == 5 and batch.chosen.sum() == 9


# --------------------------------------------------------------------------------------------------------------- update


def pair_cfg(loss="sigmoid", **update):
    smoothing = 0.1 if loss == "robust" else 0.0
    return dataclasses.replace(
        experiment(**update), dpo=DpoConfig(loss=loss, beta=0.2, label_smoothing=smoothing, sft_weight=0.3)
    )


@functools.cache
def update_of(cfg, mesh):
    return make_preference_update(SPEC, make_optimizer(cfg.optimizer), cfg, mesh)


@functools.cache
def reference_of(cfg):
    return make_reference_logps(SPEC, cfg)


def trained(cfg, pairs, mesh=None, devices=1, steps=1):
    params = params_on(mesh)
    state = init_state(params, make_optimizer(cfg.optimizer))
    batch = pack_preferences(pairs, cfg.update, devices=devices, most=len(pairs))
    for _ in range(steps):
        state, metrics = update_of(cfg, mesh)(state, batch)
    return jax.device_get(state.params), {name: float(x) for name, x in metrics.items()}


def with_reference(cfg, pairs):
    """The pairs with log-probs of random weights."""
    batch = pack_preferences(pairs, cfg.update, most=len(pairs), first=5)
    sums, owner = jax.device_get(reference_of(cfg)(params_on(), batch))
    found = {int(o): float(x) for o, x in zip(owner.ravel(), sums.ravel()) if o >= 0}
    return [dataclasses.replace(p, reference=(found[2 * i], found[2 * i + 1])) for i, p in enumerate(pairs, start=5)]


def test_the_first_step_is_ln_2_and_margin_0():
    """To the bit: the reference pass packs as the update does and runs the same functions."""
    _, metrics = trained(pair_cfg(), with_reference(pair_cfg(), some_pairs()))
    assert metrics["loss/preference"] == np.float32(LN2) and metrics["rewards/margins"] == 0.0
    assert metrics["rewards/accuracies"] == pytest.approx(0.5)


def naive(params, pairs, cfg):
    """The loss of answers in rows of their own, from full logits."""
    from coevo_jax.models.forward import forward, unembed

    rows = [(p.prompt, answer) for p in pairs for answer in (p.chosen, p.rejected)]
    T = max(len(a) + len(b) for a, b in rows)
    ids, segments, weights = np.zeros((len(rows), T), np.int32), np.zeros((len(rows), T), np.int32), np.zeros((len(rows), T - 1))
    for i, (prompt, answer) in enumerate(rows):
        n = len(prompt) + len(answer)
        ids[i, :n], segments[i, :n], weights[i, len(prompt) - 1 : n - 1] = [*prompt, *answer], 1, 1
    hidden = forward(params, SPEC, ids, np.tile(np.arange(T, dtype=np.int32), (len(rows), 1)), segments)
    every = jax.nn.log_softmax(unembed(params, SPEC, hidden))[:, :-1]
    sums = (jnp.take_along_axis(every, ids[:, 1:, None], -1)[..., 0] * weights.astype(np.float32)).sum(-1)
    n = weights.sum(-1).astype(np.float32)
    refs = np.asarray([p.reference for p in pairs], np.float32)
    found = PairLogps(sums[::2], sums[1::2], refs[:, 0], refs[:, 1], n[::2], n[1::2])
    return (pair_losses(*log_ratios(found, cfg.dpo.loss), cfg.dpo) + cfg.dpo.sft_weight * sft_losses(found)).mean()


def test_the_update_is_that_of_separate_answers():
    """Loss and gradient norm of the packed, micro-batched program against jax.grad of the naive loss."""
    pairs, cfg = some_pairs(), pair_cfg()
    loss, grads = jax.jit(jax.value_and_grad(lambda params: naive(params, pairs, cfg)))(params_on())
    _, metrics = trained(cfg, pairs)
    norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in jax.tree.leaves(jax.device_get(grads))))
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5) and metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["tokens/trained"] == sum(len(p.chosen) + len(p.rejected) for p in pairs)
    _, others = trained(
        cfg, [dataclasses.replace(p, chosen=p.rejected, rejected=p.chosen, reference=p.reference[::-1]) for p in pairs]
    )
    assert others["rewards/margins"] == pytest.approx(-metrics["rewards/margins"], rel=1e-5)
    assert others["rewards/accuracies"] == pytest.approx(1 - metrics["rewards/accuracies"])


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sigmoid", "robust", "sigmoid_norm", "ipo"])
def test_packing_micro_batches_and_devices_change_nothing(loss):
    pairs = with_reference(pair_cfg(rows_per_micro=6), some_pairs(7))
    params, metrics = trained(pair_cfg(loss, rows_per_micro=2), pairs, steps=2)
    variants = [
        trained(pair_cfg(loss, rows_per_micro=14, pack_length=24), pairs, steps=2),
        trained(pair_cfg(loss, rows_per_micro=2, share_prefix=False), pairs, steps=2),
        trained(pair_cfg(loss, rows_per_micro=8), pairs, mesh_of(2, 2, 2), devices=4, steps=2),
    ]
    first = trained(pair_cfg("sigmoid", rows_per_micro=2), pairs)[1]
    assert first["loss/preference"] == pytest.approx(LN2, abs=1e-6), "a reference that was packed otherwise"
    for other, found in variants:
        assert_close(params, other, 2e-5)
        for name, value in metrics.items():
            assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_scores_are_those_of_the_update():
    cfg, pairs = pair_cfg(), some_pairs()
    _, metrics = trained(cfg, pairs)
    batch = pack_preferences(pairs, cfg.update, most=len(pairs))
    seen = {name: float(x) for name, x in make_preference_scores(SPEC, cfg)(params_on(), batch).items()}
    assert seen and all(metrics[name] == pytest.approx(x, rel=1e-5, abs=1e-6) for name, x in seen.items())
