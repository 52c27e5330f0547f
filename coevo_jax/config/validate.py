"""Checks over a whole Experiment: types, ranges, choices and what several keys must keep among them. Imports no JAX."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from typing import Any

from coevo_jax.config import Experiment, Sampling, api_model, arm
from coevo_jax.config import check_dpo as dpo
from coevo_jax.config.check_dynamic import check_dynamic
from coevo_jax.config.check_evaluate import check_evaluate
from coevo_jax.config.check_lora import check_lora
from coevo_jax.config.check_modes import RUBRIC_FREE, check_control, check_critic, check_reward, check_rlcer, check_warmup
from coevo_jax.config.endpoints import check_endpoint
from coevo_jax.config.learn import REMAT_NAMES
from coevo_jax.config.limits import CHOICES, GUIDED, RANGES, REMATS, WRITING
from coevo_jax.config.model import API
from coevo_jax.config.override import conform, get_at, key_types
from coevo_jax.config.several import all_judges, check_panel, check_policies, rule_of
from coevo_jax.config.several import require as _require
from coevo_jax.errors import UserError, nearest

PROCEDURAL = "reasoning_gym"  # tasks with a verifier of their own
SAMPLINGS = ("answer", "rubric_sampling", "question_sampling", "judge.sampling", "heldout_judge.sampling", "arm.judge_sampling")


def validate(cfg: Experiment) -> None:
    """UserError for the first thing that is wrong; it names the keys and a value that would serve."""
    check_values(cfg)
    checks = (_check_names, _check_roles, _check_remote, _check_rubric, _check_learn, _check_lengths, _check_pairs, _check_guided)
    modes = (check_reward, check_rlcer, dpo.check_dpo, check_warmup, arm.check_arm, check_dynamic)
    extra = (_check_panel, _check_policies, *modes, check_critic, check_control, check_lora)
    for check in (*checks, _check_judge, *extra, _check_run):
        check(cfg)
    check_evaluate(cfg)


def check_values(cfg: Experiment) -> None:
    """Types, choices and ranges of single values, of any use of the settings."""
    for key, kind in key_types(cfg).items():
        conform(get_at(cfg, key), kind, key)
        if (rule := rule_of(key)) in CHOICES:
            _check_choice(key, get_at(cfg, key), CHOICES[rule])
        if rule in RANGES:
            _check_range(key, get_at(cfg, key), *RANGES[rule])
    for key in (*SAMPLINGS, *(f"panel.judges.{i}.sampling" for i in range(len(cfg.panel.judges)))):
        _check_sampling(key, get_at(cfg, key))


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        close = nearest(value, choices)
        raise UserError(f"unknown choice {key}={value!r}", where=key, expected=" | ".join(choices), nearest=close)


def _check_range(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        expected = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise UserError(f"{key}={value} is out of range", where=key, expected=expected)


def _check_sampling(key: str, sampling: Sampling) -> None:
    def need(ok: bool, name: str, expected: str) -> None:
        _require(ok, f"{key}.{name}={getattr(sampling, name)} is out of range", f"{key}.{name}", expected)

    if key in ("answer", "rubric_sampling", "arm.judge_sampling"):
        need(sampling.temperature > 0, "temperature", "above 0: the samples of a group must differ")
    need(sampling.temperature >= 0, "temperature", "at least 0 (0 = greedy)")
    need(0 < sampling.top_p <= 1, "top_p", "above 0 and at most 1")
    need(sampling.top_k >= 0, "top_k", "at least 0 (0 = off)")
    need(sampling.max_new_tokens >= 1, "max_new_tokens", "at least 1")
    need(0 <= sampling.min_new_tokens <= sampling.max_new_tokens, "min_new_tokens", f"0 to {key}.max_new_tokens")


def _check_names(cfg: Experiment) -> None:
    plain = bool(cfg.name) and "/" not in cfg.name and not cfg.name.startswith(".")
    _require(plain, f"name={cfg.name!r} can't name a run folder", "name", "a name without '/' and leading '.'")
    for key in ("policy.source", "judge.source", "data.prompts", "warmup.data"):
        _require(get_at(cfg, key) != "", f"{key} is empty", key, "a source (see the record in coevo_jax/config)")
    for key in ("loss.function", "schedule.verifier"):
        value = get_at(cfg, key)
        module, colon, function = value.partition(":")
        named = not value or bool(module and colon and function) or (key, value) == ("schedule.verifier", PROCEDURAL)
        _require(named, f"{key}={value!r} is no dotted path", key, "module:function")


def _check_roles(cfg: Experiment) -> None:
    oracle = (cfg.judge.source == "oracle", cfg.judge.protocol == "oracle")
    _require(
        oracle[0] == oracle[1],
        f"judge.source={cfg.judge.source!r} does not go with judge.protocol={cfg.judge.protocol!r}",
        "judge.source, judge.protocol",
        "both 'oracle' or neither",
    )
    _require(
        cfg.judge.weights == "full" or not (any(oracle) or api_model(cfg.judge.source) or cfg.judge.protocol == "random"),
        f"judge.weights={cfg.judge.weights} would be ignored: judge.source={cfg.judge.source!r} has no weights here",
        "judge.weights, judge.source",
        "judge.weights=full, or a judge with weights",
    )
    single = cfg.generator.mode == "single"
    _require(
        not (single and cfg.generator.source),
        f"generator.source={cfg.generator.source!r} would be ignored: generator.mode=single shares the policy's weights",
        "generator.source, generator.mode",
        "generator.mode=two, or an empty generator.source",
    )
    _require(
        not (cfg.generator.lr and (single or cfg.generator.frozen or api_model(cfg.generator.source))),
        f"generator.lr={cfg.generator.lr} would be ignored: no optimizer of the generator's own runs",
        "generator.lr, generator.mode",
        "0, or generator.mode=two with a generator that trains",
    )
    _require(
        not (cfg.generator.frozen and cfg.schedule.order in ("generator_first", "generator_only")),
        f"generator.frozen=true, but schedule.order={cfg.schedule.order} trains the generator",
        "generator.frozen, schedule.order",
        "schedule.order=policy_only, or generator.frozen=false",
    )
    for key in ("mesh.data", "mesh.fsdp"):
        size = get_at(cfg, key)
        _require(size == -1 or size >= 1, f"{key}={size}", key, "at least 1, or -1 for the rest")
    both = cfg.mesh.data == cfg.mesh.fsdp == -1
    _require(
        not both, "mesh.data=-1 and mesh.fsdp=-1: one axis takes the rest", "mesh.data, mesh.fsdp", "a number for one of them"
    )


def _check_rubric(cfg: Experiment) -> None:
    low, high = cfg.rubric.min_criteria, cfg.rubric.max_criteria
    ok = high == 0 or high >= low
    _require(ok, f"rubric.max_criteria={high} is below rubric.min_criteria={low}", "rubric.max_criteria", f"0 or at least {low}")
    temperatures = cfg.rubric.retry_temperatures
    ok = all(value > 0 for value in temperatures)
    _require(ok, f"rubric.retry_temperatures={temperatures}", "rubric.retry_temperatures", "each above 0")


def _check_learn(cfg: Experiment) -> None:
    if cfg.update.remat not in REMATS:
        for part in cfg.update.remat.split("+"):
            _check_choice("update.remat", part, (*REMATS, *REMAT_NAMES) if part == cfg.update.remat else REMAT_NAMES)
    apart = 128 * cfg.mesh.tensor
    _require(
        cfg.mesh.train != "context" or cfg.update.attention != "splash" or cfg.update.pack_length % apart == 0,
        f"update.pack_length={cfg.update.pack_length} can't be dealt to mesh.tensor={cfg.mesh.tensor} chips by blocks of 128",
        "update.pack_length, mesh.tensor",
        f"a multiple of {apart}",
        f"update.pack_length={-(-cfg.update.pack_length // apart) * apart}",
    )
    _require(
        cfg.loss.aggregation != "constant" or cfg.loss.constant_length >= 1,
        f"loss.aggregation=constant divides by loss.constant_length={cfg.loss.constant_length}",
        "loss.aggregation, loss.constant_length",
        "loss.constant_length of at least 1, for example answer.max_new_tokens",
    )
    _require(
        cfg.update.vocab_tile <= 0 or cfg.mesh.tensor == 1,
        f"update.vocab_tile={cfg.update.vocab_tile} cuts a whole vocabulary, and mesh.tensor={cfg.mesh.tensor} shards it",
        "update.vocab_tile, mesh.tensor",
        "update.vocab_tile=0 (by update.logprob_chunk)",
    )
    for key in ("optimizer.b1", "optimizer.b2"):
        _require(get_at(cfg, key) < 1, f"{key}=1 is out of range", key, "below 1")
    _require(
        cfg.schedule.mode != "sft" or cfg.warmup.on,
        "schedule.mode=sft trains on the warm-up's data, and warmup.updates=0 is no update",
        "schedule.mode, warmup.updates",
        "warmup.updates of at least 1, or warmup.epochs above 0",
    )
    own = cfg.schedule.verifier not in ("", PROCEDURAL)
    _require(
        cfg.schedule.mode not in ("verifiable", "rlcer") or own or f"{PROCEDURAL}:" in cfg.data.prompts,
        f"schedule.mode={cfg.schedule.mode} has no verifier for data.prompts={cfg.data.prompts}",
        "schedule.mode, schedule.verifier, data.prompts",
        "a dotted path module:function as schedule.verifier, or data.prompts=reasoning_gym:TASK",
    )


def used_samplings(cfg: Experiment) -> Iterator[tuple[str, Sampling, bool]]:
    """(key, sampling, is its text trained) for each kind of text that the run's own engines draw."""
    mode, order = cfg.schedule.mode, cfg.schedule.order
    if mode in ("sft", "reward", "dpo"):
        return
    if mode == arm.MODE:
        yield from arm.samplings(cfg)
        return
    yield "answer", cfg.answer, mode != "evolm" or order != "generator_only"
    if mode == dpo.ITERATED:
        if cfg.rubric.source == "generator" and not api_model(cfg.generator.source):
            yield "rubric_sampling", cfg.rubric_sampling, False
        writes = cfg.judge.protocol in WRITING or (cfg.judge.pairs != "scores" and cfg.judge.protocol != "oracle")
        if writes and not api_model(cfg.judge.source):
            yield "judge.sampling", cfg.judge.sampling, False
    if mode == "dynamic":
        yield "rubric_sampling", cfg.rubric_sampling, cfg.dynamic.static_from != 1
    if mode == "rlcer":
        yield "rubric_sampling", cfg.rubric_sampling, order == "alternate"
        if cfg.judge.protocol in WRITING and not api_model(cfg.judge.source):
            yield "judge.sampling", cfg.judge.sampling, False
    if mode == "evolm":
        if cfg.rubric.source == "generator" and not api_model(cfg.generator.source):
            yield "rubric_sampling", cfg.rubric_sampling, order != "policy_only"
        if cfg.pairs.inferred > 0 and trains_generator(cfg):
            yield "question_sampling", cfg.question_sampling, False
        for i, judge in enumerate(all_judges(cfg)):
            writes = judge.protocol in WRITING or (judge.pairs != "scores" and judge.protocol != "oracle")
            if writes and not api_model(judge.source):
                yield f"panel.judges.{i - 1}.sampling" if i else "judge.sampling", judge.sampling, False


