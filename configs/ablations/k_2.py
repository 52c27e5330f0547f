"""Length of a phase: K = 2 updates, as many updates in all as with K = 50.

    python run.py --config=configs/ablations/k_2.py --workdir=/mnt/shared/k_2
    python run.py --config=configs/ablations/k_2.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2605.03871): Table 16: RewardBench 2 46.4, JudgeBench 44.3, 12-task average 67.9.
Expected: short phases: the generator sees pairs of policies that many cycles lie between.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=k_2",
    "schedule.k=2",
    "schedule.cycles=250",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
