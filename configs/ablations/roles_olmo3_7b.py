"""Olmo-3-7B-Think as policy and generator.

    python run.py --config=configs/ablations/roles_olmo3_7b.py --workdir=/mnt/shared/roles_olmo3_7b
    python run.py --config=configs/ablations/roles_olmo3_7b.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on a
TPU.
Paper (arXiv 2605.03871): Table 21: RewardBench 2 45.3, JudgeBench 42.5, 12-task average 64.0. Which OLMo-3-7B it is
isn't said; the released code takes this one.
Expected: nothing is known.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=roles_olmo3_7b",
    "policy.source=/models/Olmo-3-7B-Think",
    # 32 kv heads: a token's keys and values take 3.6 times as much as Qwen3-8B's.
    "sampler.slots=80",
    "sampler.length_classes=40,3072;24,8192;16,19456",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
