"""Random reward: a fair coin for each answer. What is gained under it, no reward has taught.

    python run.py --config=configs/baselines/random_reward.py --workdir=/mnt/shared/random_reward \
        --config.policy.source=/models/Qwen3-8B --config.data.prompts=tulu3_prompts.jsonl

Data, policy and updates: those of configs/evolm/qwen3_8b.py. Hardware: a v5p-16 or v4-32 slice; never run on a TPU.
Expected: no number in the paper; the policy should not improve.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main


def get_config() -> Experiment:
    return apply_overrides(
        main(),
        [
            "name=random_reward",
            "schedule.order=policy_only",
            "schedule.cycles=1",
            "schedule.k=500",
            "rubric.source=none",
            "judge.protocol=random",
        ],
    )
