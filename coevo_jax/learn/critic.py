"""PPO's critic: values of the states that tokens are drawn in, generalised advantages, the clipped value loss, an optimizer step.

Axes: M micro-batches, B rows of one, T tokens of a row. Position t holds what belongs to the token it predicts (packing.py): its
value is that of the state in which that token is drawn.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from coevo_jax.config import Experiment
from coevo_jax.learn.losses import drop_truncated
from coevo_jax.learn.packing import TokenBatch
from coevo_jax.learn.update import (
    Metrics,
    Optimizer,
    TrainState,
    apply_gradients,
    compiler_options,
    in_shardings,
    in_time_order,
    one_micro,
    state_shardings,
    summed_gradients,
    used_micros,
)
from coevo_jax.mesh import replicated, train_rules
from coevo_jax.models.forward import Params, forward
from coevo_jax.models.lora import whole
from coevo_jax.models.scalar import head_values
from coevo_jax.models.spec import ModelSpec


class ValueBatch(struct.PyTreeNode):
    """Packed rows [M,B,T] to fit values on: returns, and the values before this batch's updates."""

    tokens: Any
    positions: Any
    segment_ids: Any
    mask: Any
    returns: Any
    old_values: Any
    parent_ids: Any = None


# ------------------------------------------------------------------------------------------------------------------ terms


def gae(
    rewards: jax.Array, values: jax.Array, mask: jax.Array, segment_ids: jax.Array, gamma: float, lam: float
) -> tuple[jax.Array, jax.Array]:
    """(advantages, returns), both [B,T], 0 where nothing trains (arXiv 1506.02438).

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1} inside a sample's trained positions; after its last
    one, whose reward is the sample's, the value is 0, also where a limit cut the sample. The return is A_t + V_t.
    """
    goes_on = mask[:, :-1] & mask[:, 1:] & (segment_ids[:, :-1] == segment_ids[:, 1:])
    goes_on = jnp.pad(goes_on, ((0, 0), (0, 1)))
    values = jnp.where(mask, values, 0.0)
    after = jnp.where(goes_on, jnp.pad(values[:, 1:], ((0, 0), (0, 1))), 0.0)
    delta = jnp.where(mask, jnp.where(goes_on, 0.0, rewards) + gamma * after - values, 0.0)
    decay = jnp.where(goes_on, jnp.float32(gamma * lam), jnp.float32(0.0))

    def step(later: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        now = x[0] + x[1] * later
        return now, now

    _, advantages = lax.scan(step, jnp.zeros_like(delta[:, 0]), (delta.T, decay.T), reverse=True)
    return advantages.T, jnp.where(mask, advantages.T + values, 0.0)


def whitened(advantages: jax.Array, mask: jax.Array) -> jax.Array:
    """Advantages with mean 0 and (population) std 1 over the trained positions of the whole batch."""
    count = jnp.maximum(mask.sum(), 1).astype(jnp.float32)
    mean = jnp.where(mask, advantages, 0.0).sum() / count
    variance = jnp.where(mask, (advantages - mean) ** 2, 0.0).sum() / count
    return jnp.where(mask, (advantages - mean) * lax.rsqrt(variance + 1e-8), 0.0)


def value_loss(values: jax.Array, batch: ValueBatch, count: jax.Array, clip: float) -> tuple[jax.Array, Metrics]:
    """Half the squared error, mean over `count` trained positions of the whole batch. clip: the larger of that of the value and
    of the value held within `clip` of the old one (as in the code of arXiv 1707.06347); 0 = off."""
    error = (values - batch.returns) ** 2
    held = batch.old_values + jnp.clip(values - batch.old_values, -clip, clip)
    clipped = (held - batch.returns) ** 2
    worst = jnp.maximum(error, clipped) if clip > 0 else error

    def mean(x: jax.Array) -> jax.Array:
        return jnp.where(batch.mask, x, jnp.zeros_like(x)).sum() / count

    share = mean((clipped > error).astype(jnp.float32)) if clip > 0 else jnp.float32(0.0)
    return 0.5 * mean(worst), {"critic/clip_fraction": share}


# ---------------------------------------------------------------------------------------------------------------- programs


def token_values(params: Params, spec: ModelSpec, batch: Any, cfg: Experiment, mesh: Mesh | None = None) -> jax.Array:
    """[B,T] float32 of one micro-batch."""
    u, dtype, rules = cfg.update, jnp.dtype(cfg.policy.dtype), train_rules(cfg.mesh)
    seen, back = in_time_order(batch, u.attention, mesh, rules)
    hidden = forward(
        params, spec, seen.tokens, seen.positions, seen.segment_ids,
        remat=u.remat, attention=u.attention, dtype=dtype, mesh=mesh, rules=rules,
        parent_ids_BxT=batch.parent_ids if u.attention == "xla" else None,
    )  # fmt: skip
    values = head_values(params, hidden, dtype)
    return values if back is None else values[:, back]


def make_estimate(spec: ModelSpec, cfg: Experiment, mesh: Mesh | None = None) -> Any:
    """jitted `estimate(params, batch [M,B,T]) -> (advantage, mask, returns, values, metrics)`: the pass before an update.

    batch.advantage holds each sample's reward at its trained positions.
    """
    rules, c = train_rules(cfg.mesh), cfg.critic

    def estimate(params: Params, batch: TokenBatch) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, Metrics]:
        batch = drop_truncated(batch) if cfg.loss.mask_truncated else batch

        def step(i: jax.Array, out: jax.Array) -> jax.Array:
            return lax.dynamic_update_index_in_dim(
                out, token_values(params, spec, one_micro(batch, i, mesh, rules), cfg, mesh), i, 0
            )

        values = lax.fori_loop(0, used_micros(batch), step, jnp.zeros(batch.tokens.shape, jnp.float32))
        advantage, returns = jax.vmap(lambda r, v, m, s: gae(r, v, m, s, c.gamma, c.lam))(
            batch.advantage, values, batch.mask, batch.segment_ids
        )
        metrics = _estimated(advantage, returns, values, batch.mask)
        return whitened(advantage, batch.mask) if c.whiten else advantage, batch.mask, returns, values, metrics

    out = None
    if mesh is not None:
        rows = NamedSharding(mesh, PartitionSpec(None, rules.batch))
        out = (rows, rows, rows, rows, replicated(mesh))
    places = in_shardings(mesh, rules, temperature=False)
    return jax.jit(estimate, in_shardings=places, out_shardings=out, compiler_options=compiler_options(mesh))


