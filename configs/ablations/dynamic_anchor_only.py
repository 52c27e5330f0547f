"""One objective alone: the labelled order, without discriminability.

    python run.py --config=configs/ablations/dynamic_anchor_only.py --workdir=/mnt/shared/dynamic_anchor_only
    python run.py --config=configs/ablations/dynamic_anchor_only.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/dynamic_rubric_qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2607.20083): macro average 52.7 against 58.1 with both.
Expected: items that order the labelled answers and tell the policy's own apart less and less; watch dynamic/score_gap.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.dynamic_rubric_qwen3_8b import get_config as main

CHANGES = (
    "name=dynamic_anchor_only",
    "dynamic.objectives=anchor",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
