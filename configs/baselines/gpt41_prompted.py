"""Prompted rubrics, by API: GPT-4.1 writes the rubrics that the policy is judged by (docs/remote.md). The key is read from
OPENAI_API_KEY.

    python run.py --config=configs/baselines/gpt41_prompted.py --workdir=/mnt/shared/gpt41_prompted \
        --config.policy.source=/models/Qwen3-8B --config.judge.source=/models/Qwen3-1.7B --config.data.prompts=tulu3_prompts.jsonl

Data, policy and updates: those of configs/evolm/qwen3_8b.py. Hardware: a v5p-16 or v4-32 slice; never run on a TPU.
Expected by the paper: RewardBench 2 36.6, JudgeBench 41.3 (the rubrics); 12-task average 66.7 (the policy). Its sampling of
GPT-4.1 is not published; here it is that of the local generator.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main


def get_config() -> Experiment:
    return apply_overrides(
        main(),
        [
            "name=gpt41_prompted",
            "schedule.order=policy_only",
            "schedule.cycles=1",
            "schedule.k=500",
            "generator.mode=two",
            "generator.source=api:gpt-4.1",
            "generator.thinking=false",
            "generator.endpoint.base_url=https://api.openai.com/v1",
            "generator.endpoint.key_env=OPENAI_API_KEY",
            "rubric_sampling.temperature=0.6",
            "rubric_sampling.top_p=0.95",
            "rubric_sampling.max_new_tokens=4096",
        ],
    )
