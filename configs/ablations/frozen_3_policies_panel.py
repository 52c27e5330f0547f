"""Pairs of three frozen policies under two judges.

    python run.py --config=configs/ablations/frozen_3_policies_panel.py --workdir=/mnt/shared/frozen_3_policies_panel
    python run.py --config=configs/ablations/frozen_3_policies_panel.py --config.scale=smoke  # on a CPU

Hardware: v5p-16 by an estimate, no plan compiled; the other flags (sources, data) of configs/evolm/qwen3_8b.py apply here too;
never run on a TPU.
Paper (arXiv 2605.03871): no such row. The released code has a config for it.
Expected: as frozen_3_policies, with fewer margins that one judge's slip decides.
"""

import dataclasses

from coevo_jax.config import Experiment
from configs.ablations.frozen_3_policies import get_config as policies
from configs.ablations.panel_mean import get_config as judges


def get_config() -> Experiment:
    return dataclasses.replace(policies(), name="frozen_3_policies_panel", panel=judges().panel)
