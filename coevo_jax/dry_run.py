"""--dry_run: load everything, show what would happen, train nothing: rendered prompts, batch arithmetic, memory by part.

Axes: B rows of a micro-batch, T tokens of a row, D model, V vocabulary, L layers, K kv heads, d head width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from coevo_jax.assemble import assemble
from coevo_jax.config import Experiment
from coevo_jax.judges import JUDGE_PROMPTS
from coevo_jax.judges.scalar import RewardModel
from coevo_jax.learner import tunings
from coevo_jax.methods import rlcer
from coevo_jax.methods.dpo import dpo_batch
from coevo_jax.methods.reward_model import reward_batch
from coevo_jax.methods.stage import Step
from coevo_jax.methods.supervised import sft_batch
from coevo_jax.models.remat import kept_bytes
from coevo_jax.models.spec import ModelSpec
from coevo_jax.modes import MODES
from coevo_jax.progress import RunConsole
from coevo_jax.sampler import Engine
from coevo_jax.sampler.kv import bytes_per_token
from coevo_jax.system import System
from coevo_jax.text.chat import ChatTokenizer
from coevo_jax.text.prompts import render_prompt

GIB = 2**30
SIDES = ("chosen", "rejected")


def dry_run(cfg: Experiment, console: RunConsole | None = None) -> None:
    """Print three rendered prompts as text and ids, the batch arithmetic, and memory by part in GiB."""
    console = console or RunConsole()
    system = assemble(cfg, console, warm_up=False)
    for title, tokenizer, ids in _prompts(system):
        console.note(f"\n== {title}, {len(ids)} tokens\n{tokenizer.decode(ids, keep_special=True)}\nids {ids}")
    for name, source in system.bench.later(0):
        console.note(f"\n{name} {source!r} serves in later cycles and is loaded then: it is not in the sum below")
    for line in _arithmetic(system):
        console.note(line)
    rows = [[name, f"{size / GIB:.3f}"] for name, size in memory(system).items()]
    rows.append(["sum", f"{sum(memory(system).values()) / GIB:.3f}"])
    console.console.table(["memory", "GiB"], rows, title="\nmemory by part, over all devices")


def _prompts(system: System) -> list[tuple[str, ChatTokenizer, list[int]]]:
    """Three texts as the run would make them: title, tokenizer, ids."""
    context, mode = system.context, system.cfg.schedule.mode
    policy, rubric = (context.voices[role].tokenizer for role in ("policy", "rubric"))
    if mode == "reward":
        pair = reward_batch(context, Step(0, 0, 0, "policy")).samples[0]
        return [(f"{side} conversation", policy, getattr(pair, side).tolist()) for side in SIDES]
    if mode == "dpo":
        pair = dpo_batch(context, Step(0, 0, 0, "policy")).samples[0]
        return [(f"prompt and {side} answer", policy, [*pair.prompt.tolist(), *getattr(pair, side).tolist()]) for side in SIDES]
    if mode == "sft":
        samples = sft_batch(context, Step(0, 0, 0, "policy")).samples[:3]
        return [(f"example {i + 1}", policy, [*s.prompt, *s.completion.tolist()]) for i, s in enumerate(samples)]
    if (show := MODES[mode].show) is not None:
        return [(title, context.voices[role].tokenizer, ids) for title, role, ids in show(context)]
    stream = context.streams["policy"]
    if mode == "verifiable":
        questions = [stream.prompts.records[stream.index(i % stream.slots, i // stream.slots)]["prompt"] for i in range(3)]
        return [(f"answer prompt {i + 1}", policy, context.answer_prompt(q)) for i, q in enumerate(questions)]
    question = stream.prompts.records[stream.index(0, 0)]["prompt"]
    asks = rlcer.rubric_prompt(context, question, "(the answer)") if mode == "rlcer" else context.rubric_prompt(question)
    if mode == "dynamic":
        asks = context.set_prompt(question, [f"(answer {n})" for n in range(1, context.cfg.schedule.group + 1)])
    out = [("answer prompt", policy, context.answer_prompt(question)), ("rubric prompt", rubric, asks)]
    return [*out, ("judge prompt", *_judge_prompt(system, question))]


def _judge_prompt(system: System, question: str) -> tuple[ChatTokenizer, list[int]]:
    """In the judge's own tokenizer. A judge without a model reads no prompt; the whole-rubric one is shown for it."""
    seat = system.bench.serving[0]
    cfg, judge = seat.cfg, seat.judge
    instrument = getattr(judge, "instrument", None)
    tokenizer = instrument.tokenizer if instrument else system.context.voices["policy"].tokenizer
    if isinstance(instrument, RewardModel):
        return tokenizer, instrument.ids(question, "(the answer)")
    slots = {"question": question, "answer": "(the answer)"}
    template = JUDGE_PROMPTS.get(cfg.protocol, "judge_criteria")
    shown = {
        "criterion_yes_no": {"criterion": "(one criterion)"},
        "judge_likert": {},
        "judge_reference": {"reference": "(the reference)"},
    }
    messages = render_prompt(template, **slots, **shown.get(template, {"rubric": "(the rubric)"}))
    return tokenizer, tokenizer.render_messages(messages, thinking=cfg.thinking)


