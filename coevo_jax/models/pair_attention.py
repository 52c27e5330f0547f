"""Attention over packed rows on one CPU: one pair of a block of queries and a block of keys after the other.

Pairs without a common segment are not computed, and what a pair needs stays in the cores' caches. Softmax is carried over the
pairs of a block, and the backward pass makes the scores of a pair again, as in FlashAttention (arXiv 2205.14135, algorithms 1
and 4).

Axes: B rows, T tokens of a row, N blocks of a row, n blocks of all rows, b tokens of a block, H heads, K kv heads, G query heads
a kv head, d head width, M = G b query rows of a block, S = b keys of a block.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

BLOCK = 128  # tokens
PAIRS = "pairs"  # the name under which a remat policy keeps what the backward pass needs beside q, k and v
NEGATIVE = -1e30  # finite: a query that sees nothing of a pair must not give NaN; later pairs take its weight to 0


class Marks(NamedTuple):
    """What tells who sees whom, in blocks: segments and their parents (0 = none), positions, and this layer's window or None."""

    segments_nxb: jax.Array
    parents_nxb: jax.Array
    positions_nxb: jax.Array
    window: jax.Array | None
    keys_nxN: jax.Array  # blocks of all rows that block n sees, in order, at the front
    count_n: jax.Array  # how many those are


def related(segments_BxNxb: jax.Array, parents_BxNxb: jax.Array) -> jax.Array:
    """May a query of block i see a key of block j? [B,N,N] bool, by segments' least and largest ids; blocks see themselves."""
    N = segments_BxNxb.shape[1]
    huge = jnp.iinfo(jnp.int32).max
    least = lambda x: jnp.where(x == 0, huge, x).min(2)  # noqa: E731
    first, last = least(segments_BxNxb), segments_BxNxb.max(2)
    from_, to = least(parents_BxNxb), parents_BxNxb.max(2)
    meets = lambda a, b: (a[:, :, None] <= last[:, None]) & (first[:, None] <= b[:, :, None])  # noqa: E731
    past, own = jnp.tril(jnp.ones((N, N), bool))[None], jnp.eye(N, dtype=bool)[None]
    return ((meets(first, last) | meets(from_, to)) & past) | own


