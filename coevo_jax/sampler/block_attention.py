"""Attention of packed spans, block by block, over the blocks just before and a shared head.

Blocks are independent of each other: accelerators take all of them at once. On a CPU a loop takes one after the other, so that
scores stay in the core's cache and neither keys nor heads are copied for each block.

Axes: P packed rows, T positions of a row, N blocks of a row, n blocks of all rows, b tokens a block, M = G b query rows, K kv
heads, G query heads a kv head, d head width, S own positions seen by a block, W positions of a head, R rows of the store.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from coevo_jax.sampler.draw import NEGATIVE
from coevo_jax.sampler.kv import KV

BLOCK = 64  # tokens; a head's tails begin at a multiple of it


class Context(NamedTuple):
    """Heads in a stacked store: which row and how many positions each block of tokens goes on from."""

    store: KV  # stacked [L,R,...]
    layer: jax.Array  # int32 scalar
    rows_PxN: jax.Array  # int32
    lengths_PxN: jax.Array  # int32, 0 = none
    width: int  # positions that are read


class _Block(NamedTuple):
    """What one block attends from and to (or, with a leading axis, all blocks)."""

    q_KxMxd: jax.Array
    segments_b: jax.Array
    positions_b: jax.Array
    row: jax.Array  # of the store
    length: jax.Array  # of the head there


class _Window(NamedTuple):
    """The own positions that a block sees: the blocks before it, as far as the longest span reaches, and itself."""

    keys_KxdxS: jax.Array
    values_KxSxd: jax.Array
    segments_S: jax.Array
    positions_S: jax.Array


def _attend(block: _Block, own: _Window, context: Context | None, window: jax.Array | None) -> jax.Array:
    """Attention [K,M,d] of one block over its window and its head, merged exactly."""
    G = block.q_KxMxd.shape[1] // block.positions_b.shape[0]
    age = block.positions_b[:, None] - own.positions_S[None]
    # windows of the first blocks begin before the row: their zeros are segment 0, which no token of a sequence has
    seen = (block.segments_b[:, None] == own.segments_S[None]) & (age >= 0)  # equal segment: position order is token order
    if window is not None:
        seen &= (window == 0) | (age < window)
    scores = [_scores(block.q_KxMxd, own.keys_KxdxS, None, seen, G)]
    values: list[tuple[jax.Array, jax.Array | None]] = [(own.values_KxSxd, None)]
    if context is not None:
        keys, head_values, key_scale, value_scale = _head(context, block.row)
        s = jnp.arange(context.width, dtype=jnp.int32)
        head_seen = jnp.broadcast_to((s < block.length)[None], (block.positions_b.shape[0], context.width))
        if window is not None:
            head_seen &= (window == 0) | (block.positions_b[:, None] - s[None] < window)
        scores.append(_scores(block.q_KxMxd, keys, key_scale, head_seen, G))
        values.append((head_values, value_scale))
    highest = scores[0].max(axis=2)
    for more in scores[1:]:
        highest = jnp.maximum(highest, more.max(axis=2))
    total, out = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    for part, (value, scale) in zip(scores, values):
        weights = jnp.exp(part - highest[:, :, None])
        total = total + weights.sum(axis=2)
        weights = weights if scale is None else weights * scale[:, None]
        product = jnp.einsum("KMS,KSd->KMd", weights.astype(block.q_KxMxd.dtype), value.astype(block.q_KxMxd.dtype),
                             preferred_element_type=jnp.float32)  # fmt: skip
        out = out + product
    return (out / total[:, :, None]).astype(own.values_KxSxd.dtype)


def _scores(q_KxMxd: jax.Array, keys_KxdxS: jax.Array, scale_KxS: jax.Array | None, seen_bxS: jax.Array, G: int) -> jax.Array:
    """Scores [K,M,S] float32; NEGATIVE where a query may not look."""
    scores = jnp.einsum("KMd,KdS->KMS", q_KxMxd, keys_KxdxS.astype(q_KxMxd.dtype), preferred_element_type=jnp.float32)
    scores = scores if scale_KxS is None else scores * scale_KxS[:, None]
    return jnp.where(jnp.tile(seen_bxS, (G, 1))[None], scores, NEGATIVE)


def _head(context: Context, row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Keys [K,d,W], values [K,W,d] and their scales [K,W] of one head of one layer of the store."""
    W, store = context.width, context.store
    read = lambda x, *cut: x[(context.layer, row, *cut)]  # noqa: E731
    every = slice(None)
    keys, values = read(store.keys, every, every, slice(W)), read(store.values, every, slice(W))
    if store.key_scale is None or store.value_scale is None:
        return keys, values, None, None
    return keys, values, read(store.key_scale, every, slice(W)), read(store.value_scale, every, slice(W))


