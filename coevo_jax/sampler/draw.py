"""Drawing one token a row from logits, with its log-prob and the entropy of the distribution drawn from.

The draw is an inverse CDF in two levels with two uniforms a token: first a chunk of the vocabulary by its mass, then a token
inside it. That costs two passes over the logits; Gumbel noise for every entry (V draws a token) costs more than the rest of the
head on a CPU. There the logits come as [V,B] and are taken in pieces that stay in a core's cache, each with its own peak.

Truncation (top-k, then top-p, as Hugging Face orders them) needs no sort: the smallest kept logit is found by bisection over the
float's bits, so equal logits at the border are all kept.

Axes: B rows, V vocabulary, C chunks, W entries a chunk, P pieces of chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

NEGATIVE = -1e30  # finite: exp gives 0 and 0 * NEGATIVE is 0, so masked entries add nothing to the entropy
PIECE_BYTES = 2**20


class Drawn(NamedTuple):
    token: jax.Array  # [B] int32
    logprob: jax.Array  # [B] float32
    entropy: jax.Array  # [B] float32, nats


class Masses(NamedTuple):
    """What a draw needs to know of all logits."""

    peaks: jax.Array  # [B,C] greatest logit of each chunk
    mass: jax.Array  # [B,C] sum of exp((logit - the row's peak) / temperature)
    weighted: jax.Array  # [B] sum over the vocabulary of exp(x) x, with the same x


def chunk_width(vocab: int) -> int:
    """Entries a chunk: the largest divisor of the vocabulary up to 512, or 256 (then the logits are padded) if all are tiny."""
    best = max(w for w in range(1, min(vocab, 512) + 1) if vocab % w == 0)
    return best if best >= 32 or best == vocab else 256


def _chunked(logits: jax.Array, axis: int) -> jax.Array:
    """The vocabulary's axis as two, [C,W]; padded where it doesn't divide."""
    V = logits.shape[axis]
    width = chunk_width(V)
    if pad := -V % width:
        logits = jnp.pad(logits, [(0, pad if a == axis else 0) for a in (0, 1)], constant_values=NEGATIVE)
    return logits.reshape(*logits.shape[:axis], (V + pad) // width, width, *logits.shape[axis + 1 :])


def _take(x_BxC: jax.Array, index_B: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_BxC, index_B.reshape(index_B.shape + (1,) * (x_BxC.ndim - 1)), axis=1)[:, 0]


def _first_above(mass_BxN: jax.Array, uniform_B: jax.Array) -> jax.Array:
    """Inverse CDF: the first n whose cumulative mass exceeds u * total. An entry of mass 0 is never chosen."""
    cumulative = jnp.cumsum(mass_BxN, axis=1)
    return jnp.argmax(cumulative > (uniform_B * cumulative[:, -1])[:, None], axis=1).astype(jnp.int32)


def _masses(chunks_BxCxW: jax.Array, inverse_B: jax.Array) -> Masses:
    """`Masses` at the temperature 1 / inverse."""
    peaks = jnp.max(chunks_BxCxW, axis=2)
    centred = (chunks_BxCxW - jnp.max(peaks, axis=1)[:, None, None]) * inverse_B[:, None, None]
    mass = jnp.exp(centred)
    return Masses(peaks, jnp.sum(mass, axis=2), jnp.sum(jnp.sum(mass * centred, axis=2), axis=1))


def _masses_by_piece(chunks_CxWxB: jax.Array, inverse_B: jax.Array) -> Masses:
    """The same, piece by piece; sums of a piece are relative to its own peak until all peaks are known."""
    C, W, B = chunks_CxWxB.shape
    P = next(n for n in range(1, C + 1) if C % n == 0 and (n == C or C // n * W * B * 4 <= PIECE_BYTES))
    pieces = chunks_CxWxB.reshape(P, C // P, W, B)

    def one(_: None, i: jax.Array) -> tuple[None, tuple[jax.Array, ...]]:
        piece = lax.dynamic_index_in_dim(pieces, i, keepdims=False)
        peaks = jnp.max(piece, axis=1)
        peak = jnp.max(peaks, axis=0)
        centred = (piece - peak[None, None]) * inverse_B[None, None]
        mass = jnp.exp(centred)
        return None, (peaks, peak, jnp.sum(mass, axis=1), jnp.sum(mass * centred, axis=(0, 1)))

    _, (peaks, peak_PxB, mass, weighted_PxB) = lax.scan(one, None, jnp.arange(P))
    shift_PxB = (peak_PxB - jnp.max(peak_PxB, axis=0)[None]) * inverse_B[None]  # x of a piece's peak
    scale_PxB = jnp.exp(shift_PxB)
    weighted = jnp.sum(scale_PxB * (weighted_PxB + shift_PxB * jnp.sum(mass, axis=1)), axis=0)
    return Masses(peaks.reshape(C, B).T, (mass * scale_PxB[:, None]).reshape(C, B).T, weighted)


def draw(
    logits: jax.Array,
    uniforms_Bx2: jax.Array,
    temperature_B: jax.Array,
    forced_B: jax.Array | None = None,
    vocab_first: bool = False,
) -> Drawn:
    """One token a row from softmax(logits / temperature). Temperature 0 is greedy, its log-prob taken at temperature 1.

    logits: [B,V], or [V,B] with vocab_first. forced: a token that a row must take (-1 = draw), with the log-prob that it has.
    """
    greedy = temperature_B == 0
    inverse = 1.0 / jnp.where(greedy, jnp.float32(1.0), temperature_B)
    chunks = _chunked(logits, 0 if vocab_first else 1)
    width = chunks.shape[1 if vocab_first else 2]
    peaks, chunk_mass, weighted = _masses_by_piece(chunks, inverse) if vocab_first else _masses(chunks, inverse)
    peak, total = jnp.max(peaks, axis=1), jnp.sum(chunk_mass, axis=1)
    chosen = jnp.where(greedy, jnp.argmax(peaks, axis=1).astype(jnp.int32), _first_above(chunk_mass, uniforms_Bx2[:, 0]))
    if forced_B is not None:
        chosen = jnp.where(forced_B >= 0, forced_B // width, chosen)
    if vocab_first:
        one_BxW = jnp.take_along_axis(chunks, chosen[None, None], axis=0)[0].T
    else:
        one_BxW = _take(chunks, chosen)
    inside = (one_BxW - peak[:, None]) * inverse[:, None]  # gathered again: cheaper than keeping all of them
    offset = jnp.where(greedy, jnp.argmax(inside, axis=1).astype(jnp.int32), _first_above(jnp.exp(inside), uniforms_Bx2[:, 1]))
    if forced_B is not None:
        offset = jnp.where(forced_B >= 0, forced_B % width, offset)
    log_total = jnp.log(total)
    return Drawn(chosen * width + offset, _take(inside, offset) - log_total, log_total - weighted / total)


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


def forbid(logits: jax.Array, ids: tuple[int, ...], rows_B: jax.Array, vocab_first: bool = False) -> jax.Array:
    """Logits, [B,V] or [V,B], with `ids` masked in the rows where `rows` is true (stop ids before the minimum length)."""
    if not ids:
        return logits
    entries = jnp.asarray(np.asarray(ids, np.int32))
    bound = jnp.where(rows_B, jnp.float32(NEGATIVE), jnp.float32(jnp.inf))
    return logits.at[entries].min(bound[None]) if vocab_first else logits.at[:, entries].min(bound[:, None])
