"""Logits of every family against transformers' (tests/golden/make_golden.py), and the properties that packing rests on."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coevo_jax.config import MeshConfig
from coevo_jax.mesh import batch_sharding, make_mesh
from coevo_jax.models.forward import forward, unembed
from coevo_jax.models.load import LoadedModel, load_model

GOLDEN = pathlib.Path(__file__).parent / "golden"
FAMILIES = ["llama", "llama3", "qwen2", "qwen2_yarn", "qwen3", "mistral", "olmo3"]


@functools.cache
def model(family: str) -> LoadedModel:
    return load_model(str(GOLDEN / family))


@functools.partial(jax.jit, static_argnames=("spec", "remat"))
def logits(params, spec, tokens, positions, segments, remat="none"):
    return unembed(params, spec, forward(params, spec, tokens, positions, segments, remat=remat))


def golden(family):
    data = np.load(GOLDEN / family / "golden.npz")
    return jnp.asarray(data["tokens"]), data["logits"]


def rows(tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return positions, jnp.ones_like(tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family):
    tokens, expected = golden(family)
    m = model(family)
    np.testing.assert_allclose(logits(m.params, m.spec, tokens, *rows(tokens)), expected, atol=1e-4)


@pytest.mark.parametrize("family", ["llama3", "mistral", "olmo3"])
def test_packed_rows_equal_unpacked_ones(family):
    """B13, B34, B37: left padding, right padding, two sequences in a row: each sees itself alone, whatever the padding holds."""
    (tokens, expected), m = golden(family), model(family)
    T = tokens.shape[1]
    a, b = 17, 11  # lengths; pieces of the golden rows, so that their logits are known
    packed = jnp.full((1, T), 2, jnp.int32)  # padding is the end token
    packed = packed.at[0, 3 : 3 + a].set(tokens[0, :a]).at[0, 3 + a : 3 + a + b].set(tokens[1, :b])
    positions = np.zeros((1, T), np.int32)
    positions[0, 3 : 3 + a + b] = [*range(a), *range(b)]
    segments = np.zeros((1, T), np.int32)
    segments[0, 3 : 3 + a + b] = [1] * a + [2] * b
    for padding in (2, 77):
        row = jnp.where(jnp.asarray(segments) == 0, padding, packed)
        found = logits(m.params, m.spec, row, jnp.asarray(positions), jnp.asarray(segments))
        np.testing.assert_allclose(found[0, 3 : 3 + a], expected[0, :a], atol=1e-4)
        np.testing.assert_allclose(found[0, 3 + a : 3 + a + b], expected[1, :b], atol=1e-4)
        assert np.isfinite(found).all()


@pytest.mark.parametrize("family", ["llama3", "mistral", "olmo3"])
def test_gradients_reach_neither_the_future_nor_other_segments_nor_past_the_window(family):
    m = model(family)
    T, cut, at = 24, 9, 20  # segments [0,9) and [9,24); the output looked at
    tokens = golden(family)[0][:1, :T]
    positions = jnp.asarray([[*range(cut), *range(T - cut)]], jnp.int32)
    segments = jnp.asarray([[1] * cut + [2] * (T - cut)], jnp.int32)

    @jax.jit
    def output(embed):  # one embedding row a position, so that its gradient tells the positions apart
        params = m.params | {"embed": embed}
        hidden = forward(params, m.spec, jnp.arange(T, dtype=jnp.int32)[None], positions, segments)
        return jnp.sum(hidden[0, at] ** 3)

    reach = np.abs(jax.grad(output)(m.params["embed"][tokens[0]])).max(axis=1) > 0
    # windows add up over layers: 4 * (5 - 1) places back in mistral's four layers, all of the segment elsewhere
    first = max(cut, at - 16) if family == "mistral" else cut
    assert reach.tolist() == [first <= t <= at for t in range(T)]


def test_a_window_limits_what_one_layer_sees():
    m = model("mistral")
    one_layer = m.params | {"layers": jax.tree.map(lambda x: x[:1], m.params["layers"])}
    spec = dataclasses.replace(m.spec, layers=1, windows=m.spec.windows[:1])
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    places = rows(tokens)

    @jax.jit
    def output(embed):
        return jnp.sum(forward(one_layer | {"embed": embed}, spec, tokens, *places)[0, 10] ** 3)

    reach = np.abs(jax.grad(output)(m.params["embed"][:12])).max(axis=1) > 0
    assert reach.tolist() == [6 <= t <= 10 for t in range(12)]


@pytest.mark.parametrize("family", ["qwen2", "olmo3"])
def test_eight_devices_equal_one(family):
    m = model(family)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    sharded = load_model(str(GOLDEN / family), mesh)
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(sharded.params))
    for one, eight in zip(jax.tree.leaves(m.params), jax.tree.leaves(sharded.params), strict=True):
        np.testing.assert_array_equal(one, eight)
    tokens = jnp.tile(golden(family)[0], (2, 1))
    placed = [jax.device_put(x, batch_sharding(mesh)) for x in (tokens, *rows(tokens))]
    found = logits(sharded.params, m.spec, *placed)
    assert len(found.sharding.device_set) == 8
    np.testing.assert_allclose(found, logits(m.params, m.spec, tokens, *rows(tokens)), atol=1e-4)


def test_remat_changes_memory_and_not_results():
    m = model("qwen3")
    tokens, _ = golden("qwen3")

    @functools.partial(jax.jit, static_argnames="remat")
    def gradient(params, remat):
        return jax.value_and_grad(lambda p: jnp.mean(logits(p, m.spec, tokens, *rows(tokens), remat=remat) ** 2))(params)

    expected = gradient(m.params, "none")
    for remat in ("dots", "full"):
        for a, b in zip(jax.tree.leaves(gradient(m.params, remat)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_what_remat_keeps():
    """'dots' keeps the products and nothing made from them: of the feed-forward block two of the six values that 'none' keeps."""
    m = model("qwen3")
    tokens = jnp.ones((2, 512), jnp.int32)

    def kept(remat):
        def total(params):
            return jnp.sum(forward(params, m.spec, tokens, *rows(tokens), remat=remat))

        return jax.jit(jax.grad(total)).lower(m.params).compile().memory_analysis().temp_size_in_bytes

    none, dots, full = (kept(remat) for remat in ("none", "dots", "full"))
    feed_forward = 4 * tokens.size * m.spec.mlp_size * m.spec.layers
    assert none - dots > 3 * feed_forward and dots - full > feed_forward


@pytest.mark.model
def test_the_embedded_model_is_the_one_transformers_reads():
    from transformers import PreTrainedTokenizerFast

    m = load_model("smollm2")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(m.folder)
    data = np.load(GOLDEN / "smollm2.npz")
    for i, text in enumerate(data["texts"]):
        ids = tokenizer.encode(str(text), add_special_tokens=False)
        assert ids == data[f"tokens{i}"].tolist()
        tokens = jnp.asarray([ids], jnp.int32)
        found = np.asarray(logits(m.params, m.spec, tokens, *rows(tokens)))[0]
        top = np.take_along_axis(found, data[f"top_ids{i}"], axis=-1)
        np.testing.assert_allclose(top, data[f"top_logits{i}"], atol=2e-3)
        np.testing.assert_allclose(jax.nn.logsumexp(found, axis=-1), data[f"log_total{i}"], atol=2e-3)
        assert (found.argmax(-1) == data[f"top_ids{i}"][:, 0]).all()
