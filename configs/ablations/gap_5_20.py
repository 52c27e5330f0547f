"""Gap of temporal contrast: 5 to 20 policy updates.

    python run.py --config=configs/ablations/gap_5_20.py --workdir=/mnt/shared/gap_5_20
    python run.py --config=configs/ablations/gap_5_20.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2605.03871): Table 20: RewardBench 2 48.8, JudgeBench 39.2, 12-task average 68.6.
Expected: smaller margins: the two answers come from almost the same policy.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=gap_5_20",
    "pairs.min_gap=5",
    "pairs.max_gap=20",
    "pairs.per_slot=20",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
