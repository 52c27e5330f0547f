"""Query-specific preference: an item weighs what it tells between a question's preferred and rejected answers.

    python -m coevo_jax.rubrics --input tulu3_answers.jsonl --output query_specific_preference.jsonl --weights preference \
        --source api:gpt-4.1 --base_url https://api.openai.com/v1 --key_env OPENAI_API_KEY
    python run.py --config=configs/baselines/query_specific_preference.py --workdir=/mnt/shared/query_specific_preference \
        --config.policy.source=/models/Qwen3-8B --config.judge.source=/models/Qwen3-1.7B

Data: the prompts of configs/evolm/qwen3_8b.py, each with 'samples' (answers of several models), 'strong' (preferred) and 'weak'
(rejected); the first command builds a rubric a prompt, keeps it in rrd_cache and adds the column 'rubric' (docs/baselines.md).
Policy and updates: those of configs/evolm/qwen3_8b.py. Hardware: a v5p-16 or v4-32 slice; never run on a TPU.
Expected: no number in the paper; a mode of the released code. Pairs of models far apart leave few items without weight.
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main


def get_config() -> Experiment:
    return apply_overrides(
        main(),
        [
            "name=query_specific_preference",
            "schedule.order=policy_only",
            "schedule.cycles=1",
            "schedule.k=500",
            "data.prompts=query_specific_preference.jsonl",
            "rubric.source=data",
            "rubric.min_criteria=1",
            "judge.protocol=rar_explicit",
        ],
    )
