"""Supervised training on chat data: the warm-up stage before the loop, and a mode of its own.

Every assistant turn is one sample: the turns before it are the prompt, and the loss covers its tokens and its end token.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from coevo_jax.config import Experiment, WarmupConfig
from coevo_jax.data import PromptSet, SlotStream, read_chat
from coevo_jax.distributed import own
from coevo_jax.errors import UserError
from coevo_jax.learn.packing import Sample
from coevo_jax.methods.context import Context
from coevo_jax.methods.stage import Batch, Stage, Step
from coevo_jax.methods.turns import assistant_turn
from coevo_jax.records.facts import Facts


def stages(cfg: Experiment, role: str = "rubric") -> list[Stage]:
    """One stage of `warmup.updates` updates; nothing when that is 0. `role`: whose weights are trained."""
    return [Stage("warmup", role, 0, cfg.warmup.updates, sft_batch, loss="sft")] if cfg.warmup.updates else []


def sft_batch(ctx: Context, step: Step) -> Batch:
    """The next `warmup.batch` examples of the seeded order, as far as they are this process's."""
    cfg, stream = ctx.cfg.warmup, ctx.streams["warmup"]
    samples = [_sample(ctx, stream.next(index), index) for index in own(cfg.batch)]
    lengths = [len(s.completion) for s in samples]
    facts = Facts()
    facts.mean("completions/length/mean", lengths)
    facts.total("tokens/completion", sum(lengths))
    facts.add("most", "epoch", [(step.within + 1) * cfg.batch / len(stream.prompts)])
    aside = stream.prompts.heldout if step.within % cfg.eval_every == 0 else ()
    samples += [dataclasses.replace(_sample(ctx, aside[i], i), heldout=True) for i in own(len(aside))]
    return Batch(samples, facts, [])


def _sample(ctx: Context, record: dict[str, Any], group: int) -> Sample:
    prompt, completion = _encode(ctx, record)
    return Sample(prompt, completion, np.zeros(len(completion), np.float32), advantage=1.0, group=group, index=0)


def with_updates(cfg: Experiment, streams: Mapping[str, SlotStream]) -> Experiment:
    """warmup.epochs as the number of updates that it is, once the data is read."""
    if not cfg.warmup.epochs:
        return cfg
    updates = max(1, round(cfg.warmup.epochs * len(streams["warmup"].prompts) / cfg.warmup.batch))
    return dataclasses.replace(cfg, warmup=dataclasses.replace(cfg.warmup, updates=updates, epochs=0.0))


def read(cfg: WarmupConfig) -> PromptSet:
    """The examples of warmup.data: one an assistant turn. warmup.heldout conversations are set aside whole."""
    found = list(read_chat(cfg.data, key="warmup.data").records)
    if cfg.heldout >= len(found):
        raise UserError(f"warmup.heldout={cfg.heldout} leaves nothing of {len(found)} conversations", where="warmup.heldout",
                        expected=f"at most {len(found) - 1}")  # fmt: skip
    order = np.random.RandomState(cfg.seed % 2**32).permutation(len(found))
    aside = {int(i) for i in order[len(order) - cfg.heldout :]} if cfg.heldout else set[int]()
    kept = PromptSet.of(split_turns([record for i, record in enumerate(found) if i not in aside]), cfg.data)
    return dataclasses.replace(kept, heldout=tuple(split_turns([found[i] for i in sorted(aside)])))


def length(ctx: Context, record: dict[str, Any]) -> int:
    """Tokens of a record's prompt and completion."""
    prompt, completion = _encode(ctx, record)
    return len(prompt) + len(completion)


def _encode(ctx: Context, record: dict[str, Any]) -> tuple[list[int], np.ndarray]:
    """A record of chat data ({messages}) or of rubric examples ({question, rubric}, perhaps with candidates), as ids."""
    if "rubric" in record:
        text = json.dumps(record["rubric"], ensure_ascii=False)
        shown = record.get("candidates")
        prompt = ctx.set_prompt(record["question"], shown) if shown else ctx.rubric_prompt(record["question"], training=True)
        return prompt, assistant_turn(ctx.voices["rubric"].tokenizer, text)
    messages = record["messages"]
    system = messages[0]["content"] if messages[0]["role"] == "system" else ctx.cfg.policy.system_prompt
    turns = [m for m in messages if m["role"] != "system"]
    tokenizer = ctx.voices["policy"].tokenizer
    prompt = tokenizer.render(turns[:-1], thinking=ctx.cfg.policy.thinking, system=system)
    return prompt, assistant_turn(tokenizer, turns[-1]["content"])


def split_turns(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record for each assistant turn, its messages cut after that turn. Rubric examples pass unchanged."""
    out = []
    for record in records:
        if "rubric" in record:
            out.append(record)
            continue
        for i, message in enumerate(record["messages"]):
            if message["role"] == "assistant":
                out.append({**record, "id": f"{record['id']}/{i}", "messages": record["messages"][: i + 1]})
    return out
