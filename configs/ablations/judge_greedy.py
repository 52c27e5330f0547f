"""The judge as the paper's Table 10 has it: greedy. The main config draws at 0.6 as the released code does (docs/paper.md).

    python run.py --config=configs/ablations/judge_greedy.py --workdir=/mnt/shared/judge_greedy
    python run.py --config=configs/ablations/judge_greedy.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on a
TPU.
Paper (arXiv 2605.03871): Table 10 says temperature 0 of the judge; the code that made its numbers says 0.6.
Expected: equal answers get equal scores, so fewer groups have a variance; a verdict that fails stays failed (no retry).
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=judge_greedy",
    "judge.sampling.temperature=0",
    "judge.retries=0",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
