"""Cross-policy transfer: the generator of a finished main run, frozen, writes the rubrics that Llama-3.1-8B-Instruct
trains on.

    python run.py --config=configs/ablations/transfer_llama3_8b.py --workdir=/mnt/shared/transfer_llama3_8b
    python run.py --config=configs/ablations/transfer_llama3_8b.py --config.scale=smoke  # on a CPU

Hardware: v5p-16 by an estimate, no plan compiled; /mnt/shared/evolm is the main run's folder; the other flags (sources, data) of
configs/evolm/qwen3_8b.py apply here too; never run on a TPU.
Paper (arXiv 2605.03871): Table 4: 12-task average 46.9, under rubrics of GPT-4.1 45.7.
Expected: gains of a policy that the generator never saw; beside configs/baselines/qwen3_8b_prompted.py they say what
the generator has learnt.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=transfer_llama3_8b",
    "policy.source=/models/Llama-3.1-8B-Instruct",
    "policy.thinking=false",
    "answer.max_new_tokens=4096",
    "generator.mode=two",
    "generator.frozen=true",
    "generator.source=run:/mnt/shared/evolm",
    "schedule.order=policy_only",
    "schedule.cycles=1",
    "schedule.k=500",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
