"""Reward design: the long prompt (5 to 10 criteria), 1 where the better answer wins, else 0, with the format term.

    python run.py --config=configs/ablations/reward_long_binary_format.py --workdir=/mnt/shared/reward_long_binary_format
    python run.py --config=configs/ablations/reward_long_binary_format.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2605.03871): no such row: Table 15 ablates prompt, margin and format one after the other. It completes the
grid.
Expected: fewer usable groups than with the margin: rubrics of a group that rank a pair alike earn the same.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=reward_long_binary_format",
    "rubric.prompt=rubric_long",
    "rubric.reward=binary",
    "rubric.alpha=0.7",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
