"""PPO's critic beside a Learner: a model of its own with a scalar head, its optimizer state and compiled passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from coevo_jax.adapters import Tuning, tune
from coevo_jax.config import Experiment
from coevo_jax.learn.critic import ValueBatch, make_critic_update, make_estimate
from coevo_jax.learn.packing import TokenBatch
from coevo_jax.learn.update import TrainState, init_state, make_optimizer
from coevo_jax.models.load import LoadedModel
from coevo_jax.models.spec import ModelSpec


@dataclasses.dataclass
class Critic:
    """`estimate` gives a batch its advantages, `fit` takes the optimizer steps on it. No sampler holds these weights."""

    cfg: Experiment
    spec: ModelSpec
    state: TrainState
    estimates: Callable[..., Any]
    update: Callable[..., tuple[TrainState, dict[str, Any]]]
    tuning: Tuning

    @property
    def warming_up(self) -> bool:
        """Is this one of the first updates, in which the critic alone trains?"""
        return int(self.state.step) < self.cfg.critic.warmup_updates * self.cfg.update.inner_iterations

    def estimate(self, rows: TokenBatch) -> tuple[TokenBatch, ValueBatch, dict[str, Any]]:
        """Rows whose advantage is the reward, with the advantages of GAE instead; what the critic then learns from; metrics."""
        plain = rows.replace(old_logp=None, ref_logp=None)  # one structure, and so one program
        advantage, mask, returns, values, metrics = self.estimates(self.tuning.whole(self.state.params), plain)
        fit = ValueBatch(rows.tokens, rows.positions, rows.segment_ids, mask, returns, values, rows.parent_ids)
        return rows.replace(advantage=advantage), fit, metrics

    def fit(self, batch: ValueBatch) -> dict[str, Any]:
        """update.inner_iterations steps; the metrics of the last one."""
        metrics: dict[str, Any] = {}
        for _ in range(self.cfg.update.inner_iterations):
            self.state, metrics = self.update(self.state, batch, *self.tuning.args)
        return metrics


def critic_optimizer(cfg: Experiment) -> Any:
    """That of the policy but for its learning rate, which is constant."""
    return make_optimizer(dataclasses.replace(cfg.optimizer, lr=cfg.critic.lr, warmup_steps=0, schedule="constant"))


def make_critic(cfg: Experiment, name: str, model: LoadedModel, mesh: Any = None) -> Critic:
    """A Critic, of the weights `name`, over a loaded model with a scalar head, which it takes over."""
    optimizer, (tuning, params) = critic_optimizer(cfg), tune(cfg, f"critic_{name}", model, mesh)
    state, update = init_state(params, optimizer), make_critic_update(tuning.spec, optimizer, cfg, mesh)
    return Critic(cfg, model.spec, state, make_estimate(model.spec, cfg, mesh), update, tuning)


def fetch(*metrics: dict[str, Any]) -> dict[str, float]:
    """Metrics of both passes as numbers."""
    return {name: float(value) for part in metrics for name, value in jax.device_get(part).items()}
