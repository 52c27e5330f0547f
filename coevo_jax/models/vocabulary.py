"""Log-probs and entropies of given tokens with the vocabulary cut into tiles: what one device without a sharded vocabulary runs.

Axes: N positions, D model, V vocabulary, C a tile of it. Each tile's logits [N,C] are made, used while they are in the cache, and
made again in the backward pass, where a tile of the head's gradient is written once; cutting time instead (models/logprobs.py)
reads the whole head and adds to its whole gradient at each step, and walks [.,V] arrays several times from memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LOWEST = -1e30  # a running maximum's start: finite, so that the first rescaling is exp(-large) and not exp(nan)


class _Sums(NamedTuple):
    """Running maximum m, sums of w = exp(logit - m) and of w * logit, and the target's logit, all [N]."""

    peak: jax.Array
    total: jax.Array
    weighted: jax.Array
    target: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def tiled_logprobs(head_VxD: jax.Array, hidden_NxD: jax.Array, targets_N: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
    """Log-prob of each target and the entropy, both [N] float32 in nats, under softmax(hidden @ head.T)."""
    logp, entropy, _ = _forward(head_VxD, hidden_NxD, targets_N, tile)
    return logp, entropy


def _forward(head: jax.Array, hidden: jax.Array, targets: jax.Array, tile: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    def step(first: Any, part_CxD: jax.Array, sums: _Sums) -> _Sums:
        logits = _logits(part_CxD, hidden)
        peak = jnp.maximum(sums.peak, logits.max(-1))
        weights = jnp.exp(logits - peak[:, None])
        shrink = jnp.exp(sums.peak - peak)
        target = jnp.where(_hit(first, logits, targets), logits, 0.0).sum(-1)
        total, weighted = weights.sum(-1), (weights * logits).sum(-1)
        return _Sums(peak, sums.total * shrink + total, sums.weighted * shrink + weighted, sums.target + target)

    zeros = jnp.zeros(targets.shape, jnp.float32)
    sums = _over_tiles(head, tile, step, _Sums(jnp.full_like(zeros, LOWEST), zeros, zeros, zeros))
    log_total = sums.peak + jnp.log(sums.total)
    return sums.target - log_total, log_total - sums.weighted / sums.total, log_total


def _saved(head: jax.Array, hidden: jax.Array, targets: jax.Array, tile: int) -> tuple[Any, Any]:
    logp, entropy, log_total = _forward(head, hidden, targets, tile)
    return (logp, entropy), (head, hidden, targets, log_total, entropy)


def _backward(tile: int, saved: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, None]:
    """d logp / d logit = [target] - p and d entropy / d logit = -p (log p + entropy)."""
    head, hidden, targets, log_total, entropy = saved
    of_logp, of_entropy = cotangents

    def step(first: Any, part_CxD: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        d_head, d_hidden = carry
        logp = _logits(part_CxD, hidden) - log_total[:, None]
        inner = of_logp[:, None] + of_entropy[:, None] * (logp + entropy[:, None])
        d_logits = jnp.where(_hit(first, logp, targets), of_logp[:, None], 0.0) - jnp.exp(logp) * inner
        d_logits = d_logits.astype(hidden.dtype)
        d_part = jnp.einsum("NC,ND->CD", d_logits, hidden, preferred_element_type=jnp.float32)
        d_head = lax.dynamic_update_slice_in_dim(d_head, d_part.astype(d_head.dtype), first, 0)
        return d_head, d_hidden + jnp.einsum("NC,CD->ND", d_logits, part_CxD, preferred_element_type=jnp.float32)

    start = jnp.zeros_like(head), jnp.zeros(hidden.shape, jnp.float32)
    d_head, d_hidden = _over_tiles(head, tile, step, start)
    return d_head, d_hidden.astype(hidden.dtype), None


tiled_logprobs.defvjp(_saved, _backward)


def _logits(part_CxD: jax.Array, hidden_NxD: jax.Array) -> jax.Array:
    return jnp.einsum("ND,CD->NC", hidden_NxD, part_CxD.astype(hidden_NxD.dtype), preferred_element_type=jnp.float32)


def _hit(first: Any, logits_NxC: jax.Array, targets_N: jax.Array) -> jax.Array:
    """Where a column is its row's target."""
    return (targets_N - first)[:, None] == jnp.arange(logits_NxC.shape[1], dtype=jnp.int32)[None]


def _over_tiles(head: jax.Array, tile: int, step: Callable[[Any, jax.Array, Any], Any], carry: Any) -> Any:
    """step(first id, rows of the head, carry) over whole tiles, then over what is left of the vocabulary."""
    V = head.shape[0]
    whole = V // tile

    def body(i: jax.Array, carry: Any) -> Any:
        return step(i * tile, lax.dynamic_slice_in_dim(head, i * tile, tile, 0), carry)

    carry = lax.fori_loop(0, whole, body, carry)
    return step(whole * tile, head[whole * tile :], carry) if V % tile else carry
