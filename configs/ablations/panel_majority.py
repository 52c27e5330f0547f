"""Two judges, joined otherwise: each judge votes for the answer it scores higher; an even split goes by the mean score.

    python run.py --config=configs/ablations/panel_majority.py --workdir=/mnt/shared/panel_majority
    python run.py --config=configs/ablations/panel_majority.py --config.scale=smoke  # on a CPU

Hardware: v5p-16 by an estimate, no plan compiled; the other flags (sources, data) of configs/evolm/qwen3_8b.py apply here too;
never run on a TPU.
Paper (arXiv 2605.03871): Table 22, the row of majority voting, with five judges: RewardBench 2 42.7, JudgeBench 43.8,
12-task average 66.2. It has no format term.
Expected: as with one judge's binary reward, fewer usable groups than with margins.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.ablations.panel_mean import get_config as main

CHANGES = (
    "name=panel_majority",
    "panel.aggregate=majority",
    "rubric.reward=binary",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
