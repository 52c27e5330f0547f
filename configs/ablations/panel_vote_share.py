"""Two judges, joined otherwise: the reward is the share of the judges that vote for the better answer.

    python run.py --config=configs/ablations/panel_vote_share.py --workdir=/mnt/shared/panel_vote_share
    python run.py --config=configs/ablations/panel_vote_share.py --config.scale=smoke  # on a CPU

Hardware: v5p-16 by an estimate, no plan compiled; the other flags (sources, data) of configs/evolm/qwen3_8b.py apply here too;
never run on a TPU.
Paper (arXiv 2605.03871): Eq. 10 without the term of agreement; no row.
Expected: three values instead of two: more usable groups than with a majority.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.ablations.panel_mean import get_config as main

CHANGES = (
    "name=panel_vote_share",
    "rubric.reward=binary",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
