"""Supervised training on chat data: the warm-up stage before the loop, and a mode of its own.

Every assistant turn is one sample: the turns before it are the prompt, and the loss covers its tokens and its end token.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from coevo_jax.config import Experiment
from coevo_jax.distributed import own
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
    samples = []
    for index in own(ctx.cfg.warmup.batch):
        prompt, completion = _encode(ctx, ctx.streams["warmup"].next(index))
        zeros = np.zeros(len(completion), np.float32)
        samples.append(
            Sample(prompt=prompt, completion=completion, sampler_logp=zeros, advantage=1.0, group=index, index=0, truncated=False)
        )
    lengths = [len(s.completion) for s in samples]
    facts = Facts()
    facts.mean("completions/length/mean", lengths)
    facts.total("tokens/completion", sum(lengths))
    return Batch(samples, facts, [])


def length(ctx: Context, record: dict[str, Any]) -> int:
    """Tokens of a record's prompt and completion."""
    prompt, completion = _encode(ctx, record)
    return len(prompt) + len(completion)


def _encode(ctx: Context, record: dict[str, Any]) -> tuple[list[int], np.ndarray]:
    """A record of chat data ({messages}) or of rubric examples ({question, rubric}), as prompt and completion ids."""
    if "rubric" in record:
        text = json.dumps(record["rubric"], ensure_ascii=False)
        prompt = ctx.rubric_prompt(record["question"], training=True)
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
