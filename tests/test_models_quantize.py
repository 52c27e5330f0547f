"""int8 weights: rounding against NumPy, the forward pass of every family, memory of decode, a mesh, a judge."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampler_support as ss
from train_support import tiny

from coevo_jax import loading
from coevo_jax.config import MeshConfig
from coevo_jax.errors import UserError
from coevo_jax.judges import JudgeItem, criterion_logits, make_judge
from coevo_jax.mesh import make_mesh, param_shardings
from coevo_jax.models.forward import ParamInfo, forward, init_params, param_shapes, unembed
from coevo_jax.models.load import load_model
from coevo_jax.models.quantize import (
    Int8Weight,
    compiler_options,
    dequantize_params,
    product,
    quantize_array,
    quantize_params,
    quantized_infos,
    weight_bytes,
)
from coevo_jax.models.spec import ModelSpec
from coevo_jax.records.fingerprint import fingerprint
from coevo_jax.rubrics import Criterion, Rubric
from coevo_jax.sampler import Engine, decode
from coevo_jax.text.chat import ChatTokenizer

SPECS = ss.SPECS | {"llama, untied": dataclasses.replace(ss.LLAMA, tied=False)}
is_int8 = lambda x: isinstance(x, Int8Weight)  # noqa: E731


def scales_of(w: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    top = np.abs(w).max(axis=axes)
    return np.where(top == 0, np.float32(1), top / np.float32(127))


@pytest.mark.parametrize(("shape", "axes"), [((7, 5), (1,)), ((5, 7), (0,)), ((3, 6, 4, 2), (1,)), ((3, 4, 2, 6), (1, 2))])
def test_values_and_scales_are_those_of_numpy(shape, axes):
    w = np.random.default_rng(0).normal(0, 1, shape).astype(np.float32)
    moved = np.moveaxis(w, axes, range(len(axes)))  # a view: channels are now w's other axes
    moved[(slice(None),) * len(axes) + (0,)] = 0.0
    moved[(slice(None),) * len(axes) + (1,)] *= 1000.0  # scales of channels are their own
    found = quantize_array(jnp.asarray(w), axes)
    scale = scales_of(w, axes)
    values = np.rint(w / np.expand_dims(np.asarray(found.scale), axes))  # a value on a border follows the scale's last bit
    assert found.values.dtype == jnp.int8 and found.scale.dtype == jnp.float32 and found.dtype == np.float32
    np.testing.assert_allclose(found.scale, scale, rtol=2e-7)
    np.testing.assert_array_equal(found.values, values)
    wide = np.expand_dims(scale, axes)
    assert (np.abs(values * wide - w) <= wide * 0.500001).all()
    top = np.abs(values).max(axis=axes)
    assert top[0].max() == 0 and set(np.unique(top)) <= {0, 127}


def test_weights_that_are_not_finite_are_not_hidden():
    w = jnp.asarray([[1.0, jnp.nan], [jnp.inf, 1.0], [1.0, 2.0]], jnp.float32)
    y = product("BD,VD->BV", jnp.ones((1, 2), jnp.float32), quantize_array(w, (1,)))
    assert np.isfinite(y[0]).tolist() == [False, False, True]


def test_bfloat16_products_are_rounded_once():
    """int8 values are exact in bfloat16, and sum and scale are float32."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(0, 1, (3, 64)), jnp.bfloat16)
    w = quantize_array(jnp.asarray(rng.normal(0, 1, (64, 8)), jnp.float32), (0,)).astype(jnp.bfloat16)
    found = product("BD,DF->BF", x, w)
    exact = np.asarray(x, np.float64) @ (np.asarray(w.values, np.float64) * np.asarray(w.scale, np.float64))
    assert found.dtype == jnp.bfloat16 and w.dtype == jnp.bfloat16 and w.values.dtype == jnp.int8
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2.0**-8)


@pytest.mark.parametrize("name", SPECS)
def test_the_matrices_and_only_they_are_int8(name):
    spec = SPECS[name]
    infos = param_shapes(spec)
    params = init_params(jax.random.key(0), spec)
    small = quantize_params(params)
    wanted = jax.tree.map(lambda info: info.fan_in > 0, infos, is_leaf=lambda x: isinstance(x, ParamInfo))
    assert jax.tree.map(is_int8, small, is_leaf=is_int8) == wanted
    planned = quantized_infos(infos, jnp.float32)
    shapes = lambda tree: jax.tree.map(lambda x: tuple(x.shape), tree, is_leaf=lambda x: isinstance(x, ParamInfo))  # noqa: E731
    assert shapes(planned) == shapes(small)
    matrices = sum(x.size for x, q in zip(jax.tree.leaves(params), jax.tree.leaves(wanted)) if q)
    scales = sum(q.scale.size for q in jax.tree.leaves(small, is_leaf=is_int8) if is_int8(q))
    assert weight_bytes(small) == weight_bytes(params) - 3 * matrices + 4 * scales


@functools.partial(jax.jit, static_argnums=(1, 3))
def logits_of(params, spec, tokens, dtype=jnp.float32):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return unembed(params, spec, forward(params, spec, tokens, positions, jnp.ones_like(tokens), dtype=dtype))


def relative(a, b) -> float:
    return float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b)))


