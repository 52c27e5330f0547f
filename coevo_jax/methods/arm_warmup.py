"""Supervised warm-up of Rubric-ARM's generator and judge on demonstrations (data/arm.py): a list for a question, and a judgement
of two answers under that list, in whichever order, by the prompts that are deployed."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from coevo_jax.config import Experiment
from coevo_jax.data import SlotStream
from coevo_jax.data.arm import named, read_demonstrations
from coevo_jax.distributed import most_owned, own
from coevo_jax.errors import UserError
from coevo_jax.judges import comparison
from coevo_jax.learn.packing import Sample
from coevo_jax.methods.arm_judge import ROLE, better_slot, pair_item, prompt
from coevo_jax.methods.context import Context
from coevo_jax.methods.stage import Batch, Stage, Step
from coevo_jax.methods.turns import assistant_turn
from coevo_jax.records.facts import Facts
from coevo_jax.rubrics import Criterion, Rubric, numbered_list

STREAMS = {"rubric": "arm_warm_rubric", ROLE: "arm_warm_judge"}  # by role


def stages(cfg: Experiment) -> list[Stage]:
    """The generator's, then the judge's; nothing without updates."""
    n, most = cfg.arm.warmup_updates, most_owned(cfg.warmup.batch)
    one = lambda name, role: Stage(name, role, 0, n, functools.partial(_batch, role), loss="sft", most=most)  # noqa: E731
    return [one("warm_generator", "rubric"), one("warm_judge", ROLE)] if n else []


def streams(cfg: Experiment) -> dict[str, SlotStream]:
    """Each role's walk through the demonstrations."""
    if not cfg.arm.warmup_updates:
        return {}
    found = read_demonstrations(cfg.arm.demonstrations)
    return {name: SlotStream(found, cfg.warmup.seed, cfg.warmup.batch, name) for name in STREAMS.values()}


def check(ctx: Context) -> None:
    """Every demonstration fits a packed row and says all that the judge's form asks for. UserError."""
    for role, name in STREAMS.items():
        for record in ctx.streams[name].prompts.records if name in ctx.streams else ():
            try:
                ids, completion = encode(ctx, role, record, 0)
            except UserError as error:
                raise UserError(f"the demonstration {record['id']!r}: {error.what}", where="arm.demonstrations",
                                expected=error.expected) from error  # fmt: skip
            if (length := len(ids) + len(completion)) > ctx.cfg.update.pack_length:
                raise UserError(f"the demonstration {record['id']!r} has {length} tokens for the {role}, and a packed row holds "
                                f"{ctx.cfg.update.pack_length}", where="arm.demonstrations, update.pack_length",
                                expected=f"update.pack_length of at least {length}, or shorter ones")  # fmt: skip


def _batch(role: str, ctx: Context, step: Step) -> Batch:
    """The next warmup.batch demonstrations, as far as they are this process's."""
    samples, where = [], []
    for index in own(ctx.cfg.warmup.batch):
        record = ctx.streams[STREAMS[role]].next(index)
        ids, completion = encode(ctx, role, record, step.update)
        where.append(better_slot(ctx.cfg.seed, step.update, record["id"]))
        zeros = np.zeros(len(completion), np.float32)
        samples.append(Sample(prompt=ids, completion=completion, sampler_logp=zeros, advantage=1.0, group=index, index=0,
                              truncated=False))  # fmt: skip
    facts = Facts()
    facts.mean("completions/length/mean", [len(s.completion) for s in samples])
    facts.total("tokens/completion", sum(len(s.completion) for s in samples))
    if role == ROLE:
        facts.share("arm/preferred_in_a_share", [slot == "A" for slot in where])
    return Batch(samples, facts, [])


def rubric_of(record: dict[str, Any]) -> Rubric:
    """A demonstration's list."""
    rules = record["rules"]
    return Rubric(tuple(Criterion(r["text"], numbered_list.WEIGHTS.get(r["tag"], 1.0), title=r["tag"]) for r in rules))


def encode(ctx: Context, role: str, record: dict[str, Any], update: int) -> tuple[list[int], np.ndarray]:
    """Prompt and completion ids of a demonstration. The preferred answer's slot is drawn anew in each update."""
    rubric = rubric_of(record)
    tokenizer = ctx.voices[role].tokenizer
    if role == "rubric":
        ids, text = ctx.rubric_prompt(record["prompt"], training=True), numbered_list.render(rubric)
    else:
        slot = better_slot(ctx.cfg.seed, update, record["id"])
        item = pair_item(record["prompt"], rubric, record["chosen"], record["rejected"], slot, 0)
        ids, text = prompt(ctx, item), judgement_of(record, rubric, slot)
    return ids, assistant_turn(tokenizer, text)


def judgement_of(record: dict[str, Any], rubric: Rubric, slot: str) -> str:
    """The demonstration's judgement with the preferred answer in `slot`. UserError where its structure is not whole."""
    slots = {"chosen": slot, "rejected": "AB".replace(slot, "")}
    said = {where: [named(rule[side], slots) for rule in record["rules"]] for side, where in slots.items()}
    checked = {where: named(record["check"][side], slots) for side, where in slots.items()}
    return comparison.write(rubric, record["gate"], said, checked, named(record["why"], slots), slot)
