"""Mesh, sharding rules, replication of what does not divide."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from coevo_jax.config import MeshConfig
from coevo_jax.errors import UserError
from coevo_jax.mesh import ShardingRules, array_sharding, batch_sharding, make_mesh, param_shardings, partition_spec
from coevo_jax.models.forward import param_shapes
from coevo_jax.models.spec import ModelSpec

SPEC = ModelSpec("llama", vocab_size=50, hidden_size=16, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_size=32)


def test_the_data_axis_takes_the_rest():
    assert dict(make_mesh(MeshConfig(fsdp=2, tensor=2)).shape) == {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize("cfg", [MeshConfig(data=3), MeshConfig(fsdp=3), MeshConfig(fsdp=16), MeshConfig(fsdp=0)])
def test_a_mesh_that_does_not_fit_the_devices_is_refused(cfg):
    with pytest.raises(UserError, match="8 devices"):
        make_mesh(cfg)


def test_collision_and_unknown_axis_raise():
    rules = ShardingRules(embed="tensor")
    with pytest.raises(ValueError, match="'embed' and 'mlp'"):
        partition_spec(("layers", "embed", "mlp"), rules)
    with pytest.raises(ValueError, match="no sharding rule for logical axis 'banana'"):
        partition_spec(("banana",))


def test_dimensions_that_do_not_divide_are_replicated():
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=4))
    assert array_sharding(mesh, (50, 16), ("vocab", "embed")).spec == P(None, "fsdp")
    shardings = param_shardings(param_shapes(SPEC), mesh)
    assert shardings["layers"]["q"].spec == P(None, "fsdp", "tensor")
    assert shardings["layers"]["k"].spec == P(None, "fsdp")  # 2 kv heads over 4 devices
    assert shardings["unembed"].spec == P("fsdp")
    assert jax.tree.structure(shardings) == jax.tree.structure(param_shapes(SPEC), is_leaf=lambda x: hasattr(x, "axes"))


def test_batch_rows_go_over_data_and_fsdp():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    x = jax.device_put(jnp.arange(8.0).reshape(4, 2), batch_sharding(mesh))
    assert {s.data.shape for s in x.addressable_shards} == {(1, 2)}
    np.testing.assert_array_equal(x, np.arange(8.0).reshape(4, 2))
