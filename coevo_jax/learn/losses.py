"""Losses: plain functions of arrays, one `if` a choice. Change them here, or name your own by `loss.function=module:function`.

Axes: B rows of a micro-batch, T tokens of a row, S segments (samples) of a row.

A loss is `loss(logp, entropy, batch, denominators, cfg) -> (scalar, metrics)`: logp and entropy [B,T] of the trained weights at
the temperature of sampling, one micro-batch, the denominators of the WHOLE batch. Divide by those, never by what a micro-batch
holds: the update sums scalars and metrics over micro-batches, so the size of a micro-batch changes nothing (design.md 4.6).
A metric whose name ends in '/max' is combined by the maximum instead. Only positions with batch.mask train; `masked` makes the
others 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from coevo_jax.config import LossConfig
from coevo_jax.learn.dotted import resolve_function
from coevo_jax.learn.packing import TokenBatch

Metrics = dict[str, jax.Array]


class Denominators(NamedTuple):
    """Counts over the whole batch, as float32 scalars of at least 1: trained tokens, samples with one, rows with one."""

    tokens: jax.Array
    sequences: jax.Array
    rows: jax.Array


Loss = Callable[[jax.Array, jax.Array, TokenBatch, Denominators, LossConfig], tuple[jax.Array, Metrics]]

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: no ratio overflows; beyond it the gradient is 0
MAX_LOG_KL = 40.0  # as in the released EvoLM code


def resolve_loss(cfg: LossConfig) -> Loss:
    """`policy_loss`, or the function that cfg.function names. UserError when it can't be imported."""
    return resolve_function(cfg.function, "loss.function") if cfg.function else policy_loss


# ----------------------------------------------------------------------------------------------------------------- losses


def policy_loss(
    logp: jax.Array, entropy: jax.Array, batch: TokenBatch, denominators: Denominators, cfg: LossConfig
) -> tuple[jax.Array, Metrics]:
    """GRPO and its relatives: clipped surrogate x truncated importance weight + KL to the reference - entropy bonus."""
    old = lax.stop_gradient(logp) if batch.old_logp is None else batch.old_logp
    log_ratio = masked(logp - old, batch)
    if cfg.ratio == "sequence":
        log_ratio = to_tokens(segment_means(log_ratio, batch), batch)
    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    surrogate = clipped_surrogate(ratio, batch.advantage, cfg.clip_low, cfg.clip_high)
    gap = lax.stop_gradient(masked(old - batch.sampler_logp, batch))
    weight, capped = importance_weights(gap, cfg.tis_cap)

    policy = aggregate(surrogate * weight, batch, denominators, cfg)
    loss, metrics = policy, {"loss/policy": policy}
    if batch.ref_logp is not None and cfg.kl_weight > 0:
        kl = kl_estimate(masked(logp - batch.ref_logp, batch), cfg.kl_estimator)
        kl_loss = cfg.kl_weight * aggregate(kl, batch, denominators, cfg)
        loss = loss + kl_loss
        metrics |= {"loss/kl": kl_loss, "kl": token_mean(kl, batch, denominators)}
    if cfg.entropy_weight != 0:
        loss = loss - cfg.entropy_weight * aggregate(entropy, batch, denominators, cfg)

    low, high = clipped(ratio, batch.advantage, cfg.clip_low, cfg.clip_high)
    means = {"entropy": entropy, "clip_fraction/low": low, "clip_fraction/high": high, "ratio/mean": ratio}
    means |= {"importance_weight/mean": weight, "importance_weight/capped_share": capped, "logp_gap/mean": jnp.abs(gap)}
    peaks = {"ratio/max": ratio, "importance_weight/max": weight, "logp_gap/max": jnp.abs(gap)}
    metrics |= {name: token_mean(x, batch, denominators) for name, x in means.items()}
    metrics |= {name: jnp.max(masked(x, batch)) for name, x in peaks.items()}
    return loss, metrics


def sft_loss(
    logp: jax.Array, entropy: jax.Array, batch: TokenBatch, denominators: Denominators, cfg: LossConfig
) -> tuple[jax.Array, Metrics]:
    """Cross-entropy of the completions, mean over trained tokens, in nats."""
    return -token_mean(logp, batch, denominators), {"entropy": token_mean(entropy, batch, denominators)}


# ------------------------------------------------------------------------------------------------------------------ terms


def clipped_surrogate(ratio: jax.Array, advantage: jax.Array, low: float, high: float) -> jax.Array:
    """PPO's term as a loss: -min(ratio A, clip(ratio, 1 - low, 1 + high) A) (arXiv 1707.06347; two bounds: 2503.14476)."""
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - low, 1 + high) * advantage)


def clipped(ratio: jax.Array, advantage: jax.Array, low: float, high: float) -> tuple[jax.Array, jax.Array]:
    """Where the lower and where the upper bound stops the gradient, as 0 and 1."""
    at_low = (ratio < 1 - low) & (advantage < 0)
    at_high = (ratio > 1 + high) & (advantage > 0)
    return at_low.astype(jnp.float32), at_high.astype(jnp.float32)


