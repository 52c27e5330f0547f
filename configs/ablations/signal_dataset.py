"""Preference signal: chosen and rejected of a data set, the answers of Qwen2.5-72B and 1.5B to the training prompts.

    python run.py --config=configs/ablations/signal_dataset.py --workdir=/mnt/shared/signal_dataset
    python run.py --config=configs/ablations/signal_dataset.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on a
TPU.
Paper (arXiv 2605.03871): no row; its released code names such a mode and cannot start it. The data are its training
set's own columns.
Expected: a signal that stays as it is while the policy moves away from both answers.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=signal_dataset",
    "pairs.temporal=0",
    "pairs.dataset=1",
    "pairs.data=dpo_model_ladder.parquet?chosen=qwen-2.5-72b-instruct&rejected=qwen-2.5-1.5b-instruct",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
