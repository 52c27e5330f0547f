"""Fused decode: up to n steps over all slots in one program, with no host work inside.

The block pieces are those of models.forward, so the maths exist once; only attention over the cache is its own.

Axes: B slots, D model, H heads, K kv heads, G query heads a kv head, d head width, S key positions, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coevo_jax.models.forward import attention_inputs, attention_output, embed, mlp_block, rms_norm, unembed
from coevo_jax.models.rope import rope_tables
from coevo_jax.models.spec import ModelSpec
from coevo_jax.sampler.draw import NEGATIVE, draw, forbid, truncate
from coevo_jax.sampler.keys import token_uniforms
from coevo_jax.sampler.state import LENGTH, RUNNING, STOP, Rows, State


def split_layers(layers: dict[str, jax.Array], dtype: Any) -> tuple[dict[str, jax.Array], ...]:
    """Stacked [L,...] weights as one tree a layer: slicing them inside the step would copy every weight once a token."""
    count = next(iter(layers.values())).shape[0]
    return tuple({name: w[i].astype(dtype) for name, w in layers.items()} for i in range(count))


def rope_variant(spec: ModelSpec, layer: int) -> int:
    """Which table of rope_tables a layer uses."""
    return int(bool(spec.unscaled_rope_in_windows and spec.rope_scaling and spec.window_of[layer] > 0))


def cached_attention(q_BxHxd: jax.Array, keys_BxKxdxS: jax.Array, values_BxKxSxd: jax.Array, seen_BxS: jax.Array) -> jax.Array:
    """Attention of one query a slot over its filled positions, [B,H,d]. Softmax in float32.

    Products and sums are written out: XLA fuses slice, widening and product into one loop over the cache, while a batched
    matrix product with G rows first copies its operands.
    """
    B, H, d = q_BxHxd.shape
    K = keys_BxKxdxS.shape[1]
    q = q_BxHxd.reshape(B, K, H // K, d).astype(jnp.float32) * jnp.float32(d**-0.5)
    scores = jnp.sum(q[..., None] * keys_BxKxdxS[:, :, None].astype(jnp.float32), axis=3)  # [B,K,G,S]
    scores = jnp.where(seen_BxS[:, None, None], scores, NEGATIVE)
    weights = jnp.exp(scores - jnp.max(scores, axis=3, keepdims=True))
    out = jnp.sum(weights[..., None] * values_BxKxSxd[:, :, None].astype(jnp.float32), axis=3)  # [B,K,G,d]
    return (out / jnp.sum(weights, axis=3)[..., None]).reshape(B, H, d).astype(q_BxHxd.dtype)


def _seen(position_B: jax.Array, window: int, reach: int) -> jax.Array:
    """[B,S] bool: positions up to the query's own, and within the window where there is one."""
    s, own = jnp.arange(reach, dtype=jnp.int32)[None], position_B[:, None]
    return (s <= own) & (s > own - window) if window else s <= own


def token_logits(params: dict[str, Any], spec: ModelSpec, state: State, reach: int, dtype: Any) -> tuple[jax.Array, State]:
    """Feed each slot's last token: logits [B,V] float32 and the state with that token's keys and values written.

    reach: attention reads positions below it; no active slot may be longer. Slots at rest are computed too and not used.
    """
    rows = state.rows
    B = rows.last.shape[0]
    slot = jnp.arange(B)
    position = jnp.minimum(rows.length, reach - 1)
    x = embed(params, rows.last[:, None], dtype)
    cos, sin = rope_tables(spec, position[:, None])
    keys, values = list(state.keys), list(state.values)
    seen = {window: _seen(position, window, reach) for window in set(spec.window_of)}
    for i, layer in enumerate(params["layers"]):
        r = rope_variant(spec, i)
        q, k, v = attention_inputs(layer, spec, x, cos[r], sin[r])
        keys[i] = keys[i].at[slot, :, :, position].set(k[:, 0].astype(keys[i].dtype), unique_indices=True)
        values[i] = values[i].at[slot, :, position].set(v[:, 0].astype(values[i].dtype), unique_indices=True)
        attended = cached_attention(q[:, 0], keys[i][..., :reach], values[i][:, :, :reach], seen[spec.window_of[i]])
        x = mlp_block(layer, spec, attention_output(layer, spec, x, attended[:, None]))
    hidden = rms_norm(x[:, 0], params["final_norm"], spec.norm_eps)
    return unembed(params, spec, hidden), dataclasses.replace(state, keys=tuple(keys), values=tuple(values))


