"""Rubric-ARM, the order switched: the generator first, by the judge of the round before, then the judge on its new lists.

    python run.py --config=configs/ablations/arm_generator_first.py --workdir=/mnt/shared/arm_generator_first
    python run.py --config=configs/ablations/arm_generator_first.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/rubric_arm_qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2602.01511): average 72.4 (with voting@5 74.9) against 74.8 (76.2); RewardBench 2 Precise IF 24.4 against 41.9.
Expected: noise of the generator's exploration on top of that of the judge's decision: a gradient of more variance.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.rubric_arm_qwen3_8b import get_config as main

CHANGES = (
    "name=arm_generator_first",
    "arm.order=generator_first",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
