"""Two judges, joined otherwise: each judge votes for the answer it scores higher; an even split goes by the mean score.

    python run.py --config=configs/ablations/panel_majority.py --workdir=/mnt/shared/panel_majority
    python run.py --config=configs/ablations/panel_majority.py --config.scale=smoke  # on a CPU

Hardware: no plan was compiled for it; the other flags (sources, data) of configs/evolm_qwen3_8b.py apply here too;
never run on a TPU.
Paper (arXiv 2605.03871): a row of the ablation over how several judges are joined; its number is not known here.
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
