"""Log-probabilities and entropies of given tokens without a [batch, time, vocab] array.

Axes: B batch, T time, C chunk, D model, V vocabulary. Time is cut into chunks that one `lax.scan` walks; each chunk's logits
[B,C,V] are made again for the gradient, so that memory holds one chunk of them at a time, and no reduction is: sums are kept.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from coevo_jax.models.forward import Params, unembed
from coevo_jax.models.spec import ModelSpec
from coevo_jax.models.tables import own_ids
from coevo_jax.models.vocabulary import tiled_logprobs


def token_logprobs(
    params: Params,
    spec: ModelSpec,
    hidden_BxTxD: jax.Array,
    targets_BxT: jax.Array,
    temperature: Any = 1.0,
    chunk: int = 128,
    tile: int = 0,
    vocab: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of targets[b,t] under hidden[b,t] and the entropy there, both [B,T] float32, in nats.

    They are those of softmax(logits / temperature), the distribution drawn from; `temperature` is a number or [B,T], and 0
    (greedy) is taken as 1, as the sampler records it. `hidden` is final and normalised (`forward`); the caller shifts targets.
    T need not be a multiple of `chunk`. tile > 0: all positions at once and the vocabulary in tiles (models/vocabulary.py), for a
    head that is neither int8 nor sharded. vocab: inside a shard_map, the mesh axes that cut the vocabulary (models/tables.py).
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
    name = "embed" if spec.tied else "unembed"
    head: Params = {name: params[name]}
    return _by_chunks(head, hidden_BxTxD, targets_BxT, inverse, spec, C, vocab)


def greedy_logprobs(
    params: Params, spec: ModelSpec, hidden_BxTxD: jax.Array, targets_BxT: jax.Array, chunk: int = 128
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of targets[b,t] as in token_logprobs at temperature 1, and 1 where the target is the likeliest token (the first of
    equals), both [B,T] float32. No gradient."""
    C = max(1, min(chunk, targets_BxT.shape[1]))
    name = "embed" if spec.tied else "unembed"

    def step(carry: None, x: tuple[jax.Array, ...]) -> tuple[None, tuple[jax.Array, ...]]:
        hidden, targets = x
        logits = unembed({name: params[name]}, spec, hidden)
        best = jnp.argmax(logits, axis=-1).astype(targets.dtype) == targets
        return carry, (_chunk_logprobs(logits, targets)[0], best.astype(jnp.float32))

    _, out = lax.scan(step, None, tuple(_chunked(x, C) for x in (hidden_BxTxD, targets_BxT)))
    logp, best = (_joined(y, targets_BxT.shape[1]) for y in out)
    return logp, best


