"""The step G1: 8 prompts x 8 samples of at most 128 new tokens, temperature 1, KL 0.001, one AdamW update at 1e-6."""

from __future__ import annotations

from typing import Any

from coevo_jax.config import (
    AdvantageConfig,
    DataConfig,
    Experiment,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SamplerConfig,
    Sampling,
    ScheduleConfig,
    UpdateConfig,
)

PROMPTS, SAMPLES, MAX_NEW = 8, 8, 128


def vowels(record: dict[str, Any], text: str) -> float:
    """The reward: the share of vowels among the characters."""
    return sum(c in "aeiouAEIOU" for c in text) / max(len(text), 1)


def get_config() -> Experiment:
    return Experiment(
        name="g1",
        policy=ModelConfig(source="smollm2"),
        answer=Sampling(temperature=1.0, max_new_tokens=MAX_NEW),
        data=DataConfig(max_prompt_tokens=96),
        schedule=ScheduleConfig(mode="verifiable", verifier="_g1:vowels", cycles=1, k=2, prompts=PROMPTS, group=SAMPLES),
        advantage=AdvantageConfig(kind="group_std", drop_zero_variance=False, max_resample=0),
        loss=LossConfig(kl_weight=0.001, kl_estimator="k3", aggregation="sequence"),
        optimizer=OptimizerConfig(lr=1e-6),
        update=UpdateConfig(pack_length=768, max_segments=12, rows_per_micro=1, remat="dots"),
        sampler=SamplerConfig(slots=64, narrow=(8, 16, 32, 48), max_prompt=96, max_new=MAX_NEW, steps_per_dispatch=8),
        run=RunConfig(save_every=10**6, keep=1),
    )
