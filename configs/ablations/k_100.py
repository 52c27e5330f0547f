"""Length of a phase: K = 100 updates, as many updates in all as with K = 50.

    python run.py --config=configs/ablations/k_100.py --workdir=/mnt/shared/k_100
    python run.py --config=configs/ablations/k_100.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2605.03871): Table 16: RewardBench 2 48.5, JudgeBench 42.7, 12-task average 68.7.
Expected: long phases: rubrics lag behind the policy they judge.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=k_100",
    "schedule.k=100",
    "schedule.cycles=5",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
