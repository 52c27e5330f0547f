"""The decode variant for TPUs, interpreted: the same draws as XLA's, whatever the cache, the classes and the sharing."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampler_support import LLAMA, SPECS, assert_same_draws, engine_of, flat, new_engine, params_of, prompts_of, requests_of

from coevo_jax.errors import UserError
from coevo_jax.sampler.flush import flush_kernel, flush_plain
from coevo_jax.sampler.kv import KV, each, encode
from coevo_jax.sampler.prefill import Span, pack
from coevo_jax.sampler.state import places_of

BASE = requests_of(prompts_of(6, seed=3), n=3)
START = np.array([0, 5, 120, 127, 128, 300, 250, 299, 130], np.int32)
COUNT = np.array([3, 0, 20, 1, 12, 0, 7, 1, 20], np.int32)


def caches(dtype, d: int, S: int = 300, W: int = 20, K: int = 2) -> tuple[KV, KV]:
    rng, R = np.random.default_rng(0), len(START)
    made = [encode(*(jnp.asarray(rng.normal(size=(R, n, K, d)), jnp.float32) for _ in range(2)), dtype) for n in (S, W)]
    late = jnp.asarray(np.arange(W) >= COUNT[:, None])  # what is not of the dispatch must not be looked at

    def spoil(x, axis):
        mask = late[:, None, None] if x.ndim == 4 and axis == -1 else late[:, None, :, None] if x.ndim == 4 else late[:, None]
        return jnp.where(mask, jnp.asarray(jnp.nan if x.dtype != jnp.int8 else 99).astype(x.dtype), x)

    return made[0], each(made[1], spoil)


@pytest.mark.parametrize(
    ("dtype", "d"), [(jnp.float32, 128), (jnp.float32, 64), (jnp.bfloat16, 128), (jnp.int8, 128), (jnp.int8, 64)]
)
def test_the_flush_kernel_equals_the_plain_flush(dtype, d):
    kv, window = caches(dtype, d)
    start, count = jnp.asarray(START), jnp.asarray(COUNT)
    found, expected = jax.jit(lambda *x: (flush_kernel(*x, interpret=True), flush_plain(*x)))(kv, window, start, count)
    for a, b, before in zip(*map(jax.tree.leaves, (found, expected, kv)), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
        assert (np.asarray(a) != np.asarray(before)).any()
    keys, new = np.asarray(found.keys, np.float32), np.asarray(window.keys, np.float32)
    np.testing.assert_array_equal(keys[2, :, :, 120:140], new[2])  # over the border of two tiles
    np.testing.assert_array_equal(keys[8, :, :, :130], np.asarray(kv.keys, np.float32)[8, :, :, :130])


def test_a_long_window_takes_more_tiles_and_a_short_cache_one():
    for S, W, start, count in ((600, 260, [100, 340], [260, 130]), (50, 20, [0, 30], [20, 20])):
        rng = np.random.default_rng(1)
        kv, window = (encode(*(jnp.asarray(rng.normal(size=(2, n, 1, 128)), jnp.float32) for _ in range(2)), jnp.float32)
                      for n in (S, W))  # fmt: skip
        args = kv, window, jnp.asarray(start, jnp.int32), jnp.asarray(count, jnp.int32)
        for a, b in zip(*map(jax.tree.leaves, (flush_kernel(*args, interpret=True), flush_plain(*args))), strict=True):
            np.testing.assert_array_equal(a, b)


ONE_LAYER = {  # interpreted kernels take long to compile
    "llama": dataclasses.replace(LLAMA, layers=1),
    "mistral": dataclasses.replace(SPECS["mistral"], layers=1, windows=(6,)),
}
WAYS = {
    "classes, late": ("llama", {"length_classes": ((2, 22), (2, 36)), "read_lag": 1}),
    "windows, shared heads": ("mistral", {"share_decode": True, "share_least": 4}),
}


@pytest.mark.parametrize("way", [pytest.param("classes, late", marks=pytest.mark.slow), "windows, shared heads"])
def test_draws_are_those_of_xla(way):
    family, changes = WAYS[way]
    params, spec = params_of(ONE_LAYER[family]), ONE_LAYER[family]
    requests = BASE
    if "share_decode" in changes:
        head = prompts_of(1, seed=8, low=12, high=12)[0]
        requests = requests_of([np.concatenate([head, p[:8]]) for p in prompts_of(4, seed=3)], n=2)
    base = engine_of(spec).generate(params, requests)
    engine = engine_of(spec, attention="pallas_interpret", **changes)
    assert {v.attention for v in engine.variants if not v.context} == {"splash_interpret"}
    engine.stats.reset()
    assert assert_same_draws(params, engine, requests, base, engine.generate(params, requests)) <= 2
    assert engine.stats.tokens == sum(len(c.tokens) for c in flat(base)) == engine.stats.row_steps
    assert bool(engine.stats.moves) == ("length_classes" in changes)


def test_places_of_slots():
    kinds, rows = places_of(((4, 10), (2, 20)), 2)
    assert kinds.tolist() == [0, 0, 1, 0, 0, 1] and rows.tolist() == [0, 1, 0, 2, 3, 1]
    kinds, rows = places_of(((2, 10), (1, 20)))
    assert kinds.tolist() == [0, 0, 1] and rows.tolist() == [0, 1, 0]


def test_what_cannot_run_is_refused():
    with pytest.raises(UserError, match="can't run on cpu"):
        new_engine(attention="pallas")
    with pytest.raises(UserError, match="slots at rest cost nothing"):
        new_engine(attention="pallas_interpret", narrow=(2,))


def test_prefill_by_splash_on_a_mesh_equals_block_attention():
    """Every data shard computes all rows; heads are cut over tensor."""
    mesh = jax.make_mesh((2, 1, 2), ("data", "fsdp", "tensor"), devices=jax.devices()[:4])
    spec = ONE_LAYER["mistral"]
    ways = (("xla", None), ("pallas_interpret", mesh))
    plain, splash = (new_engine(spec, attention=a, mesh=m, prefill_tokens=256) for a, m in ways)
    spans = [Span(p) for p in prompts_of(5, seed=4)]
    found = []
    for engine in (plain, splash):
        variant = next(v for v in engine.variants if not v.context and v.shape[1] >= 128)  # the smallest that splash can run
        packed = pack(spans, variant)
        weights = engine.prepare(params_of(spec))
        out = engine.run_prefill(weights, packed, None)
        found.append([out.values[:, r, :, at : at + len(s.tokens)] for s, (r, at) in zip(spans, packed.places)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
