"""The engine's device state: keys and values of every slot, what each slot is doing, what it has drawn.

Slots come in length classes: class c has n slots of S_c positions; slots are numbered device by device, on each through the
classes. Each layer and class has keys and values of its own, on the CPU each segment of positions too (of a stacked array every
step would slice them out). A slot's positions hold what follows its shared head (all of its prompt where none is shared), then
its own tokens; a row that fills its class stops as FULL, keeps everything, and goes on after a move.

Axes: B slots, L layers, C classes, N tokens drawn, F forced tokens, P packed rows, T positions of a packed row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from coevo_jax.models.spec import ModelSpec
from coevo_jax.sampler.kv import KV, blocked, empty_slots, head_of, is_blocked, part_of, splice, width_of

RUNNING, STOP, LENGTH, FULL = 0, 1, 2, 3
FINISH = {STOP: "stop", LENGTH: "length"}
FREE = -1  # entry of Drawings.tokens that nothing forces


@struct.dataclass
class Rows:
    """What each slot is doing; every field is [B]. All per request, so no value of them ever needs a compile."""

    active: jax.Array  # bool
    finish: jax.Array  # int32: RUNNING, STOP, LENGTH or FULL
    last: jax.Array  # int32: the token to feed next
    length: jax.Array  # int32: own positions filled
    base: jax.Array  # int32: length of the shared head before them
    head: jax.Array  # int32: row of the head store that holds it
    drawn: jax.Array  # int32: tokens drawn = index of the next draw
    key: jax.Array  # [B,2] uint32
    temperature: jax.Array  # float32
    top_p: jax.Array  # float32
    top_k: jax.Array  # int32
    max_new: jax.Array  # int32
    min_new: jax.Array  # int32


@struct.dataclass
class Drawings:
    """What each slot has drawn, [B,N]; the first `rows.drawn` entries count. Beyond them tokens hold what is forced, or FREE."""

    tokens: jax.Array  # int32
    logprobs: jax.Array  # float32
    entropy: jax.Array  # float32


@struct.dataclass
class State:
    own: tuple[tuple[tuple[KV, ...], ...], ...]  # L x C x segments
    rows: Rows
    drawings: Drawings


@struct.dataclass
class Report:
    """What the host needs to know after a dispatch: copies, so that the state can be donated to the next one."""

    active: jax.Array  # [B] bool
    finish: jax.Array  # [B] int32
    drawn: jax.Array  # [B] int32
    length: jax.Array  # [B] int32
    last: jax.Array  # [B] int32
    steps: jax.Array  # [devices] int32: steps done
    row_steps: jax.Array  # [devices] int32: active slots, summed over the steps


@struct.dataclass
class Admission:
    """Which prompt goes to which slot of one class; arrays of [B], of which the first `count` entries are read."""

    count: Any  # int32 scalar
    slot: Any  # int32
    packed_row: Any  # int32: where the prompt's tail lies in the packed keys and values
    offset: Any  # int32
    head: Any  # int32: row of the head store
    head_length: Any  # int32: positions taken from it (0 = none)
    forced: Any  # [B,F] int32
    rows: Rows  # entry i describes slot[i]


def new_rows(slots: int) -> Rows:
    """All slots free, as host arrays."""
    whole = ("finish", "last", "length", "base", "head", "drawn", "top_k", "max_new", "min_new")
    zeros = {name: np.zeros(slots, np.int32) for name in whole}
    ones = {name: np.ones(slots, np.float32) for name in ("temperature", "top_p")}
    return Rows(active=np.zeros(slots, bool), key=np.zeros((slots, 2), np.uint32), **zeros, **ones)  # type: ignore[arg-type]


def new_state(spec: ModelSpec, classes: tuple[tuple[int, int], ...], max_new: int, dtype: Any, segment: int = 0) -> State:
    """An empty state for classes of (slots, positions), in segments of so many positions (kv.py; 0: in one piece)."""
    slots = sum(n for n, _ in classes)
    return State(
        own=tuple(tuple(empty_slots(n, spec, positions, dtype, segment) for n, positions in classes) for _ in range(spec.layers)),
        rows=jax.tree.map(jnp.asarray, new_rows(slots)),
        drawings=Drawings(
            tokens=jnp.full((slots, max_new), FREE, jnp.int32),
            logprobs=jnp.zeros((slots, max_new), jnp.float32),
            entropy=jnp.zeros((slots, max_new), jnp.float32),
        ),
    )


def places_of(classes: tuple[tuple[int, int], ...], shards: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Class of each slot, and its row in the class's arrays, [B] each.

    Slots are dealt to `shards` devices in ranges, and a device's range has its share of each class, one behind the other: slots
    and their keys and values then lie on the same device.
    """
    kinds = np.tile(np.repeat(np.arange(len(classes)), [n // shards for n, _ in classes]), shards)
    rows = np.zeros(len(kinds), np.int32)
    for c, (n, _) in enumerate(classes):
        rows[kinds == c] = np.arange(n)
    return kinds, rows


def row_of(kv: KV, row: Any, lead: tuple[int, ...] = ()) -> KV:
    """One row [1,...] of a KV, or of one layer (`lead`) of a stacked one."""

    def cut(x: jax.Array) -> jax.Array:
        start: list[Any] = [*lead, row, *[0] * (x.ndim - len(lead) - 1)]
        piece = lax.dynamic_slice(x, start, (*[1] * (len(lead) + 1), *x.shape[len(lead) + 1 :]))
        return piece.reshape(piece.shape[len(lead) :])

    return jax.tree.map(cut, kv)


def put_row(kv: KV, row: Any, piece: KV, lead: tuple[int, ...] = ()) -> KV:
    """A KV with the leading positions of one row replaced."""

    def put(x: jax.Array, y: jax.Array) -> jax.Array:
        start: list[Any] = [*lead, row, *[0] * (x.ndim - len(lead) - 1)]
        return lax.dynamic_update_slice(x, y.reshape((1,) * len(lead) + y.shape), start)

    return jax.tree.map(put, kv, piece)


def _put_positions(segments: tuple[KV, ...], row: Any, piece: KV, width: int) -> tuple[KV, ...]:
    """One row's leading `width` positions, over its segments."""
    out, at = [], 0
    for kv in segments:
        if part := min(width_of(kv), width - at):
            new = head_of(piece, part, at)
            kv = put_row(kv, row, blocked(new) if is_blocked(kv) else new)
        out.append(kv)
        at += part
    return tuple(out)


def admit(
    state: State, prompts: KV, store: KV | None, admission: Admission, *, kind: int, rows: np.ndarray, width: int, copy: bool
) -> State:
    """Copy prompts into slots of class `kind` and start them. prompts, store: stacked; rows: each slot's row in its class.

    copy: the head's keys and values come from the store into the slot; else the slot refers to the store's row. `width` positions
    are written; what lies beyond the prompt is never read and is overwritten token by token.
    """
    own = [layer[kind] for layer in state.own]
    wide = min(width, sum(width_of(kv) for kv in own[0]))

    def one(i: jax.Array, own: list[tuple[KV, ...]]) -> list[tuple[KV, ...]]:
        slot, out = jnp.asarray(rows)[admission.slot[i]], []
        for layer, segments in enumerate(own):
            tail = row_of(prompts, admission.packed_row[i], (layer,))
            if copy and store is not None:
                head = head_of(row_of(store, admission.head[i], (layer,)), wide)
                piece = splice(head, tail, admission.head_length[i], admission.offset[i])
            else:
                piece = part_of(tail, admission.offset[i], wide)
            out.append(_put_positions(segments, slot, piece, wide))
        return out

    own = lax.fori_loop(0, admission.count, one, own)
    B = state.rows.active.shape[0]
    target = jnp.where(jnp.arange(B) < admission.count, admission.slot, B)  # B is outside: dropped
    started = jax.tree.map(lambda old, new: old.at[target].set(new, mode="drop"), state.rows, admission.rows)
    tokens = state.drawings.tokens.at[target].set(FREE, mode="drop")
    tokens = tokens.at[target, : admission.forced.shape[1]].set(admission.forced, mode="drop")
    layers = tuple((*layer[:kind], segments, *layer[kind + 1 :]) for layer, segments in zip(state.own, own))
    return dataclasses.replace(state, own=layers, rows=started, drawings=dataclasses.replace(state.drawings, tokens=tokens))


def move(state: State, source: jax.Array, target: jax.Array, *, kinds: tuple[int, int], rows: np.ndarray) -> State:
    """A row that filled its class goes on in a slot of a larger one; its tokens, keys and values come along."""
    layers, places = [], jnp.asarray(rows)
    for layer in state.own:
        come = [row_of(kv, places[source]) for kv in layer[kinds[0]]]
        to = layer[kinds[1]]
        moved = (*(put_row(kv, places[target], new) for kv, new in zip(to, come)), *to[len(come) :])
        layers.append(tuple(moved if c == kinds[1] else segments for c, segments in enumerate(layer)))
    moving, drawings = jax.tree.map(lambda x: x.at[target].set(x[source]), (state.rows, state.drawings))
    active, finish = moving.active.at[source].set(False).at[target].set(True), moving.finish.at[target].set(RUNNING)
    return State(tuple(layers), dataclasses.replace(moving, active=active, finish=finish), drawings)


def take_rows(tree: Any, rows: jax.Array) -> Any:
    """Some slots of anything with slots in front, as arrays of their own."""
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), tree)


def keep(
    store: KV,
    prompts: KV,
    row: jax.Array,
    parent: jax.Array,
    parent_length: jax.Array,
    packed_row: jax.Array,
    offset: jax.Array,
) -> KV:
    """Store a head: its parent's positions (parent_length of them, 0 = none), then its own, which prefill just made."""
    for layer in range(store.keys.shape[0]):
        piece = splice(row_of(store, parent, (layer,)), row_of(prompts, packed_row, (layer,)), parent_length, offset)
        store = put_row(store, row, piece, (layer,))
    return store
