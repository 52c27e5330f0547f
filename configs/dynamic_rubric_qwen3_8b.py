"""DynamicRubric (arXiv 2607.20083): Qwen3-8B writes weighted yes/no items with the policy's answers in sight, Qwen3-8B answers,
a frozen Qwen3-8B verifies; two rounds.

    python run.py --config=configs/dynamic_rubric_qwen3_8b.py --workdir=/mnt/shared/dynamic \
        --config.policy.source=/models/Qwen3-8B --config.judge.source=/models/Qwen3-8B \
        --config.data.rankings=nectar.parquet --config.data.prompts=policy_prompts.jsonl

Data: rankings with columns prompt, answers and ranks (the paper: Nectar, seven answers, at least 7 needed, prompt and top answer
over 50 characters, refusals, greetings and degenerate ones removed), 24K of them; 36K prompts of open instruction mixes.
Hardware: a pod slice, by its plan (docs/dynamic_rubric.md); never run on a TPU.
Expected by the paper: JudgeBench 57.4, RM-Bench 69.8 (generator); AlpacaEval 2 67.1, WildBench 64.3 (policy).
Values that the paper gives: K 8, batch 256, KL 0.01, learning rates 5e-6 and 1e-6, 8K prompts and answers, 24K generator prompts
and 8K rubrics, two rounds. Ours (docs/dynamic_rubric.md says why): G 8, temperature 1, clip 0.2, the verifier, 2 to 12 items.
A round walks 24K rankings (94 updates) and 36K prompts (141 updates) once.
"""

from coevo_jax.config import (
    AdvantageConfig,
    DataConfig,
    DynamicConfig,
    Experiment,
    GeneratorConfig,
    JudgeConfig,
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
)


def get_config() -> Experiment:
    return Experiment(
        name="dynamic_rubric_qwen3_8b",
        policy=ModelConfig(source="/models/Qwen3-8B", dtype="bfloat16", param_dtype="float32"),
        generator=GeneratorConfig(mode="two", lr=5e-6),
        judge=JudgeConfig(
            source="/models/Qwen3-8B", protocol="criterion_logits", dtype="bfloat16", max_prompt=17408,
            length_classes=((4, 25600),),
        ),
        answer=Sampling(temperature=1.0, max_new_tokens=8192),
        rubric_sampling=Sampling(temperature=1.0, max_new_tokens=8192),
        data=DataConfig(prompts="policy_prompts.jsonl", rankings="nectar.parquet", max_prompt_tokens=8192),
        rubric=RubricConfig(schema="weighted_items"),
        dynamic=DynamicConfig(generator_updates=94, policy_updates=141, test_share=0.05, min_anchors=7, min_characters=50),
        schedule=ScheduleConfig(mode="dynamic", cycles=2, k=94, prompts=256, group=8),
        advantage=AdvantageConfig(kind="group_std", ddof=0, epsilon=1e-6, max_resample=2),
        loss=LossConfig(kl_weight=0.01, kl_estimator="k3", clip_low=0.2, clip_high=0.2, aggregation="token"),
        optimizer=OptimizerConfig(lr=1e-6),
        # A row holds a generator's prompt of 24,576 tokens and its rubric.
        update=UpdateConfig(
            pack_length=32768, max_segments=64, rows_per_micro=1, remat="attention+qkv+residual", logprob_chunk=1024,
            attention="splash",
        ),
        sampler=SamplerConfig(
            slots=56, length_classes=((40, 4096), (12, 16640), (4, 32768)), max_prompt=24576, max_new=8192, share_heads=True,
            heads=8, steps_per_dispatch=64, read_lag=1, prefill_tokens=24576, kv_dtype="bfloat16", attention="pallas",
        ),
        mesh=MeshConfig(data=1, fsdp=-1, tensor=4, train="context"),
        run=RunConfig(save_every=25, keep=2),
    )  # fmt: skip