def trains_generator(cfg: Experiment) -> bool:
    """Does the run have rubric updates (and so draw pairs)?"""
    return cfg.schedule.mode == "evolm" and cfg.schedule.order != "policy_only" and not cfg.generator.frozen


def generator_learns(cfg: Experiment) -> bool:
    """Does anything train the generator's weights: rubric updates, or a warm-up on rubrics?"""
    evolving = cfg.schedule.mode == "rlcer" and cfg.schedule.order == "alternate"
    evolving |= cfg.schedule.mode == "dynamic" and cfg.dynamic.static_from != 1
    return trains_generator(cfg) or evolving or cfg.warmup.on or arm.trains_lists(cfg)


def _check_lengths(cfg: Experiment) -> None:
    limit = cfg.data.max_prompt_tokens
    _require(
        cfg.sampler.max_prompt >= limit,
        f"sampler.max_prompt={cfg.sampler.max_prompt} is below data.max_prompt_tokens={limit}",
        "sampler.max_prompt, data.max_prompt_tokens",
        f"sampler.max_prompt of at least {limit}",
    )
    for key, sampling, trained in used_samplings(cfg):
        new = sampling.max_new_tokens
        _require(
            cfg.sampler.max_new >= new,
            f"sampler.max_new={cfg.sampler.max_new} is below {key}.max_new_tokens={new}",
            f"sampler.max_new, {key}.max_new_tokens",
            f"sampler.max_new of at least {new}",
        )
        _require(
            not trained or cfg.update.pack_length >= limit + new,
            f"update.pack_length={cfg.update.pack_length} can't hold a prompt of {limit} and a completion of {new} tokens",
            f"update.pack_length, data.max_prompt_tokens, {key}.max_new_tokens",
            f"update.pack_length of at least {limit + new}",
        )


