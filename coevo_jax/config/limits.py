"""Choices and ranges of single values, by key. Imports no JAX."""

from __future__ import annotations

import math

from coevo_jax.config import arm, dynamic
from coevo_jax.config import check_dpo as dpo

DTYPES = ("float32", "bfloat16")
ENDPOINTS = ("judge", "generator", "heldout_judge")
WRITING = (
    "json_score",
    "json_criteria",
    "rar_implicit",
    "rar_explicit",
    "points",
    "likert",
    "likert_reference",
)  # that write a verdict
GUIDED = ("json_score", "json_criteria")  # of them those with a grammar
ORDERS = ("alternate", "generator_first", "policy_only", "generator_only")
REMATS = ("none", "dots", "full")
CHOICES: dict[str, tuple[str, ...]] = {
    "scale": ("full", "smoke"),
    "policy.dtype": DTYPES,
    "policy.param_dtype": DTYPES,
    "generator.mode": ("single", "two"),
    "judge.protocol": (*WRITING, "criterion_logits", "scalar", "random", "oracle"),
    "judge.pairs": ("scores", "pairwise", "comparison"),
    "judge.order": ("first", "random", "both", "agree"),
    "judge.combine": ("mean", "majority", "mean_minus_variance"),
    "judge.dtype": DTYPES,
    "judge.scalar": ("logit", "sigmoid"),
    "judge.weights": ("full", "int8"),
    "panel.aggregate": ("mean", "majority", "mean_minus_variance", "margin_kappa_format"),
    "panel.tie_breaker": ("mean_score", "first_judge"),
    "data.over_limit": ("filter", "refuse"),
    "rubric.source": ("generator", "none", "predefined", "data"),
    "rubric.schema": ("json_criteria", "rar", "points", "numbered_rules", "weighted_items"),
    "rubric.reward": ("margin", "binary", "separation", "log_sigmoid"),
    "pairs.on_empty": ("nearest", "drop"),
    "schedule.order": ORDERS,
    "schedule.mode": ("evolm", "sft", "verifiable", "rlcer", "reward", "dpo", "iterated_dpo", "rubric_arm", "dynamic"),
    "advantage.kind": ("group_std", "mean", "leave_one_out", "gae"),
    "loss.aggregation": ("token", "sequence", "constant"),
    "loss.ratio": ("token", "sequence"),
    "loss.kl_estimator": ("k1", "k2", "k3"),
    "optimizer.name": ("adamw",),
    "optimizer.schedule": ("constant", "cosine"),
    "warmup.schedule": ("constant", "cosine"),
    "optimizer.mu_dtype": DTYPES,
    "update.attention": ("xla", "splash"),
    "update.reference": ("device", "host"),
    "run.wandb": ("off", "online", "offline"),
    "lora.init": ("kaiming", "normal"),
    "sampler.kv_dtype": (*DTYPES, "int8"),
    "sampler.attention": ("xla", "pallas"),
    "mesh.train": ("tensor", "fsdp", "context"),
    **dpo.CHOICES,
    **arm.CHOICES,
    **{f"{role}.endpoint.length_field": ("max_tokens", "max_completion_tokens") for role in ENDPOINTS},
    **dynamic.CHOICES,
}

for _key in [key for key in CHOICES if key.startswith("judge.")]:
    CHOICES["heldout_" + _key] = CHOICES[_key]

