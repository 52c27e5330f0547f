"""Rubric-ARM (arXiv 2602.01511) at the paper's size: Qwen3-8B as generator and as judge, three rounds, then a policy by GRPO.

    python run.py --config=configs/rubric_arm_qwen3_8b.py --workdir=/mnt/shared/rubric_arm \
        --config.generator.source=/models/Qwen3-8B --config.arm.judge_source=/models/Qwen3-8B \
        --config.policy.source=/models/Qwen3-8B --config.data.pairs=openrubrics_pairs.jsonl \
        --config.arm.demonstrations=openrubrics_lists.jsonl --config.data.prompts=prompts.jsonl

Data: labelled pairs {prompt, chosen, rejected} of OpenRubrics' general part and demonstrations in the form of
coevo_jax/data/arm.py. The paper's policy is Qwen2.5-7B-Instruct: --config.policy.source names it (a plan knows Qwen3 alone).
Hardware: a pod slice; its plan has not been compiled yet (tpu/plan.py), so none is named; never run on a TPU.
Expected by the paper: average of its reward benchmarks 74.8, with voting@5 76.2 (arm.votes); docs/rubric_arm.md has where this
differs from the paper and why.

Values of the paper: groups of 6 lists and 7 judgements, batches of 288 and 224, completions of 512 and 1,024 tokens, learning
rates 1e-6 and 1e-6 (policy 5e-7), temperature 1, two passes over a batch, clip 0.2 and 0.28, KL 0.001, three rounds over equal
disjoint parts, one epoch each. Ours where it says nothing: size of a part, the loss's mean over a sequence's tokens first.
"""

from coevo_jax.config import (
    AdvantageConfig,
    ArmConfig,
    DataConfig,
    Experiment,
    GeneratorConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RubricConfig,
    RunConfig,
    SamplerConfig,
    Sampling,
    ScheduleConfig,
    UpdateConfig,
    WarmupConfig,
)

PART = 11_904  # a third of the 35.7 thousand pairs of the first release, in whole updates of 32 and of 48 pairs


def get_config() -> Experiment:
    return Experiment(
        name="rubric_arm_qwen3_8b",
        policy=ModelConfig(source="/models/Qwen3-8B", dtype="bfloat16", param_dtype="float32"),
        generator=GeneratorConfig(mode="two", source="/models/Qwen3-8B", lr=1e-6),
        answer=Sampling(temperature=1.0, max_new_tokens=2048),
        rubric_sampling=Sampling(temperature=1.0, max_new_tokens=512),
        data=DataConfig(prompts="prompts.jsonl", pairs="openrubrics_pairs.jsonl", max_prompt_tokens=1024),
        rubric=RubricConfig(prompt="rubric_rules", schema="numbered_rules"),
        arm=ArmConfig(
            rounds=3, order="judge_first", part=PART, test=512, cached=1024, votes=1, judge_source="/models/Qwen3-8B",
            judge_lr=1e-6, judge_prompts=32, judge_group=7, judge_updates=PART // 32,
            judge_sampling=Sampling(temperature=1.0, max_new_tokens=1024), format_weight=1.0, generator_prompts=48,
            generator_group=6, generator_updates=PART // 48, warmup_updates=558, demonstrations="openrubrics_lists.jsonl",
            policy="grpo",
        ),
        schedule=ScheduleConfig(mode="rubric_arm", cycles=1, k=500, prompts=48, group=6),
        warmup=WarmupConfig(batch=64, lr=5e-6),
        advantage=AdvantageConfig(kind="group_std", ddof=1, epsilon=1e-4, max_resample=4),
        loss=LossConfig(aggregation="sequence", kl_weight=0.001, kl_estimator="k3", clip_low=0.2, clip_high=0.28, tis_cap=0.0),
        optimizer=OptimizerConfig(lr=5e-7),
        update=UpdateConfig(
            inner_iterations=2, pack_length=8192, max_segments=32, rows_per_micro=1, remat="full", logprob_chunk=1024,
            attention="splash", reference="host",
        ),
        # A judge's prompt holds a question, two answers of up to 2,048 tokens and a list.
        sampler=SamplerConfig(
            slots=192, length_classes=((96, 3072), (96, 8192)), max_prompt=6144, max_new=2048, share_heads=False,
            steps_per_dispatch=64, read_lag=1, prefill_tokens=8192, kv_dtype="bfloat16", attention="pallas",
        ),
        mesh=MeshConfig(data=1, fsdp=-1, tensor=4, train="context"),
        run=RunConfig(save_every=25, keep=2),
    )  # fmt: skip
