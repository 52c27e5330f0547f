"""Reward design: the long prompt (5 to 10 criteria), the margin, without the format term.

    python run.py --config=configs/ablations/reward_long_margin.py --workdir=/mnt/shared/reward_long_margin
    python run.py --config=configs/ablations/reward_long_margin.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2605.03871): no such row: Table 15 ablates prompt, margin and format one after the other. It completes the
grid.
Expected: more usable groups than with the binary reward. Nothing asks for a valid rubric but that an invalid one
earns 0.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=reward_long_margin",
    "rubric.prompt=rubric_long",
    "rubric.reward=margin",
    "rubric.alpha=1.0",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
