"""The engine's decode and prefill programs as shapes on a slice that nobody owns, for coevo_jax.aot.

engine = Engine(spec, cfg, stop_ids, mesh=aot.mesh_for(aot.topology("v5e:4x4"), tensor=4))
aot.figures(*decode_program(engine), ...)
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from coevo_jax.mesh import DECODE_RULES, param_shardings
from coevo_jax.models.forward import param_shapes
from coevo_jax.models.quantize import Int8Weight
from coevo_jax.models.spec import ModelSpec
from coevo_jax.sampler import decode, kv, prefill
from coevo_jax.sampler import state as st
from coevo_jax.sampler.engine import Engine


class Program(NamedTuple):
    """A function, the shapes of its arguments, which of them are donated, and where its results lie."""

    function: Any
    args: tuple[Any, ...]
    donate: tuple[int, ...]
    out_shardings: Any


def _shaped(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def weights(spec: ModelSpec, mesh: Mesh, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """Stacked weights, heads, feed-forward and vocabulary over 'tensor', the whole of it in each data shard."""
    infos = param_shapes(spec)
    shapes = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, dtype), infos, is_leaf=lambda x: hasattr(x, "axes"))
    return _shaped(shapes, param_shardings(infos, mesh, DECODE_RULES))


def split_weights(spec: ModelSpec, mesh: Mesh, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """`weights` with a tree a layer, as decode takes them."""
    return _split(weights(spec, mesh, dtype), mesh)


def _split(stacked: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    def layer(w: Any) -> Any:
        return jax.ShapeDtypeStruct(w.shape[1:], w.dtype, sharding=NamedSharding(mesh, PartitionSpec(*w.sharding.spec[1:])))

    count = jax.tree.leaves(stacked["layers"])[0].shape[0]
    return {**stacked, "layers": tuple(jax.tree.map(layer, stacked["layers"]) for _ in range(count))}


def quantized_weights(infos: Any, mesh: Mesh, dtype: Any, split: bool) -> dict[str, Any]:
    """int8 matrices with float32 scales (quantize.quantized_infos) and the rest in `dtype`; split: a tree a layer."""
    shardings = param_shardings(infos, mesh, DECODE_RULES)

    def leaf(w: Any, lies: Any) -> Any:
        if not isinstance(w, Int8Weight):
            return jax.ShapeDtypeStruct(w.shape, dtype, sharding=lies)
        values = jax.ShapeDtypeStruct(w.values.shape, jnp.int8, sharding=lies.values)
        return Int8Weight(values, jax.ShapeDtypeStruct(w.scale.shape, jnp.float32, sharding=lies.scale), w.dtype)

    is_weight = lambda x: isinstance(x, Int8Weight) or hasattr(x, "axes")  # noqa: E731
    stacked = jax.tree.map(leaf, infos, shardings, is_leaf=is_weight)
    return _split(stacked, mesh) if split else stacked


def store(engine: Engine) -> Any:
    """The store of shared heads."""
    make = functools.partial(kv.empty, (engine.spec.layers, engine.cfg.heads), engine.spec, engine.head_width, engine.kv_dtype)
    sharding = engine._sharding(None, None, "tensor")
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), jax.eval_shape(make))


def state(engine: Engine) -> Any:
    """Keys and values of every slot, and what they are doing."""
    make = functools.partial(st.new_state, engine.spec, engine.classes, engine.cfg.max_new, engine.kv_dtype, engine.segment)
    return _shaped(jax.eval_shape(make), engine._state_sharding())


def decode_program(engine: Engine, dtype: Any = jnp.bfloat16) -> Program:
    """One dispatch. The engine has a mesh."""
    cfg, mesh = engine.cfg, engine.mesh
    assert mesh is not None
    plan = engine.plan(engine.reaches[-1], cfg.share_decode, False, False, False)
    function = functools.partial(decode.decode, spec=engine.spec, stop_ids=engine.stop_ids, plan=plan, dtype=dtype, mesh=mesh)
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    args = (
        split_weights(engine.spec, mesh, dtype), state(engine),
        store(engine) if cfg.share_decode else None, None, number, number,
    )  # fmt: skip
    return Program(function, args, (1,), (engine._state_sharding(), None))


def prefill_program(engine: Engine, variant: prefill.Variant, dtype: Any = jnp.bfloat16) -> Program:
    """One packed prefill, as Engine.run_prefill asks for it. The engine has a mesh."""
    mesh = engine.mesh
    assert mesh is not None
    function = functools.partial(
        prefill.prefill, spec=engine.spec, variant=variant, dtype=dtype, kv_dtype=engine.kv_dtype, mesh=mesh
    )
    whole, (P, T) = NamedSharding(mesh, PartitionSpec()), variant.shape
    tokens, blocks = (jax.ShapeDtypeStruct((P, n), jnp.int32, sharding=whole) for n in (T, T // prefill.BLOCK))
    heads = store(engine) if variant.context else None
    args = (weights(engine.spec, mesh, dtype), tokens, tokens, tokens, blocks, blocks, heads)
    return Program(function, args, (), engine._sharding(None, None, "tensor"))
