"""A look at supervised examples that nothing trains on.

Axes: M micro-batches, B rows of one, T tokens of a row.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from coevo_jax.config import Experiment
from coevo_jax.learn.losses import count, sft_loss
from coevo_jax.learn.packing import TokenBatch
from coevo_jax.learn.update import Metrics, batch_logprobs, compiler_options, in_shardings, one_micro, used_micros
from coevo_jax.mesh import replicated, train_rules
from coevo_jax.models.forward import Params
from coevo_jax.models.spec import ModelSpec


def make_supervised_scores(spec: ModelSpec, cfg: Experiment, mesh: Mesh | None = None) -> Any:
    """jitted `scores(params, batch [M,B,T]) -> metrics`: loss (nats a token, mean over all tokens of completions) and entropy."""
    rules = train_rules(cfg.mesh)

    def scores(params: Params, batch: TokenBatch) -> Metrics:
        denominators = count(batch)

        def step(i: jax.Array, sums: Metrics) -> Metrics:
            micro = one_micro(batch, i, mesh, rules)
            loss, metrics = sft_loss(*batch_logprobs(params, spec, micro, 1.0, cfg, mesh), micro, denominators, cfg.loss)
            return {name: sums[name] + x for name, x in {"loss": loss, **metrics}.items()}

        start = {name: jnp.zeros((), jnp.float32) for name in ("loss", "entropy")}
        return lax.fori_loop(0, used_micros(batch), step, start)

    places, out = in_shardings(mesh, rules), None if mesh is None else replicated(mesh)
    return jax.jit(scores, in_shardings=places and places[:2], out_shardings=out, compiler_options=compiler_options(mesh))
