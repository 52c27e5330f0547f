"""Fused decode: up to n steps over all slots in one program, with no host work inside.

The block pieces are those of models.forward, so the maths exist once; only attention over the cache is its own.

Axes: B slots, D model, H heads, K kv heads, G query heads a kv head, d head width, S key positions, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coevo_jax.models.forward import attention_inputs, attention_output, embed, mlp_block, rms_norm, unembed
from coevo_jax.models.rope import rope_tables
from coevo_jax.models.spec import ModelSpec
from coevo_jax.sampler.draw import draw, forbid, truncate
from coevo_jax.sampler.guided import apply_mask
from coevo_jax.sampler.keys import token_uniforms
from coevo_jax.sampler.kv import KV, Partial, attend, attend_heads, head_of, merge, write
from coevo_jax.sampler.state import FULL, LENGTH, RUNNING, STOP, Report, Rows, State, starts_of


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a decode program is compiled for. reach, head_reach: own and shared positions that attention reads at most."""

    classes: tuple[tuple[int, int], ...]  # (slots, positions)
    reach: int
    head_reach: int = 0
    truncated: bool = False  # top-k and top-p
    forced: bool = False
    check_every: int = 1
    narrow: int = 0  # only the first so many slots are computed (0 = all); for one class

    @property
    def starts(self) -> list[int]:
        """First slot of each class."""
        return starts_of(self.classes)

    @property
    def capacity(self) -> np.ndarray:
        """Positions of each slot, [B]."""
        capacity = np.concatenate([np.full(n, positions, np.int32) for n, positions in self.classes])
        return capacity[: self.narrow or None]


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


def _seen(first_B: jax.Array, last_B: jax.Array, width: int) -> jax.Array:
    """[B,S] bool: positions from first up to last, which is included."""
    s = jnp.arange(width, dtype=jnp.int32)[None]
    return (s >= first_B[:, None]) & (s <= last_B[:, None])


def _attention(q_BxHxd: jax.Array, own: list[KV], heads: KV | None, rows: Rows, plan: Plan, window: int) -> jax.Array:
    """Attention [B,H,d] of every slot over its shared head and its own positions; `own` holds a KV a class."""
    first = rows.base + rows.length - (window - 1) if window else jnp.zeros_like(rows.length)  # as a position of the sequence
    parts = []
    for kv, start in zip(own, plan.starts):
        here = slice(start, start + kv.keys.shape[0])
        width = min(plan.reach, kv.keys.shape[-1])
        seen = functools.partial(_seen, (first - rows.base)[here], rows.length[here])
        parts.append(attend(q_BxHxd[here], head_of(kv, width), seen(width)))
    whole = Partial(*(jnp.concatenate(x) for x in zip(*parts))) if len(parts) > 1 else parts[0]
    if heads is None:
        return merge([whole], q_BxHxd.dtype)
    heads = head_of(heads, min(plan.head_reach, heads.keys.shape[-1]))
    seen_BxW = _seen(first, rows.base - 1, heads.keys.shape[-1])
    return merge([whole, attend_heads(q_BxHxd, heads, rows.head, seen_BxW)], q_BxHxd.dtype)


def token_logits(
    params: dict[str, Any], spec: ModelSpec, state: State, store: KV | None, plan: Plan, dtype: Any
) -> tuple[jax.Array, State]:
    """Feed each slot's last token: logits [B,V] float32 and the state with that token's keys and values written.

    No active slot may be longer than plan.reach. Slots at rest are computed too, write nothing and are not used.
    """
    rows = state.rows
    x = embed(params, rows.last[:, None], dtype)
    cos, sin = rope_tables(spec, (rows.base + rows.length)[:, None])
    position = jnp.where(rows.active, rows.length, jnp.int32(1 << 30))
    layers = []
    for i, layer in enumerate(params["layers"]):
        r = rope_variant(spec, i)
        q, k, v = attention_inputs(layer, spec, x, cos[r], sin[r])
        own = []
        for kv, start in zip(state.own[i], plan.starts):
            here = slice(start, start + kv.keys.shape[0])
            own.append(write(kv, position[here], k[here, 0], v[here, 0]))
        heads = None if store is None else layer_of(store, i)
        attended = _attention(q[:, 0], own, heads, rows, plan, spec.window_of[i])
        x = mlp_block(layer, spec, attention_output(layer, spec, x, attended[:, None]))
        layers.append(tuple(own))
    hidden = rms_norm(x[:, 0], params["final_norm"], spec.norm_eps)
    return unembed(params, spec, hidden), dataclasses.replace(state, own=tuple(layers))


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
    spec: ModelSpec,
    state: State,
    store: KV | None,
    mask: jax.Array | None,
    stop_ids: tuple[int, ...],
    plan: Plan,
    dtype: Any,
) -> State:
    """One token for every active slot."""
    logits, state = token_logits(params, spec, state, store, plan, dtype)
    rows, out = state.rows, state.drawings
    logits = forbid(logits, stop_ids, rows.drawn < rows.min_new)
    if mask is not None:
        logits = apply_mask(logits, mask)
    if plan.truncated:
        logits = truncate(logits, rows.temperature, rows.top_p, rows.top_k)
    slot = jnp.arange(rows.last.shape[0])
    forced = None
    if plan.forced:
        forced = out.tokens[slot, jnp.minimum(rows.drawn, out.tokens.shape[1] - 1)]
    drawn = draw(logits, token_uniforms(rows.key, rows.drawn), rows.temperature, forced)
    column = jnp.where(rows.active, rows.drawn, out.tokens.shape[1])  # outside = dropped: a slot at rest keeps what it drew
    put = lambda to, x: to.at[slot, column].set(x, mode="drop", unique_indices=True)  # noqa: E731
    drawings = dataclasses.replace(
        out,
        tokens=put(out.tokens, drawn.token),
        logprobs=put(out.logprobs, drawn.logprob),
        entropy=put(out.entropy, drawn.entropy),
    )
    return dataclasses.replace(state, rows=_advance(rows, drawn.token, stop_ids, plan.capacity), drawings=drawings)


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
) -> tuple[State, Report]:
    """Up to `steps` steps; ends early when no slot is active or at most `leave_at` are (free slots enough to refill; -1 = never).

    store: shared heads (stacked), None when slots hold their own. mask: allowed ids, as bits [B,V/32], of guided rows. The end
    is looked for every plan.check_every steps.
    """

    whole = state
    if plan.narrow:
        state, mask = jax.tree.map(lambda x: x[: plan.narrow], (state, mask))

    def going(carry: tuple[State, jax.Array, jax.Array]) -> jax.Array:
        state, done, _ = carry
        active = jnp.sum(state.rows.active.astype(jnp.int32))
        return (done < steps) & (active > jnp.maximum(leave_at, 0))

    def body(carry: tuple[State, jax.Array, jax.Array]) -> tuple[State, jax.Array, jax.Array]:
        state, done, used = carry
        for _ in range(plan.check_every):
            used = used + jnp.sum(state.rows.active.astype(jnp.int32))
            state = decode_step(params, spec, state, store, mask, stop_ids, plan, dtype)
        return state, done + plan.check_every, used

    state, done, used = lax.while_loop(going, body, (state, jnp.int32(0), jnp.int32(0)))
    if plan.narrow:
        state = jax.tree.map(lambda x, part: lax.dynamic_update_slice_in_dim(x, part, 0, 0), whole, state)
    rows = state.rows
    report = {name: jnp.copy(getattr(rows, name)) for name in ("active", "finish", "drawn", "length", "last")}
    return state, Report(**report, steps=done, row_steps=used)
