"""Decode of Qwen3-8B's shapes, two layers deep, compiles for pod slices (memory and traffic, not speed)."""

from __future__ import annotations

import importlib.util
import re

import pytest

from coevo_jax import aot
from coevo_jax.config import SamplerConfig
from coevo_jax.models.spec import ModelSpec
from coevo_jax.sampler.ahead import Program, decode_program
from coevo_jax.sampler.engine import Engine

pytestmark = [pytest.mark.tpu_aot]
LAYERS, KV_HEADS, MIB = 2, 2, 2**20  # kv heads on a device
CLASSES = ((32, 3072), (16, 8192), (8, 18432))  # of a host
SPEC = ModelSpec("qwen3", vocab_size=151_936, hidden_size=4096, layers=LAYERS, heads=32, kv_heads=8, head_dim=128,
                 mlp_size=12288, rope_theta=1e6, norm_eps=1e-6, qk_norm="head", max_position=40_960)  # fmt: skip


def engine_for(name: str, **changes) -> Engine:
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    mesh = aot.mesh_for(aot.topology(name), tensor=4)
    classes = tuple((n * mesh.shape["data"], s) for n, s in CLASSES)
    cfg = SamplerConfig(slots=sum(n for n, _ in classes), length_classes=classes, max_prompt=2048, max_new=16384, heads=8,
                        steps_per_dispatch=64, kv_dtype="bfloat16", attention="pallas", prefill_tokens=8192 * 4)  # fmt: skip
    return Engine(SPEC, cfg, (151_645, 151_643), mesh=mesh)


def compiled(engine: Engine, program: Program):
    made = aot.compile_for(program.function, program.args, donate=program.donate, out_shardings=program.out_shardings)
    text = made.as_text()
    assert not [c for c in aot.collectives(text, aot.hosts_of(engine.mesh)) if c.crosses_hosts is not False]
    return aot.memory(made), text


@pytest.mark.parametrize("name", aot.TOPOLOGIES)
def test_decode_keeps_the_cache_in_place(name):
    engine = engine_for(name)
    found, text = compiled(engine, decode_program(engine))
    of_layer = sum(n * s for n, s in CLASSES) * KV_HEADS * 128 * 2  # bytes of keys (or values) of a layer on a device
    assert found.alias >= 2 * LAYERS * of_layer and found.outputs - found.alias < MIB  # all of the state is donated
    assert found.temporaries < of_layer
    sizes = "|".join(f"128,{s}|{s},128" for _, s in CLASSES)  # no part of the cache is moved in the loop, to wherever
    assert not [c for c in aot.large_copies(text, MIB) if re.search(rf",{KV_HEADS},(?:{sizes})\]", c.shape)]
    assert text.count("flush_window") >= LAYERS * len(CLASSES)
