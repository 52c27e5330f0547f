"""scale=smoke: any experiment, small enough for a laptop's CPU in seconds. Imports no JAX.

Only sizes, counts, where models and prompts come from, and what a CPU lacks (mesh, TPU kernels) change: rubric prompt and schema,
judge protocol and order, reward, advantage, loss, trainer and order of phases stay what the experiment names
(tests/test_config_scale.py holds every config to that).
"""

from __future__ import annotations

from typing import Any

from coevo_jax.config import Experiment, api_model
from coevo_jax.config.check_dpo import USERS as DPO_MODES
from coevo_jax.config.check_dpo import trains_own_pairs
from coevo_jax.config.model import STAND_IN
from coevo_jax.config.override import get_at, key_types, replace_at
from coevo_jax.config.several import rule_of

SMOKE: dict[str, Any] = {
    "policy.source": "tiny",
    "policy.sha256": "",
    "judge.sha256": "",
    "data.prompts": "tiny",
    "data.rankings": "tiny",
    "data.prompt_column": "prompt",
    "data.max_prompt_tokens": 64,
    "data.heldout": 0,
    "schedule.cycles": 1,
    "schedule.k": 2,
    "schedule.prompts": 2,
    "schedule.group": 2,
    "advantage.max_resample": 1,
    "warmup.data": "tiny",
    "warmup.batch": 4,
    "reward.data": "tiny",
    "reward.pairs": 4,
    "reward.max_tokens": 0,
    "reward.eval_every": 1,
    "pairs.min_gap": 1,
    "pairs.max_gap": 8,
    "pairs.per_slot": 8,
    "answer.max_new_tokens": 12,
    "rubric_sampling.max_new_tokens": 48,
    "question_sampling.max_new_tokens": 24,
    "judge.sampling.max_new_tokens": 32,
    "heldout_judge.sha256": "",
    "heldout_judge.sampling.max_new_tokens": 32,
    "heldout_judge.max_prompt": 0,
    "heldout_judge.length_classes": (),
    "judge.max_prompt": 0,
    "judge.length_classes": (),
    "update.pack_length": 512,
    "update.max_segments": 4,
    "update.rows_per_micro": 2,
    "update.logprob_chunk": 64,
    "update.attention": "xla",
    "sampler.slots": 8,
    "sampler.max_prompt": 448,
    "sampler.max_new": 48,
    "sampler.steps_per_dispatch": 8,
    "sampler.prefill_tokens": 512,
    "sampler.length_classes": (),
    "sampler.narrow": (),
    "sampler.heads": 4,
    "sampler.attention": "xla",
    "mesh.data": -1,
    "mesh.fsdp": 1,
    "mesh.tensor": 1,
    "run.save_every": 2,
    "arm.part": 4,
    "arm.test": 2,
    "arm.cached": 4,
    "arm.judge_prompts": 2,
    "arm.judge_group": 2,
    "arm.judge_sampling.max_new_tokens": 48,
    "arm.generator_prompts": 2,
    "arm.generator_group": 2,
    "arm.demonstrations": "tiny",
    "data.pairs": "tiny",
    "evaluate.every": 0,
    "evaluate.best": "",
}
OF_MODE = {
    "arm.": "rubric_arm",
    "data.pairs": "rubric_arm",
    "dynamic.": "dynamic",
    "data.rankings": "dynamic",
}  # keys that only one mode reads
SOURCES = (
    "generator.source",
    "judge.source",
    "heldout_judge.source",
    "critic.source",
    "arm.judge_source",
)  # kept where no weights are read: '', oracle, an endpoint's model
ENDPOINTS = {"endpoint.base_url": STAND_IN, "endpoint.key_env": ""}  # of each role behind an API: where its model comes from
TURNS = "panel.from_cycle"  # whose cycles come one after another, so that every judge serves
MOST = {  # kept where they are less
    "warmup.updates": 2, "run.keep": 2, "control.overlong_buffer": 6, "control.heldout_answers": 2,
    "critic.warmup_updates": 1, "reward.heldout": 4, "warmup.heldout": 4,
    "dpo.heldout": 4, "dpo.updates": 2, "dpo.compare": 1, "dpo.answers": 2, "dpo.pairs": 4, "dpo.max_tokens": 0,
    "dynamic.candidates": 2, "dynamic.group": 2, "dynamic.generator_updates": 2, "dynamic.policy_updates": 2,
    "dynamic.static_from": 2, "dynamic.min_anchors": 2, "dynamic.min_characters": 0,
    "arm.rounds": 2, "arm.votes": 2, "arm.warmup_updates": 1,
    "arm.judge_updates": 1, "arm.generator_updates": 1,
}  # fmt: skip


