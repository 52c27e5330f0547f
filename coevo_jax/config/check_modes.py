"""Checks of what only some modes and options know: reward models, controls against reward hacking. Imports no JAX."""

from __future__ import annotations

from coevo_jax.config import CriticConfig, Experiment, WarmupConfig, api_model
from coevo_jax.config.model import API
from coevo_jax.config.several import require

RUBRIC_FREE = ("likert", "likert_reference", "scalar", "random")  # judge protocols that read no rubric


def check_reward(cfg: Experiment) -> None:
    """Training of a reward model: conversations alone, one model."""
    if cfg.schedule.mode != "reward":
        return
    require(cfg.reward.data != "", "reward.data is empty", "reward.data", "a source of pairs, or 'tiny'")
    require(cfg.generator.mode == "single" and not cfg.warmup.on,
             "schedule.mode=reward trains one reward model and nothing else", "generator.mode, warmup.updates",
             "generator.mode=single and warmup.updates=0")  # fmt: skip
    require(cfg.update.rows_per_micro >= 2, f"update.rows_per_micro={cfg.update.rows_per_micro} holds no pair of conversations",
             "update.rows_per_micro", "at least 2")  # fmt: skip
    longest = cfg.reward.max_tokens
    what = f"reward.max_tokens={longest} is above update.pack_length={cfg.update.pack_length}"
    require(longest <= cfg.update.pack_length, what, "reward.max_tokens, update.pack_length",
             f"update.pack_length of at least {longest}")  # fmt: skip


def check_warmup(cfg: Experiment) -> None:
    """Settings of the supervised stage that go against each other, or that nothing reads."""
    warmup = cfg.warmup
    what = f"warmup.updates={warmup.updates} and warmup.epochs={warmup.epochs:g} both say how long"
    require(not (warmup.updates and warmup.epochs), what, "warmup.updates, warmup.epochs", "one of them 0")
    plain, names = WarmupConfig(), ("schedule", "warmup_steps", "heldout")
    changed = [name for name in names if getattr(warmup, name) != getattr(plain, name)]
    require(warmup.on or not changed, f"warmup.{''.join(changed[:1])} would be ignored: there is no supervised stage",
            f"warmup.{''.join(changed[:1])}, warmup.updates", "warmup.updates or warmup.epochs above 0")  # fmt: skip


CHECKING = ("points", "rar_explicit", "criterion_logits", "json_criteria", "oracle")  # protocols with a score a criterion


def check_rlcer(cfg: Experiment) -> None:
    """RLCER's axes: a verifier, a writer that is ours, a judge that says something of each criterion; and what only it knows."""
    if cfg.schedule.mode != "rlcer":
        require(cfg.rubric.schema != "points", "rubric.schema=points has weights below 0, which only RLCER reads",
                "rubric.schema, schedule.mode", "rubric.schema=json_criteria or rar, or schedule.mode=rlcer")  # fmt: skip
        require(cfg.judge.protocol != "points" or cfg.schedule.mode != "evolm", "judge.protocol=points is RLCER's",
                "judge.protocol, schedule.mode", "judge.protocol=rar_explicit, or schedule.mode=rlcer")  # fmt: skip
        return
    order, protocol = cfg.schedule.order, cfg.judge.protocol
    require(order in ("policy_only", "alternate"), f"schedule.order={order} is none of RLCER's", "schedule.order",
            "policy_only (rubrics are prompted) or alternate (evolving: their writer trains in the same updates)")  # fmt: skip
    require(protocol in CHECKING, f"judge.protocol={protocol} gives no score of each criterion", "judge.protocol",
            " | ".join(CHECKING))  # fmt: skip
    require(cfg.judge.samples == 1, f"judge.samples={cfg.judge.samples}: RLCER takes one check a criterion", "judge.samples", "1")
    require(cfg.rubric.source == "generator" and not api_model(cfg.generator.source) and not cfg.rubric.guided,
            "RLCER's rubrics are written by the run's own weights, unguided", "rubric.source, generator.source, rubric.guided",
            "rubric.source=generator, a source with weights, rubric.guided=false")  # fmt: skip
    require(order == "policy_only" or not cfg.generator.frozen, "generator.frozen=true, but schedule.order=alternate trains it",
            "generator.frozen, schedule.order", "schedule.order=policy_only, or generator.frozen=false")  # fmt: skip
    require(cfg.schedule.group <= 64, f"schedule.group={cfg.schedule.group}: every rubric is checked on every answer",
            "schedule.group", "at most 64")  # fmt: skip
    longest = cfg.data.max_prompt_tokens + cfg.answer.max_new_tokens
    what = f"a rubric is written with question and answer in view, up to {longest} tokens"
    require(cfg.sampler.max_prompt >= longest, f"{what}, and sampler.max_prompt={cfg.sampler.max_prompt}", "sampler.max_prompt",
            f"more than {longest}")  # fmt: skip
    row = longest + cfg.rubric_sampling.max_new_tokens
    require(order == "policy_only" or cfg.update.pack_length >= row,
            f"update.pack_length={cfg.update.pack_length} can't hold question, answer and rubric, {row} tokens",
            "update.pack_length", f"more than {row}")  # fmt: skip


def check_critic(cfg: Experiment) -> None:
    """A critic where there is something to value, and no settings of one that isn't there."""
    critic = cfg.advantage.kind == "gae"
    require(not critic or cfg.schedule.mode not in ("sft", "reward", "dpo", "iterated_dpo"),
            f"advantage.kind=gae has no rewards in schedule.mode={cfg.schedule.mode}", "advantage.kind, schedule.mode",
            "advantage.kind=mean, or a mode that samples")  # fmt: skip
    require(critic or cfg.critic == CriticConfig(), f"critic settings would be ignored: advantage.kind={cfg.advantage.kind}",
            "critic, advantage.kind", "advantage.kind=gae")  # fmt: skip
    require(not cfg.critic.source.startswith(API), f"critic.source={cfg.critic.source!r} is an endpoint, and the critic trains",
            "critic.source", "a source with weights, or '' for the policy's")  # fmt: skip


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
