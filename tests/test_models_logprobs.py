"""Chunked log-probs and entropy against the naive [B,T,V] computation: values and gradients."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coevo_jax.models.forward import init_params, unembed
from coevo_jax.models.logprobs import token_logprobs
from coevo_jax.models.spec import ModelSpec

SPEC = ModelSpec("llama", vocab_size=50, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_size=8, tied=True)
B, T = 2, 11


def setup(tied: bool):
    spec = dataclasses.replace(SPEC, tied=tied)
    params = init_params(jax.random.key(0), spec)
    hidden = 3.0 * jax.random.normal(jax.random.key(1), (B, T, 16))
    targets = jax.random.randint(jax.random.key(2), (B, T), 0, 50)
    return spec, params, hidden, targets


def naive(params, spec, hidden, targets, temperature):
    inverse = jnp.broadcast_to(1.0 / jnp.asarray(temperature, jnp.float32), (B, T))
    logp = jax.nn.log_softmax(unembed(params, spec, hidden) * inverse[..., None])
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    return jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0], entropy


@pytest.mark.parametrize(
    ("tied", "chunk", "per_token", "tile"),
    [(True, 1, False, 0), (True, 4, True, 0), (False, 11, True, 0), (False, 64, False, 0)]
    + [(True, 1, True, 16), (False, 1, False, 10), (True, 1, False, 64)],
)
def test_values_and_gradients_equal_the_naive_ones(tied, chunk, per_token, tile):
    spec, params, hidden, targets = setup(tied)
    temperature = jnp.linspace(0.5, 1.5, B * T).reshape(B, T) if per_token else 0.7
    mix = jax.random.normal(jax.random.key(3), (2, B, T))

    def total(compute):
        def run(params, hidden):
            logp, entropy = compute(params, spec, hidden, targets, temperature)
            return (mix[0] * logp + mix[1] * entropy).sum(), (logp, entropy)

        return jax.value_and_grad(run, argnums=(0, 1), has_aux=True)(params, hidden)

    (_, found), grads = total(lambda *a: token_logprobs(*a, chunk=chunk, tile=tile))
    (_, expected), expected_grads = total(naive)
    for a, b in zip(jax.tree.leaves((found, grads)), jax.tree.leaves((expected, expected_grads))):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-5 if tile else 2e-5)  # tiles scale the hidden state, not the logits


def test_temperature_divides_the_logits():
    """B05: logits [2,1,0], temperature 0.5, token 0: -0.142932; unscaled -0.407606."""
    spec = dataclasses.replace(SPEC, vocab_size=3, hidden_size=3, tied=True)
    params = {"embed": jnp.eye(3)}
    hidden, targets = jnp.asarray([[[2.0, 1.0, 0.0]]]), jnp.zeros((1, 1), jnp.int32)
    for temperature, expected in ((0.5, -0.142932), (1.0, -0.407606)):
        np.testing.assert_allclose(token_logprobs(params, spec, hidden, targets, temperature, 8)[0], [[expected]], atol=1e-6)


def test_bfloat16_hidden_gives_float32_results():
    spec, params, hidden, targets = setup(True)
    logp, entropy = token_logprobs(params, spec, hidden.astype(jnp.bfloat16), targets, 1.0, 4)
    assert logp.dtype == entropy.dtype == jnp.float32
    np.testing.assert_allclose(logp, naive(params, spec, hidden, targets, 1.0)[0], atol=0.2)


def test_no_array_of_batch_time_vocabulary_exists():
    """Neither forward nor backward holds [B,T,V], in the compiled program or in what is saved for the backward pass."""
    spec, params, hidden, targets = setup(True)
    hidden, targets = jnp.tile(hidden, (1, 8, 1)), jnp.tile(targets, (1, 8))  # T = 88, chunk 8

    def loss(params, hidden):
        return token_logprobs(params, spec, hidden, targets, 1.0, 8)[0].sum()

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, hidden).compile().as_text()
    assert "f32[2,8,50]" in text
    assert not any(shape in text for shape in ("f32[2,88,50]", "f32[11,2,8,50]"))


def test_tiles_hold_one_tile_of_logits():
    spec, params, hidden, targets = setup(True)

    def loss(params, hidden):
        return token_logprobs(params, spec, hidden, targets, 1.0, tile=16)[0].sum()

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, hidden).compile().as_text()
    assert f"f32[{B * T},16]" in text and f"f32[{B * T},50]" not in text and f"f32[{B},{T},50]" not in text
