"""Log-probabilities and entropies of given tokens without a [batch, time, vocab] array.

Axes: B batch, T time, C chunk, D model, V vocabulary. Time is cut into chunks that one `lax.scan` walks; each chunk's logits
[B,C,V] are recomputed in the backward pass, so that memory holds one chunk of them at a time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from coevo_jax.models.forward import Params, unembed
from coevo_jax.models.spec import ModelSpec
from coevo_jax.models.vocabulary import tiled_logprobs


def token_logprobs(
    params: Params,
    spec: ModelSpec,
    hidden_BxTxD: jax.Array,
    targets_BxT: jax.Array,
    temperature: Any = 1.0,
    chunk: int = 128,
    tile: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of targets[b,t] under hidden[b,t] and the entropy there, both [B,T] float32, in nats.

    They are those of softmax(logits / temperature), the distribution drawn from; `temperature` is a number or [B,T], and 0
    (greedy) is taken as 1, as the sampler records it. `hidden` is final and normalised (`forward`); the caller shifts targets.
    T need not be a multiple of `chunk`. tile > 0: all positions at once and the vocabulary in tiles (models/vocabulary.py), for a
    head that is neither int8 nor sharded.
    """
    B, T = targets_BxT.shape
    C = max(1, min(chunk, T))
    divisor = jnp.asarray(temperature, jnp.float32)
    inverse = jnp.broadcast_to(1.0 / jnp.where(divisor == 0, jnp.float32(1.0), divisor), (B, T))
    if tile > 0:
        head_VxD = params["embed"] if spec.tied else params["unembed"].T
        hidden_NxD = (hidden_BxTxD * inverse[..., None].astype(hidden_BxTxD.dtype)).reshape(B * T, -1)
        logp, entropy = tiled_logprobs(head_VxD, hidden_NxD, targets_BxT.reshape(-1), min(tile, spec.vocab_size))
        return logp.reshape(B, T), entropy.reshape(B, T)
    head: Params = {name: params[name] for name in ("embed", "unembed") if name in params}

    @jax.checkpoint
    def step(carry: None, x: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        return carry, _chunk_logprobs(unembed(head, spec, x[0]) * x[2][..., None], x[1])

    chunks = tuple(_chunked(x, C) for x in (hidden_BxTxD, targets_BxT, inverse))
    _, out = lax.scan(step, None, chunks)
    logp, entropy = (jnp.moveaxis(y, 0, 1).reshape(B, -1)[:, :T] for y in out)
    return logp, entropy


def _chunk_logprobs(logits_BxCxV: jax.Array, targets_BxC: jax.Array) -> tuple[jax.Array, jax.Array]:
    shifted = logits_BxCxV - lax.stop_gradient(logits_BxCxV.max(-1, keepdims=True))
    weights = jnp.exp(shifted)
    total = weights.sum(-1)
    log_total = jnp.log(total)
    logp = jnp.take_along_axis(shifted, targets_BxC[..., None], axis=-1)[..., 0] - log_total
    # weights are exactly 0 where a logit is -inf; 0 * -inf would be NaN
    expected = jnp.where(weights > 0, weights * shifted, 0.0).sum(-1) / total
    return logp, log_total - expected


def _chunked(x: jax.Array, C: int) -> jax.Array:
    """[B,T,...] -> [chunks,B,C,...], zero-padded at the end."""
    B, T = x.shape[:2]
    pad = -T % C
    x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(B, (T + pad) // C, C, *x.shape[2:]), 1, 0)
