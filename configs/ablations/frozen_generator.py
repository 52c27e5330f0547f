"""The generator keeps its first weights: prompted rubrics of the policy's own first model.

    python run.py --config=configs/ablations/frozen_generator.py --workdir=/mnt/shared/frozen_generator
    python run.py --config=configs/ablations/frozen_generator.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm_qwen3_8b.py, whose other flags (sources, data) apply here too; never run on
a TPU.
Paper (arXiv 2605.03871): the row of prompted Qwen3-8B rubrics in its main table.
Expected: rubrics don't follow the policy: their accuracy on its newer answers falls behind.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm_qwen3_8b import get_config as main

CHANGES = (
    "name=frozen_generator",
    "generator.mode=two",
    "generator.frozen=true",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
