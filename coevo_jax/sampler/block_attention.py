"""Attention of packed spans, block by block, over the blocks just before and a shared head.

Axes: P packed rows, T positions of a row, N blocks of a row, b tokens a block, M = G b query rows, K kv heads, G query heads a kv
head, d head width, S own positions seen by a block, W positions of a head, R rows of the store.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

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


def _windows(x_PxNxb: jax.Array, back: int) -> jax.Array:
    """For each block the `back` blocks before it and itself, [P,N,(back+1) b,...]; zeros before the row's beginning."""
    N = x_PxNxb.shape[1]
    rest = [(0, 0)] * (x_PxNxb.ndim - 2)
    shifted = [jnp.pad(x_PxNxb, [(0, 0), (j, 0), *rest])[:, :N] for j in range(back, -1, -1)]
    return jnp.concatenate(shifted, axis=2)


def _head(context: Context, n: int) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Keys [n,K,d,W], values [n,K,W,d] and their scales of each block's head, gathered from one layer of the store."""
    rows, W, store = context.rows_PxN.reshape(n), context.width, context.store
    keys, values = store.keys[context.layer, rows, :, :, :W], store.values[context.layer, rows, :, :W]
    if store.key_scale is None or store.value_scale is None:
        return keys, values, None, None
    return keys, values, store.key_scale[context.layer, rows, :, :W], store.value_scale[context.layer, rows, :, :W]


def block_attention(
    q_PxTxHxd: jax.Array,
    k_PxTxKxd: jax.Array,
    v_PxTxKxd: jax.Array,
    positions_PxT: jax.Array,
    segments_PxT: jax.Array,
    longest: int,
    context: Context | None,
    window: jax.Array | None,
) -> jax.Array:
    """Causal attention [P,T,H,d] inside equal segments (none longer than `longest`) and over their heads.

    T is a multiple of BLOCK. window: positions seen back, an array (0 = all), or None. Scores and softmax in float32.
    """
    P, T, H, d = q_PxTxHxd.shape
    K, b = k_PxTxKxd.shape[2], BLOCK
    G, N = H // K, T // b
    back = min(-(-(longest - 1) // b), N - 1)
    n, S = P * N, (back + 1) * b
    blocks = lambda x: x.reshape(P, N, b, *x.shape[2:])  # noqa: E731
    q = (q_PxTxHxd * jnp.asarray(d**-0.5, q_PxTxHxd.dtype)).reshape(n, b, K, G, d)
    q = q.transpose(0, 2, 3, 1, 4).reshape(n, K, G * b, d)
    keys = _windows(blocks(k_PxTxKxd), back).reshape(n, S, K, d).transpose(0, 2, 3, 1)
    values = _windows(blocks(v_PxTxKxd), back).reshape(n, S, K, d).transpose(0, 2, 1, 3)
    own_seg, seg = blocks(segments_PxT).reshape(n, b), _windows(blocks(segments_PxT), back).reshape(n, S)
    own_pos, pos = blocks(positions_PxT).reshape(n, b), _windows(blocks(positions_PxT), back).reshape(n, S)
    # the first `back` blocks' windows begin before the row: their zeros are segment 0, which no token of a sequence has
    age = own_pos[:, :, None] - pos[:, None]
    seen = (own_seg[:, :, None] == seg[:, None]) & (age >= 0)  # [n,b,S]; equal segment: position order is token order
    if window is not None:
        seen &= (window == 0) | (age < window)
    product = lambda a, c: jnp.einsum("nKMd,nKdS->nKMS", a, c, preferred_element_type=jnp.float32)  # noqa: E731
    tiled = lambda mask: jnp.tile(mask, (1, G, 1))[:, None]  # noqa: E731
    scores = jnp.where(tiled(seen), product(q, keys), NEGATIVE)
    if context is not None:
        head_keys, head_values, key_scale, value_scale = _head(context, n)
        s = jnp.arange(context.width, dtype=jnp.int32)
        head_seen = jnp.broadcast_to((s[None] < context.lengths_PxN.reshape(n, 1))[:, None], (n, b, context.width))
        if window is not None:
            head_seen &= (window == 0) | (own_pos[:, :, None] - s[None, None] < window)
        head_scores = product(q, head_keys.astype(q.dtype))
        if key_scale is not None:
            head_scores = head_scores * key_scale[:, :, None]
        scores = jnp.concatenate([jnp.where(tiled(head_seen), head_scores, NEGATIVE), scores], axis=3)
    weights = jax.nn.softmax(scores, axis=3)
    own = weights[..., context.width if context is not None else 0 :]
    out = jnp.einsum("nKMS,nKSd->nKMd", own.astype(values.dtype), values)
    if context is not None:
        head = weights[..., : context.width]
        if value_scale is not None:
            head = head * value_scale[:, :, None]
        out = out + jnp.einsum("nKMS,nKSd->nKMd", head.astype(q.dtype), head_values.astype(q.dtype)).astype(out.dtype)
    return out.reshape(n, K, G, b, d).transpose(0, 3, 1, 2, 4).reshape(P, T, H, d)