def _estimated(advantage: jax.Array, returns: jax.Array, values: jax.Array, mask: jax.Array) -> Metrics:
    count = jnp.maximum(mask.sum(), 1).astype(jnp.float32)

    def mean(x: jax.Array) -> jax.Array:
        return jnp.where(mask, x, 0.0).sum() / count

    def variance(x: jax.Array) -> jax.Array:
        return mean((x - mean(x)) ** 2)

    spread = variance(returns)
    explained = 1.0 - variance(returns - values) / jnp.maximum(spread, 1e-8)
    out = {"critic/value": mean(values), "critic/return": mean(returns), "critic/advantage_std": jnp.sqrt(variance(advantage))}
    return out | {"critic/explained_variance": jnp.where(spread > 1e-8, explained, 0.0)}


def make_critic_update(spec: ModelSpec, optimizer: Optimizer, cfg: Experiment, mesh: Mesh | None = None) -> Any:
    """jitted `update(state, batch) -> (state, metrics)`; the state passed in is donated. As learn.update.make_update."""
    rules, c = train_rules(cfg.mesh), cfg.critic

    def update(state: TrainState, batch: ValueBatch, base: Any = None) -> tuple[TrainState, Metrics]:
        count = jnp.maximum(batch.mask.sum(), 1).astype(jnp.float32)

        def micro_loss(params: Params, micro: Any) -> tuple[jax.Array, Metrics]:
            loss, metrics = value_loss(token_values(whole(spec, base, params), spec, micro, cfg, mesh), micro, count, c.clip)
            return loss, {"critic/loss": loss, **metrics}

        grads, metrics = summed_gradients(micro_loss, state.params, cast(Any, batch), spec, mesh, rules)
        state, applied = apply_gradients(state, grads, optimizer)
        return state, metrics | {f"critic/{name}": applied[name] for name in ("grad_norm", "update_norm", "lr", "nonfinite")}

    out = None if mesh is None else (state_shardings(spec, optimizer, mesh, rules), replicated(mesh))
    places = in_shardings(mesh, rules, temperature=False, base=spec.lora is not None)
    return jax.jit(update, donate_argnums=0, in_shardings=places, out_shardings=out, compiler_options=compiler_options(mesh))