def pair_attention(
    q_BxTxHxd: jax.Array, k_BxTxKxd: jax.Array, v_BxTxKxd: jax.Array,
    positions_BxT: jax.Array, segments_BxT: jax.Array, window: jax.Array | None = None, parents_BxT: jax.Array | None = None,
    block: int = BLOCK,
) -> jax.Array:  # fmt: skip
    """Causal attention [B,T,H,d] inside equal segments and to the parent segment, as attention.packed_attention's 'xla'."""
    B, T, H, d = q_BxTxHxd.shape
    K = k_BxTxKxd.shape[2]
    G, b = H // K, min(block, T)
    N = -(-T // b)
    cut = lambda x: jnp.pad(x, [(0, 0), (0, N * b - T)] + [(0, 0)] * (x.ndim - 2)).reshape(B * N, b, *x.shape[2:])  # noqa: E731
    segments = cut(segments_BxT)
    parents = jnp.zeros_like(segments) if parents_BxT is None else cut(parents_BxT)
    seen = related(segments.reshape(B, N, b), parents.reshape(B, N, b)).reshape(B * N, N)
    order = jnp.argsort(~seen, axis=1, stable=True).astype(jnp.int32) + (np.arange(B * N, dtype=np.int32) // N * N)[:, None]
    marks = Marks(segments, parents, cut(positions_BxT), window, order, seen.sum(1, dtype=jnp.int32))
    q = cut(q_BxTxHxd * jnp.asarray(d**-0.5, q_BxTxHxd.dtype)).reshape(B * N, b, K, G, d)
    q = q.transpose(0, 2, 3, 1, 4).reshape(B * N, K, G * b, d)
    k, v = (cut(x).transpose(0, 2, 1, 3) for x in (k_BxTxKxd, v_BxTxKxd))
    out = _attend(q, k, v, marks)
    out = out.reshape(B * N, K, G, b, d).transpose(0, 3, 1, 2, 4).reshape(B, N * b, H, d)
    return out[:, :T]


def _scores(q_KxMxd: jax.Array, k_KxSxd: jax.Array, marks: Marks, i: jax.Array, j: jax.Array) -> jax.Array:
    """Scores [K,M,S] float32 of query block i and key block j, NEGATIVE where a query may not look."""
    b = marks.segments_nxb.shape[1]
    G = q_KxMxd.shape[1] // b
    at = jnp.arange(b)
    queries, keys = marks.segments_nxb[i][:, None], marks.segments_nxb[j][None]
    parents = marks.parents_nxb[i][:, None]
    seen = ((queries == keys) | ((parents == keys) & (parents > 0))) & ((i > j) | (at[:, None] >= at[None]))
    if marks.window is not None:
        age = marks.positions_nxb[i][:, None] - marks.positions_nxb[j][None]
        seen &= (marks.window == 0) | (age < marks.window)
    scores = jnp.einsum("KMd,KSd->KMS", q_KxMxd, k_KxSxd, preferred_element_type=jnp.float32)
    return jnp.where(jnp.tile(seen, (G, 1))[None], scores, NEGATIVE)


@jax.custom_vjp
def _attend(q_nxKxMxd: jax.Array, k_nxKxSxd: jax.Array, v_nxKxSxd: jax.Array, marks: Marks) -> jax.Array:
    return _forward(q_nxKxMxd, k_nxKxSxd, v_nxKxSxd, marks)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, marks: Marks) -> tuple[jax.Array, jax.Array]:
    """Attention [n,K,M,d] and the logarithm of the softmax's sum [n,K,M]."""
    n, K, M, d = q.shape

    def pair(at: jax.Array, carry: Any, i: jax.Array) -> Any:
        peak, total, out = carry
        j = marks.keys_nxN[i, at]
        scores = _scores(q[i], k[j], marks, i, j)
        higher = jnp.maximum(peak, scores.max(-1))
        weights, shrink = jnp.exp(scores - higher[..., None]), jnp.exp(peak - higher)
        values = jnp.einsum("KMS,KSd->KMd", weights.astype(v.dtype), v[j], preferred_element_type=jnp.float32)
        return higher, total * shrink + weights.sum(-1), out * shrink[..., None] + values

    def block(_: None, i: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
        start = jnp.full((K, M), NEGATIVE, jnp.float32), jnp.zeros((K, M), jnp.float32), jnp.zeros((K, M, d), jnp.float32)
        peak, total, out = lax.fori_loop(0, marks.count_n[i], functools.partial(pair, i=i), start)
        return None, ((out / total[..., None]).astype(v.dtype), peak + jnp.log(total))

    return lax.scan(block, None, jnp.arange(n, dtype=jnp.int32))[1]


def _saved(q: jax.Array, k: jax.Array, v: jax.Array, marks: Marks) -> tuple[jax.Array, Any]:
    out, log_total = (checkpoint_name(x, PAIRS) for x in _forward(q, k, v, marks))
    return out, (q, k, v, marks, out, log_total)


def _backward(saved: Any, of_out: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """With weights w and their cotangent u = of_out v': d scores = w (u - of_out out)."""
    q, k, v, marks, out, log_total = saved
    inner = jnp.sum(of_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def pair(at: jax.Array, carry: Any, i: jax.Array) -> Any:
        of_q, of_k, of_v = carry
        j = marks.keys_nxN[i, at]
        weights = jnp.exp(_scores(q[i], k[j], marks, i, j) - log_total[i][..., None])
        of_weights = jnp.einsum("KMd,KSd->KMS", of_out[i], v[j], preferred_element_type=jnp.float32)
        of_scores = (weights * (of_weights - inner[i][..., None])).astype(q.dtype)
        add = lambda x, y: lax.dynamic_update_index_in_dim(x, x[j] + y, j, 0)  # noqa: E731
        sums = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        of_v = add(of_v, sums("KMS,KMd->KSd", weights.astype(v.dtype), of_out[i]))
        of_k = add(of_k, sums("KMS,KMd->KSd", of_scores, q[i]))
        return of_q + sums("KMS,KSd->KMd", of_scores, k[j]), of_k, of_v

    def block(carry: tuple[jax.Array, jax.Array], i: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        start = jnp.zeros(q.shape[1:], jnp.float32), *carry
        of_q, of_k, of_v = lax.fori_loop(0, marks.count_n[i], functools.partial(pair, i=i), start)
        return (of_k, of_v), of_q.astype(q.dtype)

    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    (of_k, of_v), of_q = lax.scan(block, zeros, jnp.arange(len(q), dtype=jnp.int32))
    return of_q, of_k.astype(k.dtype), of_v.astype(v.dtype), None


_attend.defvjp(_saved, _backward)
