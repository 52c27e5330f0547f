"""Rubric-ARM, five judgements of a pair at each look at the test pairs; test/vote_accuracy is that of their majority.

    python run.py --config=configs/ablations/arm_voting_5.py --workdir=/mnt/shared/arm_voting_5
    python run.py --config=configs/ablations/arm_voting_5.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/rubric_arm_qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2602.01511): average 76.2 against 74.8 of one judgement.
Expected: training is the same to the bit: a vote is a way to use the judge.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.rubric_arm_qwen3_8b import get_config as main

CHANGES = (
    "name=arm_voting_5",
    "arm.votes=5",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
