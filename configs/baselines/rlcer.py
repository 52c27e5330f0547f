"""RLCER (arXiv 2602.10885), prompted: the policy answers questions with a known answer and writes a rubric for each answer; a
criterion counts where its checks go with correctness. Rubrics are prompted, answers trained.

    python run.py --config=configs/baselines/rlcer.py --workdir=/mnt/shared/rlcer \
        --config.policy.source=/models/Qwen3-8B --config.judge.source=/models/Qwen3-1.7B --config.data.prompts='dapo_math.parquet'

Data: questions with a reference answer (columns prompt and reference; 'FILE?prompt=...&reference=...' names others), such as
DAPO-Math-17k. Hardware: a v5p-16 or v4-32 slice; never run on a TPU.
Expected: no number in the paper, whose row is the evolving variant (rlcer_evolving.py, App. A.6).
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main


def get_config() -> Experiment:
    return apply_overrides(
        main(),
        [
            "name=rlcer",
            "schedule.mode=rlcer",
            "schedule.verifier=coevo_jax.learn.verifiers:exact_answer",
            "schedule.cycles=1",
            "schedule.k=500",
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
            "schedule.order=policy_only",
        ],
    )