@pytest.mark.parametrize("name", SPECS)
def test_forward_is_that_of_the_dequantised_weights_and_close_to_full_precision(name):
    spec = SPECS[name]
    params = ss.params_of(spec)
    small = quantize_params(params)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, spec.vocab_size, (2, 24)), jnp.int32)
    found, full = logits_of(small, spec, tokens), logits_of(params, spec, tokens)
    same = logits_of(dequantize_params(small), spec, tokens)
    np.testing.assert_allclose(found, same, atol=1e-5 * float(np.abs(same).max()), rtol=0)
    # A weight is off by at most 1/254 of its channel's largest: under 1 % of the products' size, over two layers and the head.
    assert 1e-4 < relative(found, full) < 0.03
    assert relative(logits_of(small, spec, tokens, jnp.bfloat16), full) < 0.06


def test_the_engine_decodes_and_scores_with_them():
    """The split a layer keeps int8, and cached decoding agrees with the whole forward pass of the same int8 weights."""
    spec = ss.SPECS["qwen2"]
    small = quantize_params(ss.params_of(spec))
    layers = decode.split_layers(small["layers"], jnp.float32)
    assert layers[1]["gate"].values.dtype == jnp.int8 and layers[1]["gate"].scale.shape == (spec.mlp_size,)
    before = fingerprint(small)
    engine = ss.new_engine(spec)
    prompts = ss.prompts_of(3)
    for prompt, (completion,) in zip(prompts, engine.generate(small, ss.requests_of(prompts, n=1))):
        rows = ss.trainer_logprobs(small, spec, prompt, completion.tokens, 1.0)
        np.testing.assert_allclose(completion.logprobs, rows[np.arange(len(rows)), completion.tokens], atol=1e-4)
        (scored,) = engine.score(small, [prompt], [completion.tokens])
        np.testing.assert_allclose(scored, completion.logprobs, atol=1e-4)
    assert fingerprint(small) == before


def test_decode_stores_no_widened_weights():
    """XLA would widen all matrices before the loop, which is as large as full precision."""
    spec = ModelSpec("llama", vocab_size=256, hidden_size=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp_size=512)
    params = init_params(jax.random.key(0), spec)
    small = quantize_params(params)
    engine = ss.new_engine(spec)
    engine.generate(small, ss.requests_of(ss.prompts_of(2), n=1))
    programs = [program for key, program in engine.programs._built.items() if key[0] == "decode"]
    largest = 4 * spec.hidden_size * spec.mlp_size
    assert programs and compiler_options(params) == {}
    for program in programs:
        assert program.memory_analysis().temp_size_in_bytes < 2 * largest < weight_bytes(params) / 5


def test_on_a_mesh():
    spec = ss.SPECS["qwen2"]
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    params = ss.params_of(spec)
    alone = quantize_params(params)
    infos = param_shapes(spec)
    small = quantize_params(jax.device_put(params, param_shardings(infos, mesh)), free=True)
    planned = param_shardings(quantized_infos(infos, jnp.float32), mesh)
    assert jax.tree.map(lambda x: x.sharding, small) == planned
    assert planned["layers"]["gate"].scale.spec[1] == "tensor" and small["layers"]["down"].scale.sharding.spec[1] == "fsdp"
    assert fingerprint(small) == fingerprint(alone)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, spec.vocab_size, (4, 16)), jnp.int32)
    np.testing.assert_allclose(logits_of(small, spec, tokens), logits_of(alone, spec, tokens), atol=1e-4)


JUDGE = ("judge.source=tiny", "judge.protocol=criterion_logits", "judge.min_yes_no_mass=0", "judge.weights=int8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # the first shares the policy's start weights
def test_a_judge_of_the_config(dtype, monkeypatch):
    monkeypatch.setattr(criterion_logits, "yes_no_forms", lambda tokenizer: ([2], [57, 58, 14, 12]))  # its vocabulary lacks both
    cfg = tiny(*JUDGE, f"judge.dtype={dtype}", "sampler.max_prompt=256", "update.pack_length=256")
    policy = load_model(cfg.policy)
    full_params = jax.tree.map(jnp.copy, policy.params)
    model = loading.load_judge(cfg, policy, None)
    for leaf in jax.tree.leaves(policy.params):
        leaf.delete()  # as an update does, which donates them
    start = fingerprint(model.params)
    tokenizer = ChatTokenizer.load(model.folder)
    engine = Engine(model.spec, cfg.sampler, tokenizer.stop_ids)
    rubric = Rubric((Criterion("names a fruit", 0.5), Criterion("is short", 0.5)))
    items = [JudgeItem("what is red?", rubric, answer, i) for i, answer in enumerate(("an apple", "a cherry"))]
    found, full = (make_judge(cfg.judge, engine, p, tokenizer, 0).judge(items, 0) for p in (model.params, full_params))
    assert [v.status for v in found] == ["ok", "ok"] and model.params["embed"].dtype == jnp.dtype(dtype)
    p, q = (np.asarray([v.parts for v in verdicts]) for verdicts in (found, full))
    assert 0 < np.abs(p - q).max() < 0.05
    assert fingerprint(model.params) == start and weight_bytes(model.params) < 0.5 * weight_bytes(full_params)


def test_refused_configs():
    with pytest.raises(UserError) as error:
        tiny("judge.source=tiny", "judge.protocol=criterion_logits", "judge.weights=int4")
    assert error.value.where == "judge.weights" and error.value.nearest == "int8"
    with pytest.raises(UserError, match="would be ignored"):
        tiny("judge.source=oracle", "judge.protocol=oracle", "judge.weights=int8")
