"""Curriculum of judges: Qwen3-32B for cycles 1 to 3, then 14B to 6, 8B to 8, and 4B to the end. Each is loaded when its
turn comes.

    python run.py --config=configs/ablations/curriculum_judge_size.py --workdir=/mnt/shared/curriculum_judge_size
    python run.py --config=configs/ablations/curriculum_judge_size.py --config.scale=smoke  # on a CPU

Hardware: v5p-16 by an estimate, no plan compiled; the other flags (sources, data) of configs/evolm/qwen3_8b.py apply here too;
never run on a TPU.
Paper (arXiv 2605.03871): no such row. The released code has a config for it: 32B, 14B, 8B, 4B from cycles 0, 3, 6 and
8.
Expected: the generator begins with a judge that reads its rubrics well and ends with one that needs them clear.
"""

import dataclasses

from coevo_jax.config import Experiment, PanelConfig
from configs.evolm.qwen3_8b import get_config as main

SIZES = ("32B", "14B", "8B", "4B")


def get_config() -> Experiment:
    cfg = main()
    classes = ((32, 6144), (16, 12288), (8, 40960))
    judges = [dataclasses.replace(cfg.judge, source=f"/models/Qwen3-{size}", length_classes=classes) for size in SIZES]
    panel = PanelConfig(judges=tuple(judges[1:]), from_cycle=(3, 6, 8))
    return dataclasses.replace(cfg, name="curriculum_judge_size", judge=judges[0], panel=panel)
