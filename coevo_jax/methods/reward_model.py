"""Training a scalar reward model by Bradley-Terry on preference pairs; judge.protocol=scalar reads what comes out.

A conversation is rendered as the judge renders it (judges/scalar.py): what is trained is what is asked later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from coevo_jax.config import Experiment
from coevo_jax.data import PromptSet, SlotStream, read_pairs
from coevo_jax.data.prompts import normalise_space
from coevo_jax.distributed import own
from coevo_jax.errors import UserError
from coevo_jax.judges.scalar import conversation
from coevo_jax.learn.reward_model import PairSample
from coevo_jax.methods.context import Context
from coevo_jax.methods.stage import Batch, Stage, Step
from coevo_jax.progress import RunConsole
from coevo_jax.records.facts import Facts
from coevo_jax.text.chat import ChatTokenizer

STREAM = "reward"


def stages(cfg: Experiment) -> list[Stage]:
    """`cycles` stages of K updates."""
    return [Stage("reward", "policy", cycle, cfg.schedule.k, reward_batch, loss="reward") for cycle in range(cfg.schedule.cycles)]


def reward_batch(ctx: Context, step: Step) -> Batch:
    """The next `reward.pairs` pairs of the seeded order, as far as they are this process's."""
    tokenizer, stream = ctx.voices["policy"].tokenizer, ctx.streams[STREAM]
    records = [stream.next(slot) for slot in own(ctx.cfg.reward.pairs)]
    samples = [encode(tokenizer, record, ctx.cfg) for record in records]
    facts = Facts()
    lengths = [(len(s.chosen), len(s.rejected)) for s in samples]
    facts.mean("completions/length/mean", [n for both in lengths for n in both])
    facts.share("pairs/longer_chosen_share", [a > b for a, b in lengths])
    facts.total("tokens/conversations", sum(map(sum, lengths)))
    seen = (step.update + 1) * ctx.cfg.reward.pairs
    facts.add("most", "epoch", [seen / len(stream.prompts)])
    if step.update % ctx.cfg.reward.eval_every == 0:
        aside = [stream.prompts.heldout[i] for i in own(len(stream.prompts.heldout))]
        samples += [dataclasses.replace(encode(tokenizer, record, ctx.cfg), heldout=True) for record in aside]
    return Batch(samples, facts, [])


def encode(tokenizer: ChatTokenizer, record: Mapping[str, Any], cfg: Experiment) -> PairSample:
    """A pair's conversations as token ids, and its margin (reward.margin, plus its own with reward.data_margin)."""
    chosen, rejected = (
        np.asarray(conversation(tokenizer, record["prompt"], record[side]), np.int32) for side in ("chosen", "rejected")
    )
    return PairSample(chosen, rejected, cfg.reward.margin + (record["margin"] if cfg.reward.data_margin else 0.0))


def read(cfg: Experiment, tokenizer: ChatTokenizer, progress: Callable[[int, int], None]) -> PromptSet:
    """The pairs of reward.data whose conversations fit; counts["over_limit"] says how many don't.

    UserError: one is too long and data.over_limit=refuse, none is left, or one has no margin and reward.data_margin asks for it.
    """
    found, kept, limit = read_pairs(cfg.reward.data, key="reward.data"), [], cfg.reward.max_tokens or cfg.update.pack_length
    for i, record in enumerate(found.records):
        if i % 1000 == 999:
            progress(i + 1, len(found))
        if cfg.reward.data_margin and "margin" not in record:
            raise UserError(f"the pair {record['id']!r} has no margin", where="reward.data_margin, reward.data",
                            expected="a number in the column 'margin' of every pair, or reward.data_margin=false")  # fmt: skip
        sample = encode(tokenizer, record, cfg)
        longest = max(len(sample.chosen), len(sample.rejected))
        if longest > limit and cfg.data.over_limit == "refuse":
            raise UserError(
                f"a conversation of the pair {record['id']!r} has {longest} tokens, over the limit of {limit}",
                where="reward.max_tokens, update.pack_length", expected=f"at least {longest}, or data.over_limit=filter",
            )  # fmt: skip
        if longest <= limit:
            kept.append(record)
    if not kept:
        raise UserError(f"all {len(found)} pairs are over the limit of {limit} tokens", where=f"reward.data={cfg.reward.data}",
                        expected="a larger reward.max_tokens or update.pack_length, or shorter conversations")  # fmt: skip
    found = found if len(kept) == len(found) else _without(found, {record["id"] for record in kept})
    return _hold_out(found, cfg)


def streams(cfg: Experiment, tokenizer: ChatTokenizer, count: Callable[[str], int], console: RunConsole) -> dict[str, SlotStream]:
    """The stream of pairs."""
    pairs = read(cfg, tokenizer, lambda done, total: console.progress("pairs measured", done, total))
    console.note(f"{len(pairs)} pairs" + (f", {n} over the limit left out" if (n := pairs.filtered) else ""))
    return {STREAM: SlotStream(pairs, cfg.seed, cfg.reward.pairs, STREAM)}


def _hold_out(found: PromptSet, cfg: Experiment) -> PromptSet:
    """Set reward.heldout pairs aside, with every pair of the same question: none of theirs is trained on."""
    count = cfg.reward.heldout
    if count == 0:
        return found
    if count >= len(found):
        raise UserError(f"reward.heldout={count} leaves nothing of {len(found)} pairs", where="reward.heldout",
                        expected=f"at most {len(found) - 1}")  # fmt: skip
    order = np.random.RandomState(cfg.seed % 2**32).permutation(len(found))
    aside = [found.records[i] for i in order[len(order) - count :]]
    questions = {normalise_space(record["prompt"]) for record in aside}
    kept = {record["id"] for record in found.records if normalise_space(record["prompt"]) not in questions}
    if not kept:
        raise UserError(f"reward.heldout={count} leaves no other question", where="reward.heldout", expected="a smaller number")
    return dataclasses.replace(_without(found, kept, dict(found.counts)), heldout=tuple(aside))


def _without(found: PromptSet, kept: set[str], counts: dict[str, int] | None = None) -> PromptSet:
    """A set without the records that are not `kept`; the shares of a mixture stay. counts: of the new set, else how many left for
    their length."""
    records: list[dict[str, Any]] = []
    parts = []
    for start, size, share in found.parts:
        component = [r for r in found.records[start : start + size] if r["id"] in kept]
        if not component:
            raise UserError("nothing is left of one component of the mixture", where=f"reward.data={found.source}",
                            expected="a larger reward.max_tokens, a smaller reward.heldout, or a mixture without it")  # fmt: skip
        parts.append((len(records), len(component), share))
        records += component
    counts = {"over_limit": len(found) - len(records)} if counts is None else counts
    return PromptSet(tuple(records), tuple(parts), found.source, counts=counts)
