"""DPO (arXiv 2305.18290) on given pairs. The reference is the policy as the run loads it; its log-probs are computed once, before
the first update, and kept in the run folder: no second copy of the weights is held."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from coevo_jax.config import Experiment
from coevo_jax.data import PromptSet, SlotStream
from coevo_jax.distributed import any_process, barrier, most_owned, own, to_all
from coevo_jax.errors import UserError
from coevo_jax.learn.preference import PreferenceSample
from coevo_jax.methods.context import Context
from coevo_jax.methods.pair_data import PairSource, read
from coevo_jax.methods.prepared import Prepared
from coevo_jax.methods.stage import Batch, Stage, Step
from coevo_jax.methods.turns import assistant_turn
from coevo_jax.progress import RunConsole
from coevo_jax.records import reference_file
from coevo_jax.records.facts import Facts
from coevo_jax.text.chat import ChatTokenizer

STREAM = "dpo"


def stages(cfg: Experiment) -> list[Stage]:
    """`cycles` stages of K updates."""
    return [
        Stage("dpo", "policy", cycle, cfg.schedule.k, dpo_batch, loss="dpo", counts_as_policy=True)
        for cycle in range(cfg.schedule.cycles)
    ]


def dpo_batch(ctx: Context, step: Step) -> Batch:
    """The next dpo.pairs pairs of the seeded order, as far as they are this process's."""
    cfg, tokenizer, stream = ctx.cfg, ctx.voices["policy"].tokenizer, ctx.streams[STREAM]
    records = [stream.next(slot) for slot in own(cfg.dpo.pairs)]
    samples = [_sample(ctx, tokenizer, record) for record in records]
    facts = Facts()
    lengths = [(len(s.chosen), len(s.rejected)) for s in samples]
    facts.mean("completions/length/mean", [n for both in lengths for n in both])
    facts.mean("pairs/length_difference", [a - b for a, b in lengths])
    facts.share("pairs/longer_chosen_share", [a > b for a, b in lengths])
    facts.add("most", "epoch", [(step.update + 1) * cfg.dpo.pairs / len(stream.prompts)])
    if cfg.dpo.heldout and step.update % cfg.dpo.eval_every == 0:
        aside = [stream.prompts.heldout[i] for i in own(len(stream.prompts.heldout))]
        samples += [dataclasses.replace(_sample(ctx, tokenizer, record), heldout=True) for record in aside]
    return Batch(samples, facts, [])


def _sample(ctx: Context, tokenizer: ChatTokenizer, record: Mapping[str, Any]) -> PreferenceSample:
    return dataclasses.replace(encode(tokenizer, record, ctx.cfg), reference=ctx.reference.get(record["id"], (0.0, 0.0)))


def encode(tokenizer: ChatTokenizer, record: Mapping[str, Any], cfg: Experiment) -> PreferenceSample:
    """A pair's token ids: one prompt for both answers, as the policy is asked; each answer with its end token."""
    messages = [{"role": "user", "content": record["prompt"]}]
    prompt = tokenizer.render(messages, thinking=cfg.policy.thinking, system=cfg.policy.system_prompt)
    chosen, rejected = (assistant_turn(tokenizer, record[side]) for side in ("chosen", "rejected"))
    return PreferenceSample(np.asarray(prompt, np.int32), chosen, rejected)


def streams(cfg: Experiment, tokenizer: ChatTokenizer, count: Callable[[str], int], console: RunConsole) -> dict[str, SlotStream]:
    """The stream of pairs whose prompt and longer answer fit; both sides of a pair stay or go together."""
    limit = cfg.dpo.max_tokens or cfg.update.pack_length
    source = PairSource("dpo", cfg.dpo.data, limit, cfg.data.over_limit == "refuse", cfg.dpo.heldout, cfg.seed)
    pairs = read(
        source, lambda record: encode(tokenizer, record, cfg).longest,
        lambda done, total: console.progress("pairs measured", done, total), "prompt with its answer",
    )  # fmt: skip
    console.note(f"{len(pairs)} pairs" + (f", {n} over the limit left out" if (n := pairs.filtered) else ""))
    return {STREAM: SlotStream(pairs, cfg.seed, cfg.dpo.pairs, STREAM)}


# ------------------------------------------------------------------------------------------------------------- reference


def prepare(ctx: Context, given: Prepared) -> bool:
    """Read the reference log-probs from the run folder, or compute what is missing, a chunk of pairs at a time.

    UserError: the file is of another model, data or prompt; or some are missing and the weights have been trained already.
    """
    pairs, path = ctx.streams[STREAM].prompts, given.folder / reference_file.NAME
    records = [*pairs.records, *pairs.heldout]
    wanted = reference_hash(ctx, given.began["policy"], pairs)
    known = reference_file.read(path, wanted) or {}
    missing = [record for record in records if record["id"] not in known]
    if missing and given.updates:
        raise UserError(
            f"{len(missing)} of {len(records)} reference log-probs are missing, and {given.updates} updates changed the weights",
            where=str(path), expected="the file that the run wrote before its first update, or another --workdir",
        )  # fmt: skip
    first = jax.process_index() == 0
    barrier("reference read")
    if missing and first:
        reference_file.begin(path, wanted, len(records), known)
    size = ctx.cfg.dpo.pairs
    for start in range(0, len(missing), size):
        if any_process(given.stopped()):
            return False
        found = _reference_of(ctx, missing[start : start + size])
        known |= found
        if first:
            reference_file.append(path, found)
        ctx.progress("reference log-probs", len(known), len(records))
    ctx.reference = known
    return True


def _reference_of(ctx: Context, records: Sequence[Mapping[str, Any]]) -> reference_file.Logps:
    """Of a chunk, each process computes a part."""
    assert ctx.pair_logps is not None
    tokenizer = ctx.voices["policy"].tokenizer
    mine = [records[i] for i in own(len(records))]
    samples = [encode(tokenizer, record, ctx.cfg) for record in mine]
    logps = ctx.pair_logps("policy", samples, most_owned(ctx.cfg.dpo.pairs))
    parts = to_all("reference", [[record["id"], *both] for record, both in zip(mine, logps)])
    return {name: (chosen, rejected) for part in parts for name, chosen, rejected in part}


def reference_hash(ctx: Context, weights: str, pairs: PromptSet) -> str:
    """Of all that the log-probs depend on. weights: their fingerprint."""
    policy, tokenizer = ctx.cfg.policy, ctx.voices["policy"].tokenizer
    data = [pairs.hash, PromptSet.of(pairs.heldout).hash if pairs.heldout else ""]
    parts = [weights, *data, tokenizer.hash, policy.system_prompt, policy.thinking, policy.dtype, policy.param_dtype]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
