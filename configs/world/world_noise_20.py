"""The small-world study with a weaker judge: a coin decides 20 % of its criterion checks.

    python run.py --config=configs/world/world_noise_20.py

Hardware: any CPU with 1 GB of memory; about a minute on a core.
Expected: worse rubrics and answers than with the judge that makes no errors (docs/world.md).
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.world.world_main import get_config as main

CHANGES = (
    "name=world_noise_20",
    "judge.oracle_noise=0.2",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
