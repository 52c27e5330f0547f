"""The anchor as ListNet's top-one form in place of the rank-weighted Bradley-Terry form.

    python run.py --config=configs/ablations/dynamic_listnet.py --workdir=/mnt/shared/dynamic_listnet
    python run.py --config=configs/ablations/dynamic_listnet.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/dynamic_rubric_qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2607.20083): its formula is the Bradley-Terry form; a summary calls the reward ListNet-like, so both are here.
Expected: no number to compare with.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.dynamic_rubric_qwen3_8b import get_config as main

CHANGES = (
    "name=dynamic_listnet",
    "dynamic.anchor_loss=listnet",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