def importance_weights(gap: jax.Array, cap: float) -> tuple[jax.Array, jax.Array]:
    """min(exp(trainer - sampler), cap) a token, and where the cap holds (truncated importance sampling). cap = 0: all 1."""
    if cap <= 0:
        return jnp.ones_like(gap), jnp.zeros_like(gap)
    weight = jnp.exp(jnp.clip(gap, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return jnp.minimum(weight, cap), (weight > cap).astype(jnp.float32)


def kl_estimate(log_ratio: jax.Array, estimator: str) -> jax.Array:
    """KL(policy || reference) a token, from d = logp - ref_logp (Schulman, 'Approximating KL divergence', 2020).

    k1 = d is unbiased as a value, but as a loss its expected gradient is 0 (that of an expected score): it does not pull towards
    the reference. k2 = d^2 / 2 has the gradient of KL(policy || reference), k3 = exp(-d) - 1 + d that of KL(reference || policy).
    """
    d = jnp.clip(log_ratio, -MAX_LOG_KL, MAX_LOG_KL)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d * d
    if estimator == "k3":
        return jnp.expm1(-d) + d
    raise ValueError(f"unknown KL estimator {estimator!r}")


def aggregate(x: jax.Array, batch: TokenBatch, denominators: Denominators, cfg: LossConfig) -> jax.Array:
    """Per-token values [B,T] to this micro-batch's part of the batch's scalar.

    token: mean over all trained tokens (DAPO). sequence: mean over samples of their token means (GRPO). constant: sum over
    samples x constant_length (Dr. GRPO). pack (compat.pack_mean alone sets it): mean over a packed row, then over rows.
    """
    x = masked(x, batch)
    if cfg.aggregation == "token":
        return x.sum() / denominators.tokens
    if cfg.aggregation == "sequence":
        return segment_means(x, batch).sum() / denominators.sequences
    if cfg.aggregation == "constant":
        return x.sum() / (denominators.sequences * cfg.constant_length)
    if cfg.aggregation == "pack":
        return (x.sum(-1) / jnp.maximum(batch.mask.sum(-1), 1).astype(x.dtype)).sum() / denominators.rows
    raise ValueError(f"unknown aggregation {cfg.aggregation!r}")


# ------------------------------------------------------------------------------------------------------ masks and segments


def masked(x: jax.Array, batch: TokenBatch) -> jax.Array:
    """x [B,T], with 0 where nothing trains."""
    return jnp.where(batch.mask, x, jnp.zeros_like(x))


def token_mean(x: jax.Array, batch: TokenBatch, denominators: Denominators) -> jax.Array:
    """This micro-batch's part of the mean of x [B,T] over all trained tokens."""
    return masked(x, batch).sum() / denominators.tokens


def segment_sums(x: jax.Array, batch: TokenBatch) -> jax.Array:
    """Sums of x [B,T] over each sample's trained tokens, [B,S]."""
    S = batch.owner.shape[-1]
    inside = batch.segment_ids[..., None] == jnp.arange(1, S + 1, dtype=jnp.int32)[None, None]
    inside &= batch.mask[..., None]
    return jnp.where(inside, x[..., None], jnp.zeros((), x.dtype)).sum(-2)


def segment_means(x: jax.Array, batch: TokenBatch) -> jax.Array:
    """Means of x [B,T] over each sample's trained tokens, [B,S]; 0 for a segment without one."""
    return segment_sums(x, batch) / jnp.maximum(segment_sums(jnp.ones_like(x), batch), 1)


def to_tokens(x: jax.Array, batch: TokenBatch) -> jax.Array:
    """Per-sample values [...,B,S] at each of the sample's tokens, [...,B,T]; 0 in padding."""
    found = jnp.take_along_axis(x, jnp.maximum(batch.segment_ids - 1, 0), axis=-1)
    return jnp.where(batch.segment_ids > 0, found, jnp.zeros_like(found))


def drop_truncated(batch: TokenBatch) -> TokenBatch:
    """The batch without its truncated samples: they leave numerators and denominators (cfg.mask_truncated)."""
    return batch.replace(mask=batch.mask & ~to_tokens(batch.truncated, batch))


def count(batch: TokenBatch) -> Denominators:
    """Denominators of a whole batch, [M,B,T]."""
    S = batch.owner.shape[-1]
    ids = jnp.arange(1, S + 1, dtype=jnp.int32)
    trains = [jnp.any(batch.mask & (batch.segment_ids == i), axis=-1) for i in ids]
    counts = batch.mask.sum(), sum(x.sum() for x in trains), jnp.any(batch.mask, axis=-1).sum()
    return Denominators(*(jnp.maximum(c, 1).astype(jnp.float32) for c in counts))
