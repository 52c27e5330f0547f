"""Static generator: trained in the first round, frozen from the second on.

    python run.py --config=configs/ablations/dynamic_static.py --workdir=/mnt/shared/dynamic_static
    python run.py --config=configs/ablations/dynamic_static.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/dynamic_rubric_qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2607.20083): the policy stalls in round 2 when the first generator is kept.
Expected: dynamic/score_gap of the second policy stage falls below that of the main run.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.dynamic_rubric_qwen3_8b import get_config as main

CHANGES = (
    "name=dynamic_static",
    "dynamic.static_from=2",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
