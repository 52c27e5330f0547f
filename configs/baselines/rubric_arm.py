"""Rubric-ARM as a row of EvoLM's table: the policy trains by GRPO on what a trained generator and judge say, both frozen.

    python run.py --config=configs/baselines/rubric_arm.py --workdir=/mnt/shared/rubric_arm_row \
        --config.generator.source=run:/mnt/shared/rubric_arm#rubric --config.arm.judge_source=/models/Qwen3-1.7B \
        --config.policy.source=/models/Qwen3-8B --config.data.prompts=tulu3_prompts.jsonl

The generator comes from a run of configs/rubric_arm_qwen3_8b.py. As in EvoLM's port the judge is the table's frozen Qwen3-1.7B;
--config.arm.judge_source=run:/mnt/shared/rubric_arm#judge takes the judge that was trained with the generator, as the paper
does. Each answer meets the policy's greedy one in both orders (the port compares with the data set's preferred answer instead).
Hardware: a v5p-16 or v4-32 slice; never run on a TPU.
Expected by the paper (arXiv 2605.03871): RewardBench 2 56.1, JudgeBench 51.5 (the rubrics); 12-task average 67.5 (the policy).
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.rubric_arm_qwen3_8b import get_config as main


def get_config() -> Experiment:
    return apply_overrides(
        main(),
        [
            "name=rubric_arm",
            "arm.rounds=0",
            "arm.warmup_updates=0",
            "generator.frozen=true",
            "generator.lr=0",
            "arm.judge_lr=0",
            "arm.judge_source=/models/Qwen3-1.7B",
            "schedule.k=500",
            "schedule.prompts=64",
            "schedule.group=8",
            "optimizer.lr=1e-6",
            "update.inner_iterations=1",
            "loss.aggregation=token",
            "loss.clip_high=0.2",
            "loss.tis_cap=2.0",
            "advantage.ddof=0",
            "advantage.epsilon=1e-6",
            "advantage.max_resample=8",
        ],
    )
