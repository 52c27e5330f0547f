"""One objective alone: discriminability, without the labelled order.

    python run.py --config=configs/ablations/dynamic_disc_only.py --workdir=/mnt/shared/dynamic_disc_only
    python run.py --config=configs/ablations/dynamic_disc_only.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/dynamic_rubric_qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2607.20083): macro average 56.9 against 58.1 with both.
Expected: items that split the answers whatever they mean; watch dynamic/surface_share and rubric/pair_accuracy.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.dynamic_rubric_qwen3_8b import get_config as main

CHANGES = (
    "name=dynamic_disc_only",
    "dynamic.objectives=discriminability",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
