"""RaR, implicit: a frozen Qwen3-8B writes RaR's rubric, the judge gives one rating from 1 to 10 with all of it in view.
The paper's rubrics are written before training and beside a reference: for those, rubric.source=data and a column 'rubric'.

    python run.py --config=configs/baselines/rar_implicit.py --workdir=/mnt/shared/rar_implicit \
        --config.policy.source=/models/Qwen3-8B --config.judge.source=/models/Qwen3-1.7B --config.data.prompts=tulu3_prompts.jsonl

Data, policy and updates: those of configs/evolm/qwen3_8b.py. Hardware: a v5p-16 or v4-32 slice; never run on a TPU.
Expected: no number in the paper, whose row of RaR has GPT-4.1 as the writer (rar_gpt41.py).
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main


def get_config() -> Experiment:
    return apply_overrides(
        main(),
        [
            "name=rar_implicit",
            "schedule.order=policy_only",
            "schedule.cycles=1",
            "schedule.k=500",
            "generator.mode=two",
            "generator.frozen=true",
            "rubric.schema=rar",
            "rubric.prompt=rubric_rar",
            "judge.protocol=rar_implicit",
        ],
    )
