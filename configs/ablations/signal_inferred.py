"""Preference signal: an answer against one to the question inferred from it.

    python run.py --config=configs/ablations/signal_inferred.py --workdir=/mnt/shared/signal_inferred
    python run.py --config=configs/ablations/signal_inferred.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2605.03871): Table 18: RewardBench 2 48.1, JudgeBench 43.6, 12-task average 68.6.
Expected: needs no older policy; a question that is inferred exactly makes no pair (counted).
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=signal_inferred",
    "pairs.temporal=0",
    "pairs.inferred=1",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
