"""A cheap fingerprint of parameters: equal for equal bits, whatever the sharding; computed on the devices.

It answers "are the sampler's weights the trainer's" and "did the judge change" (design.md 4.7). It is not cryptographic.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def fingerprint(params: Any, dtype: str = "") -> str:
    """16 hex digits over names, shapes, dtypes, bits and positions of all leaves of a pytree of arrays.

    dtype: that of the leaves cast to it, of which no copy is stored.
    """
    high, low = np.asarray(jax.device_get(_as_dtype(params, dtype) if dtype else device_fingerprint(params)))
    return f"{int(high):08x}{int(low):08x}"


@jax.jit
def device_fingerprint(params: Any) -> jax.Array:
    """uint32[2]: two sums modulo 2^32 of mixed words. Integer sums do not depend on their order, so neither on the sharding."""
    total = jnp.zeros((2,), jnp.uint32)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        words = _words(leaf)
        name = f"{jax.tree_util.keystr(path)} {jnp.shape(leaf)} {leaf.dtype}"
        total = total + _mix_leaf(words, zlib.crc32(name.encode()))
    return total


@functools.partial(jax.jit, static_argnames="dtype")
def _as_dtype(params: Any, dtype: str) -> jax.Array:
    return device_fingerprint(jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), params))


def _words(leaf: jax.Array) -> jax.Array:
    """The bits of a leaf as uint32 words (a 64-bit value gives two)."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    bits = jnp.finfo(leaf.dtype).bits if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.iinfo(leaf.dtype).bits
    if bits < 8:
        return leaf.astype(jnp.int8).astype(jnp.uint8).astype(jnp.uint32)
    unsigned = {8: jnp.uint8, 16: jnp.uint16}.get(bits, jnp.uint32)
    return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)


def _mix_leaf(words: jax.Array, seed: int) -> jax.Array:
    """uint32[2] of one leaf. Each word is mixed with its position, so that exchanged values change the sum."""
    first = _avalanche(words ^ _avalanche(_positions(words.shape) + jnp.uint32(seed)))
    second = _avalanche(first * jnp.uint32(0x9E3779B1) + words)
    # One reduction of both: XLA then fuses it all and stores no array of the leaf's size, which two reductions would.
    zero = jnp.uint32(0)
    sums = jax.lax.reduce(
        (first, second), (zero, zero), lambda left, right: (left[0] + right[0], left[1] + right[1]), tuple(range(words.ndim))
    )
    return jnp.stack(sums) + jnp.uint32(seed)  # the seed alone marks an empty leaf


def _positions(shape: tuple[int, ...]) -> jax.Array:
    """Flat index of each element modulo 2^32, from one iota an axis: no reshape, so no data moves between devices."""
    flat = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        flat = flat + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return flat


def _avalanche(word: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3 (32 bits, a bijection)."""
    word = (word ^ (word >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> jnp.uint32(16))
