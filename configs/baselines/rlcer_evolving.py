"""RLCER (arXiv 2602.10885), evolving: as rlcer.py, and the writer of rubrics is trained too, on the share of its criteria that
are valid and on its form, in a second optimizer step of each update.

    python run.py --config=configs/baselines/rlcer_evolving.py --workdir=/mnt/shared/rlcer_evolving \
        --config.policy.source=/models/Qwen3-8B --config.judge.source=/models/Qwen3-1.7B --config.data.prompts='dapo_math.parquet'

Data: questions with a reference answer (columns prompt and reference; 'FILE?prompt=...&reference=...' names others), such as
DAPO-Math-17k. Hardware: a v5p-16 or v4-32 slice; never run on a TPU.
Expected by the paper: RewardBench 2 45.0, JudgeBench 49.2, 12-task average 66.7 (App. A.6: the evolving variant).
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main


def get_config() -> Experiment:
    return apply_overrides(
        main(),
        [
            "name=rlcer_evolving",
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
            "schedule.order=alternate",
        ],
    )
