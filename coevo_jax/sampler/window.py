"""Decoding on a TPU: the cache is only read during a dispatch, new tokens go to a small window, which is flushed at its end.

A kernel that writes rows into the cache inside the loop makes XLA copy every array of it each step. Here a step writes one slice
of the window, the same for all slots, and attention has three parts that merge exactly: the shared head and the slot's own
positions before the dispatch, both by the Pallas kernel over filled tiles, and the window.

Axes: B slots, L layers, H heads, K kv heads, d head width, W positions of the window (steps a dispatch).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from coevo_jax.models.spec import ModelSpec
from coevo_jax.sampler.draw import NEGATIVE
from coevo_jax.sampler.flush import flush_kernel, flush_plain
from coevo_jax.sampler.kernel import Part, decode_attention_kernel, merge_parts
from coevo_jax.sampler.kv import KV, Partial, each, empty, encode, merge, seen_between
from coevo_jax.sampler.state import Rows

if TYPE_CHECKING:
    from coevo_jax.sampler.decode import Plan

SLOTS = ("data", "fsdp")  # mesh axes that slots are dealt to


@dataclasses.dataclass(frozen=True)
class Windowed:
    """The cache of one dispatch. A slot at rest has nothing to read."""

    own: tuple[tuple[KV, ...], ...]  # L x classes, as they were before the dispatch
    store: KV | None  # shared heads, stacked
    start: jax.Array  # [B] int32: own positions before the dispatch
    spec: ModelSpec
    plan: Plan
    mesh: Mesh | None = None

    @property
    def interpret(self) -> bool:
        return self.plan.attention == "pallas_interpret"

    @property
    def _tensor(self) -> str | None:
        """Mesh axis of kv heads."""
        return (
            "tensor"
            if self.mesh is not None
            and self.spec.kv_heads % self.mesh.shape.get("tensor", 1) == 0
            and "tensor" in self.mesh.shape
            else None
        )

    def begin(self) -> tuple[KV, ...]:
        """An empty window a layer."""
        window = empty((self.start.shape[0],), self.spec, self.plan.window, self.own[0][0].keys.dtype)
        if self._tensor:
            window = jax.tree.map(lambda x: lax.with_sharding_constraint(x, P(None, "tensor")), window)
        return (window,) * self.spec.layers

    def layer(
        self, i: int, q_BxHxd: jax.Array, k_BxKxd: jax.Array, v_BxKxd: jax.Array, window: KV, rows: Rows, step: jax.Array
    ) -> tuple[jax.Array, KV]:
        """Attention [B,H,d] of layer i with the step's token in the window."""
        new = encode(k_BxKxd[:, None], v_BxKxd[:, None], window.keys.dtype)
        window = each(window, lambda x, y, axis: lax.dynamic_update_slice_in_dim(x, y, step, axis % x.ndim), new)
        back = self.spec.window_of[i]
        # first position that is seen, counted from the beginning of the sequence
        first = rows.base + rows.length - (back - 1) if back else jnp.zeros_like(rows.length)
        recent = seen_between(first - rows.base - self.start, rows.length - self.start, self.plan.window)
        parts = [self._filled(i, q_BxHxd, first, rows), _recent(q_BxHxd, window, recent)]
        return merge(parts, q_BxHxd.dtype), window

    def _filled(self, i: int, q: jax.Array, first: jax.Array, rows: Rows) -> Partial:
        """Over what lay in the cache when the dispatch began."""
        zero = jnp.zeros_like(self.start)
        own = jnp.maximum(first - rows.base, 0), jnp.where(rows.active, self.start, zero)
        head = jnp.maximum(first, 0), jnp.where(rows.active, rows.base, zero), rows.head + jnp.int32(i * self._heads)
        run: Any = functools.partial(_kernels, classes=tuple(n for n, _ in self.plan.classes), interpret=self.interpret)
        args = (q, self.own[i], self.store, own, head)
        heads = P(None, self._tensor)
        run = self._on_tensor(run, (heads, heads, P(None, None, self._tensor), P(), P()), heads)
        shape = q.shape[0], self.spec.kv_heads, q.shape[1] // self.spec.kv_heads
        return Partial(*(x.reshape(*shape, *x.shape[2:]) for x in run(*args)))

    def finish(self, windows: tuple[KV, ...], rows: Rows) -> tuple[tuple[KV, ...], ...]:
        """The cache with what the window holds."""
        run: Any = functools.partial(_flush, classes=tuple(n for n, _ in self.plan.classes), interpret=self.interpret)
        heads = P(None, self._tensor)
        run = self._on_tensor(run, (heads, heads, P(), P()), heads)
        count = rows.length - self.start
        return tuple(run(own, window, self.start, count) for own, window in zip(self.own, windows))

    @property
    def _heads(self) -> int:
        """Rows of the store."""
        return 0 if self.store is None else self.store.keys.shape[1]

    def _on_tensor(self, run: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`run` on the heads of each device: a kernel is opaque to the partitioner. The slots are those of one device already."""
        if self.mesh is None:
            return run
        return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, axis_names={"tensor"}, check_vma=False)


def _recent(q_BxHxd: jax.Array, window: KV, seen_BxW: jax.Array) -> Partial:
    """kv.attend as matrix products, which a TPU runs without widening the window first."""
    B, H, d = q_BxHxd.shape
    K, int8 = window.keys.shape[1], window.keys.dtype == jnp.int8
    dtype = jnp.bfloat16 if q_BxHxd.dtype == jnp.bfloat16 and window.keys.dtype != jnp.float32 else jnp.float32
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    dot = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    q = q_BxHxd.reshape(B, K, H // K, d).astype(dtype)
    scores = dot("BKGd,BKdW->BKGW", q, window.keys.astype(dtype)) * jnp.float32(d**-0.5)
    if int8:
        scores = scores * window.key_scale[:, :, None]  # type: ignore[index]
    seen = seen_BxW[:, None, None]
    scores = jnp.where(seen, scores, NEGATIVE)
    peak = jnp.max(scores, axis=3)
    weights = jnp.where(seen, jnp.exp(scores - peak[..., None]), jnp.float32(0))
    total = jnp.sum(weights, axis=3)
    if int8:
        weights = weights * window.value_scale[:, :, None]  # type: ignore[index]
    return Partial(dot("BKGW,BKWd->BKGd", weights.astype(dtype), window.values.astype(dtype)), peak, total)


def _pieces(x: Any, classes: tuple[int, ...]) -> list[Any]:
    """Arrays [B,...] cut into those of each class."""
    ends = [sum(classes[: c + 1]) for c in range(len(classes))]
    return [jax.tree.map(lambda a, n=n, end=end: a[end - n : end], x) for n, end in zip(classes, ends)]  # type: ignore[misc]


def _kernels(q: jax.Array, own: Any, store: KV | None, own_range: Any, head: Any, *, classes: Any, interpret: bool) -> Part:
    """Parts of own positions and, where there is a store, of shared heads, merged; of one device."""
    cut = _pieces((q, *own_range), classes)
    found = [_part(x, kv, first, last, None, interpret) for (x, first, last), kv in zip(cut, own)]
    part = tuple(jnp.concatenate(x) if len(found) > 1 else x[0] for x in zip(*found))
    if store is None:
        return part  # type: ignore[return-value]
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), store)  # a layer sliced out would be copied each step
    first, last, rows = head
    return merge_parts([part, _part(q, flat, first, last, rows, interpret)])  # type: ignore[list-item]


def _part(q: jax.Array, kv: KV, first: jax.Array, last: jax.Array, rows: jax.Array | None, interpret: bool) -> Part:
    return decode_attention_kernel(
        q, kv.keys, kv.values, first, last, key_scale=kv.key_scale, value_scale=kv.value_scale, rows=rows, interpret=interpret
    )


def _flush(own: Any, window: KV, start: jax.Array, count: jax.Array, *, classes: Any, interpret: bool) -> tuple[KV, ...]:
    """One layer on one device."""
    cut = _pieces((window, start, count), classes)
    flush = flush_plain if interpret else flush_kernel
    return tuple(flush(kv, *piece) for kv, piece in zip(own, cut))
