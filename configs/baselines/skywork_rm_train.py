"""Training a scalar reward model of Skywork-Reward-V2's kind (arXiv 2507.01352): Bradley-Terry on preference pairs, Qwen3-0.6B.

    python run.py --config=configs/baselines/skywork_rm_train.py --workdir=/mnt/shared/skywork_rm_train \
        --config.policy.source=/models/Qwen3-0.6B --config.reward.data=pairs.parquet
    python -m coevo_jax.export --run=/mnt/shared/skywork_rm_train --out=/models/my_reward_model
    python run.py --config=configs/baselines/skywork_rm.py --config.judge.source=/models/my_reward_model

Data: pairs (prompt, chosen, rejected). Hardware: a v5p-8 or v4-8 slice; never run on a TPU.
Expected: no number in the paper, which takes the published model; its makers report for this size RewardBench 2 61.3, JudgeBench
67.6, on 26 M pairs of their own at 10,240 an update. Their learning rate isn't published; here 5e-6, AdamW without decay, as most
public recipes at this size.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main


def get_config() -> Experiment:
    return apply_overrides(
        main(),
        [
            "name=skywork_rm_train",
            "policy.source=/models/Qwen3-0.6B",
            "policy.thinking=false",
            "schedule.mode=reward",
            "schedule.cycles=1",
            "schedule.k=2500",
            "reward.data=/data/pairs.parquet",
            "reward.pairs=256",
            "reward.max_tokens=16384",
            "reward.heldout=512",
            "update.rows_per_micro=4",
            "optimizer.lr=5e-6",
            "optimizer.warmup_steps=75",
        ],
    )
