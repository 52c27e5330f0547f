"""Judge of another family: Llama-3.2-1B-Instruct, which does not reason first, in training as well.

    python run.py --config=configs/ablations/judge_llama3_2_1b.py --workdir=/mnt/shared/judge_llama3_2_1b
    python run.py --config=configs/ablations/judge_llama3_2_1b.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on a
TPU.
Paper (arXiv 2605.03871): no such row: it changes the judge's family when it evaluates (Table 5), not in training. The
released code has a config for it.
Expected: nothing is known.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=judge_llama3_2_1b",
    "judge.source=/models/Llama-3.2-1B-Instruct",
    "judge.thinking=false",
    "judge.sampling.max_new_tokens=2048",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
