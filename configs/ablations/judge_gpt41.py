"""Judge behind an endpoint: gpt-4.1.

    python run.py --config=configs/ablations/judge_gpt41.py --workdir=/mnt/shared/judge_gpt41
    python run.py --config=configs/ablations/judge_gpt41.py --config.scale=smoke  # on a CPU

Hardware: a slice that holds configs/evolm/qwen3_8b.py, whose other flags (sources, data) apply here too; never run on a
TPU.
Paper (arXiv 2605.03871): no such row: it changes the judge's family when it evaluates (Table 5), not in training. The
released code has a config for it.
Expected: nothing is known; docs/remote.md tells what it costs and how it is cached.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main

CHANGES = (
    "name=judge_gpt41",
    "judge.source=api:gpt-4.1",
    "judge.thinking=false",
    "judge.sampling.max_new_tokens=4096",
    "judge.max_prompt=0",
    "judge.length_classes=",
    "judge.endpoint.base_url=https://api.openai.com/v1",
    "judge.endpoint.key_env=OPENAI_API_KEY",
    "judge.endpoint.concurrency=128",
)


def get_config() -> Experiment:
    return apply_overrides(main(), CHANGES)
