"""Gap of temporal contrast: 100 to 300 policy updates, which the buffer here really holds.

    python run.py --config=configs/ablations/gap_100_300.py --workdir=/mnt/shared/gap_100_300
    python run.py --config=configs/ablations/gap_100_300.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2605.03871): Table 20: RewardBench 2 47.1, JudgeBench 44.7, 12-task average 68.9. The released buffer held
about 32 updates and fell back to its oldest half.
Expected: larger margins; no pair fits before update 100, until then the nearest is taken and counted.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=gap_100_300",
    "pairs.min_gap=100",
    "pairs.max_gap=300",
    "pairs.per_slot=300",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
