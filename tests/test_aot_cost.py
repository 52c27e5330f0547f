"""The cost model on programs that libtpu compiled: what it counts is what the shapes say (nothing is run)."""

from __future__ import annotations

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from coevo_jax import aot
from coevo_jax.cost import Network, program_cost

pytestmark = [pytest.mark.tpu_aot]


@pytest.fixture(scope="module")
def mesh():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    return aot.mesh_for(aot.topology("v5e:2x4"), fsdp=8)


def cost_of(fn, args, mesh, **options):
    chip = aot.CHIPS["v5e"]
    text = aot.compile_for(fn, args).as_text()
    return program_cost(text, chip, aot.hosts_of(mesh), network=Network.of(list(mesh.devices.flat), chip), **options)


def given(mesh, shape, dtype, *axes):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))


def test_a_product_of_two_matrices(mesh):
    x, y = given(mesh, (8192, 4096), jnp.bfloat16, "fsdp"), given(mesh, (4096, 2048), jnp.bfloat16)
    found = cost_of(lambda x, y: x @ y, (x, y), mesh)
    flops, size = 2 * 1024 * 4096 * 2048, 2 * (1024 * 4096 + 4096 * 2048 + 1024 * 2048)
    assert found.flops == flops and found.exposed_seconds == 0
    assert found.bytes == pytest.approx(size, rel=0.02)  # operands may be fetched ahead into fast memory: read once all the same
    assert found.seconds >= max(flops / (0.75 * 197e12), size / (0.8 * 819e9)) * 0.98


def test_a_scan_costs_its_layer_as_often_as_there_are_layers(mesh):
    """Stacked weights are read a layer at a time: twice the layers, twice the cost."""

    def run(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    x = given(mesh, (8192, 2048), jnp.bfloat16, "fsdp")
    found = {n: cost_of(run, (x, given(mesh, (n, 2048, 2048), jnp.bfloat16)), mesh) for n in (1, 8, 16)}
    layer_flops, layer_bytes = 2 * 1024 * 2048 * 2048, 2 * 2048 * 2048
    assert all(found[n].flops == n * layer_flops and found[n].unknown_loops == 0 for n in found)
    for figure in ("bytes", "seconds"):
        growth = getattr(found[16], figure) - getattr(found[8], figure)
        assert growth == pytest.approx(8 * getattr(found[8], figure) / 8, rel=0.15), figure
    assert found[16].bytes < 16 * (layer_bytes + 4 * 2 * 1024 * 2048)  # and not 16 x 16 layers


def test_gathering_is_a_collective_with_its_time_on_the_torus(mesh):
    x, w = given(mesh, (512, 4096), jnp.bfloat16, "fsdp"), given(mesh, (4096, 8192), jnp.bfloat16, None, "fsdp")
    found = cost_of(lambda x, w: x @ w, (x, w), mesh)
    whole = 2 * 4096 * 8192
    moved = sum(found.collective_bytes.values())
    assert found.flops == pytest.approx(2 * 64 * 4096 * 8192)
    assert 0.05 * whole < moved < 1.1 * whole and found.collective_seconds > 0
    assert found.crossing_bytes == 0 or len(set(aot.hosts_of(mesh))) > 1
    slow = dataclasses.replace(aot.CHIPS["v5e"], ici_link=45e7)
    text = aot.compile_for(lambda x, w: x @ w, (x, w)).as_text()
    slower = program_cost(text, slow, network=Network.of(list(mesh.devices.flat), slow))
    assert slower.collective_seconds > 5 * found.collective_seconds
