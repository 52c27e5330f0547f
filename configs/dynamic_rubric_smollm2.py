"""DynamicRubric (arXiv 2607.20083) end to end on a CPU: SmolLM2-135M-Instruct learns to write weighted yes/no items over its own
answers, and trains on the scores that they give; two rounds, after a warm-up on the form.

    python run.py --config=configs/dynamic_rubric_smollm2.py --workdir=runs/dynamic_rubric_smollm2
    python benchmarks/dynamic.py --workdir=runs/dynamic_rubric_smollm2      # the same run, then both ends on the test rankings

Data: the bundled labelled set ('labelled', 66 prompts with 4 ranked answers of our own); a quarter of its prompts is set aside
and scores. --config.data.rankings=FILE takes other rankings.
Hardware: any laptop, 2 cores and 16 GB. docs/results.md has the time and the figures before and after.
Expected: the loop, its counters and honest numbers. A 135M verifier's p(yes) hardly moves with the answer (its votes agree with
the labelled order in about 6 of 10 pairs even under the items that the set was made by), so little can be learned from it.
It says yes to nearly everything at 0.5: yes_above=0.6 is the place where its votes differ most.
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
        name="dynamic_rubric_smollm2",
        policy=ModelConfig(source="smollm2"),
        generator=GeneratorConfig(mode="two", lr=5e-5),
        judge=JudgeConfig(source="smollm2", protocol="criterion_logits"),
        answer=Sampling(temperature=1.0, max_new_tokens=48),
        rubric_sampling=Sampling(temperature=1.0, max_new_tokens=112),
        data=DataConfig(prompts="demo", rankings="labelled", max_prompt_tokens=64),
        rubric=RubricConfig(schema="weighted_items"),
        dynamic=DynamicConfig(generator_updates=4, policy_updates=4, shuffle="group", yes_above=0.6),
        schedule=ScheduleConfig(mode="dynamic", cycles=2, k=4, prompts=3, group=4),
        warmup=WarmupConfig(updates=20, data="dynamic", batch=6, lr=2e-4),
        advantage=AdvantageConfig(kind="group_std", max_resample=1),
        loss=LossConfig(kl_weight=0.01),
        optimizer=OptimizerConfig(lr=1e-5),
        update=UpdateConfig(pack_length=1024, max_segments=16, rows_per_micro=1, remat="dots", logprob_chunk=256),
        sampler=SamplerConfig(slots=12, narrow=(4,), max_prompt=640, max_new=112, steps_per_dispatch=16),
        run=RunConfig(save_every=4, keep=1),
    )
