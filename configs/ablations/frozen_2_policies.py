"""Pairs of two frozen policies: of two answers that of the policy named first is the better one. The generator alone
trains.

    python run.py --config=configs/ablations/frozen_2_policies.py --workdir=/mnt/shared/frozen_2_policies
    python run.py --config=configs/ablations/frozen_2_policies.py --config.scale=smoke  # on a CPU

Hardware: v5p-16 by an estimate, no plan compiled; the other flags (sources, data) of configs/evolm/qwen3_8b.py apply here too;
never run on a TPU.
Paper (arXiv 2605.03871): no such row. In the released code, which has a config for it, the judge itself orders the
answers under a fresh rubric. Here the order is stated: a label that the system in training makes is circular.
Expected: rubrics that tell models of other families apart, by style too; nothing says that they tell two answers of one
policy apart.
"""

import dataclasses

from coevo_jax.config import Experiment, ModelConfig
from configs.evolm.qwen3_8b import get_config as main

MODELS = ("Qwen3-8B", "Meta-Llama-3-8B-Instruct")  # best first, by our order


def get_config() -> Experiment:
    cfg = main()
    models = tuple(ModelConfig(source=f"/models/{name}", dtype="bfloat16", thinking=name == "Qwen3-8B") for name in MODELS)
    pairs = dataclasses.replace(cfg.pairs, temporal=0.0, frozen=1.0, frozen_models=models)
    schedule = dataclasses.replace(cfg.schedule, order="generator_only")
    return dataclasses.replace(cfg, name="frozen_2_policies", pairs=pairs, schedule=schedule)
