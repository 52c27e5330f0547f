"""What a run reads: its data streams, the identity of every file that the config only names, and whether it all fits."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from coevo_jax.bench import Seat
from coevo_jax.config import Experiment
from coevo_jax.config.several import all_judges, policy_names
from coevo_jax.data import PromptSet, SlotStream, read_pairs, read_prompts
from coevo_jax.errors import UserError
from coevo_jax.judges import JUDGE_PROMPTS, MODEL_FREE, PAIR_PROMPTS
from coevo_jax.learn.verifiers import check_needs, resolve_verifier
from coevo_jax.methods import supervised
from coevo_jax.methods.context import Context
from coevo_jax.methods.fixed_rubrics import check_records
from coevo_jax.modes import MODES
from coevo_jax.progress import RunConsole
from coevo_jax.records.run_folder import Input
from coevo_jax.text.chat import ChatTokenizer
from coevo_jax.text.prompts import template_identity

CHECKED_QUESTIONS = 64  # of the longest ones, whose rubric prompts are made at the start


def make_streams(cfg: Experiment, tokenizer: ChatTokenizer, console: RunConsole) -> tuple[dict[str, SlotStream], str]:
    """Prompt streams of both roles and of the warm-up; whose weights the warm-up trains."""
    streams: dict[str, SlotStream] = {}
    role = "policy"
    if cfg.warmup.on:
        examples = supervised.read(cfg.warmup)
        role = "rubric" if "rubric" in examples.records[0] else "policy"
        streams["warmup"] = SlotStream(examples, cfg.warmup.seed, cfg.warmup.batch, "warmup")
    mode = MODES[cfg.schedule.mode]
    if cfg.schedule.mode == "evolm" and cfg.schedule.order == "generator_first" and cfg.generator.mode == "single":
        console.note("note: generator_first with generator.mode=single: training the policy changes the generator's weights too")

    def count(question: str) -> int:
        messages = [{"role": "user", "content": question}]
        return len(tokenizer.render(messages, thinking=cfg.policy.thinking, system=cfg.policy.system_prompt))

    streams |= mode.streams(cfg, tokenizer, count, console)
    if not mode.prompts:
        return streams, role
    prompts = read_prompts(cfg.data, count, cfg.seed, lambda done, total: console.progress("prompts measured", done, total))
    console.note(f"{len(prompts)} prompts" + (f", {prompts.filtered} over the limit left out" if prompts.filtered else ""))
    for name in (*policy_names(cfg), "rubric"):
        streams[name] = SlotStream(prompts, cfg.seed, cfg.schedule.prompts, name)
    if cfg.pairs.data:
        streams["pairs"] = SlotStream(_read_pairs(cfg, count, console), cfg.seed, cfg.schedule.prompts, "pairs")
    return streams, role


def _read_pairs(cfg: Experiment, count: Callable[[str], int], console: RunConsole) -> PromptSet:
    """The pairs of pairs.data whose prompts keep the limit on prompts. UserError where none does."""
    found = read_pairs(cfg.pairs.data, key="pairs.data")
    kept = [record for record in found.records if count(record["prompt"]) <= cfg.data.max_prompt_tokens]
    dropped = len(found) - len(kept)
    if not kept or (dropped and cfg.data.over_limit == "refuse"):
        raise UserError(f"{dropped} of {len(found)} pairs have a prompt over the limit of {cfg.data.max_prompt_tokens} tokens",
                        where=f"pairs.data={cfg.pairs.data}",
                        expected="a larger data.max_prompt_tokens, or shorter prompts")  # fmt: skip
    console.note(f"{len(kept)} pairs" + (f", {dropped} over the limit left out" if dropped else ""))
    return PromptSet.of(kept, found.source) if dropped else found


def run_inputs(context: Context, serving: Iterable[Seat]) -> dict[str, Input]:
    """What the config only names and the run reads: prompt templates, data and tokenizers, by key."""
    cfg = context.cfg
    names = {}
    if (MODES[cfg.schedule.mode].judged and cfg.rubric.source == "generator") or cfg.warmup.updates:
        names = {"rubric.prompt": cfg.rubric.prompt, "compat.train_rubric_prompt": cfg.compat.train_rubric_prompt}
    if MODES[cfg.schedule.mode].judged:
        names["heldout_judge.protocol"] = JUDGE_PROMPTS.get(cfg.heldout_judge.protocol, "") if cfg.heldout_judge.source else ""
        for i, judge in enumerate(all_judges(cfg)):
            group = f"panel.judges.{i - 1}" if i else "judge"
            names[f"{group}.protocol"] = JUDGE_PROMPTS.get(judge.protocol, "")
            beside = PAIR_PROMPTS.get(judge.pairs, "") and (judge.pairs_prompt or PAIR_PROMPTS[judge.pairs])
            names[f"{group}.pairs"] = beside if judge.protocol not in MODEL_FREE else ""
        names["pairs.inference_prompt"] = cfg.pairs.inference_prompt if cfg.pairs.inferred > 0 else ""
        names["pairs.conditioned_prompt"] = cfg.pairs.conditioned_prompt if cfg.pairs.conditioned > 0 else ""
    names |= MODES[cfg.schedule.mode].templates(cfg)
    found = {key: Input(*template_identity(name)) for key, name in names.items() if name}
    keys = {"policy": "data.prompts", "warmup": "warmup.data", "pairs": "pairs.data"}
    keys |= dict.fromkeys((*policy_names(cfg)[1:], "rubric"), "data.prompts")
    for name, stream in context.streams.items():
        key = keys.get(name) or MODES[cfg.schedule.mode].data_keys.get(name, f"stream {name}")
        found[key] = Input(stream.prompts.hash, f"{key}={stream.prompts.source}")
    tokenizers = {f"tokenizer of {role}": voice.tokenizer for role, voice in context.voices.items()}
    for seat in serving:  # a judge that comes later shows its tokenizer then
        if (instrument := getattr(seat.judge, "instrument", None)) is not None:
            tokenizers[f"tokenizer of {seat.name}"] = instrument.tokenizer
    return found | {key: Input(tokenizer.hash, tokenizer.where) for key, tokenizer in tokenizers.items()}


def check_lengths(context: Context) -> None:
    """The longest question allowed must fit its rubric prompt too: into the sampler and, with a rubric, into a packed row.

    A template may hold the question more than once, so the prompts of the longest questions are made as well.
    """
    cfg = context.cfg
    if cfg.schedule.mode in ("verifiable", "rlcer"):
        prompts = context.streams["policy"].prompts
        check_needs(resolve_verifier(cfg.schedule.verifier), prompts.records, prompts.source)
    MODES[cfg.schedule.mode].check(context)
    if cfg.schedule.mode != "evolm":
        return
    check_records(cfg, context.streams["policy"].prompts.records)
    _check_other_policies(context)
    if context.writer is not None or cfg.rubric.source != "generator":
        return
    # What the rubric prompt adds to a question; the answer prompt's own frame is within data.max_prompt_tokens.
    added = len(context.rubric_prompt("", training=True)) - len(context.answer_prompt(""))
    longest, what = cfg.data.max_prompt_tokens + max(added, 0), f"data.max_prompt_tokens = {cfg.data.max_prompt_tokens}"
    records = context.streams["rubric"].prompts.records
    for record in heapq.nlargest(CHECKED_QUESTIONS, records, key=lambda r: len(r["prompt"])):
        if (length := len(context.rubric_prompt(record["prompt"], training=True))) > longest:
            longest, what = length, f"the prompt {record['id']!r}"
    if longest > cfg.sampler.max_prompt:
        raise UserError(
            f"a question of {what} makes a rubric prompt of {longest} tokens",
            where="sampler.max_prompt", expected=f"at least {longest}, or a smaller data.max_prompt_tokens",
        )  # fmt: skip
    if (row := longest + cfg.rubric_sampling.max_new_tokens) > cfg.update.pack_length:
        raise UserError(
            f"a rubric prompt of {longest} tokens and a rubric of {cfg.rubric_sampling.max_new_tokens} do not fit a packed row",
            where="update.pack_length", expected=f"at least {row}",
        )  # fmt: skip


def _check_other_policies(context: Context) -> None:
    """The longest questions, measured in the first policy's tokens, fit the others' prompts and packed rows too."""
    cfg, records = context.cfg, context.streams["policy"].prompts.records
    limit = min(cfg.sampler.max_prompt, cfg.update.pack_length - cfg.answer.max_new_tokens)
    for i, role in enumerate(policy_names(cfg)[1:]):
        for record in heapq.nlargest(CHECKED_QUESTIONS, records, key=lambda r: len(r["prompt"])):
            if (length := len(context.answer_prompt(record["prompt"], role))) > limit:
                expected = f"room for {length} tokens, or a smaller data.max_prompt_tokens"
                what = f"the prompt {record['id']!r} has {length} tokens for {role}, and there is room for {limit}"
                raise UserError(what, where=f"policies.{i}.source, sampler.max_prompt, update.pack_length", expected=expected)


def check_examples(context: Context) -> None:
    """Every supervised example that the run will see fits a packed row: found now, and not at the update that draws it."""
    cfg, stream = context.cfg, context.streams.get("warmup")
    if stream is None:
        return
    drawn = {stream.index(slot, count) for slot in range(stream.slots) for count in range(cfg.warmup.updates)}
    for record in (*(stream.prompts.records[index] for index in sorted(drawn)), *stream.prompts.heldout):
        if (length := supervised.length(context, record)) > cfg.update.pack_length:
            raise UserError(
                f"the example {record['id']!r} has {length} tokens, and a packed row holds {cfg.update.pack_length}",
                where=f"warmup.data={stream.prompts.source}, update.pack_length",
                expected=f"update.pack_length of at least {length}, or shorter examples",
            )
