"""The device mesh and where arrays lie on it: logical axis -> mesh axis -> PartitionSpec.

Mesh axes: `data` (batch only), `fsdp` (batch, and parameters cut along their model dimension), `tensor` (heads, feed-forward,
vocabulary).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from coevo_jax.config import MeshConfig
from coevo_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")
MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Mesh axes of each logical axis. None: every device holds the whole of it."""

    batch: MeshAxes = ("data", "fsdp")
    time: MeshAxes = None
    layers: MeshAxes = None
    embed: MeshAxes = "fsdp"
    vocab: MeshAxes = "tensor"
    heads: MeshAxes = "tensor"
    kv_heads: MeshAxes = "tensor"
    head_dim: MeshAxes = None
    mlp: MeshAxes = "tensor"


RULES = ShardingRules()
DECODE_RULES = ShardingRules(embed=None)  # decoding reads every weight for every token: no gathering over fsdp


def make_mesh(cfg: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh of all devices with axes data, fsdp, tensor. `tensor` is the innermost, between neighbours."""
    devices = list(jax.devices() if devices is None else devices)
    sizes = [cfg.data, cfg.fsdp, cfg.tensor]
    fixed = math.prod(s for s in sizes if s != -1)
    if cfg.data == -1:
        sizes[0] = len(devices) // fixed if fixed > 0 else 0
    if min(sizes) < 1 or math.prod(sizes) != len(devices):
        raise UserError(
            f"a mesh of data={cfg.data} fsdp={cfg.fsdp} tensor={cfg.tensor} does not use {len(devices)} devices exactly",
            where="mesh", expected=f"sizes whose product is {len(devices)} (data = -1 takes the rest)",
        )  # fmt: skip
    if devices[0].platform == "cpu":
        return Mesh(np.asarray(devices, dtype=object).reshape(sizes), AXES)
    from jax.experimental import mesh_utils

    return Mesh(mesh_utils.create_device_mesh(tuple(sizes), devices=devices), AXES)


def partition_spec(axes: Sequence[str | None], rules: ShardingRules = RULES) -> PartitionSpec:
    """PartitionSpec of logical axes. ValueError when two of them claim one mesh axis, or for a logical axis without a rule."""
    known = {f.name for f in dataclasses.fields(rules)}
    taken: dict[str, str] = {}
    out: list[MeshAxes] = []
    for name in axes:
        if name is not None and name not in known:
            raise ValueError(f"no sharding rule for logical axis {name!r}; known: {', '.join(sorted(known))}")
        mesh_axes = None if name is None else getattr(rules, name)
        for mesh_axis in _each(mesh_axes):
            if mesh_axis in taken:
                raise ValueError(
                    f"logical axes {taken[mesh_axis]!r} and {name!r} of one array both map to mesh axis {mesh_axis!r}"
                )
            taken[mesh_axis] = str(name)
        out.append(mesh_axes)
    return PartitionSpec(*out)


def array_sharding(mesh: Mesh, shape: Sequence[int], axes: Sequence[str | None], rules: ShardingRules = RULES) -> NamedSharding:
    """Sharding of one array; a dimension that its mesh axes do not divide is replicated."""
    spec = partition_spec(axes, rules)
    kept = [m if size % math.prod(mesh.shape[a] for a in _each(m)) == 0 else None for size, m in zip(shape, spec, strict=True)]
    while kept and kept[-1] is None:  # as jit writes the sharding of its results; else the second call would compile again
        kept.pop()
    return NamedSharding(mesh, PartitionSpec(*kept))


def param_shardings(infos: Any, mesh: Mesh, rules: ShardingRules = RULES) -> Any:
    """Shardings of a tree whose leaves have `shape` and `axes` (models.forward.param_shapes(spec))."""
    return jax.tree.map(
        lambda info: array_sharding(mesh, info.shape, info.axes, rules), infos, is_leaf=lambda x: hasattr(x, "axes")
    )


def batch_sharding(mesh: Mesh, rules: ShardingRules = RULES) -> NamedSharding:
    """Arrays [B, ...]: rows over data and fsdp."""
    return NamedSharding(mesh, partition_spec(("batch",), rules))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def _each(mesh_axes: MeshAxes) -> tuple[str, ...]:
    return () if mesh_axes is None else (mesh_axes,) if isinstance(mesh_axes, str) else tuple(mesh_axes)
