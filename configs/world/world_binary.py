"""The small-world study with a binary rubric reward: 1 where the accepted answer scores higher, whatever the margin.

    python run.py --config=configs/world/world_binary.py

Hardware: any CPU with 1 GB of memory; about a minute on a core.
Expected: fewer groups of rubrics whose rewards differ than with the margin (docs/world.md).
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.world.world_main import get_config as main

CHANGES = (
    "name=world_binary",
    "rubric.reward=binary",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
