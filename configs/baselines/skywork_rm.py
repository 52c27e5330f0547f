"""Scalar reward model: Skywork-Reward-V2-Llama-3.1-8B-40M scores the answers, its raw logit being the reward.

    python run.py --config=configs/baselines/skywork_rm.py --workdir=/mnt/shared/skywork_rm \
        --config.policy.source=/models/Qwen3-8B --config.judge.source=/models/Skywork-Reward-V2-Llama-3.1-8B-40M \
        --config.data.prompts=tulu3_prompts.jsonl

Data, policy and updates: those of configs/evolm/qwen3_8b.py. Hardware: a v5p-16 or v4-32 slice; never run on a TPU.
Expected by the paper: RewardBench 2 86.4, JudgeBench 80.8 (the reward model); 12-task average 59.7 (the policy). The released
code takes 10 times the sigmoid and leaves reasoning in what it scores; judge.scalar=sigmoid gives the former up to the factor,
which the group's standard deviation divides out.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main


def get_config() -> Experiment:
    return apply_overrides(
        main(),
        [
            "name=skywork_rm",
            "schedule.order=policy_only",
            "schedule.cycles=1",
            "schedule.k=500",
            "judge.source=/models/Skywork-Reward-V2-Llama-3.1-8B-40M",
            "judge.protocol=scalar",
            "judge.thinking=false",
            "rubric.source=none",
        ],
    )
