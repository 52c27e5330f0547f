"""The device mesh and where arrays lie on it: logical axis -> mesh axis -> PartitionSpec.

Mesh axes: `data` (batch only), `fsdp` (batch, and parameters cut along their model dimension), `tensor` (heads, feed-forward,
vocabulary). One mesh serves training and decoding by different rules: a decoding host holds all weights over its own chips, and
training may deal rows and weights to all chips (`FSDP_RULES`), or a row's time to a host's chips (`CONTEXT_RULES`).
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
    table: MeshAxes = "fsdp"  # the model dimension of the embedding and of the head
    vocab: MeshAxes = "tensor"
    heads: MeshAxes = "tensor"
    kv_heads: MeshAxes = "tensor"
    head_dim: MeshAxes = None
    mlp: MeshAxes = "tensor"
    rank: MeshAxes = "fsdp"  # of the half of a low-rank adapter that has no model dimension


RULES = ShardingRules()
DECODE_RULES = ShardingRules(embed=None, table=None)  # decoding reads every weight for every token: no gathering over fsdp
# Rows over every chip, and a layer's weights gathered when it is their turn: a row of 18,432 tokens gives a chip more work than
# the gathering takes time, where sums over `tensor` after each block do not hide. The head stays cut by vocabulary.
FSDP_RULES = ShardingRules(
    batch=("data", "fsdp", "tensor"), embed=("fsdp", "tensor"), heads=None, kv_heads=None, mlp=None, rank=("fsdp", "tensor")
)
# A row's time over `tensor` (context parallelism): what a chip keeps of a long row shrinks with it, and its keys and values are
# gathered inside the host. Weights lie as in FSDP_RULES.
CONTEXT_RULES = dataclasses.replace(FSDP_RULES, batch=("data", "fsdp"), time="tensor")
TRAIN_RULES = {"tensor": RULES, "fsdp": FSDP_RULES, "context": CONTEXT_RULES}


def train_rules(cfg: MeshConfig) -> ShardingRules:
    """Where parameters, moments and rows lie while training (mesh.train)."""
    return TRAIN_RULES[cfg.train]


def make_mesh(cfg: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh of all devices with axes data, fsdp, tensor; -1 takes the rest. Slices are outermost, then hosts, and `tensor` lies
    inside a host: its collectives must not leave it."""
    devices = list(jax.devices() if devices is None else devices)
    sizes = [cfg.data, cfg.fsdp, cfg.tensor]
    fixed = math.prod(s for s in sizes if s != -1)
    if -1 in sizes and fixed > 0:
        sizes[sizes.index(-1)] = len(devices) // fixed
    if min(sizes) < 1 or math.prod(sizes) != len(devices):
        raise UserError(
            f"a mesh of data={cfg.data} fsdp={cfg.fsdp} tensor={cfg.tensor} does not use {len(devices)} devices exactly",
            where="mesh", expected=f"sizes whose product is {len(devices)} (one of them may be -1: the rest)",
        )  # fmt: skip
    if devices[0].platform != "cpu":
        devices = by_host(devices)
        a_host = sum(d.process_index == devices[0].process_index for d in devices)
        if a_host % sizes[2]:
            raise UserError(f"tensor={sizes[2]} does not fit into hosts of {a_host} chips", where="mesh.tensor",
                            expected=f"a divisor of {a_host}")  # fmt: skip
    return Mesh(np.asarray(devices, dtype=object).reshape(sizes), AXES)


def by_host(devices: Sequence[Any]) -> list[Any]:
    """Slice by slice, host by host."""
    return sorted(devices, key=lambda d: (int(getattr(d, "slice_index", None) or 0), int(d.process_index)))


def partition_spec(axes: Sequence[str | None], rules: ShardingRules = RULES) -> PartitionSpec:
    """PartitionSpec of logical axes. ValueError when two of them claim one mesh axis, or for a logical axis without a rule."""
    known = {f.name for f in dataclasses.fields(rules)}
    taken: dict[str, str] = {}
    out: list[MeshAxes] = []
    for name in axes:
        if name is not None and name not in known:
            raise ValueError(f"no sharding rule for logical axis {name!r}; known: {', '.join(sorted(known))}")
        over = None if name is None else getattr(rules, name)
        for mesh_axis in mesh_axes(over):
            if mesh_axis in taken:
                raise ValueError(
                    f"logical axes {taken[mesh_axis]!r} and {name!r} of one array both map to mesh axis {mesh_axis!r}"
                )
            taken[mesh_axis] = str(name)
        out.append(over)
    return PartitionSpec(*out)


def array_sharding(mesh: Mesh, shape: Sequence[int], axes: Sequence[str | None], rules: ShardingRules = RULES) -> NamedSharding:
    """Sharding of one array; a dimension that its mesh axes do not divide is replicated."""
    spec = partition_spec(axes, rules)
    kept = [
        m if size % math.prod(mesh.shape[a] for a in mesh_axes(m)) == 0 else None for size, m in zip(shape, spec, strict=True)
    ]
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


def token_sharding(mesh: Mesh, rules: ShardingRules = RULES) -> NamedSharding:
    """Arrays [B, T, ...] inside the layers: rows by `batch`, positions by `time`."""
    return NamedSharding(mesh, partition_spec(("batch", "time"), rules))


def vocab_batch_sharding(mesh: Mesh, rules: ShardingRules = RULES) -> NamedSharding:
    """Arrays [B, ...] where the vocabulary is cut: rows over those of their axes that it leaves."""
    left = tuple(axis for axis in mesh_axes(rules.batch) if axis not in mesh_axes(rules.vocab))
    return NamedSharding(mesh, PartitionSpec(left))


def one_cpu(mesh: Mesh | None) -> bool:
    """Does a program for `mesh` (None: the default device) run on one device, a CPU?"""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return platform == "cpu" and (mesh is None or mesh.size == 1)


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def mesh_axes(axes: MeshAxes) -> tuple[str, ...]:
    """The mesh axes of one rule."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
