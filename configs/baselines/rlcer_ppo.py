"""RLCER (arXiv 2602.10885) as its own paper trains it: evolving, PPO with a critic, an overlong buffer of 4,096 tokens.

    python run.py --config=configs/baselines/rlcer_ppo.py --workdir=/mnt/shared/rlcer_ppo \
        --config.policy.source=/models/Qwen3-8B --config.judge.source=/models/Qwen3-1.7B --config.data.prompts='dapo_math.parquet'

Data: questions with a reference answer (columns prompt and reference; 'FILE?prompt=...&reference=...' names others), such as
DAPO-Math-17k. Hardware: a v5p-16 or v4-32 slice; never run on a TPU.
Settings of RLCER's paper: 8 answers to each of 32 questions, critic at 1e-5, clip 0.2, up to 1500 updates, no KL term. Discount
and lambda aren't published, here 1. Its mini-batches of 64 are one step of the whole batch here.
Expected by that paper (8B): AIME24 34.79 to 37.50, AIME25 32.50 to 33.33, AMC 84.53 to 86.41, GPQA-D 46.56 to 48.77.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main


def get_config() -> Experiment:
    return apply_overrides(
        main(),
        [
            "name=rlcer_ppo",
            "schedule.mode=rlcer",
            "schedule.verifier=coevo_jax.learn.verifiers:exact_answer",
            "schedule.cycles=1",
            "data.prompts=dapo_math.parquet",
            "rubric.schema=points",
            "rubric.prompt=rubric_points",
            "judge.protocol=points",
            "answer.max_new_tokens=12288",
            "rubric_sampling.max_new_tokens=4096",
            "sampler.max_prompt=15360",
            "judge.max_prompt=20480",
            "judge.sampling.max_new_tokens=12288",
            "sampler.max_new=12288",
            "sampler.length_classes=96,3072;64,8192;32,27648",
            "schedule.k=1500",
            "schedule.order=alternate",
            "schedule.prompts=32",
            "advantage.kind=gae",
            "critic.lr=1e-5",
            "loss.kl_weight=0",
            "control.overlong_buffer=4096",
        ],
    )
