"""Attention by pairs of blocks against the einsum over whole rows: values, gradients, and what is left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coevo_jax.models.attention import _xla_attention
from coevo_jax.models.pair_attention import pair_attention

B, T, H, K, d, BLOCK = 2, 22, 4, 2, 8, 4


def packed(shared: bool):
    """Rows of segments 1..3 with padding at the end; shared: the first is the head of the others."""
    segments = np.asarray([[1] * 5 + [2] * 9 + [3] * 6 + [0] * 2, [1] * 2 + [2] * 12 + [3] * 8], np.int32)
    starts = np.asarray([[np.flatnonzero(row == s)[0] for s in row] for row in segments])
    positions = np.arange(T)[None] - starts + (segments > 1) * int(shared) * np.asarray([[5], [2]])
    parents = np.where(segments > 1, 1, 0) if shared else np.zeros_like(segments)
    return jnp.asarray(positions, jnp.int32), jnp.asarray(segments), jnp.asarray(parents, jnp.int32)


def qkv():
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, (B, T, heads, d)) for key, heads in zip(keys, (H, K, K)))


@pytest.mark.parametrize(("shared", "window"), [(False, None), (True, None), (True, 3), (False, 0)])
def test_values_and_gradients_equal_those_of_whole_rows(shared, window):
    positions, segments, parents = packed(shared)
    window = None if window is None else jnp.int32(window)
    mix = jnp.where(segments[..., None, None] > 0, jax.random.normal(jax.random.key(1), (B, T, H, d)), 0.0)

    def total(attend, *extra):
        run = lambda q, k, v: (attend(q, k, v, positions, segments, window, parents, *extra) * mix).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(run, (0, 1, 2)))(*qkv())

    found, expected = total(pair_attention, BLOCK), total(_xla_attention)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_blocks_of_other_segments_are_not_read():
    """Row 0: block 1 (tokens 4 to 7) holds segments 1 and 2, so queries of segment 3 never meet it. A masked NaN would show."""
    positions, segments, parents = packed(False)
    q, k, v = qkv()
    spoilt = v.at[0, 4:8].set(jnp.nan)
    attend = jax.jit(lambda v: pair_attention(q, k, v, positions, segments, None, parents, BLOCK))
    clean, found = np.asarray(attend(v)), np.asarray(attend(spoilt))
    np.testing.assert_array_equal(found[0, 16:], clean[0, 16:])
    assert np.isnan(found[0, 8:14]).all() and np.array_equal(found[1], clean[1])
