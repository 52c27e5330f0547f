"""What trains of a model with low-rank adapters, how it joins the frozen base, and both as plain weights.

A trained tree is {"layers": {"q": {"a": [L, inputs, r], "b": [L, r, outputs]}, ...}}, with "score" beside it where the model has
a scalar head, which trains whole. With ModelSpec.lora = None all parameters train and nothing is frozen: the base is None.

Axes: L layers, r rank, D model, H heads, K kv heads, d head width, F feed-forward.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from coevo_jax.config.lora import LoraConfig
from coevo_jax.errors import UserError
from coevo_jax.models.forward import ParamInfo, Params, param_shapes
from coevo_jax.models.low_rank import LoraWeight
from coevo_jax.models.quantize import INPUT_AXES
from coevo_jax.models.spec import LoraSpec, ModelSpec


def adapted(spec: ModelSpec, cfg: LoraConfig) -> ModelSpec:
    """The spec of programs that train adapters. UserError: a rank that a target does not have."""
    spec = dataclasses.replace(spec, lora=LoraSpec(cfg.rank, cfg.scale, cfg.targets))
    trained_shapes(spec)
    return spec


def trained_shapes(spec: ModelSpec) -> dict[str, Any]:
    """The tree of what trains, with ParamInfo leaves: A is cut over the mesh like its matrix's inputs, B like its outputs,
    and the one of them that has no model dimension along its rank.

    UserError: a rank above the smaller side of a target.
    """
    infos = param_shapes(spec)
    if spec.lora is None:
        return infos
    layers = {name: _pair(name, infos["layers"][name], spec.lora.rank) for name in spec.lora.targets}
    return {"layers": layers} | ({"score": infos["score"]} if spec.scalar else {})


def _pair(name: str, info: ParamInfo, rank: int) -> dict[str, ParamInfo]:
    cut = 1 + len(INPUT_AXES[name])  # our matrices have their inputs first
    inputs, outputs = info.shape[1:cut], info.shape[cut:]
    largest = min(int(np.prod(inputs)), int(np.prod(outputs)))
    if rank > largest:
        raise UserError(f"lora.rank={rank} is above what a matrix {name} of {int(np.prod(inputs))} x {int(np.prod(outputs))} has",
                        where="lora.rank, lora.targets", expected=f"at most {largest}, or targets without {name}")  # fmt: skip
    L, (layers, *axes) = info.shape[:1], info.axes
    before, after = tuple(axes[: cut - 1]), tuple(axes[cut - 1 :])
    names = ["layers" if "embed" in part else "rank" for part in (before, after)]  # 'layers', which nothing cuts, beside 'embed'
    a = ParamInfo((*L, *inputs, rank), (layers, *before, names[0]), int(np.prod(inputs)))
    return {"a": a, "b": ParamInfo((*L, rank, *outputs), (layers, names[1], *after), -1)}


def frozen_part(params: Params) -> Params:
    """What is the base of a loaded model: all but a scalar head, and no vocabulary's head beside one. No array is copied."""
    gone = ("score", "unembed") if "score" in params else ()
    return {name: leaf for name, leaf in params.items() if name not in gone}


def fresh(
    spec: ModelSpec, params: Params, init: str, seed: int, name: str = "", place: Callable[[ParamInfo], Any] | None = None
) -> Params:
    """A trained tree in float32 to begin with, over loaded `params`: A drawn by seed, `name` of the model and matrix, B zero, the
    head as it is. place(info): where a leaf lies, None without a mesh."""
    assert spec.lora is not None
    std = 1 / spec.lora.rank

    def leaf(target: str, part: str, info: ParamInfo) -> jax.Array:
        if part == "b":
            value = np.zeros(info.shape, np.float32)
        else:
            rng = np.random.RandomState((seed + zlib.crc32(f"{name}/{target}".encode())) % 2**32)
            bound = info.fan_in**-0.5
            drawn = rng.uniform(-bound, bound, info.shape) if init == "kaiming" else rng.normal(0, std, info.shape)
            value = drawn.astype(np.float32)
        return placed(value, None if place is None else place(info))

    shapes = trained_shapes(spec)["layers"]
    layers = {target: {part: leaf(target, part, info) for part, info in pair.items()} for target, pair in shapes.items()}
    return {"layers": layers} | ({"score": jnp.copy(params["score"].astype(jnp.float32))} if spec.scalar else {})


def placed(value: np.ndarray, sharding: Any) -> jax.Array:
    """An array of the host on the devices."""
    return jnp.asarray(value) if sharding is None else jax.make_array_from_callback(value.shape, sharding, lambda i: value[i])


def whole(spec: ModelSpec, base: Params | None, trained: Params) -> Params:
    """The parameters that a forward pass takes: the trained ones, or the base with adapters at its products."""
    if spec.lora is None or base is None:
        return trained
    pairs = trained["layers"].items()
    adapted = {name: LoraWeight(base["layers"][name], pair["a"], pair["b"], spec.lora.scale) for name, pair in pairs}
    head = {"score": trained["score"]} if spec.scalar else {}
    return {**base, "layers": base["layers"] | adapted, **head}


def merged(spec: ModelSpec, base: Params | None, trained: Params, dtype: Any) -> Params:
    """Plain weights in `dtype` that stand for both, W + scale A B added in float32: leaves without an adapter are those of the
    base where they have the dtype. Equal inputs give equal bits: each matrix is made by one compiled function."""
    if spec.lora is None or base is None:
        return jax.tree.map(lambda p: p.astype(jnp.dtype(dtype)), trained)
    layers = {name: merged_matrix(spec, base, trained, name, dtype) for name in base["layers"]}
    rest = {name: leaf for name, leaf in base.items() if name != "layers"} | ({"score": trained["score"]} if spec.scalar else {})
    return {name: leaf.astype(jnp.dtype(dtype)) for name, leaf in rest.items()} | {"layers": layers}


def merged_matrix(spec: ModelSpec, base: Params, trained: Params, name: str, dtype: Any) -> jax.Array:
    """One stacked leaf of the layers, as in `merged`."""
    w = base["layers"][name]
    if spec.lora is None or name not in trained["layers"]:
        return w.astype(jnp.dtype(dtype))
    place = w.sharding if isinstance(w.sharding, NamedSharding) else None
    pair = trained["layers"][name]
    return _merge(len(INPUT_AXES[name]), spec.lora.scale, jnp.dtype(dtype), place)(w, pair["a"], pair["b"])


@functools.lru_cache(maxsize=64)
def _merge(inputs: int, scale: float, dtype: Any, place: Any) -> Any:
    def merge(w: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        front, back = "xyz"[:inputs], "uvw"[: w.ndim - 1 - inputs]
        product = jnp.einsum(f"L{front}r,Lr{back}->L{front}{back}", a, b, precision=lax.Precision.HIGHEST)
        return (w.astype(jnp.float32) + scale * product).astype(dtype)

    return jax.jit(merge, out_shardings=place)
