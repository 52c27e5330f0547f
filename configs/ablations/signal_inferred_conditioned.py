"""Preference signal: inferred question and conditioned answers, a half each, without temporal contrast.

    python run.py --config=configs/ablations/signal_inferred_conditioned.py --workdir=/mnt/shared/signal_inferred_conditioned
    python run.py --config=configs/ablations/signal_inferred_conditioned.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2605.03871): Table 18: RewardBench 2 45.6, JudgeBench 47.2, 12-task average 68.9.
Expected: needs no older policy.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=signal_inferred_conditioned",
    "pairs.temporal=0",
    "pairs.inferred=1",
    "pairs.conditioned=1",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
