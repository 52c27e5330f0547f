"""Reward design: the long prompt (5 to 10 criteria), the margin, with the format term.

    python run.py --config=configs/ablations/reward_long_margin_format.py --workdir=/mnt/shared/reward_long_margin_format
    python run.py --config=configs/ablations/reward_long_margin_format.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2605.03871): no such row: Table 15 ablates prompt, margin and format one after the other. It completes the
grid.
Expected: more usable groups than with the binary reward.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=reward_long_margin_format",
    "rubric.prompt=rubric_long",
    "rubric.reward=margin",
    "rubric.alpha=0.7",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
