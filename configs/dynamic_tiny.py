"""DynamicRubric in the small world: a 0.4 MB model reads four answers, writes weighted items, and rules know the true quality.

    python run.py --config=configs/dynamic_tiny.py

Hardware: any CPU with 1 GB of memory; half a minute to compile, then less than a second an update.
Expected: 2 rounds of 2 generator and 2 policy updates. About three quarters of the rubrics are valid and half of their items tell
the answers apart, so both rewards differ inside groups. What longer runs learn: benchmarks/dynamic_world.py, docs/results.md.
"""

from coevo_jax.config import (
    AdvantageConfig,
    DataConfig,
    DynamicConfig,
    Experiment,
    GeneratorConfig,
    JudgeConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    RubricConfig,
    RunConfig,
    SamplerConfig,
    Sampling,
    ScheduleConfig,
    UpdateConfig,
    WarmupConfig,
)


def get_config() -> Experiment:
    return Experiment(
        name="dynamic_tiny",
        policy=ModelConfig(source="tiny_dynamic"),
        generator=GeneratorConfig(mode="two"),
        judge=JudgeConfig(source="oracle", protocol="oracle"),
        data=DataConfig(prompts="tiny", rankings="tiny", max_prompt_tokens=64),
        rubric=RubricConfig(schema="weighted_items"),
        # The rules grade; a yes is a requirement that is wholly met.
        dynamic=DynamicConfig(prompt="world_dynamic", blind_prompt="world_dynamic_blind", yes_above=0.99),
        schedule=ScheduleConfig(mode="dynamic", cycles=2, k=2, prompts=4, group=4),
        warmup=WarmupConfig(data="tiny_dynamic"),
        answer=Sampling(max_new_tokens=12),
        rubric_sampling=Sampling(max_new_tokens=40),
        advantage=AdvantageConfig(kind="group_std"),
        loss=LossConfig(kl_weight=0.001),
        optimizer=OptimizerConfig(lr=1e-3),
        update=UpdateConfig(pack_length=168, max_segments=8, rows_per_micro=2, remat="none", logprob_chunk=64),
        sampler=SamplerConfig(slots=16, max_prompt=128, max_new=40, steps_per_dispatch=8, prefill_tokens=512),
        run=RunConfig(save_every=2),
    )
