"""After a dispatch: the tokens of the staging window go into the cache, in place.

A row's new tokens lie at positions of its own, anywhere in a tile, and a TPU addresses whole tiles. So the kernel reads the one
or few aligned tiles that a row's tokens touch, places the tokens among the old ones and writes the tiles back; the rest of the
cache is not read. Placing is a product with a matrix of zeros and ones, which is exact: each sum has one term.

Axes: R rows, K kv heads, d head width, S positions, W positions of the window, t positions a tile.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from coevo_jax.sampler.kernel import LANES, in_hbm
from coevo_jax.sampler.kv import KV

TILE_BUDGET = 8 * 2**20  # bytes of VMEM for tiles in and out, each twice


def flush_plain(kv: KV, window: KV, start_R: jax.Array, count_R: jax.Array) -> KV:
    """`kv` with the first `count` positions of each row of `window` at `start` and after; what goes beyond the end is dropped."""
    row = jnp.arange(start_R.shape[0])[:, None]
    s = jnp.arange(window.keys.shape[-1], dtype=jnp.int32)[None]
    at = jnp.where(s < count_R[:, None], start_R[:, None] + s, jnp.int32(1 << 30))
    put = lambda ref, new: ref.set(new, mode="drop", unique_indices=True)  # noqa: E731
    scales = (kv.key_scale, window.key_scale), (kv.value_scale, window.value_scale)
    return KV(
        put(kv.keys.at[row, :, :, at], window.keys.transpose(0, 3, 1, 2)),
        put(kv.values.at[row, :, at], window.values.transpose(0, 2, 1, 3)),
        *(None if a is None or b is None else put(a.at[row, :, at], b.transpose(0, 2, 1)) for a, b in scales),
    )


def flush_kernel(kv: KV, window: KV, start_R: jax.Array, count_R: jax.Array, *, interpret: bool = False) -> KV:
    """`flush_plain` as a kernel that changes the cache in place. start + count must not go beyond the end."""
    R, K, d, S = kv.keys.shape
    W, t = window.keys.shape[-1], min(LANES, S)
    tiles = -(-(W - 1) // t) + 1  # that W positions touch at most
    flipped = d % LANES != 0  # as in the attention kernel: XLA stores narrow heads with S innermost
    heads = _heads_a_step(K, d, t, W, kv.keys.dtype.itemsize) if kv.key_scale is None else K

    def tile(r: Any, j: Any, start: Any, count: Any) -> Any:
        """The row's j-th tile, its last one again where it has no more: that is written twice with the same values."""
        last = jnp.maximum(start[r] + count[r] - 1, start[r])
        return jnp.minimum(jnp.minimum(start[r] // t + j, last // t), jnp.int32((S - 1) // t))

    def by_key(width: int, place: Any) -> pl.BlockSpec:
        return pl.BlockSpec((1, heads, d, width), lambda g, r, j, *s: (r, g, 0, place(r, j, *s)))

    def by_value(width: int, place: Any) -> pl.BlockSpec:
        return pl.BlockSpec((1, heads, width, d), lambda g, r, j, *s: (r, g, place(r, j, *s), 0))

    def by_scale(width: int, place: Any) -> pl.BlockSpec:
        return pl.BlockSpec((1, K, width), lambda g, r, j, *s: (r, 0, place(r, j, *s)))

    swap = lambda x: x.swapaxes(2, 3) if flipped else x  # noqa: E731
    kinds, cache, new = [by_key, by_key if flipped else by_value], [kv.keys, swap(kv.values)], [window.keys, swap(window.values)]
    if kv.key_scale is not None:
        kinds += [by_scale, by_scale]
        cache += [kv.key_scale, kv.value_scale]
        new += [window.key_scale, window.value_scale]
    whole = lambda *_: 0  # noqa: E731
    out = pl.pallas_call(
        functools.partial(_kernel, tile=tile, t=t, kinds=len(kinds), flipped=flipped),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(K // heads, R, tiles),
            in_specs=[*(kind(W, whole) for kind in kinds), *(kind(t, tile) for kind in kinds)],
            out_specs=[kind(t, tile) for kind in kinds],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cache],
        input_output_aliases={2 + len(kinds) + i: i for i in range(len(kinds))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="flush_window",
    )(start_R, count_R, *new, *in_hbm(interpret, *cache))
    return KV(out[0], swap(out[1]), *out[2:])


def _heads_a_step(K: int, d: int, t: int, W: int, itemsize: int) -> int:
    """Half of the kv heads, so that two cores share the work; fewer where VMEM can't hold their tiles."""
    a_head = max(d, LANES) * itemsize * (8 * t + 4 * max(W, LANES))
    fitting = [n for n in range(1, max(K // 2, 1) + 1) if K % n == 0 and n * a_head <= TILE_BUDGET]
    return max(fitting, default=1)


def _kernel(start_R, count_R, *refs, tile, t, kinds, flipped):  # type: ignore[no-untyped-def]
    """One tile of one row."""
    new, old, out = refs[:kinds], refs[kinds : 2 * kinds], refs[2 * kinds :]
    r, j = pl.program_id(1), pl.program_id(2)
    W = new[0].shape[-1]
    begin = tile(r, j, start_R, count_R) * t - start_R[r]  # the window's position that comes first in the tile, may be negative

    def chosen(shape: tuple[int, int], window_axis: int) -> jax.Array:
        """Which position of the window stands where in the tile; no row or column has two."""
        w = lax.broadcasted_iota(jnp.int32, shape, window_axis)
        s = begin + lax.broadcasted_iota(jnp.int32, shape, 1 - window_axis)
        return (w == s) & (w < count_R[r])

    def fresh(shape: tuple[int, ...], axis: int) -> jax.Array:
        s = begin + lax.broadcasted_iota(jnp.int32, shape, axis)
        return (s >= 0) & (s < count_R[r])

    def kept(x: jax.Array, axis: int) -> jax.Array:
        """What is not of this dispatch is not read: 0 times NaN is NaN."""
        w = lax.broadcasted_iota(jnp.int32, x.shape, axis)
        return jnp.where(w < count_R[r], x, jnp.zeros((), x.dtype))

    wide, tall = chosen((W, t), 0), chosen((t, W), 1)
    for n in range(old[0].shape[1]):
        for i in (0, 1):
            last = i == 0 or flipped  # positions are the last axis
            x = kept(_exact(new[i][0, n]), 1 if last else 0)
            moved = _product(x, wide.astype(x.dtype)) if last else _product(tall.astype(x.dtype), x)
            before = old[i][0, n]
            moved = moved.astype(jnp.int32).astype(before.dtype) if before.dtype == jnp.int8 else moved.astype(before.dtype)
            out[i][0, n] = jnp.where(fresh(before.shape, 1 if last else 0), moved, before)
    for i in range(2, kinds):
        x = kept(new[i][0], 1)
        out[i][0] = jnp.where(fresh(old[i].shape[1:], 1), _product(x, wide.astype(x.dtype)), old[i][0])


def _exact(x: jax.Array) -> jax.Array:
    """A type for products that holds every value; int8 goes by way of float32, which every chip converts."""
    return x.astype(jnp.float32).astype(jnp.bfloat16) if x.dtype == jnp.int8 else x


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b in float32, without rounding of either."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
