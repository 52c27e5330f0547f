"""Prompted rubrics, local: a frozen Qwen3-8B writes the rubrics that the policy is judged by.

    python run.py --config=configs/baselines/qwen3_8b_prompted.py --workdir=/mnt/shared/qwen3_8b_prompted \
        --config.policy.source=/models/Qwen3-8B --config.judge.source=/models/Qwen3-1.7B --config.data.prompts=tulu3_prompts.jsonl

Data, policy and updates: those of configs/evolm/qwen3_8b.py. Hardware: a v5p-16 or v4-32 slice; never run on a TPU.
Expected by the paper: RewardBench 2 26.2, JudgeBench 36.6 (the rubrics); 12-task average 67.5 (the policy).
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main


def get_config() -> Experiment:
    return apply_overrides(
        main(),
        [
            "name=qwen3_8b_prompted",
            "schedule.order=policy_only",
            "schedule.cycles=1",
            "schedule.k=500",
            "generator.mode=two",
            "generator.frozen=true",
        ],
    )
