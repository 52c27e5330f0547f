"""Judge of another family: Meta-Llama-3-8B-Instruct, whose context is 8,192 tokens, in training as well.

    python run.py --config=configs/ablations/judge_llama3_8b.py --workdir=/mnt/shared/judge_llama3_8b
    python run.py --config=configs/ablations/judge_llama3_8b.py --config.scale=smoke  # on a CPU

Hardware: v5p-16 by an estimate, no plan compiled; the other flags (sources, data) of configs/evolm/qwen3_8b.py apply here too;
never run on a TPU.
Paper (arXiv 2605.03871): no such row: it changes the judge's family when it evaluates (Table 5), not in training. The
released code has a config for it.
Expected: nothing is known; an answer that does not fit its context is a refused verdict, which is counted.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=judge_llama3_8b",
    "judge.source=/models/Meta-Llama-3-8B-Instruct",
    "judge.thinking=false",
    "judge.sampling.max_new_tokens=2048",
    "judge.max_prompt=6144",
    "judge.length_classes=96,3072;48,8192",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