# Smallest and largest value of a key, both allowed.
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(
        (
            *("schedule.k", "schedule.cycles", "schedule.prompts", "data.max_prompt_tokens", "rubric.min_criteria"),
            *("pairs.min_gap", "pairs.per_slot", "warmup.batch", "update.inner_iterations", "update.pack_length"),
            *("update.max_segments", "update.rows_per_micro", "update.logprob_chunk", "sampler.slots", "sampler.max_prompt"),
            *("sampler.max_new", "sampler.steps_per_dispatch", "sampler.prefill_tokens", "mesh.tensor"),
            *("sampler.heads", "sampler.check_every", "sampler.share_least"),
            *("run.save_every", "run.keep", "run.rollouts_every", "run.show"),
        ),
        (1, math.inf),
    ),
    **dict.fromkeys(
        (
            *("data.heldout", "rubric.max_criteria", "rubric.separation_weight", "rubric.weight_tolerance", "pairs.temporal"),
            *(
                "pairs.inferred",
                "pairs.conditioned",
                "pairs.max_gap",
                "pairs.frozen",
                "pairs.dataset",
                "pairs.leak_words",
                "warmup.updates",
                "warmup.lr",
                "warmup.seed",
            ),
            *("advantage.epsilon", "advantage.max_resample", "loss.constant_length", "loss.clip_low", "loss.clip_high"),
            *("loss.kl_weight", "loss.tis_cap", "optimizer.lr", "generator.lr", "optimizer.warmup_steps", "optimizer.eps"),
            *("optimizer.weight_decay", "optimizer.grad_clip", "judge.retries", "compat.policy_rubric_temperature"),
            *(
                "compat.buffer_entries",
                "seed",
                "judge.max_prompt",
                "sampler.read_lag",
                "sampler.forced_tokens",
            ),
        ),
        (0, math.inf),
    ),
    "update.vocab_tile": (-1, math.inf),
    **dict.fromkeys(("lora.rank", "lora.alpha"), (0, math.inf)),
    **dict.fromkeys(
        (
            *("judge.oracle_noise", "judge.oracle_failure_rate"),
            *(
                "rubric.alpha",
                "rubric.pitfall_weight",
                "judge.min_yes_no_mass",
                "judge.alarm_failure_share",
                "sampler.refill_free_share",
            ),
            *("compat.top_p", "advantage.ddof", "optimizer.b1", "optimizer.b2"),
        ),
        (0, 1),
    ),
    "schedule.group": (2, math.inf),
    **dict.fromkeys(
        ("reward.pairs", "reward.eval_every", "control.heldout_every", "control.heldout_answers", "control.ngram"), (1, math.inf)
    ),
    **dict.fromkeys(
        (
            *(
                "reward.max_tokens",
                "reward.heldout",
                "reward.center",
                "reward.head_std",
                "critic.lr",
                "critic.warmup_updates",
                "critic.clip",
            ),
            *(
                "rlcer.outcome_weight",
                "rlcer.cot_weight",
                "critic.head_std",
                "control.overlong_buffer",
                "control.overlong_penalty",
                "control.judge_gap",
                "control.kl",
            ),
            *("control.entropy_low", "control.entropy_high"),
        ),
        (0, math.inf),
    ),
    **dict.fromkeys(
        (
            *(
                "rlcer.correlation",
                "rlcer.correct",
                "critic.gamma",
                "critic.lam",
                "control.rubric_dropout",
                "control.length_correlation",
                "control.verdict_like",
            ),
            *("control.repeated_ngrams", "control.part_share", "control.judge_agreement"),
            *("control.score_gap", "control.surface_items"),
        ),
        (0, 1),
    ),
    "judge.samples": (1, 64),
    **dpo.RANGES,
    **dict.fromkeys(("warmup.epochs", "warmup.warmup_steps", "warmup.heldout"), (0, math.inf)),
    "warmup.eval_every": (1, math.inf),
    **dynamic.RANGES,
    **arm.RANGES,
    **{f"{role}.endpoint.concurrency": (1, 1024) for role in ENDPOINTS},
    **{f"{role}.endpoint.retries": (0, 100) for role in ENDPOINTS},
    **{f"{role}.endpoint.top_logprobs": (2, 20) for role in ENDPOINTS},
    **{f"{role}.endpoint.{n}": (0, 86400) for role in ENDPOINTS for n in ("backoff_s", "max_wait_s")},
    **{f"{role}.endpoint.timeout_s": (0.001, 86400) for role in ENDPOINTS},
    **{f"{role}.endpoint.{n}": (0, math.inf) for role in ENDPOINTS for n in ("price_in", "price_out")},
}
for _key in [key for key in RANGES if key.startswith("judge.")]:
    RANGES["heldout_" + _key] = RANGES[_key]
