"""RaR (arXiv 2507.17746) as the paper has it: GPT-4.1 writes the rubric, the judge rates from 1 to 10 with all of it in view. The
key is read from OPENAI_API_KEY (docs/remote.md).

    python run.py --config=configs/baselines/rar_gpt41.py --workdir=/mnt/shared/rar_gpt41 \
        --config.policy.source=/models/Qwen3-8B --config.judge.source=/models/Qwen3-1.7B --config.data.prompts=tulu3_prompts.jsonl

Data, policy and updates: those of configs/evolm/qwen3_8b.py. Hardware: a v5p-16 or v4-32 slice; never run on a TPU.
Expected by the paper: 12-task average 67.5. Its sampling of GPT-4.1 is not published; here it is that of gpt41_prompted.py.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.baselines.gpt41_prompted import get_config as prompted


def get_config() -> Experiment:
    return apply_overrides(
        prompted(),
        ["name=rar_gpt41", "rubric.schema=rar", "rubric.prompt=rubric_rar", "judge.protocol=rar_implicit"],
    )
