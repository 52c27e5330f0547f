"""Qwen3-8B writes the rubrics and trains on them; Llama-3.1-8B-Instruct is the policy.

    python run.py --config=configs/ablations/roles_qwen3_8b_llama3_8b.py --workdir=/mnt/shared/roles_qwen3_8b_llama3_8b
    python run.py --config=configs/ablations/roles_qwen3_8b_llama3_8b.py --config.scale=smoke  # on a CPU

Hardware: v5p-16 by an estimate, no plan compiled; the other flags (sources, data) of configs/evolm/qwen3_8b.py apply here too;
never run on a TPU.
Paper (arXiv 2605.03871): no such row. The released code has a config for it.
Expected: nothing is known.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=roles_qwen3_8b_llama3_8b",
    "policy.source=/models/Llama-3.1-8B-Instruct",
    "policy.thinking=false",
    "answer.max_new_tokens=4096",
    "generator.mode=two",
    "generator.source=/models/Qwen3-8B",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
