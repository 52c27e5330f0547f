"""Keys and values: how they lie in memory, how a token is written, and attention over them with exact merging of parts.

keys [R,K,d,S] and values [R,K,S,d]: both products of the attention then run along contiguous memory inside one fused loop, and a
token's row is scattered in place. int8 keeps one float32 scale for each token and kv head.

On the CPU a slot's positions are cut into a few segments, each an array of its own, and a step reads only those that its longest
row reaches: a shorter part of one array would be copied out first, a loop over parts as well. Keys lie in blocks of 32 positions
there, [R,K,S/32,d,32] ('blocked'): XLA sums over d for 32 positions in registers, where the sums of a long row of them go through
memory.

Axes: R rows (slots, or rows of a store), B queries, K kv heads, G query heads a kv head, H = K G, d head width, S positions,
W positions of a shared head, N blocks of positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from coevo_jax.models.spec import ModelSpec
from coevo_jax.sampler.draw import NEGATIVE

BLOCK = 32  # positions of a block of keys
SEGMENT, MOST_SEGMENTS = 96, 3  # least positions of a segment; segments that a slot is cut into at most
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int8": jnp.int8}


@struct.dataclass
class KV:
    """Keys and values of R rows; with a leading layer axis where it says 'stacked'."""

    keys: jax.Array  # [R,K,d,S], or blocked
    values: jax.Array  # [R,K,S,d]
    key_scale: jax.Array | None = None  # [R,K,S] float32, with int8 alone
    value_scale: jax.Array | None = None


class Partial(NamedTuple):
    """Attention over a part of the positions: sums of exp(score - peak), so that parts merge exactly."""

    out: jax.Array  # [B,K,G,d] float32, not normalised
    peak: jax.Array  # [B,K,G] float32
    total: jax.Array  # [B,K,G] float32; 0 for an empty part


def empty(lead: tuple[int, ...], spec: ModelSpec, positions: int, dtype: Any, blocks: bool = False) -> KV:
    """Zeros for `lead` rows. Nothing is read before it was written, so the zeros are only there to be defined."""
    K, d = spec.kv_heads, spec.head_dim
    positions = -(-positions // BLOCK) * BLOCK if blocks else positions
    scale = jnp.zeros((*lead, K, positions), jnp.float32) if dtype == jnp.int8 else None
    keys = (*lead, K, positions // BLOCK, d, BLOCK) if blocks else (*lead, K, d, positions)
    return KV(jnp.zeros(keys, dtype), jnp.zeros((*lead, K, positions, d), dtype), scale, scale)


def segment_for(positions: int) -> int:
    """Positions of a segment where the longest slot has so many."""
    return max(SEGMENT, -(-positions // (MOST_SEGMENTS * BLOCK)) * BLOCK)


def empty_slots(slots: int, spec: ModelSpec, positions: int, dtype: Any, segment: int) -> tuple[KV, ...]:
    """Slots of one layer and class in segments of so many positions; 0: in one piece, and not in blocks."""
    if not segment:
        return (empty((slots,), spec, positions, dtype),)
    return tuple(empty((slots,), spec, min(segment, positions - at), dtype, True) for at in range(0, positions, segment))


def is_blocked(kv: KV) -> bool:
    return kv.keys.ndim > kv.values.ndim


def width_of(kv: KV) -> int:
    """Positions of a row."""
    return kv.values.shape[-2]


def blocked(kv: KV) -> KV:
    """Keys [...,d,S] in blocks, [...,N,d,32]. S is a multiple of 32."""
    *lead, d, S = kv.keys.shape
    return kv.replace(keys=jnp.moveaxis(kv.keys.reshape(*lead, d, S // BLOCK, BLOCK), -2, -3))  # type: ignore[attr-defined]


def bytes_per_token(spec: ModelSpec, dtype: str) -> int:
    """Bytes of keys and values that one position of one row takes, scales included."""
    heads = 2 * spec.layers * spec.kv_heads
    return heads * (spec.head_dim * jnp.dtype(DTYPES[dtype]).itemsize + (4 if dtype == "int8" else 0))


def quantize(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """int8 values, and the float32 scale of each vector along `axis` (which the scale's shape lacks)."""
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=axis), 1e-30) / 127
    return jnp.round(x / jnp.expand_dims(scale, axis)).astype(jnp.int8), scale


