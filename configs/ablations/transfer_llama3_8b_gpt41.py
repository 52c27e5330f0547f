"""Beside transfer_llama3_8b.py: GPT-4.1 writes the rubrics that Llama-3.1-8B-Instruct trains on (the key: OPENAI_API_KEY).

    python run.py --config=configs/ablations/transfer_llama3_8b_gpt41.py --workdir=/mnt/shared/transfer_llama3_8b_gpt41
    python run.py --config=configs/ablations/transfer_llama3_8b_gpt41.py --config.scale=smoke  # on a CPU

Hardware: v5p-16 by an estimate, no plan compiled; the other flags (sources, data) of configs/evolm/qwen3_8b.py apply here
too; never run on a TPU.
Paper (arXiv 2605.03871): Table 4: 12-task average 45.7, under rubrics of the trained generator 46.9.
Expected: what a prompted writer of another family brings the same policy.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.baselines.gpt41_prompted import get_config as prompted

CHANGES = (
    "name=transfer_llama3_8b_gpt41",
    "policy.source=/models/Llama-3.1-8B-Instruct",
    "policy.thinking=false",
    "answer.max_new_tokens=4096",
)


def get_config() -> Experiment:
    return apply_overrides(prompted(), CHANGES)
