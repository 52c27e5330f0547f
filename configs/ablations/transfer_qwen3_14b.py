"""Cross-policy transfer: the generator of a finished main run, frozen, writes the rubrics that Qwen3-14B trains on.

    python run.py --config=configs/ablations/transfer_qwen3_14b.py --workdir=/mnt/shared/transfer_qwen3_14b
    python run.py --config=configs/ablations/transfer_qwen3_14b.py --config.scale=smoke  # on a CPU

Hardware: v5p-16 by an estimate, no plan compiled; /mnt/shared/evolm is the main run's folder; the other flags (sources, data) of
configs/evolm/qwen3_8b.py apply here too; never run on a TPU.
Paper (arXiv 2605.03871): no such row; Table 4 has Qwen3-4B and Llama-3.1-8B. The released code has a config for it.
Expected: gains of a policy that the generator never saw; beside configs/baselines/qwen3_8b_prompted.py they say what
the generator has learnt.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=transfer_qwen3_14b",
    "policy.source=/models/Qwen3-14B",
    "generator.mode=two",
    "generator.frozen=true",
    "generator.source=run:/mnt/shared/evolm",
    "schedule.order=policy_only",
    "schedule.cycles=1",
    "schedule.k=500",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
