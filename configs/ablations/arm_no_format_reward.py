"""Rubric-ARM, the judge paid for the right winner alone.

    python run.py --config=configs/ablations/arm_no_format_reward.py --workdir=/mnt/shared/arm_no_format_reward
    python run.py --config=configs/ablations/arm_no_format_reward.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/rubric_arm_qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2602.01511): average 72.6 (with voting@5 75.5) against 74.8 (76.2).
Expected: judgements that leave criteria out.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.rubric_arm_qwen3_8b import get_config as main

CHANGES = (
    "name=arm_no_format_reward",
    "arm.format_weight=0",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