def _advance(rows: Rows, token_B: jax.Array, stop_ids: tuple[int, ...]) -> Rows:
    """Rows after a draw. A stop id ends a row as 'stop' even when it is the last token allowed."""
    stops = jnp.asarray(np.asarray(stop_ids, np.int32).reshape(1, -1))
    stopped = jnp.any(token_B[:, None] == stops, axis=1)
    drawn = rows.drawn + 1
    finish = jnp.where(stopped, STOP, jnp.where(drawn >= rows.max_new, LENGTH, RUNNING)).astype(jnp.int32)
    on = rows.active
    return dataclasses.replace(
        rows,
        active=on & (finish == RUNNING),
        finish=jnp.where(on, finish, rows.finish),
        last=jnp.where(on, token_B, rows.last),
        length=jnp.where(on, rows.length + 1, rows.length),
        drawn=jnp.where(on, drawn, rows.drawn),
    )


def decode_step(
    params: dict[str, Any], spec: ModelSpec, state: State, stop_ids: tuple[int, ...], reach: int, truncated: bool, dtype: Any
) -> State:
    """One token for every active slot."""
    logits, state = token_logits(params, spec, state, reach, dtype)
    rows, out = state.rows, state.drawings
    logits = forbid(logits, stop_ids, rows.drawn < rows.min_new)
    if truncated:
        logits = truncate(logits, rows.temperature, rows.top_p, rows.top_k)
    drawn = draw(logits, token_uniforms(rows.key, rows.drawn), rows.temperature)
    slot = jnp.arange(rows.last.shape[0])
    column = jnp.where(rows.active, rows.drawn, out.tokens.shape[1])  # outside = dropped: a slot at rest keeps what it drew
    put = lambda to, x: to.at[slot, column].set(x, mode="drop", unique_indices=True)  # noqa: E731
    drawings = dataclasses.replace(
        out,
        tokens=put(out.tokens, drawn.token),
        logprobs=put(out.logprobs, drawn.logprob),
        entropy=put(out.entropy, drawn.entropy),
    )
    return dataclasses.replace(state, rows=_advance(rows, drawn.token, stop_ids), drawings=drawings)


def decode(
    params: dict[str, Any],
    state: State,
    steps: jax.Array,
    leave_at: jax.Array,
    *,
    spec: ModelSpec,
    stop_ids: tuple[int, ...],
    reach: int,
    truncated: bool,
    dtype: Any,
) -> tuple[State, jax.Array, jax.Array]:
    """Up to `steps` steps; ends early when no slot is active or at most `leave_at` are (free slots enough to refill; -1 = never).

    Returns the state, the steps done and the row-steps that were active (both int32).
    """

    def going(carry: tuple[State, jax.Array, jax.Array]) -> jax.Array:
        state, done, _ = carry
        active = jnp.sum(state.rows.active.astype(jnp.int32))
        return (done < steps) & (active > jnp.maximum(leave_at, 0))

    def body(carry: tuple[State, jax.Array, jax.Array]) -> tuple[State, jax.Array, jax.Array]:
        state, done, used = carry
        used = used + jnp.sum(state.rows.active.astype(jnp.int32))
        return decode_step(params, spec, state, stop_ids, reach, truncated, dtype), done + 1, used

    return lax.while_loop(going, body, (state, jnp.int32(0), jnp.int32(0)))