def _check_pairs(cfg: Experiment) -> None:
    pairs, order = cfg.pairs, cfg.schedule.order
    low, high = pairs.min_gap, pairs.max_gap
    _require(
        high == 0 or high >= low, f"pairs.max_gap={high} is below pairs.min_gap={low}", "pairs.max_gap", f"0 or at least {low}"
    )
    if not trains_generator(cfg):
        return
    sources = ("temporal", "inferred", "conditioned", "frozen", "dataset")
    _require(
        sum(getattr(pairs, name) for name in sources) > 0,
        "no pair source has a weight above 0",
        ", ".join(f"pairs.{name}" for name in sources),
        "at least one above 0",
    )
    if pairs.temporal == 0:
        return
    _require(
        order == "alternate",
        f"schedule.order={order} trains no policy before the generator, so temporal contrast has no older answer",
        "schedule.order, pairs.temporal",
        "pairs.temporal=0 with another source of pairs above 0, or schedule.order=alternate",
    )
    needed = high or low
    _require(
        pairs.per_slot >= needed or cfg.compat.buffer_entries > 0,
        f"the replay buffer holds {pairs.per_slot} answers a slot, one a policy update; a gap of {needed} updates needs {needed}",
        "pairs.per_slot, pairs.min_gap, pairs.max_gap",
        f"pairs.per_slot of at least {needed}",
    )
    updates = cfg.schedule.cycles * cfg.schedule.k
    _require(
        low <= updates,
        f"pairs.min_gap={low} is never reached: the run has {updates} policy updates (schedule.cycles x schedule.k)",
        "pairs.min_gap, schedule.cycles, schedule.k",
        f"pairs.min_gap of at most {updates}",
    )


