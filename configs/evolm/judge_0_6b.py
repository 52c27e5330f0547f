"""The main experiment (qwen3_8b.py) with Qwen3-0.6B as its judge.

    python run.py --config=configs/evolm/judge_0_6b.py --workdir=/mnt/shared/evolm_judge_0_6b \
        --config.policy.source=/models/Qwen3-8B --config.judge.source=/models/Qwen3-0.6B --config.data.prompts=tulu3_prompts.jsonl

Hardware: fits v4:2x2x4 by its plan (docs/performance.md); it was never run on a TPU.
Expected by the paper (Table 19): RewardBench 2 22.1, JudgeBench 35.3, 12-task average 67.9.
"""

import dataclasses

from coevo_jax.config import Experiment
from configs.evolm.qwen3_8b import get_config as main


def get_config() -> Experiment:
    cfg = main()
    judge = dataclasses.replace(cfg.judge, source="/models/Qwen3-0.6B")
    return dataclasses.replace(cfg, name="evolm_qwen3_8b_judge_0_6b", judge=judge)
