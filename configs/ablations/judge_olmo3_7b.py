"""Judge of another family: Olmo-3-7B-Think, in training as well.

    python run.py --config=configs/ablations/judge_olmo3_7b.py --workdir=/mnt/shared/judge_olmo3_7b
    python run.py --config=configs/ablations/judge_olmo3_7b.py --config.scale=smoke  # on a CPU

Hardware: v5p-16 by an estimate, no plan compiled; the other flags (sources, data) of configs/evolm/qwen3_8b.py apply here too;
never run on a TPU.
Paper (arXiv 2605.03871): no such row: it changes the judge's family when it evaluates (Table 5), not in training. The
released code has a config for it.
Expected: nothing is known.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=judge_olmo3_7b",
    "judge.source=/models/Olmo-3-7B-Think",
    "judge.length_classes=32,6144;16,12288;8,40960",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
