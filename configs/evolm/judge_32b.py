"""The main experiment (qwen3_8b.py) with Qwen3-32B as its judge.

    python run.py --config=configs/evolm/judge_32b.py --workdir=/mnt/shared/evolm_judge_32b \
        --config.policy.source=/models/Qwen3-8B --config.judge.source=/models/Qwen3-32B --config.data.prompts=tulu3_prompts.jsonl

Hardware: fits v5p:2x2x2 by its plan (docs/performance.md); it was never run on a TPU.
Expected by the paper (Table 19): RewardBench 2 66.5, JudgeBench 63.7, 12-task average 67.7.
"""

import dataclasses

from coevo_jax.config import Experiment
from configs.evolm.qwen3_8b import get_config as main


def get_config() -> Experiment:
    cfg = main()
    judge = dataclasses.replace(cfg.judge, source="/models/Qwen3-32B", length_classes=((32, 6144), (16, 12288), (8, 40960)))
    return dataclasses.replace(cfg, name="evolm_qwen3_8b_judge_32b", judge=judge)