def _windows(x_PxNxb: jax.Array, back: int) -> jax.Array:
    """For each block the `back` blocks before it and itself, [n,(back+1) b,...]; zeros before the row's beginning."""
    P, N, b = x_PxNxb.shape[:3]
    rest = [(0, 0)] * (x_PxNxb.ndim - 2)
    shifted = [jnp.pad(x_PxNxb, [(0, 0), (j, 0), *rest])[:, :N] for j in range(back, -1, -1)]
    return jnp.concatenate(shifted, axis=2).reshape(P * N, (back + 1) * b, *x_PxNxb.shape[3:])


def block_attention(
    q_PxTxHxd: jax.Array,
    k_PxTxKxd: jax.Array,
    v_PxTxKxd: jax.Array,
    positions_PxT: jax.Array,
    segments_PxT: jax.Array,
    longest: int,
    context: Context | None,
    window: jax.Array | None,
    loop: bool = False,
) -> jax.Array:
    """Causal attention [P,T,H,d] inside equal segments (none longer than `longest`) and over their heads.

    T is a multiple of BLOCK. window: positions seen back, an array (0 = all), or None. Scores and softmax in float32. loop: one
    block after the other; segment ids of different rows differ then.
    """
    P, T, H, d = q_PxTxHxd.shape
    K, b = k_PxTxKxd.shape[2], BLOCK
    G, N = H // K, T // b
    n, back = P * N, min(-(-(longest - 1) // b), N - 1)
    q = (q_PxTxHxd * jnp.asarray(d**-0.5, q_PxTxHxd.dtype)).reshape(n, b, K, G, d)
    nothing = jnp.zeros(n, jnp.int32)
    rows, lengths = (nothing, nothing) if context is None else (context.rows_PxN.reshape(n), context.lengths_PxN.reshape(n))
    blocks = _Block(q.transpose(0, 2, 3, 1, 4).reshape(n, K, G * b, d), segments_PxT.reshape(n, b), positions_PxT.reshape(n, b),
                    rows, lengths)  # fmt: skip
    arrays = k_PxTxKxd, v_PxTxKxd, segments_PxT, positions_PxT
    if loop:
        S = (back + 1) * b
        k, v, segments, positions = (
            jnp.pad(x.reshape(n * b, *x.shape[2:]), [(back * b, 0)] + [(0, 0)] * (x.ndim - 2)) for x in arrays
        )
        k, v = k.transpose(1, 2, 0), v.transpose(1, 0, 2)

        def step(first: jax.Array, block: _Block) -> tuple[jax.Array, jax.Array]:
            cut = lambda x, axis: lax.dynamic_slice_in_dim(x, first, S, axis)  # noqa: E731
            own = _Window(cut(k, 2), cut(v, 1), cut(segments, 0), cut(positions, 0))
            return first + b, _attend(block, own, context, window)

        # two at a time: each core takes the products of one
        out = lax.scan(step, jnp.int32(0), blocks, unroll=2)[1]
    else:
        k, v, segments, positions = (_windows(x.reshape(P, N, b, *x.shape[2:]), back) for x in arrays)
        windows = _Window(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), segments, positions)
        out = jax.vmap(lambda block, own: _attend(block, own, context, window))(blocks, windows)
    return out.reshape(n, K, G, b, d).transpose(0, 3, 1, 2, 4).reshape(P, T, H, d)
