"""Length of a phase: K = 20 updates, as many updates in all as with K = 50.

    python run.py --config=configs/ablations/k_20.py --workdir=/mnt/shared/k_20
    python run.py --config=configs/ablations/k_20.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm_qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2605.03871): a row of the ablation over K in {2, 10, 20, 50, 100}; K = 50 is the main experiment.
Expected: between its neighbours.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm_qwen3_8b import get_config as main

CHANGES = (
    "name=k_20",
    "schedule.k=20",
    "schedule.cycles=25",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
