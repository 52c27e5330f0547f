"""RRD (arXiv 2602.05125) with whitened-uniform weights: items that say the same share theirs. Each is checked by yes or no.

    python -m coevo_jax.rubrics --input tulu3_answers.jsonl --output rrd_whitened.jsonl --weights whitened \
        --source api:gpt-4.1 --base_url https://api.openai.com/v1 --key_env OPENAI_API_KEY
    python run.py --config=configs/baselines/rrd_whitened.py --workdir=/mnt/shared/rrd_whitened \
        --config.policy.source=/models/Qwen3-8B --config.judge.source=/models/Qwen3-1.7B --config.data.prompts=rrd_whitened.jsonl

Data: the prompts of configs/evolm/qwen3_8b.py, each with 'samples' (answers of several models), 'strong' and 'weak' (references);
the first command builds a rubric a prompt, once, keeps it in rrd_cache and adds the column 'rubric' (docs/baselines.md).
Policy and updates: those of configs/evolm/qwen3_8b.py. Hardware: a v5p-16 or v4-32 slice; never run on a TPU.
Expected by the paper: 12-task average 67.6, its row of RRD (App. A.6); the writer is GPT-4.1.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main


def get_config() -> Experiment:
    return apply_overrides(
        main(),
        [
            "name=rrd_whitened",
            "schedule.order=policy_only",
            "schedule.cycles=1",
            "schedule.k=500",
            "data.prompts=rrd_whitened.jsonl",
            "rubric.source=data",
            "rubric.min_criteria=1",
            "judge.protocol=rar_explicit",
        ],
    )
