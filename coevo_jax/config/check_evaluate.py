"""Checks of evaluation while a run trains. Imports no JAX."""

from __future__ import annotations

from coevo_jax.config import Experiment
from coevo_jax.config.model import api_model
from coevo_jax.config.several import require

MODES = ("max", "min")


def check_evaluate(cfg: Experiment) -> None:
    """UserError for an evaluation that would find nothing to measure or no room."""
    own = cfg.evaluate
    require(own.best_is in MODES, f"evaluate.best_is={own.best_is!r}", "evaluate.best_is", "max or min")
    for key in ("every", "prompts", "probe"):
        require(getattr(own, key) >= 0, f"evaluate.{key} is below 0", f"evaluate.{key}", "0 or more")
    if not own.every:
        require(not own.best, "evaluate.best names a metric, and nothing is evaluated", "evaluate.best, evaluate.every",
                "evaluate.every of at least 1")  # fmt: skip
        return
    samples = cfg.schedule.mode not in ("sft", "reward", "dpo")
    require(samples, f"schedule.mode={cfg.schedule.mode} draws nothing that could be evaluated", "evaluate.every", "0")
    require(own.prompts > 0 or own.pairs != "", "there is nothing to evaluate on", "evaluate.prompts, evaluate.pairs",
            "held-out prompts or a file of pairs")  # fmt: skip
    require(own.prompts <= cfg.data.heldout, f"evaluate.prompts={own.prompts} with data.heldout={cfg.data.heldout}",
            "evaluate.prompts, data.heldout", f"data.heldout of at least {own.prompts}, or evaluate.prompts=0")  # fmt: skip
    used = {"answer": own.answer, "rubric": own.rubric}
    if cfg.rubric.source != "generator" or api_model(cfg.generator.source):
        del used["rubric"]
    for name, sampling in used.items():
        key, limit = f"evaluate.{name}.max_new_tokens", cfg.sampler.max_new
        fits = 1 <= sampling.max_new_tokens <= limit
        require(fits, f"{key}={sampling.max_new_tokens}", f"{key}, sampler.max_new", f"1 to {limit}")
        drawn = sampling.temperature >= 0 and 0 < sampling.top_p <= 1 and sampling.top_k >= 0
        require(drawn, f"evaluate.{name} is no way to draw", f"evaluate.{name}",
                "temperature at least 0, top_p above 0 and at most 1, top_k at least 0")  # fmt: skip
