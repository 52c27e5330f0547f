"""Two policies and one generator: each policy has its K updates a cycle, and they take turns in giving the pairs.

    python run.py --config=configs/ablations/coevolve_2.py --workdir=/mnt/shared/coevolve_2
    python run.py --config=configs/ablations/coevolve_2.py --config.scale=smoke  # on a CPU

Hardware: v5p-16 by an estimate, no plan compiled; the other flags (sources, data) of configs/evolm/qwen3_8b.py apply here too;
never run on a TPU.
Paper (arXiv 2605.03871): no such row. The released code has a config for it.
Expected: rubrics that serve more than one policy; each policy's pairs come every other cycle.
"""

import dataclasses

from coevo_jax.config import Experiment, GeneratorConfig, ModelConfig
from configs.evolm.qwen3_8b import get_config as main

OTHERS = ("Llama-3.1-8B-Instruct",)


def get_config() -> Experiment:
    cfg = main()
    policies = tuple(ModelConfig(source=f"/models/{name}", dtype="bfloat16") for name in OTHERS)
    generator = GeneratorConfig(mode="two", thinking=True)
    return dataclasses.replace(cfg, name="coevolve_2", policies=policies, generator=generator)
