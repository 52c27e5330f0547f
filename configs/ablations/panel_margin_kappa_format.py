"""Two judges, joined otherwise: 0.5 mean margin + 0.3 format + 0.2 Fleiss' kappa of the group.

    python run.py --config=configs/ablations/panel_margin_kappa_format.py --workdir=/mnt/shared/panel_margin_kappa_format
    python run.py --config=configs/ablations/panel_margin_kappa_format.py --config.scale=smoke  # on a CPU

Hardware: v5p-16 by an estimate, no plan compiled; the other flags (sources, data) of configs/evolm/qwen3_8b.py apply here too;
never run on a TPU.
Paper (arXiv 2605.03871): Eq. 9 with weights 0.5, 0.3, 0.2 (MAF); Table 22, with five judges: RewardBench 2 45.1,
JudgeBench 45.7, 12-task average 66.2.
Expected: as with the mean margin, at another weight of the format: kappa is one number a group and moves no advantage
inside it.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.ablations.panel_mean import get_config as main

CHANGES = (
    "name=panel_margin_kappa_format",
    "panel.aggregate=margin_kappa_format",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
