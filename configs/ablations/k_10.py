"""Length of a phase: K = 10 updates, as many updates in all as with K = 50.

    python run.py --config=configs/ablations/k_10.py --workdir=/mnt/shared/k_10
    python run.py --config=configs/ablations/k_10.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2605.03871): Table 16: RewardBench 2 44.5, JudgeBench 45.4, 12-task average 68.5.
Expected: short phases: the generator sees pairs of policies that many cycles lie between.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=k_10",
    "schedule.k=10",
    "schedule.cycles=50",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
