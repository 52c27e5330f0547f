"""Fused decode: up to n steps over all slots in one program, with no host work inside.

The block pieces are those of models.forward, so the maths exist once; only attention over the cache is its own.

Axes: B slots, D model, H heads, K kv heads, G query heads a kv head, d head width, S key positions, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from coevo_jax.models.forward import attention_inputs, attention_output, embed, mlp_block, rms_norm, unembed
from coevo_jax.models.quantize import Int8Weight
from coevo_jax.models.rope import rope_tables
from coevo_jax.models.spec import ModelSpec
from coevo_jax.sampler.draw import draw, forbid, truncate
from coevo_jax.sampler.guided import apply_mask
from coevo_jax.sampler.keys import token_uniforms
from coevo_jax.sampler.kv import (
    KV,
    Partial,
    attend,
    attend_heads,
    attend_segments,
    head_of,
    is_blocked,
    merge,
    seen_between,
    width_of,
    write,
)
from coevo_jax.sampler.state import FULL, LENGTH, RUNNING, STOP, Drawings, Report, Rows, State, places_of
from coevo_jax.sampler.window import SLOTS, Windowed

Segments = tuple[KV, ...]


@struct.dataclass
class Loop:
    """What changes from step to step."""

    held: tuple[Any, ...]  # a layer each: the cache itself, or its staging window
    rows: Rows
    drawings: Drawings
    done: jax.Array  # int32: steps
    row_steps: jax.Array  # int32: active slots, summed over the steps


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a decode program is compiled for. reach, head_reach: own and shared positions that attention reads at most (with slots
    in segments a step finds out itself how far it has to read)."""

    classes: tuple[tuple[int, int], ...]  # (slots, positions)
    reach: int
    head_reach: int = 0
    truncated: bool = False  # top-k and top-p
    forced: bool = False
    check_every: int = 1
    attention: str = "xla"  # or pallas: the cache is read by a kernel, over filled tiles whatever the reach (window.py)
    window: int = 0  # pallas: most steps of a dispatch
    cpu: bool = False  # compiled for one CPU device (_vocab_first)

    @property
    def capacity(self) -> np.ndarray:
        """Positions of each slot, [B]."""
        kinds, _ = places_of(self.classes)
        return np.asarray([s for _, s in self.classes], np.int32)[kinds]

    def cut(self, x: jax.Array) -> list[jax.Array]:
        """[B,...] as one array for the slots of each class."""
        out, at = [], 0
        for n, _ in self.classes:
            out.append(x[at : at + n])
            at += n
        return out

    def share(self, shards: int) -> Plan:
        """The plan of one device's slots, of which there are `shards`."""
        return dataclasses.replace(self, classes=tuple((n // shards, positions) for n, positions in self.classes))


@dataclasses.dataclass(frozen=True)
class InPlace:
    """The cache that XLA writes token by token: what the loop holds is the cache itself."""

    store: KV | None  # shared heads, stacked
    spec: ModelSpec
    plan: Plan

    def layer(
        self, i: int, q_BxHxd: jax.Array, k_BxKxd: jax.Array, v_BxKxd: jax.Array, own: tuple[Segments, ...], rows: Rows, step: Any
    ) -> tuple[jax.Array, tuple[Segments, ...]]:
        """Attention [B,H,d] of layer i, and its cache with the step's token written. Slots at rest write nothing."""
        cut = self.plan.cut
        position = jnp.where(rows.active, rows.length, jnp.int32(1 << 30))
        own = tuple(_write(*x) for x in zip(own, cut(position), cut(k_BxKxd), cut(v_BxKxd)))
        heads = None if self.store is None else layer_of(self.store, i)
        return _attention(q_BxHxd, own, heads, rows, self.plan, self.spec.window_of[i]), own


def layer_of(stacked: KV, i: int) -> KV:
    """One layer of a stacked KV."""
    return jax.tree.map(lambda x: x[i], stacked)


def split_layers(layers: dict[str, jax.Array], dtype: Any) -> tuple[dict[str, jax.Array], ...]:
    """Stacked [L,...] weights as one tree a layer: slicing them inside the step would copy every weight once a token."""
    count = next(iter(layers.values())).shape[0]
    return tuple({name: w[i].astype(dtype) for name, w in layers.items()} for i in range(count))


def rope_variant(spec: ModelSpec, layer: int) -> int:
    """Which table of rope_tables a layer uses."""
    return int(bool(spec.unscaled_rope_in_windows and spec.rope_scaling and spec.window_of[layer] > 0))


def _write(segments: Segments, position_B: jax.Array, k_BxKxd: jax.Array, v_BxKxd: jax.Array) -> Segments:
    """One token a slot of a class, in the segment of its position; others drop it."""
    out, at = [], 0
    for kv in segments:
        inside = position_B - at
        out.append(write(kv, jnp.where(inside >= 0, inside, jnp.int32(1 << 30)), k_BxKxd, v_BxKxd))
        at += width_of(kv)
    return tuple(out)


def _attention(q_BxHxd: jax.Array, own: tuple[Segments, ...], heads: KV | None, rows: Rows, plan: Plan, window: int) -> jax.Array:
    """Attention [B,H,d] of every slot over its shared head and its own positions; `own` holds a class each."""
    first = rows.base + rows.length - (window - 1) if window else jnp.zeros_like(rows.length)  # as a position of the sequence
    parts = []
    filled = jnp.where(rows.active, rows.length, 0)
    for segments, *x in zip(own, plan.cut(q_BxHxd), plan.cut(first - rows.base), plan.cut(rows.length), plan.cut(filled)):
        q, low, high, reached = x
        if is_blocked(segments[0]):
            parts.append(attend_segments(q, segments, low, high, jnp.max(reached)))
        else:
            width = min(plan.reach, width_of(segments[0]))
            parts.append(attend(q, head_of(segments[0], width), seen_between(low, high, width)))
    whole = Partial(*(jnp.concatenate(x) for x in zip(*parts))) if len(parts) > 1 else parts[0]
    if heads is None:
        return merge([whole], q_BxHxd.dtype)
    heads = head_of(heads, min(plan.head_reach, heads.keys.shape[-1]))
    seen_BxW = seen_between(first, rows.base - 1, heads.keys.shape[-1])
    return merge([whole, attend_heads(q_BxHxd, heads, rows.head, seen_BxW)], q_BxHxd.dtype)


def token_logits(
    params: dict[str, Any], cache: InPlace | Windowed, held: tuple[Any, ...], rows: Rows, step: jax.Array, dtype: Any
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Feed each slot's last token: logits [B,V] float32 ([V,B] where _vocab_first says so), and what the cache holds a layer
    with that token's keys and values.

    No active slot may be longer than plan.reach. Slots at rest are computed too and are not used.
    """
    spec = cache.spec
    x = embed(params, rows.last[:, None], dtype)
    cos, sin = rope_tables(spec, (rows.base + rows.length)[:, None])
    out = []
    for i, layer in enumerate(params["layers"]):
        r = rope_variant(spec, i)
        q, k, v = attention_inputs(layer, spec, x, cos[r], sin[r])
        attended, kept = cache.layer(i, q[:, 0], k[:, 0], v[:, 0], held[i], rows, step)
        x = mlp_block(layer, spec, attention_output(layer, spec, x, attended[:, None]))
        out.append(kept)
    hidden = rms_norm(x[:, 0], params["final_norm"], spec.norm_eps)
    if not _vocab_first(params, cache):
        return unembed(params, spec, hidden), tuple(out)
    logits = jnp.einsum("VD,BD->VB", params["embed"].astype(hidden.dtype), hidden, preferred_element_type=jnp.float32)
    return lax.optimization_barrier(logits), tuple(out)  # else XLA turns the product around again


def _vocab_first(params: dict[str, Any], cache: InPlace | Windowed) -> bool:
    """Whether logits come as [V,B]: on the CPU tied embeddings stand on the left, since as a transposed right side Eigen is far
    slower with them."""
    return cache.plan.cpu and cache.spec.tied and not isinstance(params["embed"], Int8Weight)


def _by_row(logits_BxV: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Logits dealt out by rows over 'tensor', from the vocabulary over it: the draw looks at a whole row several times."""
    if mesh is None or mesh.shape.get("tensor", 1) == 1 or logits_BxV.shape[0] % mesh.shape.get("tensor", 1):
        return logits_BxV
    for spec in (PartitionSpec(None, "tensor"), PartitionSpec("tensor")):  # both: else the weights are gathered instead
        logits_BxV = lax.with_sharding_constraint(logits_BxV, spec)
    return logits_BxV


def _advance(rows: Rows, token_B: jax.Array, stop_ids: tuple[int, ...], capacity_B: np.ndarray) -> Rows:
    """Rows after a draw. A stop id ends a row as 'stop' even when it is the last token allowed; a row whose class has no
    position left for its last token is FULL."""
    stops = jnp.asarray(np.asarray(stop_ids, np.int32).reshape(1, -1))
    stopped = jnp.any(token_B[:, None] == stops, axis=1)
    drawn, length = rows.drawn + 1, rows.length + 1
    finish = jnp.where(length >= jnp.asarray(capacity_B), FULL, RUNNING)
    finish = jnp.where(stopped, STOP, jnp.where(drawn >= rows.max_new, LENGTH, finish)).astype(jnp.int32)
    on = rows.active
    return dataclasses.replace(
        rows,
        active=on & (finish == RUNNING),
        finish=jnp.where(on, finish, rows.finish),
        last=jnp.where(on, token_B, rows.last),
        length=jnp.where(on, length, rows.length),
        drawn=jnp.where(on, drawn, rows.drawn),
    )


def decode_step(
    params: dict[str, Any],
    cache: InPlace | Windowed,
    loop: Loop,
    mask: jax.Array | None,
    stop_ids: tuple[int, ...],
    dtype: Any,
    mesh: Mesh | None,
) -> Loop:
    """One token for every active slot."""
    rows, out, plan = loop.rows, loop.drawings, cache.plan
    logits, held = token_logits(params, cache, loop.held, rows, loop.done, dtype)
    first = _vocab_first(params, cache)
    if first and (mask is not None or plan.truncated):
        logits, first = logits.T, False
    logits = logits if first else _by_row(logits, mesh)
    logits = forbid(logits, stop_ids, rows.drawn < rows.min_new, first)
    if mask is not None:
        logits = apply_mask(logits, mask)
    if plan.truncated:
        logits = truncate(logits, rows.temperature, rows.top_p, rows.top_k)
    slot = jnp.arange(rows.last.shape[0])
    forced = None
    if plan.forced:
        forced = out.tokens[slot, jnp.minimum(rows.drawn, out.tokens.shape[1] - 1)]
    drawn = draw(logits, token_uniforms(rows.key, rows.drawn), rows.temperature, forced, first)
    column = jnp.where(rows.active, rows.drawn, out.tokens.shape[1])  # outside = dropped: a slot at rest keeps what it drew
    put = lambda to, x: to.at[slot, column].set(x, mode="drop", unique_indices=True)  # noqa: E731
    drawings = dataclasses.replace(
        out,
        tokens=put(out.tokens, drawn.token),
        logprobs=put(out.logprobs, drawn.logprob),
        entropy=put(out.entropy, drawn.entropy),
    )
    rows = _advance(rows, drawn.token, stop_ids, plan.capacity)
    return Loop(held, rows, drawings, loop.done + 1, loop.row_steps + jnp.sum(loop.rows.active.astype(jnp.int32)))


def decode(
    params: dict[str, Any],
    state: State,
    store: KV | None,
    mask: jax.Array | None,
    steps: jax.Array,
    leave_at: jax.Array,
    *,
    spec: ModelSpec,
    stop_ids: tuple[int, ...],
    plan: Plan,
    dtype: Any,
    mesh: Mesh | None = None,
) -> tuple[State, Report]:
    """Up to `steps` steps; ends early when no slot is active or at most `leave_at` are (free slots enough to refill; -1 = never).

    store: shared heads (stacked), None when slots hold their own. mask: allowed ids, as bits [B,V/32], of guided rows. The end
    is looked for every plan.check_every steps. With a mesh each device of data and fsdp goes its own way, with its share of the
    slots and of leave_at: nothing is sent between them.
    """
    shards = 1 if mesh is None else math.prod(mesh.shape[a] for a in SLOTS)
    run = functools.partial(_decode, spec=spec, stop_ids=stop_ids, plan=plan.share(shards), dtype=dtype, mesh=mesh)
    args = (params, state, store, mask, steps, leave_at // shards)
    if mesh is None:
        return run(*args)
    whole, cut = PartitionSpec(), PartitionSpec(SLOTS)
    return jax.shard_map(
        run, mesh=mesh, in_specs=(whole, cut, whole, cut, whole, whole), out_specs=cut, axis_names=set(SLOTS), check_vma=False
    )(*args)


def _decode(
    params: dict[str, Any],
    state: State,
    store: KV | None,
    mask: jax.Array | None,
    steps: jax.Array,
    leave_at: jax.Array,
    *,
    spec: ModelSpec,
    stop_ids: tuple[int, ...],
    plan: Plan,
    dtype: Any,
    mesh: Mesh | None,
) -> tuple[State, Report]:
    """`decode` of one device's slots."""

    def going(loop: Loop) -> jax.Array:
        active = jnp.sum(loop.rows.active.astype(jnp.int32))
        return (loop.done < steps) & (active > jnp.maximum(leave_at, 0))

    def body(loop: Loop) -> Loop:
        for _ in range(plan.check_every):
            loop = decode_step(params, cache, loop, mask, stop_ids, dtype, mesh)
        return loop

    cache: InPlace | Windowed = InPlace(store, spec, plan)
    held: tuple[Any, ...] = state.own
    if plan.attention != "xla":
        steps = jnp.minimum(steps, plan.window // plan.check_every * plan.check_every)
        cache = Windowed(tuple(tuple(kv for (kv,) in layer) for layer in state.own), store, state.rows.length, spec, plan, mesh)
        held = cache.begin()
    loop = lax.while_loop(going, body, Loop(held, state.rows, state.drawings, jnp.int32(0), jnp.int32(0)))
    own = loop.held
    if isinstance(cache, Windowed):
        own = tuple(tuple((kv,) for kv in layer) for layer in cache.finish(loop.held, loop.rows))
    state = State(own, loop.rows, loop.drawings)
    rows = state.rows
    report = {name: jnp.copy(getattr(rows, name)) for name in ("active", "finish", "drawn", "length", "last")}
    return state, Report(**report, steps=loop.done[None], row_steps=loop.row_steps[None])
