"""Reward design: 0.7 of the binary reward and 0.3 of the margin, clipped to [0, 1].

    python run.py --config=configs/ablations/reward_separation.py --workdir=/mnt/shared/reward_separation
    python run.py --config=configs/ablations/reward_separation.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2605.03871): not in its tables; the released code has it for one of its trainers.
Expected: between binary and margin in usable groups.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=reward_separation",
    "rubric.reward=separation",
    "rubric.separation_weight=0.3",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
