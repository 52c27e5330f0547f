"""The engine's device state: keys and values of every slot, what each slot is doing, what it has drawn.

Keys and values are one array a layer, keys [slots, K, d, S] and values [slots, K, S, d]: on the CPU both products of the
attention then run along contiguous memory inside one fused loop, and a token's row is scattered in place (a stacked array would
be sliced out, layer by layer, every step). A slot's first `length` positions are filled: prompt, then its own tokens.

Axes: B slots, L layers, K kv heads, d head width, S key positions, N tokens drawn, P packed rows, T positions of a packed row.
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

RUNNING, STOP, LENGTH = 0, 1, 2
FINISH = {STOP: "stop", LENGTH: "length"}


@struct.dataclass
class Rows:
    """What each slot is doing; every field is [B]. All per request, so no value of them ever needs a compile."""

    active: jax.Array  # bool
    finish: jax.Array  # int32: RUNNING, STOP or LENGTH
    last: jax.Array  # int32: the token to feed next
    length: jax.Array  # int32: positions filled
    drawn: jax.Array  # int32: tokens drawn = index of the next draw
    key: jax.Array  # [B,2] uint32
    temperature: jax.Array  # float32
    top_p: jax.Array  # float32
    top_k: jax.Array  # int32
    max_new: jax.Array  # int32
    min_new: jax.Array  # int32


@struct.dataclass
class Drawings:
    """What each slot has drawn, [B,N]; the first `rows.drawn` entries count."""

    tokens: jax.Array  # int32
    logprobs: jax.Array  # float32
    entropy: jax.Array  # float32


@struct.dataclass
class State:
    keys: tuple[jax.Array, ...]  # L x [B,K,d,S]
    values: tuple[jax.Array, ...]  # L x [B,K,S,d]
    rows: Rows
    drawings: Drawings


@struct.dataclass
class PromptKV:
    """Keys and values of packed prompts, as prefill leaves them."""

    keys: tuple[jax.Array, ...]  # L x [P,K,d,T]
    values: tuple[jax.Array, ...]  # L x [P,K,T,d]


@struct.dataclass
class Admission:
    """Which prompt goes to which slot; arrays of [B], of which the first `count` entries are read."""

    count: Any  # int32 scalar
    slot: Any  # int32
    packed_row: Any  # int32: where the prompt lies in a PromptKV
    offset: Any  # int32
    rows: Rows  # entry i describes slot[i]


def new_rows(slots: int) -> Rows:
    """All slots free, as host arrays."""
    zeros = {name: np.zeros(slots, np.int32) for name in ("finish", "last", "length", "drawn", "top_k", "max_new", "min_new")}
    ones = {name: np.ones(slots, np.float32) for name in ("temperature", "top_p")}
    return Rows(active=np.zeros(slots, bool), key=np.zeros((slots, 2), np.uint32), **zeros, **ones)  # type: ignore[arg-type]


def new_state(spec: ModelSpec, slots: int, positions: int, max_new: int, dtype: Any) -> State:
    """An empty state. Nothing in a slot is read before it was written, so the zeros are only there to be defined."""
    K, d = spec.kv_heads, spec.head_dim
    return State(
        keys=tuple(jnp.zeros((slots, K, d, positions), dtype) for _ in range(spec.layers)),
        values=tuple(jnp.zeros((slots, K, positions, d), dtype) for _ in range(spec.layers)),
        rows=jax.tree.map(jnp.asarray, new_rows(slots)),
        drawings=Drawings(
            tokens=jnp.zeros((slots, max_new), jnp.int32),
            logprobs=jnp.zeros((slots, max_new), jnp.float32),
            entropy=jnp.zeros((slots, max_new), jnp.float32),
        ),
    )


def kv_bytes_per_token(spec: ModelSpec, itemsize: int) -> int:
    """Bytes of keys and values that one position of one slot takes."""
    return 2 * spec.layers * spec.kv_heads * spec.head_dim * itemsize


def admit(state: State, prompts: PromptKV, admission: Admission) -> State:
    """Copy prompts into slots and start them. The copy is as wide as a packed row; what it brings beyond the prompt lies
    beyond `length`, is never read and is overwritten token by token."""
    T = prompts.keys[0].shape[3]
    K, d = prompts.values[0].shape[1], prompts.values[0].shape[3]

    def one(i: jax.Array, kv: tuple[Any, Any]) -> tuple[Any, Any]:
        slot, row, start = admission.slot[i], admission.packed_row[i], admission.offset[i]
        keys, values = [], []
        for k, v, pk, pv in zip(*kv, prompts.keys, prompts.values):
            # roll, not a plain slice: a slice that runs over the end would be clamped and so moved
            from_k = jnp.roll(lax.dynamic_slice(pk, (row, 0, 0, 0), (1, K, d, T)), -start, axis=3)
            from_v = jnp.roll(lax.dynamic_slice(pv, (row, 0, 0, 0), (1, K, T, d)), -start, axis=2)
            keys.append(lax.dynamic_update_slice(k, from_k, (slot, 0, 0, 0)))
            values.append(lax.dynamic_update_slice(v, from_v, (slot, 0, 0, 0)))
        return tuple(keys), tuple(values)

    keys, values = lax.fori_loop(0, admission.count, one, (state.keys, state.values))
    B = state.rows.active.shape[0]
    target = jnp.where(jnp.arange(B) < admission.count, admission.slot, B)  # B is outside: dropped
    rows = jax.tree.map(lambda old, new: old.at[target].set(new, mode="drop"), state.rows, admission.rows)
    return dataclasses.replace(state, keys=keys, values=values, rows=rows)
