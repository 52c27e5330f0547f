"""Length of a phase: K = 20 updates, as many updates in all as with K = 50.

    python run.py --config=configs/ablations/k_20.py --workdir=/mnt/shared/k_20
    python run.py --config=configs/ablations/k_20.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2605.03871): Table 16: RewardBench 2 46.9, JudgeBench 45.3, 12-task average 68.6.
Expected: between its neighbours.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=k_20",
    "schedule.k=20",
    "schedule.cycles=25",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
