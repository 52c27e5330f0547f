"""From the trainer's weights to those that decode: cast and laid out anew by one jitted identity.

On a mesh each host ends up with all weights over its own chips (mesh.DECODE_RULES), so that no collective leaves a host while it
decodes. The cast comes before the weights travel: bfloat16 crosses the links, not float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from coevo_jax.mesh import DECODE_RULES, ShardingRules, param_shardings
from coevo_jax.models.forward import Params, param_shapes
from coevo_jax.models.quantize import INPUT_AXES
from coevo_jax.models.spec import ModelSpec


def make_publish(spec: ModelSpec, dtype: str, rules: ShardingRules, mesh: Mesh | None = None) -> Callable[[Params], Params]:
    """jitted `publish(params) -> params` in `dtype`, by DECODE_RULES where there is a mesh. rules: of the params that come in."""

    def publish(params: Params) -> Params:
        params = jax.tree.map(lambda p: p.astype(jnp.dtype(dtype)), params)
        if mesh is None:
            return params
        return lax.optimization_barrier(lax.with_sharding_constraint(params, param_shardings(param_shapes(spec), mesh, rules)))

    if mesh is None:
        return jax.jit(publish)
    infos = param_shapes(spec)
    return jax.jit(
        publish, in_shardings=(param_shardings(infos, mesh, rules),), out_shardings=param_shardings(infos, mesh, DECODE_RULES)
    )


def same_places(spec: ModelSpec, rules: ShardingRules, mesh: Mesh | None) -> bool:
    """Do weights lie where decoding wants them already?"""
    if mesh is None:
        return True
    infos = param_shapes(spec)
    pairs = zip(*(jax.tree.leaves(param_shardings(infos, mesh, r)) for r in (rules, DECODE_RULES)), strict=True)
    return all(a == b for a, b in pairs)


def cast_matrices(params: Params, dtype: str) -> Params:
    """A frozen copy's matrices in the dtype of the computation; norms and biases, which are used in float32, stay as they are.

    Log-probs under it are bit for bit those of the whole: a product casts its matrix to that dtype anyway.
    """

    def leaf(path: tuple[Any, ...], p: jax.Array) -> jax.Array:
        return p.astype(jnp.dtype(dtype)) if path[-1].key in INPUT_AXES else p

    return jax.tree_util.tree_map_with_path(leaf, params)
