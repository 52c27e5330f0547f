"""Prompt-only generator: it does not see the candidate answers.

    python run.py --config=configs/ablations/dynamic_prompt_only.py --workdir=/mnt/shared/dynamic_prompt_only
    python run.py --config=configs/ablations/dynamic_prompt_only.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/dynamic_rubric_qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2607.20083): conditioning on the set is what the method is about; no number of this row is known to us.
Expected: less discriminability at the same pair accuracy.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.dynamic_rubric_qwen3_8b import get_config as main

CHANGES = (
    "name=dynamic_prompt_only",
    "dynamic.conditioned=prompt_only",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