def _check_remote(cfg: Experiment) -> None:
    """Roles behind an endpoint. They never train, so the policy can't be one."""
    _require(
        not cfg.policy.source.startswith(API),
        f"policy.source={cfg.policy.source!r} is an endpoint, and the policy trains",
        "policy.source",
        "a source with weights; judge.source and generator.source may be 'api:MODEL'",
    )
    _require(
        not (api_model(cfg.generator.source) and trains_generator(cfg)),
        f"generator.source={cfg.generator.source!r} is an endpoint, which can't train, but schedule.order={cfg.schedule.order} "
        "trains the generator",
        "generator.source, schedule.order",
        "schedule.order=policy_only (or generator.frozen=true)",
    )
    check_endpoint("judge", cfg.judge.source, cfg.judge.thinking, cfg.judge.endpoint)
    check_endpoint("generator", cfg.generator.source, cfg.generator.thinking, cfg.generator.endpoint)
    heldout = cfg.heldout_judge
    check_endpoint("heldout_judge", heldout.source, heldout.thinking, heldout.endpoint)


def _check_judge(cfg: Experiment) -> None:
    """Which rubrics a judge reads, and what only some protocols know."""
    if cfg.schedule.mode not in ("evolm", dpo.ITERATED):
        return
    protocol, source = cfg.judge.protocol, cfg.rubric.source
    free = protocol in RUBRIC_FREE
    _require(
        free == (source == "none"),
        f"judge.protocol={protocol} reads {'no' if free else 'a'} rubric, and rubric.source={source}",
        "judge.protocol, rubric.source",
        "rubric.source=none" if free else "rubric.source=generator, predefined or data",
    )
    _require(
        source == "generator" or cfg.schedule.order == "policy_only" or cfg.schedule.mode == dpo.ITERATED,
        f"rubric.source={source}, but schedule.order={cfg.schedule.order} trains a generator whose rubrics nobody reads",
        "rubric.source, schedule.order",
        "schedule.order=policy_only",
    )
    _require(
        source == "generator" or cfg.generator.mode == "single",
        f"generator.mode=two would be ignored: rubric.source={source}",
        "generator.mode, rubric.source",
        "generator.mode=single",
    )
    _require(
        cfg.judge.samples == 1 or protocol in WRITING,
        f"judge.samples={cfg.judge.samples} samples of judge.protocol={protocol} are all the same",
        "judge.samples, judge.protocol",
        "judge.samples=1, or a protocol that writes",
    )
    _check_pairwise(cfg)
    if protocol == "scalar":
        _require(not api_model(cfg.judge.source), f"judge.source={cfg.judge.source!r} serves no scalar head", "judge.source",
                 "a Hugging Face folder with score.weight")  # fmt: skip
        needed = cfg.data.max_prompt_tokens + cfg.answer.max_new_tokens
        limit = cfg.judge.max_prompt or cfg.sampler.max_prompt
        key = "judge.max_prompt" if cfg.judge.max_prompt else "sampler.max_prompt"
        _require(
            limit >= needed,
            f"the reward model reads prompt and answer, up to {needed} tokens, and {key}={limit}",
            f"{key}, data.max_prompt_tokens, answer.max_new_tokens",
            f"{key} of at least {needed}: an answer that doesn't fit would never be scored",
        )
        _require(cfg.judge.weights == "full", f"judge.weights={cfg.judge.weights} is not made for reward models",
                 "judge.weights", "judge.weights=full")  # fmt: skip


