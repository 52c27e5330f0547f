"""The frozen record of one experiment. `configs/*.py` build it with get_config(); run.py overrides its fields by name."""

from __future__ import annotations

import dataclasses

from coevo_jax.config.arm import ArmConfig
from coevo_jax.config.dpo import DpoConfig
from coevo_jax.config.dynamic import DynamicConfig
from coevo_jax.config.evaluate import EvalConfig
from coevo_jax.config.learn import AdvantageConfig, LossConfig, OptimizerConfig, UpdateConfig
from coevo_jax.config.lora import LoraConfig
from coevo_jax.config.model import (
    EndpointConfig,
    GeneratorConfig,
    JudgeConfig,
    MeshConfig,
    ModelConfig,
    PanelConfig,
    SamplerConfig,
    Sampling,
    api_model,
    judge_sampler,
)
from coevo_jax.config.reward import ControlConfig, CriticConfig, RewardConfig, RlcerConfig
from coevo_jax.config.system import (
    CompatConfig,
    DataConfig,
    PairConfig,
    RubricConfig,
    RunConfig,
    ScheduleConfig,
    WarmupConfig,
)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything a run depends on, except the code."""

    name: str = "experiment"
    seed: int = 1
    scale: str = "full"  # full | smoke: the same experiment in seconds on a CPU (config/scale.py)
    policy: ModelConfig = ModelConfig()
    policies: tuple[ModelConfig, ...] = ()  # further policies that co-evolve (keys policies.0.source, ...); docs/signals.md
    generator: GeneratorConfig = GeneratorConfig()
    judge: JudgeConfig = JudgeConfig()
    panel: PanelConfig = PanelConfig()
    answer: Sampling = Sampling(max_new_tokens=64)
    rubric_sampling: Sampling = Sampling(max_new_tokens=128)
    question_sampling: Sampling = Sampling(temperature=0.3, max_new_tokens=64)
    data: DataConfig = DataConfig()
    rubric: RubricConfig = RubricConfig()
    pairs: PairConfig = PairConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    warmup: WarmupConfig = WarmupConfig()
    reward: RewardConfig = RewardConfig()
    dpo: DpoConfig = DpoConfig()
    rlcer: RlcerConfig = RlcerConfig()
    dynamic: DynamicConfig = DynamicConfig()
    arm: ArmConfig = ArmConfig()
    critic: CriticConfig = CriticConfig()
    control: ControlConfig = ControlConfig()
    heldout_judge: JudgeConfig = JudgeConfig(source="")  # scores some answers and rewards none; '' = none
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    update: UpdateConfig = UpdateConfig()
    lora: LoraConfig = LoraConfig()  # adapters in place of full weights; docs/lora.md
    sampler: SamplerConfig = SamplerConfig()
    mesh: MeshConfig = MeshConfig()
    run: RunConfig = RunConfig()
    evaluate: EvalConfig = EvalConfig()
    compat: CompatConfig = CompatConfig()


__all__ = [
    "AdvantageConfig",
    "ArmConfig",
    "CompatConfig",
    "ControlConfig",
    "CriticConfig",
    "DataConfig",
    "DpoConfig",
    "DynamicConfig",
    "EndpointConfig",
    "EvalConfig",
    "Experiment",
    "GeneratorConfig",
    "JudgeConfig",
    "LoraConfig",
    "LossConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PairConfig",
    "PanelConfig",
    "RewardConfig",
    "RlcerConfig",
    "RubricConfig",
    "RunConfig",
    "SamplerConfig",
    "Sampling",
    "ScheduleConfig",
    "UpdateConfig",
    "WarmupConfig",
    "api_model",
    "judge_sampler",
]