def _arithmetic(system: System) -> list[str]:
    s, u = system.cfg.schedule, system.cfg.update
    updates = sum(stage.updates for stage in system.stages)
    number = system.cfg.dpo.pairs if s.mode == "dpo" else system.cfg.reward.pairs
    conversations = f"{number} pairs = {2 * number} conversations an update"
    sequences = f"{s.prompts} prompts x {s.group} samples = {s.prompts * s.group} sequences an update, "
    sequences += f"{u.inner_iterations} pass(es)"
    return [
        "\n== batch arithmetic",
        conversations if s.mode in ("reward", "dpo") else sequences,
        f"packed rows of {u.pack_length} tokens, {u.rows_per_micro} rows a micro-batch, at most {u.max_segments} sequences a row",
        f"stages: {' '.join(f'{stage.name} x{stage.updates}' for stage in system.stages)} = {updates} updates",
    ]


def memory(system: System) -> dict[str, int]:
    """Bytes of each part that lives through the run, and the largest passing ones (activations of a micro-batch, gradients)."""
    cfg, out = system.cfg, {}
    counted: set[int] = set()
    for name, tuning in tunings(system.learners).items():
        if tuning.base is not None:
            out[f"{name}'s frozen base"] = _bytes([x for x in jax.tree.leaves(tuning.base) if id(x) not in counted])
            counted |= {id(x) for x in jax.tree.leaves(tuning.base)}
    for name, learner in system.learners.items():
        params = _bytes(learner.state.params)
        out[f"{name} parameters"] = params
        out[f"{name} optimizer state"] = _bytes(learner.state.opt_state)
        out[f"{name} gradients"] = params
        sizes = [jnp.dtype(d).itemsize for d in (cfg.policy.dtype, cfg.policy.param_dtype)]
        if cfg.loss.kl_weight > 0 and any(stage.loss == "policy" for stage in system.stages):
            lesser = params * sizes[0] // sizes[1]  # whose matrices are in the dtype of the computation
            out[f"{name} reference"] = params if learner.tuning.base is not None else lesser
        if learner.critic is not None:
            state = learner.critic.state
            out[f"{name}'s critic, moments and gradients"] = 2 * _bytes(state.params) + _bytes(state.opt_state)
        if learner.tuning.base is not None:  # what has an adapter, and the rest where it is cast
            kept = (
                {} if sizes[0] != sizes[1] else {n: x for n, x in learner.tuning.base["layers"].items() if n in cfg.lora.targets}
            )
            out[f"{name} sampler copy"] = _bytes(kept or learner.tuning.base) * sizes[0] // sizes[1]
        elif cfg.policy.dtype != cfg.policy.param_dtype:
            out[f"{name} sampler copy"] = params * sizes[0] // sizes[1]
    for name, params in system.frozen.items():
        out[name] = _bytes([x for x in jax.tree.leaves(params) if id(x) not in counted])
    for i, engine in enumerate(system.engines if MODES[cfg.schedule.mode].sampled else []):
        out[f"sampler keys and values {i}" if i else "sampler keys and values"] = kv_bytes(engine)
    out["activations of a micro-batch"] = activation_bytes(system.learners["policy"].spec, cfg)
    return out


def kv_bytes(engine: Engine) -> int:
    """Keys and values of all slots, and of the store of shared heads."""
    cfg, positions = engine.cfg, sum(n * length for n, length in engine.classes)
    if cfg.share_heads or cfg.share_decode:
        positions += cfg.heads * engine.head_width
    return positions * bytes_per_token(engine.spec, cfg.kv_dtype)


def activation_bytes(spec: ModelSpec, cfg: Experiment) -> int:
    """What the forward pass keeps for the gradient, and a chunk of logits, all in float32: the residual stream and what
    update.remat names of every layer; all else of the one in work (and the one before it), or of all layers without remat."""
    u, D, F = cfg.update, spec.hidden_size, spec.mlp_size
    tokens = u.rows_per_micro * u.pack_length
    products = tokens * (2 * D + 2 * F + (spec.heads + 2 * spec.kv_heads) * spec.head_dim)
    scores = tokens * u.pack_length * spec.heads if u.attention == "xla" else 0
    others = tokens * (2 * D + 4 * F + (2 * spec.heads + spec.kv_heads) * spec.head_dim) + scores
    logits = tokens * max(u.vocab_tile, 0) or u.rows_per_micro * u.logprob_chunk * spec.vocab_size
    if u.remat in ("none", "dots"):
        kept, inner = products * spec.layers, spec.layers if u.remat == "none" else 2
    else:
        named = tokens * round(kept_bytes(spec, u.remat) / 2 - D)
        kept, inner = named * spec.layers + 2 * products, 2
    return 4 * (tokens * D * spec.layers + kept + inner * others + 2 * logits)


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
