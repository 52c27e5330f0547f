"""Preference signal: temporal contrast, inferred question and conditioned answers, a third each.

    python run.py --config=configs/ablations/signal_mixture.py --workdir=/mnt/shared/signal_mixture
    python run.py --config=configs/ablations/signal_mixture.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm_qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2605.03871): a row of the ablation over preference signals; temporal contrast is the main experiment. The
released launch files default to it.
Expected: margins between those of the three.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm_qwen3_8b import get_config as main

CHANGES = (
    "name=signal_mixture",
    "pairs.temporal=1",
    "pairs.inferred=1",
    "pairs.conditioned=1",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
