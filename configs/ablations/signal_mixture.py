"""Preference signal: temporal contrast, inferred question and conditioned answers, a third each.

    python run.py --config=configs/ablations/signal_mixture.py --workdir=/mnt/shared/signal_mixture
    python run.py --config=configs/ablations/signal_mixture.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2605.03871): Table 18: RewardBench 2 49.3, JudgeBench 42.2, 12-task average 67.8. Its §2.4 calls this the
default; its tables have temporal contrast as the main row.
Expected: margins between those of the three.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=signal_mixture",
    "pairs.temporal=1",
    "pairs.inferred=1",
    "pairs.conditioned=1",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
