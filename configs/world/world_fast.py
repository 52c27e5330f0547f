"""The small-world study with three times the learning rate, and for longer.

    python run.py --config=configs/world/world_fast.py

Hardware: any CPU with 1 GB of memory; about 2 minutes on a core.
Expected: better rubrics and answers sooner, then collapse: when the policy improves no more, newer is no longer better, but it is
still what the generator is paid for (docs/world.md).
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.world.world_main import get_config as main

CHANGES = (
    "name=world_fast",
    "optimizer.lr=1e-3",
    "schedule.cycles=8",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
