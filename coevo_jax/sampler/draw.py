"""Drawing one token a row from logits, with its log-prob and the entropy of the distribution drawn from.

The draw is an inverse CDF in two levels with two uniforms a token: first a chunk of the vocabulary by its mass, then a token
inside it. That costs two passes over the logits; Gumbel noise for every entry (V draws a token) costs more than the rest of the
head on a CPU. Truncation (top-k, then top-p, as Hugging Face orders them) needs no sort: the smallest kept logit is found by
bisection over the float's bits, so equal logits at the border are all kept.

Axes: B rows, V vocabulary, C chunks, W entries a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

NEGATIVE = -1e30  # finite: exp gives 0 and 0 * NEGATIVE is 0, so masked entries add nothing to the entropy


class Drawn(NamedTuple):
    token: jax.Array  # [B] int32
    logprob: jax.Array  # [B] float32
    entropy: jax.Array  # [B] float32, nats


def chunk_width(vocab: int) -> int:
    """Entries a chunk: the largest divisor of the vocabulary up to 512, or 256 (then the logits are padded) if all are tiny."""
    best = max(w for w in range(1, min(vocab, 512) + 1) if vocab % w == 0)
    return best if best >= 32 or best == vocab else 256


def _chunked(logits_BxV: jax.Array) -> jax.Array:
    B, V = logits_BxV.shape
    width = chunk_width(V)
    pad = -V % width
    if pad:
        logits_BxV = jnp.pad(logits_BxV, ((0, 0), (0, pad)), constant_values=NEGATIVE)
    return logits_BxV.reshape(B, (V + pad) // width, width)


def _take(x_BxC: jax.Array, index_B: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_BxC, index_B.reshape(index_B.shape + (1,) * (x_BxC.ndim - 1)), axis=1)[:, 0]


def _first_above(mass_BxN: jax.Array, uniform_B: jax.Array) -> jax.Array:
    """Inverse CDF: the first n whose cumulative mass exceeds u * total. An entry of mass 0 is never chosen."""
    cumulative = jnp.cumsum(mass_BxN, axis=1)
    return jnp.argmax(cumulative > (uniform_B * cumulative[:, -1])[:, None], axis=1).astype(jnp.int32)


def draw(logits_BxV: jax.Array, uniforms_Bx2: jax.Array, temperature_B: jax.Array, forced_B: jax.Array | None = None) -> Drawn:
    """One token a row from softmax(logits / temperature). Temperature 0 is greedy, its log-prob taken at temperature 1.

    forced: a token that a row must take (-1 = draw), with the log-prob that it has.
    """
    greedy = temperature_B == 0
    inverse = 1.0 / jnp.where(greedy, jnp.float32(1.0), temperature_B)
    chunks = _chunked(logits_BxV)
    width = chunks.shape[2]
    peaks = jnp.max(chunks, axis=2)  # [B,C]
    peak = jnp.max(peaks, axis=1)
    centred = (chunks - peak[:, None, None]) * inverse[:, None, None]
    mass = jnp.exp(centred)
    chunk_mass = jnp.sum(mass, axis=2)
    total = jnp.sum(chunk_mass, axis=1)
    chosen = jnp.where(greedy, jnp.argmax(peaks, axis=1).astype(jnp.int32), _first_above(chunk_mass, uniforms_Bx2[:, 0]))
    if forced_B is not None:
        chosen = jnp.where(forced_B >= 0, forced_B // width, chosen)
    inside = (_take(chunks, chosen) - peak[:, None]) * inverse[:, None]  # [B,W], gathered again: cheaper than keeping `centred`
    offset = jnp.where(greedy, jnp.argmax(inside, axis=1).astype(jnp.int32), _first_above(jnp.exp(inside), uniforms_Bx2[:, 1]))
    if forced_B is not None:
        offset = jnp.where(forced_B >= 0, forced_B % width, offset)
    log_total = jnp.log(total)
    entropy = log_total - jnp.sum(jnp.sum(mass * centred, axis=2), axis=1) / total
    return Drawn(chosen * width + offset, _take(inside, offset) - log_total, entropy)


def _ordered(x: jax.Array) -> jax.Array:
    """float32 -> uint32 with the same order."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))


def _largest_threshold(codes_BxV: jax.Array, weight_BxV: jax.Array, need_B: jax.Array) -> jax.Array:
    """The largest code t of each row whose entries >= t weigh at least `need`, bit by bit from the top."""

    def bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        trial = threshold | (jnp.uint32(1) << (jnp.uint32(31) - i.astype(jnp.uint32)))
        kept = jnp.sum(jnp.where(codes_BxV >= trial[:, None], weight_BxV, jnp.float32(0)), axis=1)
        return jnp.where(kept >= need_B, trial, threshold)

    return lax.fori_loop(0, 32, bit, jnp.zeros(codes_BxV.shape[0], jnp.uint32))


def truncate(logits_BxV: jax.Array, temperature_B: jax.Array, top_p_B: jax.Array, top_k_B: jax.Array) -> jax.Array:
    """Logits with everything outside top-k, then outside the smallest set of mass top_p (at the temperature), at NEGATIVE.

    top_k 0 and top_p 1 keep a row whole. The mass of top-p is that of the tokens which top-k left.
    """
    V = logits_BxV.shape[1]
    codes = _ordered(logits_BxV)
    some_k = jnp.where((top_k_B > 0) & (top_k_B < V), top_k_B, V).astype(jnp.float32)
    by_k = _largest_threshold(codes, jnp.ones_like(logits_BxV), some_k)
    logits = jnp.where(codes >= by_k[:, None], logits_BxV, NEGATIVE)
    divisor = jnp.where(temperature_B == 0, jnp.float32(1.0), temperature_B)
    probs = jax.nn.softmax(logits / divisor[:, None], axis=1)
    by_p = _largest_threshold(codes, probs, jnp.where(top_p_B < 1, top_p_B, jnp.float32(0)))
    return jnp.where((top_p_B[:, None] < 1) & (codes < by_p[:, None]), NEGATIVE, logits)


def forbid(logits_BxV: jax.Array, ids: tuple[int, ...], rows_B: jax.Array) -> jax.Array:
    """Logits with `ids` masked in the rows where `rows` is true (stop ids before the minimum length)."""
    if not ids:
        return logits_BxV
    columns = jnp.asarray(np.asarray(ids, np.int32))
    return logits_BxV.at[:, columns].min(jnp.where(rows_B, jnp.float32(NEGATIVE), jnp.float32(jnp.inf))[:, None])
