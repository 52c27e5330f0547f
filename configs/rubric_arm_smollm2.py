"""Rubric-ARM (arXiv 2602.01511) on a CPU: SmolLM2-135M as generator, as judge and as policy, from warm-up to a trained policy.

    python run.py --config=configs/rubric_arm_smollm2.py --workdir=runs/rubric_arm
    python run.py --config=configs/rubric_arm_smollm2.py --config.data.pairs=pairs.jsonl    # pairs of one's own

Hardware: 2 cores, 12 GB of memory. docs/results.md has time, memory and the figures before and after.
Schedule: a look at 16 test pairs; 20 supervised updates of generator and of judge on the bundled demonstrations; a look; two
rounds of 3 judge and 3 generator updates over 16 pairs each; a look; 3 updates of the policy against its own greedy answers,
judged by the judge and the generator of the run. Labels of the bundled pairs are true by construction
(benchmarks/make_arm_data.py).
Expected: the warm-up teaches both formats. Six updates of a 135M judge move its accuracy by no more than chance does on 16 pairs:
the loop, its counters and honest numbers are the point.
"""

from coevo_jax.config import (
    AdvantageConfig,
    ArmConfig,
    DataConfig,
    Experiment,
    GeneratorConfig,
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
        name="rubric_arm_smollm2",
        policy=ModelConfig(source="smollm2"),
        generator=GeneratorConfig(mode="two"),
        answer=Sampling(temperature=1.0, max_new_tokens=48),
        rubric_sampling=Sampling(temperature=1.0, max_new_tokens=80),
        data=DataConfig(prompts="demo", pairs="demo", max_prompt_tokens=64),
        rubric=RubricConfig(prompt="rubric_rules", schema="numbered_rules", max_criteria=6),
        arm=ArmConfig(
            rounds=2, part=16, test=16, cached=16, votes=3, judge_prompts=4, judge_group=4, judge_updates=3,
            judge_sampling=Sampling(temperature=1.0, max_new_tokens=208), generator_prompts=4, generator_group=4,
            generator_updates=3, warmup_updates=20, policy="grpo",
        ),
        schedule=ScheduleConfig(mode="rubric_arm", cycles=1, k=3, prompts=4, group=4),
        warmup=WarmupConfig(batch=8, lr=2e-4),
        advantage=AdvantageConfig(kind="group_std", max_resample=1),
        loss=LossConfig(kl_weight=0.001, clip_low=0.2, clip_high=0.28),
        optimizer=OptimizerConfig(lr=1e-5, mu_dtype="bfloat16"),
        update=UpdateConfig(pack_length=800, max_segments=16, rows_per_micro=1, remat="dots", logprob_chunk=256),
        sampler=SamplerConfig(slots=20, narrow=(5,), max_prompt=576, max_new=208, steps_per_dispatch=16),
        run=RunConfig(save_every=12, keep=1),
    )  # fmt: skip
