"""The demo: SmolLM2-135M-Instruct co-evolves with its rubrics for two cycles, after a short warm-up on rubric examples.

    make demo            (or: python run.py --config=configs/smollm2_demo.py --workdir=runs/smollm2_demo)

Hardware: any laptop, 2 cores and 8 GB of memory. README states the time and the table it ends with.
Expected: the whole loop in small. After the warm-up most rubrics are valid; rewards move, but a 135M judge
proves no gain in quality.
"""

from coevo_jax.config import (
    AdvantageConfig,
    DataConfig,
    Experiment,
    JudgeConfig,
    ModelConfig,
    OptimizerConfig,
    PairConfig,
    RunConfig,
    SamplerConfig,
    Sampling,
    ScheduleConfig,
    UpdateConfig,
    WarmupConfig,
)


def get_config() -> Experiment:
    return Experiment(
        name="smollm2_demo",
        policy=ModelConfig(source="smollm2"),
        judge=JudgeConfig(source="smollm2", protocol="criterion_logits"),
        answer=Sampling(temperature=1.0, max_new_tokens=64),
        rubric_sampling=Sampling(temperature=1.0, max_new_tokens=128),
        question_sampling=Sampling(temperature=0.3, max_new_tokens=48),
        data=DataConfig(prompts="demo", max_prompt_tokens=64),
        pairs=PairConfig(temporal=1.0, min_gap=1, max_gap=4, per_slot=4),
        schedule=ScheduleConfig(order="alternate", cycles=2, k=2, prompts=4, group=4),
        warmup=WarmupConfig(updates=12, data="demo", batch=8, lr=2e-4),
        advantage=AdvantageConfig(kind="mean", max_resample=1),
        optimizer=OptimizerConfig(lr=1e-5),
        update=UpdateConfig(pack_length=768, max_segments=16, rows_per_micro=1, remat="dots", logprob_chunk=256),
        sampler=SamplerConfig(slots=20, narrow=(5,), max_prompt=320, max_new=128, steps_per_dispatch=16),
        run=RunConfig(save_every=1000, keep=1),
    )