def encode(k_RxTxKxd: jax.Array, v_RxTxKxd: jax.Array, dtype: Any) -> KV:
    """A layer's fresh keys and values in the layout and dtype of the cache."""
    keys, values = k_RxTxKxd.transpose(0, 2, 3, 1), v_RxTxKxd.transpose(0, 2, 1, 3)
    if dtype != jnp.int8:
        return KV(keys.astype(dtype), values.astype(dtype))
    (keys, key_scale), (values, value_scale) = quantize(keys, 2), quantize(values, 3)
    return KV(keys, values, key_scale, value_scale)


def write(kv: KV, position_R: jax.Array, k_RxKxd: jax.Array, v_RxKxd: jax.Array) -> KV:
    """One token a row, at a position of its own; a position beyond the end is dropped."""
    row = jnp.arange(position_R.shape[0])
    put = lambda at, x: at.set(x, mode="drop", unique_indices=True)  # noqa: E731
    place = (row, slice(None), position_R // BLOCK, slice(None), position_R % BLOCK)
    keys = kv.keys.at[place if is_blocked(kv) else (row, slice(None), slice(None), position_R)]
    if kv.key_scale is None or kv.value_scale is None:
        return KV(
            put(keys, k_RxKxd.astype(kv.keys.dtype)),
            put(kv.values.at[row, :, position_R], v_RxKxd.astype(kv.values.dtype)),
        )
    (k, key_scale), (v, value_scale) = quantize(k_RxKxd, 2), quantize(v_RxKxd, 2)
    return KV(
        put(keys, k),
        put(kv.values.at[row, :, position_R], v),
        put(kv.key_scale.at[row, :, position_R], key_scale),
        put(kv.value_scale.at[row, :, position_R], value_scale),
    )


def each(kv: KV, f: Callable[..., jax.Array], *others: KV) -> KV:
    """f(array, axis of its positions) for each array; with `others` f(array, those of the others, axis)."""
    axes = KV(-1, -2, None if kv.key_scale is None else -1, None if kv.value_scale is None else -1)  # type: ignore[arg-type]
    return jax.tree.map(f, kv, *others, axes)


def head_of(kv: KV, width: int, start: int = 0) -> KV:
    """`width` positions from `start` on, of keys that aren't blocked."""
    return each(kv, lambda x, axis: lax.slice_in_dim(x, start, start + width, axis=axis % x.ndim))


def seen_between(first_B: jax.Array, last_B: jax.Array, width: int) -> jax.Array:
    """[B,S] bool: positions from first up to last, which is included."""
    s = jnp.arange(width, dtype=jnp.int32)[None]
    return (s >= first_B[:, None]) & (s <= last_B[:, None])


def attend(q_BxHxd: jax.Array, kv: KV, seen_BxS: jax.Array) -> Partial:
    """Attention of one query a row over the positions it sees. Softmax in float32.

    Products and sums are written out: XLA fuses widening and product into one loop over the cache, while a batched matrix product
    with G rows first copies its operands.
    """
    q = _scaled(q_BxHxd, kv.keys.shape[1])
    if is_blocked(kv):
        scores = jnp.sum(q[:, :, :, None, :, None] * kv.keys[:, :, None].astype(jnp.float32), axis=4)  # [B,K,G,N,32]
        scores = scores.reshape(*q.shape[:3], width_of(kv))
    else:
        scores = jnp.sum(q[..., None] * kv.keys[:, :, None].astype(jnp.float32), axis=3)  # [B,K,G,S]
    if kv.key_scale is not None:
        scores = scores * kv.key_scale[:, :, None]
    weights, peak, total = _weights(scores, seen_BxS[:, None, None], (3,))
    if kv.value_scale is not None:
        weights = weights * kv.value_scale[:, :, None]
    return Partial(jnp.sum(weights[..., None] * kv.values[:, :, None].astype(jnp.float32), axis=3), peak, total)


def attend_segments(q_BxHxd: jax.Array, segments: Sequence[KV], first_B: jax.Array, last_B: jax.Array, reached: Any) -> Partial:
    """`attend` over the positions first..last of slots in segments. Those that begin beyond position `reached` are not read."""
    K, at = segments[0].keys.shape[1], 0
    B, H, d = q_BxHxd.shape
    parts = []
    for kv in segments:
        width = width_of(kv)

        def read(q: jax.Array, kv: KV, at: int = at, width: int = width) -> Partial:
            return attend(q, kv, seen_between(first_B - at, last_B - at, width))

        def skip(q: jax.Array, kv: KV) -> Partial:
            none = jnp.zeros((B, K, H // K), jnp.float32)
            return Partial(jnp.zeros((B, K, H // K, d), jnp.float32), none + NEGATIVE, none)

        parts.append(lax.cond(reached >= at, read, skip, q_BxHxd, kv) if at else read(q_BxHxd, kv))
        at += width
    return combine(parts)


def attend_heads(q_BxHxd: jax.Array, heads: KV, row_B: jax.Array, seen_BxW: jax.Array) -> Partial:
    """Attention of each query over the shared head in its row of a store.

    Every query meets every head in one matrix product, and what is not its own is masked: as long as heads are few, that is
    cheaper than to gather a copy of its head for each query.
    """
    q, rows = _scaled(q_BxHxd, heads.keys.shape[1]), jnp.arange(heads.keys.shape[0], dtype=jnp.int32)
    scores = jnp.einsum("BKGd,RKdW->BKGRW", q, heads.keys.astype(jnp.float32))
    if heads.key_scale is not None:
        scores = scores * heads.key_scale.transpose(1, 0, 2)[None, :, None]
    seen = (row_B[:, None] == rows[None])[..., None] & seen_BxW[:, None]  # [B,R,W]
    weights, peak, total = _weights(scores, seen[:, None, None], (3, 4))
    if heads.value_scale is not None:
        weights = weights * heads.value_scale.transpose(1, 0, 2)[None, :, None]
    return Partial(jnp.einsum("BKGRW,RKWd->BKGd", weights, heads.values.astype(jnp.float32)), peak, total)


def _scaled(q_BxHxd: jax.Array, kv_heads: int) -> jax.Array:
    B, H, d = q_BxHxd.shape
    return q_BxHxd.reshape(B, kv_heads, H // kv_heads, d).astype(jnp.float32) * jnp.float32(d**-0.5)


def _weights(scores: jax.Array, seen: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """exp(score - peak) where seen and 0 elsewhere; the peak and the sum over `axes`, where the positions lie."""
    scores = jnp.where(seen, scores, NEGATIVE)
    peak = jnp.max(scores, axis=axes, keepdims=True)
    weights = jnp.where(seen, jnp.exp(scores - peak), jnp.float32(0))
    return weights, jnp.squeeze(peak, axes), jnp.sum(weights, axis=axes)


def combine(parts: Sequence[Partial]) -> Partial:
    """Parts as one: each is brought to the common peak."""
    if len(parts) == 1:
        return parts[0]
    peak = functools.reduce(jnp.maximum, [part.peak for part in parts])
    scales = [jnp.exp(part.peak - peak) for part in parts]
    out = functools.reduce(jnp.add, [part.out * s[..., None] for part, s in zip(parts, scales)])
    return Partial(out, peak, functools.reduce(jnp.add, [part.total * s for part, s in zip(parts, scales)]))


def merge(parts: Sequence[Partial], dtype: Any) -> jax.Array:
    """The attention [B,H,d] over all parts together: sums are divided once."""
    out, _, total = combine(parts)
    B, K, G, d = out.shape
    return (out / jnp.maximum(total, 1e-30)[..., None]).reshape(B, K * G, d).astype(dtype)


def spliced(head: jax.Array, tail: jax.Array, head_length: jax.Array, offset: jax.Array, axis: int) -> jax.Array:
    """`head` up to head_length, then `tail` from `offset` on, as long as `head` along `axis` (what follows the tail is not
    defined). roll, not a plain slice: a slice that runs over the end would be clamped and so moved."""
    W, T = head.shape[axis], tail.shape[axis]
    if T < W:
        tail = jnp.pad(tail, [(0, W - T if a == axis % tail.ndim else 0) for a in range(tail.ndim)])
    moved = lax.slice_in_dim(jnp.roll(tail, head_length - offset, axis=axis), 0, W, axis=axis % tail.ndim)
    shape = [1] * head.ndim
    shape[axis] = W
    return jnp.where(jnp.arange(W).reshape(shape) < head_length, head, moved)


def part_of(kv: KV, offset: jax.Array, width: int) -> KV:
    """`width` positions from `offset` on; what lies beyond the end is not defined."""

    def one(x: jax.Array, axis: int) -> jax.Array:
        none = jnp.zeros((*x.shape[: axis % x.ndim], width, *x.shape[axis % x.ndim + 1 :]), x.dtype)
        return spliced(none, x, jnp.int32(0), offset, axis)

    return each(kv, one)


def splice(head: KV, tail: KV, head_length: jax.Array, offset: jax.Array) -> KV:
    """`spliced` for each array."""

    def one(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
        return spliced(a, b, head_length, offset, axis)

    return each(head, one, tail)
