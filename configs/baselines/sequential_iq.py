"""Sequential, inferred question: first the generator trains on inferred-question pairs of the frozen policy, then the
policy under the frozen generator.

    python run.py --config=configs/baselines/sequential_iq.py --workdir=/mnt/shared/sequential_iq \
        --config.policy.source=/models/Qwen3-8B --config.judge.source=/models/Qwen3-1.7B --config.data.prompts=tulu3_prompts.jsonl

Data, policy and updates: those of configs/evolm/qwen3_8b.py. Hardware: two models, so sized as
configs/evolm/two_models.py, for v4:2x2x4; never run on a TPU.
Expected by the paper: RewardBench 2 47.2, JudgeBench 48.6 (the rubrics); 12-task average 68.0 (the policy). Its number of
generator updates isn't published; here 500, as many as the policy's.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main


def get_config() -> Experiment:
    return apply_overrides(
        main(),
        [
            "name=sequential_iq",
            "schedule.order=generator_first",
            "schedule.cycles=1",
            "schedule.k=500",
            "generator.mode=two",
            "sampler.slots=40",
            "sampler.length_classes=24,3072;12,8192;4,19456",
            "judge.length_classes=24,6144;8,12288;4,40960",
            "update.remat=attention+qkv+residual",
            "pairs.temporal=0",
            "pairs.inferred=1",
        ],
    )
