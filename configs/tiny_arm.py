"""Rubric-ARM in the small world: a generator of numbered lists, a judge of pairs and a policy, each a 0.4 MB model.

    python run.py --config=configs/tiny_arm.py
    python run.py --config=configs/tiny_arm.py --config.arm.judge=oracle     # the judge is rules; the generator alone learns

Hardware: any CPU with 1 GB of memory; a minute to compile, then a second or two an update.
Expected: two rounds of 3 judge and 3 generator updates, then 3 of a policy against its own greedy answers. All three start in
the middle on purpose (benchmarks/train_tiny_arm.py): lists and judgements are broken now and then, checks are misread, winners
wrong. It is too short to show learning: benchmarks/arm_world.py does that.
"""

from coevo_jax.config import (
    AdvantageConfig,
    ArmConfig,
    DataConfig,
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
        name="tiny_arm",
        policy=ModelConfig(source="tiny_arm"),
        generator=GeneratorConfig(mode="two"),
        judge=JudgeConfig(source="oracle", protocol="oracle"),
        data=DataConfig(prompts="tiny", pairs="tiny", max_prompt_tokens=64),
        rubric=RubricConfig(prompt="world_rules", schema="numbered_rules"),
        arm=ArmConfig(
            rounds=2, part=16, test=8, cached=16, votes=3, judge_prompt="world_comparison", judge_prompts=4, judge_group=4,
            judge_updates=3, judge_sampling=Sampling(max_new_tokens=160), generator_prompts=4, generator_group=4,
            generator_updates=3, policy="grpo", demonstrations="tiny",
        ),
        schedule=ScheduleConfig(mode="rubric_arm", cycles=1, k=3, prompts=4, group=4),
        warmup=WarmupConfig(batch=8, lr=1e-3),
        answer=Sampling(max_new_tokens=12),
        rubric_sampling=Sampling(max_new_tokens=40),
        advantage=AdvantageConfig(kind="group_std"),
        loss=LossConfig(kl_weight=0.001, clip_high=0.28),
        optimizer=OptimizerConfig(lr=3e-4),
        update=UpdateConfig(pack_length=288, max_segments=8, rows_per_micro=2, remat="none", logprob_chunk=64),
        sampler=SamplerConfig(slots=16, max_prompt=128, max_new=160, steps_per_dispatch=8, prefill_tokens=512),
        run=RunConfig(save_every=2),
    )  # fmt: skip
