"""RaR, predefined: four generic items of equal weight, the same for every question, each checked with yes or no.

    python run.py --config=configs/baselines/rar_predefined.py --workdir=/mnt/shared/rar_predefined \
        --config.policy.source=/models/Qwen3-8B --config.judge.source=/models/Qwen3-1.7B --config.data.prompts=tulu3_prompts.jsonl

Data, policy and updates: those of configs/evolm/qwen3_8b.py. Hardware: a v5p-16 or v4-32 slice; never run on a TPU.
Expected: no number in the paper; in RaR's own (HealthBench) it is the weakest, 12.5 against 31.2 of the implicit mode.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main


def get_config() -> Experiment:
    return apply_overrides(
        main(),
        [
            "name=rar_predefined",
            "schedule.order=policy_only",
            "schedule.cycles=1",
            "schedule.k=500",
            "rubric.source=predefined",
            "judge.protocol=rar_explicit",
        ],
    )
