"""Llama-3.1-8B-Instruct as policy and generator.

    python run.py --config=configs/ablations/roles_llama3_8b.py --workdir=/mnt/shared/roles_llama3_8b
    python run.py --config=configs/ablations/roles_llama3_8b.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on a
TPU.
Paper (arXiv 2605.03871): Table 21: RewardBench 2 34.0, JudgeBench 47.1, 12-task average 43.8.
Expected: nothing is known; it does not reason first.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=roles_llama3_8b",
    "policy.source=/models/Llama-3.1-8B-Instruct",
    "policy.thinking=false",
    "generator.thinking=false",
    "answer.max_new_tokens=4096",
    "rubric_sampling.max_new_tokens=4096",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
