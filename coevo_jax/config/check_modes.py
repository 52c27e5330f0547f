"""Checks of what only some modes and options know: reward models, controls against reward hacking. Imports no JAX."""

from __future__ import annotations

from coevo_jax.config import Experiment
from coevo_jax.errors import UserError

RUBRIC_FREE = ("likert", "likert_reference", "scalar", "random")  # judge protocols that read no rubric


def require(ok: bool, what: str, where: str, expected: str, close: str = "") -> None:
    if not ok:
        raise UserError(what, where=where, expected=expected, nearest=close)


def check_reward(cfg: Experiment) -> None:
    """Training of a reward model: conversations alone, one model."""
    if cfg.schedule.mode != "reward":
        return
    require(cfg.reward.data != "", "reward.data is empty", "reward.data", "a source of pairs, or 'tiny'")
    require(cfg.generator.mode == "single" and cfg.warmup.updates == 0,
             "schedule.mode=reward trains one reward model and nothing else", "generator.mode, warmup.updates",
             "generator.mode=single and warmup.updates=0")  # fmt: skip
    require(cfg.update.rows_per_micro >= 2, f"update.rows_per_micro={cfg.update.rows_per_micro} holds no pair of conversations",
             "update.rows_per_micro", "at least 2")  # fmt: skip
    longest = cfg.reward.max_tokens
    what = f"reward.max_tokens={longest} is above update.pack_length={cfg.update.pack_length}"
    require(longest <= cfg.update.pack_length, what, "reward.max_tokens, update.pack_length",
             f"update.pack_length of at least {longest}")  # fmt: skip


def check_control(cfg: Experiment) -> None:
    """Controls against reward hacking that would do nothing, or more than is there."""
    control, group = cfg.control, cfg.schedule.group
    buffer, longest = control.overlong_buffer, cfg.answer.max_new_tokens
    require(buffer <= longest, f"control.overlong_buffer={buffer} is above answer.max_new_tokens={longest}",
             "control.overlong_buffer, answer.max_new_tokens", f"at most {longest}")  # fmt: skip
    read = cfg.schedule.mode == "evolm" and cfg.rubric.source != "none"
    require(control.rubric_dropout == 0 or read, "control.rubric_dropout has no rubric to take criteria from",
             "control.rubric_dropout, rubric.source", "control.rubric_dropout=0, or a judge that reads a rubric")  # fmt: skip
    require(control.rubric_dropout < 1, "control.rubric_dropout=1 leaves no criterion", "control.rubric_dropout", "below 1")
    judge = cfg.heldout_judge
    if not judge.source:
        needs = [key for key in ("judge_gap", "judge_agreement") if getattr(control, key) > 0]
        require(not needs, f"control.{''.join(needs[:1])} has no judge that is held out", "heldout_judge.source",
                 "a source like those of judge.source")  # fmt: skip
        return
    require(cfg.schedule.mode == "evolm", f"heldout_judge has no rubrics to read in schedule.mode={cfg.schedule.mode}",
             "heldout_judge.source, schedule.mode", "schedule.mode=evolm, or heldout_judge.source=")  # fmt: skip
    many, key = control.heldout_answers, "control.heldout_answers"
    require(many <= group, f"{key}={many} is above schedule.group={group}", key, f"at most {group}")
    require(control.judge_agreement == 0 or control.heldout_answers > 1,
             "control.judge_agreement compares pairs of a group's answers", "control.heldout_answers", "at least 2")  # fmt: skip
    require(judge.protocol in RUBRIC_FREE or cfg.rubric.source != "none",
             f"heldout_judge.protocol={judge.protocol} reads a rubric, and rubric.source=none",
             "heldout_judge.protocol, rubric.source", f"one of {', '.join(RUBRIC_FREE)}")  # fmt: skip
    require((judge.source == "oracle") == (judge.protocol == "oracle"),
             f"heldout_judge.source={judge.source!r} does not go with heldout_judge.protocol={judge.protocol!r}",
             "heldout_judge.source, heldout_judge.protocol", "both 'oracle' or neither")  # fmt: skip
