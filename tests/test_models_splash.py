"""Splash attention equals the einsum (interpreted), over windows, packing and a mesh; and it compiles for a pod slice."""

from __future__ import annotations

import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from coevo_jax.config import MeshConfig
from coevo_jax.errors import UserError
from coevo_jax.mesh import AXES, batch_sharding, make_mesh, param_shardings
from coevo_jax.models.attention import packed_attention, related_blocks, splash_block, time_order
from coevo_jax.models.forward import forward, param_shapes
from coevo_jax.models.logprobs import token_logprobs
from coevo_jax.models.spec import ModelSpec

B, T, H, K, d = 2, 256, 4, 2, 16


def operands(rows: int = B):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (rows, T, heads, d)) for key, heads in zip(keys, (H, K, K)))
    lengths = (150, 70, 36)  # two sequences and padding
    segments = jnp.broadcast_to(jnp.asarray(np.repeat([1, 2, 0], lengths), jnp.int32), (rows, T))
    positions = jnp.broadcast_to(jnp.asarray(np.concatenate([np.arange(n) for n in lengths]), jnp.int32), (rows, T))
    return q, k, v, positions, segments


def test_values_and_gradients_equal_those_of_the_einsum():
    q, k, v, positions, segments = operands()
    real = (segments > 0)[..., None, None]

    def loss(q, k, v, window, choice):
        out = jnp.where(real, packed_attention(q, k, v, positions, segments, window, choice, windows=(40, 0)), 0.0)
        return jnp.sum(jnp.sin(out)), out

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True), static_argnames="choice")
    for window in (None, jnp.int32(40), jnp.int32(0)):
        results = [run(q, k, v, window, choice=choice) for choice in ("xla", "splash_interpret")]
        for a, b in zip(*map(jax.tree.leaves, results), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4)


def test_blocks_of_other_segments_are_left_out():
    """Values and gradients over 5 blocks; and keys that no block may look at can't do harm, be they NaN."""
    T, block = 640, splash_block(640)
    lengths = (100, 28, 200, 180, 40, 92)  # the last is padding
    ids = np.repeat([1, 2, 3, 4, 5, 0], lengths).astype(np.int32)
    related = related_blocks(ids, block)
    assert block == 128 and related.tolist() == (
        [[1, 0, 0, 0, 0], [0, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]
    )
    keys = jax.random.split(jax.random.key(1), 3)
    q, k, v = (jax.random.normal(key, (2, T, heads, d)) for key, heads in zip(keys, (H, K, K)))
    segments = jnp.broadcast_to(jnp.asarray(ids), (2, T))
    positions = jnp.broadcast_to(jnp.asarray(np.concatenate([np.arange(n) for n in lengths]), jnp.int32), (2, T))
    real = (segments > 0)[..., None, None]

    def loss(q, k, v, choice):
        out = jnp.where(real, packed_attention(q, k, v, positions, segments, choice=choice), 0.0)
        return jnp.sum(jnp.sin(out)), out

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True), static_argnames="choice")
    for a, b in zip(*(jax.tree.leaves(run(q, k, v, choice=c)) for c in ("xla", "splash_interpret")), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4)
    poisoned = k.at[:, :128].set(jnp.nan)
    (_, out), (dq, dk, dv) = run(q, poisoned, v, choice="splash_interpret")
    assert not any(bool(jnp.isnan(x[:, 128:548]).any()) for x in (out, dq, dk, dv)) and bool(jnp.isnan(out[:, :128]).any())
    assert not jnp.isnan(related_blocks(segments[0], block)).any() and (related_blocks(segments[0], block) == related).all()


def test_over_a_mesh_it_equals_one_device():
    q, k, v, positions, segments = operands(rows=4)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    expected = packed_attention(q, k, v, positions, segments)
    placed = [jax.device_put(x, batch_sharding(mesh)) for x in (q, k, v, positions, segments)]
    found = jax.jit(lambda *x: packed_attention(*x, choice="splash_interpret", mesh=mesh))(*placed)
    real = np.asarray(segments > 0)
    np.testing.assert_allclose(np.asarray(found)[real], np.asarray(expected)[real], atol=2e-5)