def shrink(cfg: Experiment) -> Experiment:
    """The experiment at the size of a smoke test."""
    prompts, alike = cfg.data.prompts, {key: rule_of(key) for key in key_types(cfg)}
    for key, rule in alike.items():  # an item of a list as the record that it is like
        if rule in SMOKE and _read(cfg, rule):
            cfg = replace_at(cfg, key, SMOKE[rule])
    if prompts.startswith("reasoning_gym:"):  # which bring their verifier
        cfg = replace_at(cfg, "data.prompts", prompts)
    if cfg.schedule.mode == "dpo":
        cfg = replace_at(replace_at(cfg, "dpo.data", "tiny"), "dpo.eval_every", 1)
    if cfg.rubric.source == "data":  # which bring their rubrics
        cfg = replace_at(cfg, "data.prompts", "tiny_rubrics")
    if cfg.pairs.data:
        cfg = replace_at(cfg, "pairs.data", "tiny")
    if cfg.schedule.mode == "rubric_arm":  # whose roles another small model knows
        cfg = replace_at(cfg, "policy.source", "tiny_arm")
    if cfg.schedule.mode == "dynamic":
        cfg = replace_at(replace_at(cfg, "policy.source", "tiny_dynamic"), "warmup.data", "tiny_dynamic")
    for key, rule in alike.items():
        if rule in SOURCES and (source := get_at(cfg, key)) not in ("", "oracle") and not api_model(source):
            cfg = replace_at(cfg, key, cfg.policy.source)
    for role in (key.removesuffix(".source") for key, rule in alike.items() if rule in SOURCES and api_model(get_at(cfg, key))):
        for key, value in ENDPOINTS.items():
            cfg = replace_at(cfg, f"{role}.{key}", value)
    starts = sorted({0, *cfg.panel.from_cycle})
    cfg = replace_at(cfg, TURNS, tuple(starts.index(start) for start in cfg.panel.from_cycle))
    if cfg.schedule.mode == "dynamic":
        cfg = replace_at(cfg, "dynamic.new_rankings", ("tiny",) * min(1, len(cfg.dynamic.new_rankings)))
        starts = [*starts, len(starts)]  # a round with the generator frozen
    cycles = 1 if cfg.schedule.order == "generator_first" else max(len(starts), len(cfg.policies) + 1)
    cfg = replace_at(cfg, "schedule.cycles", cycles)
    if cfg.warmup.epochs:
        cfg = replace_at(replace_at(cfg, "warmup.epochs", 0.0), "warmup.updates", MOST["warmup.updates"])
    for key, most in MOST.items():
        if key.startswith("dpo.") and cfg.schedule.mode not in DPO_MODES and not trains_own_pairs(cfg):  # whose stay the defaults
            continue
        if _read(cfg, key):
            cfg = replace_at(cfg, key, min(most, get_at(cfg, key)))
    return replace_at(cfg, "scale", "smoke")


def _read(cfg: Experiment, key: str) -> bool:
    """Does the config's mode read the key at all?"""
    return all(cfg.schedule.mode == mode or not key.startswith(head) for head, mode in OF_MODE.items())
