"""The main experiment (qwen3_8b.py) with Qwen3-14B as its judge.

    python run.py --config=configs/evolm/judge_14b.py --workdir=/mnt/shared/evolm_judge_14b \
        --config.policy.source=/models/Qwen3-8B --config.judge.source=/models/Qwen3-14B --config.data.prompts=tulu3_prompts.jsonl

Hardware: with int8 weights of the judge it fits v4:2x2x4 by its plan (docs/performance.md); it was never run on a TPU.
Expected by the paper (Table 19): RewardBench 2 67.6, JudgeBench 65.3, 12-task average 69.0.
"""

import dataclasses

from coevo_jax.config import Experiment
from configs.evolm.qwen3_8b import get_config as main


def get_config() -> Experiment:
    cfg = main()
    judge = dataclasses.replace(
        cfg.judge, source="/models/Qwen3-14B", weights="int8", length_classes=((16, 6144), (8, 12288), (4, 40960))
    )
    # Room for a judge of this size on v4:2x2x4
    update = dataclasses.replace(cfg.update, remat="attention+qkv+residual")
    sampler = dataclasses.replace(cfg.sampler, slots=144, length_classes=((72, 3072), (48, 8192), (24, 19456)))
    return dataclasses.replace(cfg, name="evolm_qwen3_8b_judge_14b", judge=judge, sampler=sampler, update=update)
