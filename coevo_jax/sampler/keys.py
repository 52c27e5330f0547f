"""Noise by identity (design.md 4.5): a draw depends on (run seed, role, update, request, sample, token index) and nothing else.

Axes: B rows.
"""

from __future__ import annotations

import hashlib

import jax
import jax.numpy as jnp
import numpy as np


def row_key(seed: int, role: str, update: int, request: int, sample: int) -> np.ndarray:
    """Two uint32 words that name one completion's noise: BLAKE2b of its identity."""
    identity = f"{seed}\0{role}\0{update}\0{request}\0{sample}".encode()
    return np.frombuffer(hashlib.blake2b(identity, digest_size=8).digest(), "<u4").astype(np.uint32)


def token_uniforms(keys_Bx2: jax.Array, index_B: jax.Array) -> jax.Array:
    """Two uniforms in [0, 1) a row, [B,2] float32 with 24 bits each, from the token key fold_in(row key, token index)."""

    def bits(words: jax.Array, index: jax.Array) -> jax.Array:
        token_key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), index)
        return jax.random.bits(token_key, (2,), jnp.uint32)

    raw = jax.vmap(bits)(keys_Bx2, index_B)
    return (raw >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
