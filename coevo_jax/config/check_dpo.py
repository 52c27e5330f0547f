"""Checks of schedule.mode=dpo and iterated_dpo. Imports no JAX."""

from __future__ import annotations

import math

from coevo_jax.config import Experiment, api_model
from coevo_jax.config.dpo import DpoConfig
from coevo_jax.config.several import require

OFFLINE, ITERATED = "dpo", "iterated_dpo"
ALONE = (OFFLINE, ITERATED)  # modes that train by DPO and nothing else
USERS = ALONE  # modes that always read `dpo`
LOSSES = ("sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "sppo", "apo_zero")
SMOOTHED = ("sigmoid", "sigmoid_norm", "robust")
CHOICES = {"dpo.loss": LOSSES}
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("dpo.pairs", "dpo.eval_every"), (1, math.inf)),
    **dict.fromkeys(("dpo.sft_weight", "dpo.max_tokens", "dpo.heldout", "dpo.updates", "dpo.compare"), (0, math.inf)),
    "dpo.answers": (2, 64),
}
ONLY_OFFLINE = ("data", "max_tokens", "heldout", "eval_every")
ONLY_ITERATED = ("answers", "updates", "keep_truncated", "compare")


def check_dpo(cfg: Experiment) -> None:
    """Settings of DPO that are out of range together, or that the mode would ignore."""
    dpo, mode, plain = cfg.dpo, cfg.schedule.mode, DpoConfig()
    if trains_own_pairs(cfg):
        _check_arm(cfg)
        return
    if mode not in USERS:
        require(dpo == plain, f"the settings of `dpo` would be ignored: schedule.mode={mode}", "dpo, schedule.mode",
                f"schedule.mode={' or '.join(USERS)}")  # fmt: skip
        return
    for name in ONLY_ITERATED if mode == OFFLINE else ONLY_OFFLINE if mode == ITERATED else ():
        same = getattr(dpo, name) == getattr(plain, name)
        require(same, f"dpo.{name}={getattr(dpo, name)} would be ignored: schedule.mode={mode}", f"dpo.{name}, schedule.mode",
                f"dpo.{name}={getattr(plain, name)}, or schedule.mode={ITERATED if mode == OFFLINE else OFFLINE}")  # fmt: skip
    check_preference_loss(cfg)
    require(cfg.update.inner_iterations == 1, f"update.inner_iterations={cfg.update.inner_iterations} would be ignored: "
            f"schedule.mode={mode} trains once on a batch", "update.inner_iterations", "update.inner_iterations=1")  # fmt: skip
    if mode == OFFLINE:
        _check_offline(cfg)
    if mode == ITERATED:
        _check_iterated(cfg)


def trains_own_pairs(cfg: Experiment) -> bool:
    """Is it Rubric-ARM whose policy trains on labelled pairs of its own answers?"""
    return cfg.arm.policy in (OFFLINE, ITERATED)


def _check_arm(cfg: Experiment) -> None:
    for name in ONLY_OFFLINE:
        same = getattr(cfg.dpo, name) == getattr(DpoConfig(), name)
        require(same, f"dpo.{name} would be ignored: the pairs are the policy's own", f"dpo.{name}", "its default")
    require(
        cfg.dpo.answers % 2 == 0, f"dpo.answers={cfg.dpo.answers} leaves one without a partner", "dpo.answers", "an even number"
    )
    require(cfg.dpo.compare <= cfg.schedule.k, f"dpo.compare={cfg.dpo.compare} is above schedule.k={cfg.schedule.k}",
            "dpo.compare, schedule.k", f"at most {cfg.schedule.k}")  # fmt: skip
    check_preference_loss(cfg)


def check_preference_loss(cfg: Experiment) -> None:
    """The loss and the rows of a mode that trains on pairs."""
    dpo, longest = cfg.dpo, cfg.dpo.max_tokens
    require(dpo.beta > 0, f"dpo.beta={dpo.beta}: nothing would hold the policy to the reference", "dpo.beta", "above 0")
    smoothing = dpo.label_smoothing
    require(0 <= smoothing < 0.5, f"dpo.label_smoothing={smoothing} is out of range", "dpo.label_smoothing",
            "at least 0, below 0.5")  # fmt: skip
    require(smoothing == 0 or dpo.loss in SMOOTHED, f"dpo.label_smoothing={smoothing} would be ignored: dpo.loss={dpo.loss}",
            "dpo.label_smoothing, dpo.loss", f"0, or dpo.loss={' or '.join(SMOOTHED)}")  # fmt: skip
    require(dpo.loss != "robust" or smoothing > 0, "dpo.loss=robust without wrong labels is dpo.loss=sigmoid",
            "dpo.loss, dpo.label_smoothing", "dpo.label_smoothing above 0, or dpo.loss=sigmoid")  # fmt: skip
    require(cfg.update.rows_per_micro >= 2, f"update.rows_per_micro={cfg.update.rows_per_micro} may hold no pair of answers",
            "update.rows_per_micro", "at least 2")  # fmt: skip
    require(longest <= cfg.update.pack_length, f"dpo.max_tokens={longest} is above update.pack_length={cfg.update.pack_length}",
            "dpo.max_tokens, update.pack_length", f"update.pack_length of at least {longest}")  # fmt: skip
    require(not cfg.compat.pack_mean, "compat.pack_mean would be ignored: a preference loss has no mean over rows",
            "compat.pack_mean, schedule.mode", "compat.pack_mean=false")  # fmt: skip


def _check_offline(cfg: Experiment) -> None:
    require(cfg.dpo.data != "", "dpo.data is empty", "dpo.data", "a source of pairs, or 'tiny'")
    require(cfg.generator.mode == "single" and not cfg.warmup.on, "schedule.mode=dpo trains one policy on given pairs",
            "generator.mode, warmup.updates",
            "generator.mode=single and warmup.updates=0 (after schedule.mode=sft: policy.source=run:FOLDER)")  # fmt: skip


def _check_iterated(cfg: Experiment) -> None:
    dpo, source = cfg.dpo, cfg.rubric.source
    require(dpo.answers % 2 == 0, f"dpo.answers={dpo.answers} leaves one without a partner", "dpo.answers", "an even number")
    require(dpo.compare <= cfg.schedule.k, f"dpo.compare={dpo.compare} is above schedule.k={cfg.schedule.k}",
            "dpo.compare, schedule.k", f"at most {cfg.schedule.k}")  # fmt: skip
    require(cfg.optimizer.schedule == "constant", f"optimizer.schedule={cfg.optimizer.schedule}: each iteration begins a fresh "
            "optimizer, whose schedule would end early", "optimizer.schedule", "optimizer.schedule=constant")  # fmt: skip
    own = cfg.generator.mode == "two" or api_model(cfg.generator.source) != ""
    require(cfg.generator.lr == 0, f"generator.lr={cfg.generator.lr} would be ignored: nothing trains the generator",
            "generator.lr", "generator.lr=0")  # fmt: skip
    require(source != "generator" or own, "generator.mode=single: the policy in training would write the rubrics of its labels",
            "generator.mode, rubric.source",
            "generator.mode=two with generator.source, or rubric.source=none, predefined or data")  # fmt: skip
