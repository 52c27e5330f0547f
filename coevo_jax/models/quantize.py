"""int8 weights of a frozen model: one symmetric scale an output channel, applied to the product and never to the weight.

    y = (x @ q) * scale      q = round(w / scale) in [-127, 127],  scale = max |w| over the channel's inputs / 127

so no product ever needs the weight in another type in memory, and the rounding error of a weight is at most half its channel's
scale. The embedding has one scale a vocabulary row, which is also an output channel where it is the head (tied). Norms and biases
stay as they are.

Axes: L layers, D model, H heads, K kv heads, d head width, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from coevo_jax.models.low_rank import ADAPTED, LoraWeight, low_rank

LEVELS = 127  # -128 is left out: the range is symmetric
# Axes of each matrix (without L) that its product sums over; a scale has the other ones. Every matrix of forward.param_shapes.
INPUT_AXES: dict[str, tuple[int, ...]] = {
    "embed": (1,),  # [V,D]
    "unembed": (0,),  # [D,V]
    "q": (0,),  # [D,H,d]
    "k": (0,),
    "v": (0,),
    "o": (0, 1),  # [H,d,D]
    "gate": (0,),  # [D,F]
    "up": (0,),
    "down": (0,),  # [F,D]
}


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=["dtype"])
@dataclasses.dataclass(frozen=True)
class Int8Weight:
    """A matrix as int8 values and float32 scales (its shape without the input axes). `dtype`: of the computation.

    It stands where the array stood: `w[layer]` and `w.astype(dtype)` keep the values int8.
    """

    values: Any
    scale: Any
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    def __getitem__(self, layer: int) -> Int8Weight:
        """One layer of a stacked matrix."""
        return Int8Weight(self.values[layer], self.scale[layer], self.dtype)

    def astype(self, dtype: Any) -> Int8Weight:
        """The same weight for a computation in another type."""
        return Int8Weight(self.values, self.scale, np.dtype(dtype))


Weight = jax.Array | Int8Weight | LoraWeight


def product(equation: str, x: jax.Array, w: Weight, out: Any = None) -> jax.Array:
    """einsum(equation, x, w) in x's dtype (the sum and the scale in float32), as `out` or x's dtype.

    The output's last axes must be w's output axes in their order, as they are in every product of the model.
    """
    if isinstance(w, LoraWeight):
        return checkpoint_name(product(equation, x, w.base, out) + low_rank(equation, x, w).astype(out or x.dtype), ADAPTED)
    if not isinstance(w, Int8Weight):
        return jnp.einsum(equation, x, w.astype(x.dtype), preferred_element_type=out)
    x, values = lax.optimization_barrier((x, w.values))  # else XLA may widen all weights ahead of a decode loop and keep them
    y = jnp.einsum(equation, x, values.astype(x.dtype), preferred_element_type=jnp.float32)
    return (y * lax.expand_dims(w.scale, range(y.ndim - w.scale.ndim))).astype(out or x.dtype)


def rows(w: jax.Array | Int8Weight, index: jax.Array, dtype: Any) -> jax.Array:
    """Rows of an embedding, [..., D]."""
    if not isinstance(w, Int8Weight):
        return jnp.take(w, index, axis=0).astype(dtype)
    values, scale = jnp.take(w.values, index, axis=0), jnp.take(w.scale, index, axis=0)
    return (values.astype(jnp.float32) * scale[..., None]).astype(dtype)


def quantize_params(params: dict[str, Any], free: bool = False) -> dict[str, Any]:
    """The tree with Int8Weight matrices; shares no buffer with `params`. Scales lie on the devices of their output axes.

    free: delete each array once its int8 values exist, so that two whole trees are never held.
    """

    def kept(make: Callable[..., Any]) -> Callable[..., Any]:
        def leaf(w: jax.Array, *axes: Any) -> Any:
            made = jax.block_until_ready(make(w, *axes))
            if free:
                w.delete()
            return made

        return leaf

    return _map_matrices(params, kept(quantize_array), kept(jnp.copy))


def dequantize_params(params: dict[str, Any]) -> dict[str, Any]:
    """Full matrices that the int8 ones stand for, in float32."""
    return _map_matrices(
        params, lambda w, axes: w.values.astype(jnp.float32) * jnp.expand_dims(w.scale, axes), lambda x: x.astype(jnp.float32)
    )


def quantized_infos(infos: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """forward.param_shapes of the quantised tree, for mesh.param_shardings and for plans: ParamInfo of values and scales."""

    def matrix(info: Any, axes: tuple[int, ...]) -> Int8Weight:
        scale = dataclasses.replace(info, shape=_without(info.shape, axes), axes=_without(info.axes, axes))
        return Int8Weight(info, scale, np.dtype(dtype))

    return _map_matrices(infos, matrix, lambda info: info)


def compiler_options(args: Any) -> dict[str, Any]:
    """What a program with int8 weights is compiled with: on the CPU, widen one matrix at a time and not all at a step's start."""
    is_int8 = lambda x: isinstance(x, Int8Weight)  # noqa: E731
    int8 = any(is_int8(leaf) for leaf in jax.tree.leaves(args, is_leaf=is_int8))
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if int8 and jax.default_backend() == "cpu" else {}


def weight_bytes(params: Any) -> int:
    """Bytes of all arrays of a tree, scales included."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))


def quantize_array(w: jax.Array, axes: tuple[int, ...]) -> Int8Weight:
    """One matrix; `axes`: those summed over. A channel of zeros has scale 1; NaN or infinities make its scale so, and show."""
    placed = None
    if isinstance(w.sharding, NamedSharding):
        mesh, names = w.sharding.mesh, [*w.sharding.spec, *[None] * (w.ndim - len(w.sharding.spec))]
        kept = list(_without(names, axes))
        while kept and kept[-1] is None:  # as mesh.array_sharding writes it
            kept.pop()
        placed = (w.sharding, NamedSharding(mesh, PartitionSpec(*kept)))
    values, scale = jax.jit(_round, static_argnums=1, out_shardings=placed)(w, axes)
    return Int8Weight(values, scale, np.dtype(w.dtype))


def _round(w: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    w32 = w.astype(jnp.float32)
    scale = jnp.max(jnp.abs(w32), axis=axes, keepdims=True) / np.float32(LEVELS)
    scale = jnp.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale)
    return jnp.round(w32 / scale).astype(jnp.int8), jnp.squeeze(scale, axes)


def _without(values: Any, axes: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(v for i, v in enumerate(values) if i not in axes)


def _map_matrices(
    tree: dict[str, Any], matrix: Callable[[Any, tuple[int, ...]], Any], rest: Callable[[Any], Any], stacked: int = 0
) -> dict[str, Any]:
    """matrix(leaf, input axes) of each matrix and rest(leaf) of each other leaf; those of 'layers' have L in front."""
    out: dict[str, Any] = {}
    for name, leaf in tree.items():
        if name == "layers":
            out[name] = _map_matrices(leaf, matrix, rest, 1)
        elif name in INPUT_AXES:
            out[name] = matrix(leaf, tuple(axis + stacked for axis in INPUT_AXES[name]))
        else:
            out[name] = rest(leaf)
    return out
