"""The small world: the whole loop on a 0.3 MB model, whose true answer quality a rule-based judge knows. Tests use it.

    python run.py --config=configs/tiny.py

Hardware: any CPU with 1 GB of memory; half a minute to compile, then less than a second an update.
Expected: 3 cycles of 2 policy and 2 rubric updates. Both roles start in the middle: about half of the rubrics are valid and
answers meet about half of what is asked, so groups differ and both roles move. It is too short and small to show learning: with
--config.schedule.prompts=16 --config.schedule.group=8 --config.schedule.k=20 the true quality of answers went from about 0.56 to
0.88 and the valid share from 0.58 to 0.94 within 3 cycles (one seed).
"""

from coevo_jax.config import (
    DataConfig,
    Experiment,
    JudgeConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PairConfig,
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
        name="tiny",
        policy=ModelConfig(source="tiny"),
        judge=JudgeConfig(source="oracle", protocol="oracle"),
        data=DataConfig(prompts="tiny", max_prompt_tokens=64),
        rubric=RubricConfig(prompt="world_rubric"),
        pairs=PairConfig(
            min_gap=1, max_gap=16, per_slot=16, inference_prompt="world_question", conditioned_prompt="world_conditioned"
        ),
        schedule=ScheduleConfig(cycles=3, k=2, prompts=4, group=4),
        warmup=WarmupConfig(data="tiny"),
        answer=Sampling(max_new_tokens=12),
        rubric_sampling=Sampling(max_new_tokens=48),
        question_sampling=Sampling(temperature=0.3, max_new_tokens=24),
        loss=LossConfig(kl_weight=0.001),
        optimizer=OptimizerConfig(lr=1e-3),
        update=UpdateConfig(pack_length=128, max_segments=8, rows_per_micro=2, remat="none", logprob_chunk=64),
        sampler=SamplerConfig(slots=16, max_prompt=128, max_new=48, steps_per_dispatch=8, prefill_tokens=512),
        run=RunConfig(save_every=2),
    )
