"""Reward design: log sigmoid of the margin, the likelihood of Bradley and Terry.

    python run.py --config=configs/ablations/reward_log_sigmoid.py --workdir=/mnt/shared/reward_log_sigmoid
    python run.py --config=configs/ablations/reward_log_sigmoid.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2605.03871): in its theory; no row.
Expected: advantages close to the margin's: the function is almost straight over margins in [-1, 1].
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=reward_log_sigmoid",
    "rubric.reward=log_sigmoid",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