def _check_pairwise(cfg: Experiment) -> None:
    judge = cfg.judge
    if judge.pairs == "scores":
        _require(judge.pairs_prompt == "", "judge.pairs_prompt would be ignored: judge.pairs=scores asks about single answers",
                 "judge.pairs_prompt, judge.pairs", "judge.pairs_prompt=, or judge.pairs=pairwise")  # fmt: skip
        _require(judge.order == "both", f"judge.order={judge.order} would be ignored: judge.pairs=scores has no order",
                 "judge.order, judge.pairs", "judge.order=both, or judge.pairs=pairwise")  # fmt: skip
        return
    what = f"judge.pairs={judge.pairs} would be ignored: the run judges no pairs"
    labels = cfg.schedule.mode == dpo.ITERATED
    _require(trains_generator(cfg) or labels, what, "judge.pairs, schedule.order", "judge.pairs=scores")
    _require(not labels or judge.order == "both", f"judge.order={judge.order} would be ignored: labels need both orders",
             "judge.order, schedule.mode", "judge.order=both")  # fmt: skip
    _require(judge.pairs != "comparison" or cfg.rubric.schema == "numbered_rules",
             f"judge.pairs=comparison goes by a numbered list, and rubric.schema={cfg.rubric.schema}",
             "judge.pairs, rubric.schema", "rubric.schema=numbered_rules, or judge.pairs=pairwise")  # fmt: skip
    _require(not judge.guided, f"judge.pairs={judge.pairs} has no grammar", "judge.pairs, judge.guided", "judge.guided=false")


