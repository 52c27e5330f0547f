"""Preference signal: an answer against one to the question inferred from it.

    python run.py --config=configs/ablations/signal_inferred.py --workdir=/mnt/shared/signal_inferred
    python run.py --config=configs/ablations/signal_inferred.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm_qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2605.03871): a row of the ablation over preference signals; temporal contrast is the main experiment.
Expected: needs no older policy; a question that is inferred exactly makes no pair (counted).
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm_qwen3_8b import get_config as main

CHANGES = (
    "name=signal_inferred",
    "pairs.temporal=0",
    "pairs.inferred=1",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
