"""Reward design: the long prompt (5 to 10 criteria), 1 where the better answer wins, else 0, without the format term.

    python run.py --config=configs/ablations/reward_long_binary.py --workdir=/mnt/shared/reward_long_binary
    python run.py --config=configs/ablations/reward_long_binary.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2605.03871): Table 15, its first row: RewardBench 2 38.9, JudgeBench 27.7, 12-task average 67.6.
Expected: fewer usable groups than with the margin: rubrics of a group that rank a pair alike earn the same. Nothing
asks for a valid rubric but that an invalid one earns 0.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=reward_long_binary",
    "rubric.prompt=rubric_long",
    "rubric.reward=binary",
    "rubric.alpha=1.0",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
