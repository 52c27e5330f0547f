"""Reference Likert: as direct_likert.py, with a reference answer in the judge's view. Every record of the data needs one
(a column 'reference', or 'FILE?reference=COLUMN').

    python run.py --config=configs/baselines/reference_likert.py --workdir=/mnt/shared/reference_likert \
        --config.policy.source=/models/Qwen3-8B --config.judge.source=/models/Qwen3-1.7B --config.data.prompts=tulu3_prompts.jsonl

Data, policy and updates: those of configs/evolm/qwen3_8b.py. Hardware: a v5p-16 or v4-32 slice; never run on a TPU.
Expected: no number in the paper; RaR's own (HealthBench): 28.9 against 31.2 of its implicit mode.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main


def get_config() -> Experiment:
    return apply_overrides(
        main(),
        [
            "name=reference_likert",
            "schedule.order=policy_only",
            "schedule.cycles=1",
            "schedule.k=500",
            "rubric.source=none",
            "judge.protocol=likert_reference",
        ],
    )