def test_over_a_rows_time_it_equals_one_device():
    """Values and gradients where two chips share a row of ten blocks, with and without a window."""
    mesh, T = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)), 1280
    order = time_order(T, 2)
    assert order[:256].tolist() == [*range(128), *range(256, 384)] and order[640:768].tolist() == list(range(128, 256))
    lengths = np.asarray(
        [[140, 660, 260, 220], [1200, 12, 0, 68], [30, 300, 800, 150], [128, 256, 384, 512]]
    )  # the last is padding
    segments = jnp.asarray(np.stack([np.repeat([1, 2, 3, 0], n) for n in lengths]), jnp.int32)
    positions = jnp.asarray(np.stack([np.concatenate([np.arange(n) for n in row]) for row in lengths]), jnp.int32)
    keys = jax.random.split(jax.random.key(2), 3)
    operands = [jax.random.normal(key, (4, T, heads, d)) for key, heads in zip(keys, (H, K, K))]
    real = (segments > 0)[..., None, None]

    def loss(q, k, v, window, along):
        rows, at = (q, k, v, positions, segments), {"windows": (40, 0)}
        if along:
            out = packed_attention(*(x[:, order] for x in rows), window, "splash_interpret", mesh=mesh, along=("tensor",), **at)
            out = out[:, np.argsort(order)]
        else:
            out = packed_attention(*rows, window, "xla", **at)
        out = jnp.where(real, out, 0.0)
        return jnp.sum(jnp.sin(out)), out

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True), static_argnames="along")
    for window in (None, jnp.int32(40)):
        for a, b in zip(*(jax.tree.leaves(run(*operands, window, along=x)) for x in (False, True)), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4)


def test_other_lengths_and_names_are_refused():
    q, k, v, positions, segments = (x[:, :100] for x in operands())
    with pytest.raises(UserError, match="100 tokens"):
        packed_attention(q, k, v, positions, segments, choice="splash")
    with pytest.raises(UserError, match="'flash'"):
        packed_attention(q, k, v, positions, segments, choice="flash")
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with pytest.raises(UserError, match="384 tokens over 2 chips"):
        packed_attention(*(jnp.repeat(x, 4, axis=1)[:, :384] for x in operands()), choice="splash", mesh=mesh, along=("tensor",))


@pytest.mark.tpu_aot
def test_the_gradient_compiles_for_eight_v5e_chips():
    """Kernels inside shard_map inside the layer scan, with windows, remat, bfloat16 and sharded parameters."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # another process may hold its lock
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    mesh = Mesh(np.asarray(chips, dtype=object).reshape(2, 2, 2), AXES)
    spec = ModelSpec("llama", 1024, 256, layers=2, heads=8, kv_heads=4, head_dim=128, mlp_size=512, windows=(256, 0))
    infos = param_shapes(spec)
    params = jax.tree.map(
        lambda info, sharding: jax.ShapeDtypeStruct(info.shape, jnp.bfloat16, sharding=sharding),
        infos, param_shardings(infos, mesh), is_leaf=lambda x: hasattr(x, "axes"),
    )  # fmt: skip
    ints = jax.ShapeDtypeStruct((8, 512), jnp.int32, sharding=batch_sharding(mesh))

    def loss(params, tokens, positions, segments):
        hidden = forward(
            params, spec, tokens, positions, segments, remat="full", attention="splash", dtype=jnp.bfloat16, mesh=mesh
        )
        return token_logprobs(params, spec, hidden, tokens, 1.0, 128)[0].sum()

    text = jax.jit(jax.grad(loss)).lower(params, ints, ints, ints).compile().as_text()
    assert text.count("tpu_custom_call") >= 4  # forward, its recomputation, dq, dkv
