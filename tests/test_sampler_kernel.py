"""The decode kernel (interpreted) equals a plain softmax over each row's own range; parts merge exactly."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coevo_jax.config import MeshConfig
from coevo_jax.errors import UserError
from coevo_jax.mesh import batch_sharding, make_mesh
from coevo_jax.sampler.kernel import NEGATIVE, decode_attention_kernel, merge_partials, merge_parts, schedule

BLOCK = 16
RANGES = np.array([[0, 1], [0, 16], [0, 17], [5, 5], [3, 41], [20, 33], [0, 0], [16, 50]], np.int32)  # first, length
attend = jax.jit(decode_attention_kernel, static_argnames=("block", "interpret", "heads", "mesh"))


def operands(B: int, R: int, K: int, G: int, d: int, S: int, dtype=np.float32):
    rng = np.random.default_rng(0)
    q, keys, values = (rng.normal(size=s).astype(np.float32) for s in ((B, K * G, d), (R, K, d, S), (R, K, S, d)))
    return jnp.asarray(q), jnp.asarray(keys, dtype), jnp.asarray(values, dtype)


def reference(q, keys, values, first, length, rows=None):
    """float64 (normalised out, peak, total) by the definition, row by row."""
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    G = q.shape[1] // keys.shape[1]
    out, peak, total = np.zeros(q.shape), np.full(q.shape[:2], NEGATIVE), np.zeros(q.shape[:2])
    for b, h in np.ndindex(q.shape[:2]):
        r, span = b if rows is None else rows[b], slice(first[b], length[b])
        scores = q[b, h] @ keys[r, h // G][:, span] * q.shape[2] ** -0.5
        if scores.size:
            weights = np.exp(scores - scores.max())
            peak[b, h], total[b, h] = scores.max(), weights.sum()
            out[b, h] = weights @ values[r, h // G, span] / weights.sum()
    return out, peak, total


def check(found, expected, atol):
    out, peak, total = map(np.asarray, found)
    np.testing.assert_allclose(merge_partials([found]), expected[0], atol=atol)
    np.testing.assert_allclose(peak, expected[1], atol=atol, rtol=1e-6)
    np.testing.assert_allclose(total, expected[2], rtol=max(atol, 1e-5))
    assert out.dtype == peak.dtype == total.dtype == np.float32


@pytest.mark.parametrize(
    ("K", "G", "d", "S", "heads"),
    [(2, 3, 64, 50, None), (2, 4, 128, 50, 2), (3, 1, 64, 53, 1), (1, 16, 16, 16, None), (4, 9, 16, 50, 2)],
)
def test_it_equals_a_plain_softmax(K, G, d, S, heads):
    q, keys, values = operands(8, 8, K, G, d, S)
    first, length = (np.minimum(x, S) for x in RANGES.T)
    found = attend(q, keys, values, first, length, block=BLOCK, interpret=True, heads=heads)
    check(found, reference(q, keys, values, first, length), 2e-6)


def test_only_the_range_is_read():
    """Whatever stands outside first..length, even NaN in other tiles, is not seen."""
    q, keys, values = operands(8, 8, 2, 2, 16, 64)
    first, length = RANGES.T
    s, ends = np.arange(64), (first // BLOCK * BLOCK, -(-length // BLOCK) * BLOCK)
    untouched = (s < ends[0][:, None]) | (s >= ends[1][:, None]) | (length <= first)[:, None]
    untouched[0] = False  # tile 0 of row 0 is what an empty row's step names
    hole = jnp.asarray(untouched)
    poisoned = jnp.where(hole[:, None, None], jnp.nan, keys), jnp.where(hole[:, None, :, None], jnp.nan, values)
    check(attend(q, *poisoned, first, length, block=BLOCK, interpret=True), reference(q, keys, values, first, length), 2e-6)


def test_the_grid_is_as_long_as_the_filled_tiles():
    steps, row, source, tile = map(np.asarray, schedule(*RANGES.T, None, BLOCK, 4))
    assert steps == 1 + 1 + 2 + 1 + 3 + 2 + 1 + 3  # an empty row has one
    assert list(zip(row[:steps].tolist(), tile[:steps].tolist())) == [
        (0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (4, 0), (4, 1), (4, 2), (5, 1), (5, 2), (6, 0), (7, 1), (7, 2), (7, 3),
    ]  # fmt: skip
    assert source[:steps].tolist() == [0, 1, 2, 2, 0, 4, 4, 4, 5, 5, 0, 7, 7, 7]
    assert row.shape == (8 * 4,) and tile.max() < 4


def test_rows_pick_shared_heads():
    q, keys, values = operands(8, 3, 2, 3, 16, 50)
    rows = np.array([2, 2, 0, 1, 1, 2, 0, 2], np.int32)
    first, length = RANGES.T
    found = attend(q, keys, values, first, length, rows=rows, block=BLOCK, interpret=True)
    check(found, reference(q, keys, values, first, length, rows), 2e-6)


def test_bfloat16_and_int8_caches():
    first, length = RANGES.T
    q, keys, values = operands(8, 8, 2, 4, 64, 50, jnp.bfloat16)
    expected = reference(q.astype(jnp.bfloat16), keys, values, first, length)
    run = lambda *x, **scales: attend(*x, first, length, block=BLOCK, interpret=True, **scales)  # noqa: E731
    check(run(q.astype(jnp.bfloat16), keys, values), expected, 1e-2)
    check(run(q, keys, values), reference(q, keys, values, first, length), 2e-6)  # a float32 query is not rounded

    rng = np.random.default_rng(1)
    k8, v8 = (jnp.asarray(rng.integers(-127, 128, x.shape), jnp.int8) for x in (keys, values))
    ks, vs = (jnp.asarray(rng.uniform(0.005, 0.02, (8, 2, 50)), jnp.float32) for _ in range(2))
    full = k8.astype(jnp.float32) * ks[:, :, None], v8.astype(jnp.float32) * vs[..., None]
    check(run(q, k8, v8, key_scale=ks, value_scale=vs), reference(q, *full, first, length), 5e-6)
    q16 = q.astype(jnp.bfloat16)
    check(run(q16, k8, v8, key_scale=ks, value_scale=vs), reference(q16, *full, first, length), 1e-2)


def test_parts_merge_to_one_softmax():
    """A shared head, an empty part and a row's own positions equal one softmax over all of them."""
    q, head_k, head_v = operands(4, 2, 2, 3, 16, 40)
    _, own_k, own_v = operands(4, 4, 2, 3, 16, 32)
    zero, rows = np.zeros(4, np.int32), np.array([1, 1, 0, 1], np.int32)
    heads, owns = np.array([33, 0, 40, 0], np.int32), np.array([7, 20, 0, 0], np.int32)
    head = attend(q, head_k, head_v, zero, heads, rows=rows, block=BLOCK, interpret=True)
    own = attend(q, own_k * 3, own_v, zero, owns, block=BLOCK, interpret=True)
    empty = attend(q, own_k, own_v, owns, owns, block=BLOCK, interpret=True)
    found = merge_partials([merge_parts([head, empty]), own])
    for b in range(4):
        spans = [(head_k, head_v, rows[b], heads[b]), (own_k * 3, own_v, b, owns[b])]
        k, v = (np.concatenate([np.asarray(x[i])[x[2], :, :, : x[3]] if i == 0 else np.asarray(x[i])[x[2], :, : x[3]]
                                for x in spans], axis=2 - i) for i in (0, 1))  # fmt: skip
        one = reference(q[b : b + 1], k[None], v[None], [0], [heads[b] + owns[b]])
        np.testing.assert_allclose(found[b], one[0][0], atol=2e-6)
    assert not np.any(np.asarray(found[3])) and not np.any(np.asarray(empty[2]))
    np.testing.assert_array_equal(merge_partials([own, empty])[0], merge_partials([own])[0])


def test_over_a_mesh_it_equals_one_device():
    q, keys, values = operands(8, 8, 4, 2, 16, 50)
    first, length = RANGES.T
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    one = attend(q, keys, values, first, length, block=BLOCK, interpret=True)
    placed = [jax.device_put(x, batch_sharding(mesh)) for x in (q, keys, values, first, length)]
    rows = jnp.asarray([0, 1] * 4, jnp.int32)  # within the two cache rows of each shard
    for choice in (None, rows):
        many = attend(*placed, rows=choice, block=BLOCK, interpret=True, mesh=mesh)
        for a, b in zip(many, one, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-6)


def test_wrong_operands_are_refused():
    q, keys, values = operands(4, 2, 2, 2, 16, 300)
    ends = jnp.zeros(4, jnp.int32)
    with pytest.raises(ValueError, match="`rows` must say"):
        decode_attention_kernel(q, keys, values, ends, ends)
    with pytest.raises(ValueError, match="int8 wants both scales"):
        decode_attention_kernel(q, keys.astype(jnp.int8), values.astype(jnp.int8), ends, ends, rows=ends)
    with pytest.raises(UserError, match="200 positions"):
        decode_attention_kernel(q, keys, values, ends, ends, rows=ends, block=200)
