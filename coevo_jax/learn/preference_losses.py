"""Losses of preference pairs: plain functions of arrays, one `if` a choice. Change them here.

Axes: any; one number a pair. c and r: log-ratios of policy over reference, summed over the tokens of the chosen and the rejected
answer, the end token included and the prompt left out; `averaged` losses divide them by those tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from coevo_jax.config.dpo import DpoConfig

AVERAGED = ("sigmoid_norm", "ipo")


class PairLogps(NamedTuple):
    """Of each pair: summed log-probs of both answers under policy and reference, in nats, and the answers' tokens."""

    chosen: jax.Array
    rejected: jax.Array
    ref_chosen: jax.Array
    ref_rejected: jax.Array
    chosen_tokens: jax.Array
    rejected_tokens: jax.Array


def log_ratios(logps: PairLogps, loss: str) -> tuple[jax.Array, jax.Array]:
    """c and r of each pair."""
    c, r = logps.chosen - logps.ref_chosen, logps.rejected - logps.ref_rejected
    if loss in AVERAGED:
        return c / jnp.maximum(logps.chosen_tokens, 1), r / jnp.maximum(logps.rejected_tokens, 1)
    return c, r


def pair_losses(c: jax.Array, r: jax.Array, cfg: DpoConfig) -> jax.Array:
    """The loss of each pair. With policy = reference (c = r = 0) sigmoid, sigmoid_norm and robust are ln 2.

    sigmoid: -log s(h), h = beta (c - r) (DPO, arXiv 2305.18290, eq. 7); label_smoothing e: (1 - e) of it + e of -log s(-h)
    (conservative DPO, E. Mitchell, 2023). sigmoid_norm: the same of averages (arXiv 2411.15124).
    robust: the unbiased form, ((1 - e) of -log s(h) - e of -log s(-h)) / (1 - 2 e) (arXiv 2403.00409).
    hinge: max(0, 1 - h) (arXiv 2305.10425). ipo: (c - r - 1 / (2 beta))^2 (arXiv 2310.12036), of averages as trainers in
    use have it. sppo: (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2, hard labels (arXiv 2405.00675).
    apo_zero: 1 - s(beta c) + s(beta r) (arXiv 2408.06266).
    """
    e, h = cfg.label_smoothing, cfg.beta * (c - r)
    if cfg.loss in ("sigmoid", "sigmoid_norm"):
        return (1 - e) * jax.nn.softplus(-h) + e * jax.nn.softplus(h)
    if cfg.loss == "robust":
        return ((1 - e) * jax.nn.softplus(-h) - e * jax.nn.softplus(h)) / (1 - 2 * e)
    if cfg.loss == "hinge":
        return jax.nn.relu(1 - h)
    if cfg.loss == "ipo":
        return (c - r - 1 / (2 * cfg.beta)) ** 2
    if cfg.loss == "sppo":
        return (c - 1 / (2 * cfg.beta)) ** 2 + (r + 1 / (2 * cfg.beta)) ** 2
    if cfg.loss == "apo_zero":
        return 1 - jax.nn.sigmoid(cfg.beta * c) + jax.nn.sigmoid(cfg.beta * r)
    raise ValueError(f"unknown preference loss {cfg.loss!r}")


def sft_losses(logps: PairLogps) -> jax.Array:
    """Cross-entropy of each pair's chosen answer, a token: the term that dpo.sft_weight adds (as in arXiv 2404.19733)."""
    return -logps.chosen / jnp.maximum(logps.chosen_tokens, 1)
