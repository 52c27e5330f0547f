"""The small-world study with a generator that stays as it began: the policy alone trains, under its rubrics.

    python run.py --config=configs/world/world_frozen.py

Hardware: any CPU with 1 GB of memory; about 1 minute on a core.
Expected: rubrics that do not follow the policy (docs/world.md).
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.world.world_main import get_config as main

CHANGES = (
    "name=world_frozen",
    "generator.frozen=true",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
