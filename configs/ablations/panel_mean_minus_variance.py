"""Two judges, joined otherwise: the share of votes less 1 - Fleiss' kappa of the group.

    python run.py --config=configs/ablations/panel_mean_minus_variance.py --workdir=/mnt/shared/panel_mean_minus_variance
    python run.py --config=configs/ablations/panel_mean_minus_variance.py --config.scale=smoke  # on a CPU

Hardware: v5p-16 by an estimate, no plan compiled; the other flags (sources, data) of configs/evolm/qwen3_8b.py apply here too;
never run on a TPU.
Paper (arXiv 2605.03871): Eq. 10 (BA); Table 22, with five judges: RewardBench 2 45.7, JudgeBench 50.4, 12-task average
67.7. It has no format term.
Expected: as with the share of votes: kappa is one number a group and moves no advantage inside it.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.ablations.panel_mean import get_config as main

CHANGES = (
    "name=panel_mean_minus_variance",
    "panel.aggregate=mean_minus_variance",
    "rubric.reward=binary",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
