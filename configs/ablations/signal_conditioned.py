"""Preference signal: an answer written with the rubric in view against one without.

    python run.py --config=configs/ablations/signal_conditioned.py --workdir=/mnt/shared/signal_conditioned
    python run.py --config=configs/ablations/signal_conditioned.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2605.03871): Table 18: RewardBench 2 48.4, JudgeBench 44.4, 12-task average 68.6.
Expected: large margins early on: the better answer has read the criteria.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=signal_conditioned",
    "pairs.temporal=0",
    "pairs.conditioned=1",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
