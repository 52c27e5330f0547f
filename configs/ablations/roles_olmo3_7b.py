"""Olmo-3-7B-Think as policy and generator.

    python run.py --config=configs/ablations/roles_olmo3_7b.py --workdir=/mnt/shared/roles_olmo3_7b
    python run.py --config=configs/ablations/roles_olmo3_7b.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm_qwen3_8b.py, whose other flags (sources, data) apply here too; never run on a
TPU.
Paper (arXiv 2605.03871): its rows of other model families; their numbers are not known here.
Expected: nothing is known.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm_qwen3_8b import get_config as main

CHANGES = (
    "name=roles_olmo3_7b",
    "policy.source=/models/Olmo-3-7B-Think",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
