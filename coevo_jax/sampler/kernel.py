"""Decode attention on TPU: a Pallas kernel that reads only the filled tiles of a cache.

One grid step is one tile of `block` positions of one row. Which tile a step takes is worked out before the kernel starts and is
known to the index maps through scalar prefetch, and the grid is as long as the sum of the rows' filled tiles: a tile outside
first..length costs neither a fetch nor an empty step, whatever the size of the cache. Results are parts of a softmax (weighted
sum, peak, total), so that a shared head, a row's own positions and a staging window are attended apart and merged exactly.

On chips with two cores to a device (v4, v5p) the cores share the kv heads: an even number of them on a device beats one.

Axes: B rows, R rows of the cache, H heads, K kv heads, G query heads a kv head (padded to sublanes), d head width, S positions,
N grid steps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from coevo_jax.errors import UserError

NEGATIVE = -1e30  # peak of an empty part; finite, so that merging two empty parts gives zeros and not NaN
LANES = 128
TILE_BUDGET = 8 * 2**20  # bytes of VMEM for the double-buffered tiles of one step; half of what a kernel may use by default
Part = tuple[jax.Array, jax.Array, jax.Array]


def decode_attention_kernel(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    first: jax.Array,
    length: jax.Array,
    *,
    key_scale: jax.Array | None = None,
    value_scale: jax.Array | None = None,
    rows: jax.Array | None = None,
    block: int = 512,
    interpret: bool = False,
    heads: int | None = None,
    mesh: Mesh | None = None,
) -> Part:
    """Part of the attention of q [B,H,d] over positions first <= s < length (both [B] int32) of its row in the cache.

    keys [R,K,d,S] and values [R,K,S,d] in float32, bfloat16 or int8; int8 needs key_scale and value_scale [R,K,S] float32. Row b
    reads cache row `rows[b]`, or b where rows is None; other rows are not touched. Returns the un-normalised sum of
    exp(score - peak) * value [B,H,d], the peak score and the sum of exp(score - peak), both [B,H], all float32, for merge_parts;
    an empty range gives (0, NEGATIVE, 0). Products run in bfloat16 where q and the cache fit it, else in float32.

    block: positions a tile; on TPU a multiple of 128. heads: kv heads a step (None = half of them, or what VMEM holds).
    mesh: cuts B and R over data and fsdp and heads over tensor; `rows` then counts within the shard's own cache rows.
    """
    _check(q, keys, values, key_scale, value_scale, rows, block, interpret)
    scales = None if key_scale is None or value_scale is None else (key_scale, value_scale)
    run = functools.partial(_attend, block=min(block, keys.shape[3]), interpret=interpret, heads=heads)
    operands = (q, keys, values, first, length, scales, rows)
    if mesh is None:
        return run(*operands)
    tensor = "tensor" if keys.shape[1] % mesh.shape["tensor"] == 0 else None
    row, head = P(("data", "fsdp")), P(("data", "fsdp"), tensor)
    specs = (head, head, head, row, row, scales and (head, head), None if rows is None else row)
    # the kernel is opaque to the partitioner and has no rule for which axes its outputs vary over
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(head, head, head), check_vma=False)(*operands)


def merge_parts(parts: Sequence[Part]) -> Part:
    """One part out of several over disjoint positions; empty parts change nothing."""
    outs, peaks, totals = zip(*parts)
    peak = functools.reduce(jnp.maximum, peaks)
    weights = [jnp.exp(p - peak) for p in peaks]
    return sum_(w[..., None] * o for w, o in zip(weights, outs)), peak, sum_(w * t for w, t in zip(weights, totals))


def merge_partials(parts: Sequence[Part]) -> jax.Array:
    """Attention [B,H,d] float32 over all positions of the parts; zeros where every part is empty."""
    out, _, total = merge_parts(parts)
    return out / jnp.where(total > 0, total, jnp.float32(1))[..., None]


def sum_(terms: Any) -> jax.Array:
    """Sum of arrays, without the integer zero that `sum` starts from."""
    return functools.reduce(jnp.add, terms)


def _check(q: Any, keys: Any, values: Any, key_scale: Any, value_scale: Any, rows: Any, block: int, interpret: bool) -> None:
    B, H, d = q.shape
    R, K, _, S = keys.shape
    if keys.shape != (R, K, d, S) or values.shape != (R, K, S, d) or H % K:
        raise ValueError(f"q {q.shape}, keys {keys.shape}, values {values.shape}: want [B,H,d], [R,K,d,S], [R,K,S,d] and K | H")
    if rows is None and R != B:
        raise ValueError(f"{B} queries and {R} cache rows: `rows` must say which row each query reads")
    int8 = keys.dtype == jnp.int8
    if (values.dtype == jnp.int8) != int8 or (key_scale is None) == int8 or (value_scale is None) == int8:
        raise ValueError(f"keys {keys.dtype} and values {values.dtype}: int8 wants both scales, other types want none")
    if not interpret and block < S and block % LANES:
        raise UserError(f"a tile of {block} positions can't be compiled for a TPU", where="block",
                        expected=f"a multiple of {LANES}", nearest=str(max(LANES, block // LANES * LANES)))  # fmt: skip


def _attend(
    q: jax.Array, keys: jax.Array, values: jax.Array, first: jax.Array, length: jax.Array, scales: Any, rows: Any,
    *, block: int, interpret: bool, heads: int | None,
) -> Part:  # fmt: skip
    """decode_attention_kernel on one device."""
    B, H, d = q.shape
    K, S = keys.shape[1], keys.shape[3]
    G = H // K
    dtype = jnp.bfloat16 if q.dtype == jnp.bfloat16 and keys.dtype in (jnp.bfloat16, jnp.int8) else jnp.float32
    sublanes = 16 if dtype == jnp.bfloat16 else 8
    Gp = -(-G // sublanes) * sublanes
    grouped = jnp.pad(q.astype(dtype).reshape(B, K, G, d), ((0, 0), (0, 0), (0, Gp - G), (0, 0)))
    heads = heads or _heads_a_step(K, d, block, keys.dtype.itemsize)
    steps, row, source, tile = schedule(first, length, rows, block, pl.cdiv(S, block))

    # XLA stores heads narrower than a lane with S innermost; asking for d innermost would copy and pad the whole cache
    flipped = d % LANES != 0
    by_key = lambda g, n, _, source, tile, *__: (source[n], g, 0, tile[n])  # noqa: E731
    by_value = lambda g, n, _, source, tile, *__: (source[n], g, tile[n], 0)  # noqa: E731

    def tiles(shape: tuple[int, ...], index: Any) -> pl.BlockSpec:
        return pl.BlockSpec(shape, index, memory_space=pltpu.VMEM)

    own = tiles((1, heads, Gp, d), lambda g, n, row, *_: (row[n], g, 0, 0))
    stats = tiles((1, heads, Gp, LANES), lambda g, n, row, *_: (row[n], g, 0, 0))
    in_specs = [
        own,
        tiles((1, heads, d, block), by_key),
        tiles((1, heads, d, block), by_key) if flipped else tiles((1, heads, block, d), by_value),
    ]
    if scales is not None:  # all heads at once: a block of fewer sublanes than the array has would not be legal
        in_specs += [tiles((1, K, block), lambda g, n, _, source, tile, *__: (source[n], 0, tile[n]))] * 2
    cache = in_hbm(interpret, keys, values.swapaxes(2, 3) if flipped else values, *(scales or ()))
    out, stat = pl.pallas_call(
        functools.partial(
            _kernel, heads=heads, block=block, ragged=S % block != 0, quantised=scales is not None, flipped=flipped
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5, grid=(K // heads, steps), in_specs=in_specs, out_specs=[own, stats]
        ),
        out_shape=[jax.ShapeDtypeStruct((B, K, Gp, width), jnp.float32) for width in (d, LANES)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="decode_attention",
    )(row, source, tile, first, length, grouped, *cache)
    flat = lambda x: x[:, :, :G].reshape(B, H, *x.shape[3:])  # noqa: E731
    return flat(out), flat(stat[..., 0]), flat(stat[..., 1])


def in_hbm(interpret: bool, *cache: jax.Array) -> tuple[jax.Array, ...]:
    """Operands of a kernel that stay where they are: XLA moves a cache that fits into VMEM there whole, ahead of every step."""
    return cache if interpret else tuple(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in cache)


def schedule(first: jax.Array, length: jax.Array, rows: jax.Array | None, block: int, tiles: int) -> tuple[jax.Array, ...]:
    """Grid steps in use (scalar) and, per step of the longest possible grid [B * tiles]: row, its cache row, its tile; int32.

    A row with nothing to read has one step, which writes its empty result; it names cache row 0, tile 0, so that neighbours of
    this kind share one fetch. Layers with the same ranges have the same schedule, which XLA computes once.
    """
    B = first.shape[0]
    empty = length <= first
    begin = jnp.where(empty, 0, first // block)
    count = jnp.where(empty, 1, (length + (block - 1)) // block - begin)
    end = jnp.cumsum(count, dtype=jnp.int32)
    n = jnp.arange(B * tiles, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(end[None] <= n[:, None], axis=1, dtype=jnp.int32), B - 1)
    source = jnp.where(empty, 0, jnp.arange(B, dtype=jnp.int32) if rows is None else rows)
    tile = jnp.minimum(begin[row] + n - (end - count)[row], tiles - 1)
    return end[-1], row, source[row], tile


def _heads_a_step(K: int, d: int, block: int, itemsize: int) -> int:
    """Half of the kv heads, so that two cores share the work; fewer where VMEM can't hold their tiles twice."""
    a_head = 2 * (d + max(d, LANES)) * block * itemsize
    fitting = [n for n in range(1, max(K // 2, 1) + 1) if K % n == 0 and n * a_head <= TILE_BUDGET]
    return max(fitting, default=1)


def _kernel(  # type: ignore[no-untyped-def]
    row_N, source_N, tile_N, first_B, length_B, q, keys, values, *refs, heads, block, ragged, quantised, flipped
):
    """One tile: fold its scores into the running sum, peak (lane 0 of stat) and total (lane 1), kept in VMEM along a row."""
    key_scale, value_scale, out, stat = refs if quantised else (None, None, *refs)
    g, n = pl.program_id(0), pl.program_id(1)
    b = row_N[n]
    lane = lax.broadcasted_iota(jnp.int32, stat.shape[2:], 1)

    @pl.when((n == 0) | (row_N[jnp.maximum(n - 1, 0)] != b))
    def _start() -> None:
        out[...] = jnp.zeros(out.shape, jnp.float32)
        for j in range(heads):
            stat[0, j] = jnp.where(lane == 0, jnp.float32(NEGATIVE), jnp.float32(0))

    def seen(shape: tuple[int, int], axis: int) -> jax.Array:
        s = tile_N[n] * block + lax.broadcasted_iota(jnp.int32, shape, axis)
        return (s >= first_B[b]) & (s < length_B[b])

    @pl.when(length_B[b] > first_B[b])
    def _fold() -> None:
        wide, tall = seen((1, block), 1), seen((block, 1), 0)
        for j in range(heads):
            scores = _product(q[0, j], keys[0, j]) * jnp.float32(q.shape[3] ** -0.5)
            if quantised:
                scores = scores * key_scale[0, pl.ds(g * heads + j, 1), :]
            scores = jnp.where(wide, scores, jnp.float32(NEGATIVE))
            before = stat[0, j]
            peak = jnp.maximum(before[:, :1], jnp.max(scores, axis=1, keepdims=True))
            kept = jnp.exp(before[:, :1] - peak)
            weights = jnp.where(wide, jnp.exp(scores - peak), jnp.float32(0))
            total = before[:, 1:2] * kept + jnp.sum(weights, axis=1, keepdims=True)
            if quantised:  # the last tile may reach beyond the array, where anything may stand
                weights = jnp.where(wide, weights * value_scale[0, pl.ds(g * heads + j, 1), :], jnp.float32(0))
            v = _widen(values[0, j], q.dtype)
            v = jnp.where(wide if flipped else tall, v, jnp.zeros((), v.dtype)) if ragged else v
            out[0, j] = out[0, j] * kept + _product(weights.astype(q.dtype), v, flipped)
            stat[0, j] = jnp.where(lane == 0, peak, total)


def _widen(x: jax.Array, dtype: Any) -> jax.Array:
    """To the type of the products; int8 goes by way of float32, which every chip converts."""
    return (x.astype(jnp.float32) if x.dtype == jnp.int8 else x).astype(dtype)


def _product(a: jax.Array, b: jax.Array, flipped: bool = False) -> jax.Array:
    """a @ b, or a @ b.T, accumulated in float32; float32 operands are not rounded on the way."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    contract = (((1,), (1 if flipped else 0,)), ((), ()))
    return lax.dot_general(a, _widen(b, a.dtype), contract, precision=precision, preferred_element_type=jnp.float32)
