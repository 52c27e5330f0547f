"""RRD (arXiv 2602.05125) with weights that the writer of the items gives them in one more call.

    python -m coevo_jax.rubrics --input tulu3_answers.jsonl --output rrd_model.jsonl --weights model \
        --source api:gpt-4.1 --base_url https://api.openai.com/v1 --key_env OPENAI_API_KEY
    python run.py --config=configs/baselines/rrd_model.py --workdir=/mnt/shared/rrd_model \
        --config.policy.source=/models/Qwen3-8B --config.judge.source=/models/Qwen3-1.7B --config.data.prompts=rrd_model.jsonl

Data: the prompts of configs/evolm/qwen3_8b.py, each with 'samples' (answers of several models), 'strong' and 'weak' (references);
the first command builds a rubric a prompt, once, keeps it in rrd_cache and adds the column 'rubric' (docs/baselines.md).
Policy and updates: those of configs/evolm/qwen3_8b.py. Hardware: a v5p-16 or v4-32 slice; never run on a TPU.
Expected: no number in the paper, whose row of RRD has whitened-uniform weights (rrd_whitened.py).
"""

from coevo_jax.config import Experiment
from coevo_jax.config.override import apply_overrides
from configs.evolm.qwen3_8b import get_config as main


def get_config() -> Experiment:
    return apply_overrides(
        main(),
        [
            "name=rrd_model",
            "schedule.order=policy_only",
            "schedule.cycles=1",
            "schedule.k=500",
            "data.prompts=rrd_model.jsonl",
            "rubric.source=data",
            "rubric.min_criteria=1",
            "judge.protocol=rar_explicit",
        ],
    )