def _check_guided(cfg: Experiment) -> None:
    """A grammar has no room for reasoning and ends its text itself; where it would change nothing it is refused."""
    if cfg.rubric.guided:
        _require(
            cfg.rubric.schema == "json_criteria",
            f"rubric.guided=true has no grammar for rubric.schema={cfg.rubric.schema}",
            "rubric.guided, rubric.schema",
            "rubric.guided=false",
        )
        _check_guided_text(cfg, "rubric.guided", "generator.source", "generator.thinking", "rubric_sampling.min_new_tokens")
        _require(
            cfg.schedule.order != "generator_only" or cfg.pairs.conditioned > 0,
            "rubric.guided=true has no effect: every rubric of the run is trained, and those are drawn unguided",
            "rubric.guided, schedule.order",
            "rubric.guided=false",
        )
    if cfg.judge.guided:
        _check_guided_text(cfg, "judge.guided", "judge.source", "judge.thinking", "judge.sampling.min_new_tokens")
        _require(
            cfg.judge.protocol in GUIDED,
            f"judge.guided=true has no effect on judge.protocol={cfg.judge.protocol}, for which there is no grammar",
            "judge.guided, judge.protocol",
            "judge.protocol=json_score or json_criteria, or judge.guided=false",
        )


def _check_guided_text(cfg: Experiment, key: str, source: str, thinking: str, least: str) -> None:
    local = not api_model(get_at(cfg, source))
    _require(local, f"{key}=true needs a local model, and {source} is an endpoint", f"{key}, {source}", f"{key}=false")
    _require(not get_at(cfg, thinking), f"{key}=true leaves no room for reasoning", f"{key}, {thinking}", f"{thinking}=false")
    _require(get_at(cfg, least) == 0, f"{key}=true ends a text where its grammar does", f"{key}, {least}", f"{least}=0")
    found = importlib.util.find_spec("llguidance") is not None
    _require(found, f"{key}=true needs the package llguidance", key, "pip install 'coevo-jax[guided]'")


def _check_panel(cfg: Experiment) -> None:
    def one(single: Experiment) -> None:
        for check in (_check_names, _check_roles, _check_remote, _check_guided, _check_judge):
            check(single)

    check_panel(cfg, one, trains_generator(cfg))


def _check_policies(cfg: Experiment) -> None:
    check_policies(cfg, trains_generator(cfg))


def _check_run(cfg: Experiment) -> None:
    found = not cfg.run.tensorboard or importlib.util.find_spec("tensorboardX") is not None
    _require(found, "run.tensorboard=true needs the package tensorboardX", "run.tensorboard",
             "pip install 'coevo-jax[tensorboard]', or run.tensorboard=false")  # fmt: skip
    found = cfg.run.wandb == "off" or importlib.util.find_spec("wandb") is not None
    _require(found, f"run.wandb={cfg.run.wandb} needs the package wandb", "run.wandb",
             "pip install 'coevo-jax[wandb]', or run.wandb=off")  # fmt: skip
    window = cfg.run.profile.split(":") if cfg.run.profile else ["0"]
    ok = len(window) <= 2 and all(part.isdecimal() for part in window) and int(window[0]) <= int(window[-1])
    _require(ok, f"run.profile={cfg.run.profile!r} is no window of updates", "run.profile", "FIRST:LAST, such as 3:4")


COMPAT_REASONS: dict[str, str] = {
    "train_rubric_prompt": "rubrics are trained with another template than the one deployed",
    "policy_rubric_temperature": "rubrics of the policy phase are drawn at another temperature than those of training",
    "buffer_entries": "one global first-in-first-out replay buffer; age counts from its newest entry",
    "pack_mean": "the loss is a mean over a packed row, then over rows: it depends on the packing",
    "failed_to_mean": "a failed verdict takes its group's mean instead of leaving the group",
    "top_p": "draws come from a truncated support while the loss uses the full softmax",
}


def compat_warnings(cfg: Experiment) -> list[str]:
    """One line for each compat switch that is on; such a run reproduces a fault of released code (design.md 4.12)."""
    return [f"compat.{key}={value}: {COMPAT_REASONS[key]}" for key, value in _compat(cfg).items() if value]


def _compat(cfg: Experiment) -> dict[str, Any]:
    return {key: getattr(cfg.compat, key) for key in key_types(type(cfg.compat))}
