"""The main experiment (qwen3_8b.py) with two models: the rubric generator has weights and an optimizer of its own.

    python run.py --config=configs/evolm/two_models.py --workdir=/mnt/shared/evolm_two \
        --config.policy.source=/models/Qwen3-8B --config.judge.source=/models/Qwen3-1.7B --config.data.prompts=tulu3_prompts.jsonl

Hardware: fits v4:2x2x4 by its plan (docs/performance.md); it was never run on a TPU.
Expected by the paper (Table 17): RewardBench 2 48.4, JudgeBench 45.7, 12-task average 69.3.
"""

import dataclasses

from coevo_jax.config import Experiment, GeneratorConfig
from configs.evolm.qwen3_8b import get_config as main


def get_config() -> Experiment:
    cfg = main()
    sampler = dataclasses.replace(cfg.sampler, slots=40, length_classes=((24, 3072), (12, 8192), (4, 19456)))
    # The other model's state lies beside an update.
    update = dataclasses.replace(cfg.update, remat="attention+qkv+residual")
    return dataclasses.replace(
        cfg, name="evolm_qwen3_8b_two_models", generator=GeneratorConfig(mode="two", thinking=True), sampler=sampler,
        update=update,
        judge=dataclasses.replace(cfg.judge, length_classes=((24, 6144), (8, 12288), (4, 40960))),
    )  # fmt: skip
