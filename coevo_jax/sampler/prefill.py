"""Prefill of prompts packed into rows, and the plan (on the host) of what is packed where.

Axes: P packed rows, T positions of a row, K kv heads, d head width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coevo_jax.models.attention import packed_attention
from coevo_jax.models.forward import attention_inputs, attention_output, embed, mlp_block
from coevo_jax.models.rope import rope_tables
from coevo_jax.models.spec import ModelSpec
from coevo_jax.sampler.decode import rope_variant
from coevo_jax.sampler.state import PromptKV

Bucket = tuple[int, int]  # (rows, positions a row) of a compiled program


def buckets(longest: int, budget: int, least: int = 32) -> list[Bucket]:
    """Program shapes, smallest first: one short row up to as many rows of the longest length as the token budget holds."""
    widest = -(-longest // least) * least
    short = sorted({-(-max(widest // share, least) // least) * least for share in (4, 2, 1)})
    most = max(1, budget // widest)
    rows = sorted({min(1 << i, most) for i in range(1, most.bit_length() + 1)} - {1})
    return [(1, width) for width in short] + [(r, widest) for r in rows if r > 1]


@dataclasses.dataclass
class Packed:
    """Arrays of one packed batch [P,T] and, for each sequence, its row and offset."""

    bucket: Bucket
    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    places: list[tuple[int, int]]


def fit(lengths: Sequence[int], bucket: Bucket) -> list[tuple[int, int]] | None:
    """First-fit places (row, offset) of sequences in order, or None when they do not all fit."""
    filled = [0] * bucket[0]
    places = []
    for n in lengths:
        row = next((r for r, used in enumerate(filled) if used + n <= bucket[1]), None)
        if row is None:
            return None
        places.append((row, filled[row]))
        filled[row] += n
    return places


def take(lengths: Sequence[int], shapes: Sequence[Bucket], wanted: int, at_most: int) -> tuple[int, Bucket]:
    """How many of the leading sequences to pack, and into which shape: the smallest that holds `wanted` of them (else as many
    as the largest holds), then further ones as long as they fit into the padding."""
    count = max(n for n in range(1, min(wanted, at_most) + 1) if fit(lengths[:n], shapes[-1]) is not None)
    bucket = next(b for b in shapes if fit(lengths[:count], b) is not None)
    while count < min(len(lengths), at_most) and fit(lengths[: count + 1], bucket) is not None:
        count += 1
    return count, bucket


def pack(sequences: Sequence[np.ndarray], bucket: Bucket) -> Packed:
    """Sequences in first-fit order; segment ids count from 1, positions restart with each."""
    places = fit([len(s) for s in sequences], bucket)
    if places is None:
        raise ValueError(f"sequences of {[len(s) for s in sequences]} tokens do not fit into {bucket}")
    packed = Packed(bucket, np.zeros(bucket, np.int32), np.zeros(bucket, np.int32), np.zeros(bucket, np.int32), places)
    for i, (ids, (row, start)) in enumerate(zip(sequences, places)):
        where = np.s_[row, start : start + len(ids)]
        packed.tokens[where], packed.positions[where], packed.segments[where] = ids, np.arange(len(ids)), i + 1
    return packed


def prefill(
    params: dict[str, Any],
    tokens_PxT: jax.Array,
    positions_PxT: jax.Array,
    segments_PxT: jax.Array,
    *,
    spec: ModelSpec,
    dtype: Any,
    kv_dtype: Any,
) -> PromptKV:
    """Keys and values of packed prompts, in the slots' layout. The last layer's output is not needed: no logits are made here,
    because a slot's first decode step feeds the prompt's last token."""
    x = embed(params, tokens_PxT, dtype)
    cos, sin = rope_tables(spec, positions_PxT)
    keys, values = [], []
    for i, layer in enumerate(params["layers"]):
        r = rope_variant(spec, i)
        q, k, v = attention_inputs(layer, spec, x, cos[r], sin[r])
        keys.append(k.astype(kv_dtype).transpose(0, 2, 3, 1))
        values.append(v.astype(kv_dtype).transpose(0, 2, 1, 3))
        window = jnp.int32(spec.window_of[i]) if spec.windows else None
        attended = packed_attention(q, k, v, positions_PxT, segments_PxT, window)
        x = mlp_block(layer, spec, attention_output(layer, spec, x, attended))
    return PromptKV(keys=tuple(keys), values=tuple(values))