class _Saved(NamedTuple):
    """For the gradient, all [B,T]: log of the sum of exp(logits), and the entropy."""

    log_total: jax.Array
    entropy: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _by_chunks(
    head: Params, hidden: jax.Array, targets: jax.Array, inverse: jax.Array, spec: ModelSpec, C: int, vocab: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """Log-prob and entropy [B,T] by a scan over chunks of time. inverse [B,T]: of the temperature, which has no gradient."""
    logp, saved = _forward(head, hidden, targets, inverse, spec, C, vocab)
    return logp, saved.entropy


def _forward(
    head: Params, hidden: jax.Array, targets: jax.Array, inverse: jax.Array, spec: ModelSpec, C: int, vocab: tuple[str, ...]
) -> tuple[jax.Array, _Saved]:
    def step(carry: None, x: tuple[jax.Array, ...]) -> tuple[None, tuple[jax.Array, ...]]:
        hidden, targets, inverse = x
        return carry, _chunk_logprobs(unembed(head, spec, hidden) * inverse[..., None], targets, vocab)

    _, out = lax.scan(step, None, tuple(_chunked(x, C) for x in (hidden, targets, inverse)))
    logp, entropy, log_total = (_joined(y, targets.shape[1]) for y in out)
    return logp, _Saved(log_total, entropy)


def _forward_saved(
    head: Params, hidden: jax.Array, targets: jax.Array, inverse: jax.Array, spec: ModelSpec, C: int, vocab: tuple[str, ...]
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    logp, saved = _forward(head, hidden, targets, inverse, spec, C, vocab)
    return (logp, saved.entropy), (head, hidden, targets, inverse, saved)


def _backward(
    spec: ModelSpec, C: int, vocab: tuple[str, ...], kept: Any, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[Params, jax.Array, None, jax.Array]:
    """d logp / d logit = [target] - p and d entropy / d logit = -p (log p + entropy), from logits that are made again."""
    head, hidden, targets, inverse, saved = kept
    ((name, w),) = head.items()
    of_logp, of_entropy = lax.psum(cotangents, vocab) if vocab else cotangents  # a shard_map gives each chip its share of them

    def step(d_head: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        hidden, targets, inverse, log_total, entropy, of_logp, of_entropy = x
        logp = unembed(head, spec, hidden) * inverse[..., None] - log_total[..., None]
        p = jnp.exp(logp)
        inner = jnp.where(p > 0, p * (of_logp[..., None] + of_entropy[..., None] * (logp + entropy[..., None])), 0.0)
        inside, at = own_ids(targets, logp.shape[-1], vocab)
        hit = (at[..., None] == jnp.arange(logp.shape[-1], dtype=at.dtype)[None, None]) & inside[..., None]
        d_logits = ((jnp.where(hit, of_logp[..., None], 0.0) - inner) * inverse[..., None]).astype(hidden.dtype)
        of_head, of_hidden = ("BTV,BTD->VD", "BTV,VD->BTD") if spec.tied else ("BTV,BTD->DV", "BTV,DV->BTD")
        d_head += jnp.einsum(of_head, d_logits, hidden, preferred_element_type=jnp.float32)
        return d_head, jnp.einsum(of_hidden, d_logits, w.astype(hidden.dtype), preferred_element_type=hidden.dtype)

    rows = hidden, targets, inverse, saved.log_total, saved.entropy, of_logp, of_entropy
    d_head, d_hidden = lax.scan(step, jnp.zeros(w.shape, jnp.float32), tuple(_chunked(x, C) for x in rows))
    return {name: d_head.astype(w.dtype)}, _joined(d_hidden, hidden.shape[1]), None, jnp.zeros_like(inverse)


_by_chunks.defvjp(_forward_saved, _backward)


def _chunk_logprobs(
    logits_BxCxV: jax.Array, targets_BxC: jax.Array, vocab: tuple[str, ...] = ()
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-prob, entropy and log of the sum of exp(logits), each [B,C]."""
    peak = logits_BxCxV.max(-1, keepdims=True)
    peak = lax.pmax(peak, vocab) if vocab else peak
    shifted = logits_BxCxV - peak
    weights = jnp.exp(shifted)
    inside, at = own_ids(targets_BxC, shifted.shape[-1], vocab)
    target = jnp.where(inside, jnp.take_along_axis(shifted, at[..., None], axis=-1)[..., 0], 0.0)
    # weights are exactly 0 where a logit is -inf; 0 * -inf would be NaN
    sums = weights.sum(-1), jnp.where(weights > 0, weights * shifted, 0.0).sum(-1), target
    total, weighted, target = lax.psum(sums, vocab) if vocab else sums
    log_total = jnp.log(total)
    return target - log_total, log_total - weighted / total, peak[..., 0] + log_total


def _joined(x: jax.Array, T: int) -> jax.Array:
    """[chunks,B,C,...] -> [B,T,...]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :T]


def _chunked(x: jax.Array, C: int) -> jax.Array:
    """[B,T,...] -> [chunks,B,C,...], zero-padded at the end."""
    B, T = x.shape[:2]
    pad = -T % C
    x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(B, (T + pad) // C, C, *x.shape[2:]), 1, 0)
