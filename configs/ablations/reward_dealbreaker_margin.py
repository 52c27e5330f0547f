"""Reward design: the deal-breaker prompt (2 to 5 criteria), the margin, without the format term.

    python run.py --config=configs/ablations/reward_dealbreaker_margin.py --workdir=/mnt/shared/reward_dealbreaker_margin
    python run.py --config=configs/ablations/reward_dealbreaker_margin.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2605.03871): Table 15: RewardBench 2 37.2, JudgeBench 40.4, 12-task average 66.9.
Expected: more usable groups than with the binary reward. Nothing asks for a valid rubric but that an invalid one
earns 0.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=reward_dealbreaker_margin",
    "rubric.prompt=rubric_dealbreaker",
    "rubric.reward=margin",
    "rubric.alpha=1.0",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
