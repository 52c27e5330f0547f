"""Training a scalar reward model by Bradley-Terry on preference pairs; judge.protocol=scalar reads what comes out.

A conversation is rendered as the judge renders it (judges/scalar.py): what is trained is what is asked later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from coevo_jax.config import Experiment
from coevo_jax.data import PromptSet, SlotStream
from coevo_jax.distributed import own
from coevo_jax.errors import UserError
from coevo_jax.judges.scalar import conversation
from coevo_jax.learn.reward_model import PairSample
from coevo_jax.methods import pair_data
from coevo_jax.methods.context import Context
from coevo_jax.methods.pair_data import PairSource
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
    """The pairs of reward.data whose conversations fit (pair_data.py). UserError too where one has no margin and
    reward.data_margin asks for it."""

    def longest(record: Mapping[str, Any]) -> int:
        if cfg.reward.data_margin and "margin" not in record:
            raise UserError(f"the pair {record['id']!r} has no margin", where="reward.data_margin, reward.data",
                            expected="a number in the column 'margin' of every pair, or reward.data_margin=false")  # fmt: skip
        sample = encode(tokenizer, record, cfg)
        return max(len(sample.chosen), len(sample.rejected))

    limit = cfg.reward.max_tokens or cfg.update.pack_length
    source = PairSource("reward", cfg.reward.data, limit, cfg.data.over_limit == "refuse", cfg.reward.heldout, cfg.seed)
    return pair_data.read(source, longest, progress, "conversation")


def streams(cfg: Experiment, tokenizer: ChatTokenizer, count: Callable[[str], int], console: RunConsole) -> dict[str, SlotStream]:
    """The stream of pairs."""
    pairs = read(cfg, tokenizer, lambda done, total: console.progress("pairs measured", done, total))
    console.note(f"{len(pairs)} pairs" + (f", {n} over the limit left out" if (n := pairs.filtered) else ""))
    return {STREAM: SlotStream(pairs, cfg.seed, cfg.reward.pairs, STREAM)}
