"""Checks of DynamicRubric's axes (schedule.mode=dynamic). Imports no JAX."""

from __future__ import annotations

from coevo_jax.config import DynamicConfig, Experiment, api_model
from coevo_jax.config.several import require

VERIFIERS = ("criterion_logits", "json_criteria", "rar_explicit", "oracle")  # protocols with a score of one item


def check_dynamic(cfg: Experiment) -> None:
    """A generator with weights of its own, a verifier that answers one item, and no settings that would be ignored."""
    dynamic = cfg.dynamic
    if cfg.schedule.mode != "dynamic":
        require(dynamic == DynamicConfig(), f"settings of dynamic would be ignored: schedule.mode={cfg.schedule.mode}",
                "dynamic, schedule.mode", "schedule.mode=dynamic")  # fmt: skip
        return
    _check_roles(cfg)
    order, rounds, static = cfg.schedule.order, cfg.schedule.cycles, dynamic.static_from
    require(order in ("alternate", "generator_only"), f"schedule.order={order} is none of DynamicRubric's", "schedule.order",
            "alternate or generator_only; dynamic.static_from=1 trains the policy alone")  # fmt: skip
    require(static <= rounds, f"dynamic.static_from={static} is after the last of schedule.cycles={rounds} rounds",
            "dynamic.static_from, schedule.cycles", f"at most {rounds}, or 0")  # fmt: skip
    require(static != 1 or order == "alternate", "dynamic.static_from=1 with schedule.order=generator_only trains nothing",
            "dynamic.static_from, schedule.order", "schedule.order=alternate")  # fmt: skip
    require(not cfg.generator.frozen, "generator.frozen=true would be ignored", "generator.frozen, dynamic.static_from",
            "generator.frozen=false; dynamic.static_from=1 never trains the generator")  # fmt: skip
    require(len(dynamic.new_rankings) < rounds,
            f"dynamic.new_rankings has {len(dynamic.new_rankings)} sources for the {rounds - 1} rounds after the first",
            "dynamic.new_rankings, schedule.cycles", f"at most {rounds - 1}")  # fmt: skip
    for key, value in (("candidates", dynamic.candidates), ("group", dynamic.group)):
        require(value != 1, f"dynamic.{key}=1 leaves nothing to compare", f"dynamic.{key}", "at least 2, or 0")
    require(cfg.schedule.group <= 64, f"schedule.group={cfg.schedule.group}: the generator reads the whole group",
            "schedule.group", "at most 64")  # fmt: skip
    require(cfg.advantage.kind != "gae", "two rewards are normalised inside groups, which advantage.kind=gae doesn't do",
            "advantage.kind", "group_std, mean or leave_one_out")  # fmt: skip
    require(dynamic.anchor_loss == "listnet" or dynamic.tau == 1.0, f"dynamic.tau={dynamic.tau} would be ignored",
            "dynamic.tau, dynamic.anchor_loss", "dynamic.anchor_loss=listnet")  # fmt: skip
    one = dynamic.objectives != "both"
    require(not one or dynamic.anchor_weight == 1.0, "dynamic.anchor_weight weighs nothing against one objective alone",
            "dynamic.anchor_weight, dynamic.objectives", "dynamic.objectives=both")  # fmt: skip


def _check_roles(cfg: Experiment) -> None:
    require(cfg.generator.mode == "two" and not api_model(cfg.generator.source),
            "the generator is frozen while the policy trains, so it has weights of its own", "generator.mode, generator.source",
            "generator.mode=two and a source with weights (or none: a copy of the policy's)")  # fmt: skip
    require(cfg.judge.protocol in VERIFIERS, f"judge.protocol={cfg.judge.protocol} answers no single item", "judge.protocol",
            " | ".join(VERIFIERS))  # fmt: skip
    require(cfg.judge.samples == 1 and cfg.judge.pairs == "scores",
            "the verifier answers each item once, for one answer alone", "judge.samples, judge.pairs",
            "judge.samples=1, judge.pairs=scores")  # fmt: skip
    require(cfg.rubric.schema == "weighted_items" and cfg.rubric.source == "generator",
            f"rubric.schema={cfg.rubric.schema}, rubric.source={cfg.rubric.source}", "rubric.schema, rubric.source",
            "weighted_items and generator")  # fmt: skip
