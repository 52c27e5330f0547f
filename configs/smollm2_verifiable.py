"""GRPO on a verifiable reward: SmolLM2-135M-Instruct on a reasoning-gym task, scored by the task itself.

    python benchmarks/learning.py --what=verifiable --workdir=runs/verifiable      # trains and measures both ends
    python run.py --config=configs/smollm2_verifiable.py --workdir=runs/verifiable # trains alone

The task: which of two numbers in mixed notation is the largest (or smallest). At the start the model often answers in a sentence,
rounds, or takes the wrong one; greedy answers to 200 other instances are counted before and after. Training draws at temperature
0.7: at 1 this small model rarely writes a bare number, and a group without one teaches nothing.

Hardware: 2 cores, 10 GB (8.7 GiB at its peak). Needs the extra 'eval' (reasoning-gym).
Expected: docs/results.md.
"""

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

TASK = "reasoning_gym:number_format?size=4000&seed=1&max_num_candidates=2&min_n=1000&max_n=99999&max_delta=1000"


def get_config() -> Experiment:
    return Experiment(
        name="smollm2_verifiable",
        policy=ModelConfig(source="smollm2", system_prompt="Reply with the answer alone."),
        answer=Sampling(temperature=0.7, max_new_tokens=16),
        data=DataConfig(prompts=TASK, max_prompt_tokens=112),
        schedule=ScheduleConfig(mode="verifiable", verifier="reasoning_gym", cycles=3, k=6, prompts=4, group=8),
        advantage=AdvantageConfig(kind="mean", max_resample=2),
        loss=LossConfig(kl_weight=0.0),
        optimizer=OptimizerConfig(lr=3e-5),
        update=UpdateConfig(pack_length=512, max_segments=4, rows_per_micro=2, remat="dots"),
        sampler=SamplerConfig(slots=32, max_prompt=112, max_new=16, steps_per_dispatch=8, prefill_tokens=1024),
        run=RunConfig(save_every=6, keep=1),
    )
