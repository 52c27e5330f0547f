"""The small-world study (docs/world.md): two models, pairs by temporal contrast, the margin as reward, a judge without noise.

    python run.py --config=configs/world/world_main.py
    python benchmarks/world_study.py --workdir=runs/world      # the whole study: these arms, three seeds, held-out measurement

Hardware: any CPU with 1 GB of memory; 5 cycles of 20 and 20 updates in about a minute on a core.
Expected: docs/world.md. The policy's learning rate lets it improve over several cycles, which is what temporal contrast feeds on.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.tiny import get_config as tiny

CHANGES = (
    "name=world_main",
    "generator.mode=two",
    "schedule.cycles=5",
    "schedule.k=20",
    "schedule.prompts=8",
    "schedule.group=8",
    "pairs.min_gap=20",
    "pairs.max_gap=100",
    "pairs.per_slot=100",
    "optimizer.lr=3e-4",
    "run.save_every=20",  # the end of each phase
    "run.keep=100",  # all of them: the study measures each cycle's weights
)


def get_config() -> Experiment:
    return apply_overrides(tiny(), CHANGES)
