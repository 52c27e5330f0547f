"""The embedding and the head on a mesh: their vocabulary is cut over chips that share rows, their model dimension is gathered.

Left to itself XLA gathers a head at every chunk of time, sums its gradient over devices there, and sums an embedding's gradient
whole before it cuts it. Here both run inside a shard_map over all axes: a table is gathered once a micro-batch and its gradient
summed and cut by one reduce-scatter; the chips among which the vocabulary is cut first get each other's tokens.

Axes: B rows, T time, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from coevo_jax.mesh import ShardingRules, array_sharding, mesh_axes, partition_spec, vocab_batch_sharding
from coevo_jax.models.quantize import rows

AXES = {"embed": ("vocab", "table"), "unembed": ("table", "vocab")}
Axes = tuple[str, ...]


def embed_rows(table_VxD: jax.Array, tokens_BxT: jax.Array, dtype: Any, mesh: Mesh, rules: ShardingRules) -> jax.Array:
    """Embeddings [B,T,D] of whole rows of ids, laid out by rules.batch and rules.time."""
    spec = _spec("embed", table_VxD, mesh, rules)
    vocab = mesh_axes(spec[0])

    def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
        table = _whole(table, spec, "embed")
        inside, at = own_ids(tokens, table.shape[0], vocab)
        x = jnp.where(inside[..., None], rows(table, at, dtype), jnp.zeros((), dtype))  # one chip's is not 0: the sum is exact
        lent = _lent(rules, vocab)
        for dim, axes in lent:
            x = lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        kept = tuple(a for a in vocab if not any(a in axes for _, axes in lent))
        return lax.psum(x, kept) if kept else x

    taken = vocab_batch_sharding(mesh, rules).spec
    out = _tokens_spec(rules, vocab, mesh)
    return jax.shard_map(local, mesh=mesh, in_specs=(spec, taken), out_specs=out, check_vma=False)(table_VxD, tokens_BxT)


def over_head(
    run: Callable[..., Any],
    head: dict[str, jax.Array],
    hidden_BxTxD: jax.Array,
    mesh: Mesh,
    rules: ShardingRules,
    rest: tuple[Any, ...],
) -> Any:
    """`run(head, hidden, *rest, vocab)` on each chip, of arrays [B,T]: its part of the vocabulary, which the mesh axes `vocab`
    cut, and whole rows. head: 'embed' [V,D] or 'unembed' [D,V]; rest: arrays of whole rows [B,T]."""
    ((name, w),) = head.items()
    spec = _spec(name, w, mesh, rules)
    vocab = mesh_axes(spec[AXES[name].index("vocab")])
    whole_rows = vocab_batch_sharding(mesh, rules).spec

    def local(w: jax.Array, hidden: jax.Array, *rest: Any) -> Any:
        for dim, axes in _lent(rules, vocab):
            hidden = lax.all_gather(hidden, axes, axis=dim, tiled=True)
        return run({name: _whole(w, spec, name)}, hidden, *rest, vocab)

    shared = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, _tokens_spec(rules, vocab, mesh), *(whole_rows,) * len(rest)), out_specs=whole_rows,
        check_vma=False,
    )  # fmt: skip
    return shared(w, hidden_BxTxD, *rest)


def own_ids(ids: jax.Array, own: int, vocab: Axes) -> tuple[jax.Array, jax.Array]:
    """Which ids are among the `own` that this chip has of the vocabulary, and where they lie there (0 for the others)."""
    at = ids - (lax.axis_index(vocab) * own if vocab else 0)
    inside = (at >= 0) & (at < own)
    return inside, jnp.where(inside, at, 0)


def _spec(name: str, w: jax.Array, mesh: Mesh, rules: ShardingRules) -> PartitionSpec:
    """Of a table, an entry for both of its axes; mesh axes of size 1 cut nothing."""
    spec = array_sharding(mesh, w.shape, AXES[name], rules).spec
    cuts = [tuple(axis for axis in mesh_axes(entry) if mesh.shape[axis] > 1) or None for entry in spec]
    return PartitionSpec(*cuts, *(None,) * (2 - len(cuts)))


def _lent(rules: ShardingRules, vocab: Axes) -> list[tuple[int, Axes]]:
    """(axis of an array [B,T,...], mesh axes): where tokens lie over the axes that cut the vocabulary."""
    found = [(dim, tuple(a for a in mesh_axes(rule) if a in vocab)) for dim, rule in enumerate((rules.batch, rules.time))]
    return [(dim, axes) for dim, axes in found if axes]


def _tokens_spec(rules: ShardingRules, vocab: Axes, mesh: Mesh) -> PartitionSpec:
    """Of tokens inside the layers, or of whole rows where nothing cuts the vocabulary."""
    return partition_spec(("batch", "time"), rules) if vocab else vocab_batch_sharding(mesh, rules).spec


def _whole(w: jax.Array, spec: PartitionSpec, name: str) -> jax.Array:
    """A table whole along its model dimension. Gathered by a new first axis, along which its gradient can be scattered."""
    dim = AXES[name].index("table")
    axes = mesh_axes(spec[dim])
    if not axes:
        return w
    parts = jnp.moveaxis(lax.all_gather(w, axes), 0, dim)
    return parts.reshape(*parts.shape[:dim], -1, *parts.shape[dim + 2 :])
