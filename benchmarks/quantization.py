"""What int8 weights and narrow keys and values cost in accuracy, against full precision (float32 weights, float32 cache).

    python benchmarks/quantization.py [--prompts=16] [--samples=4] [--max_new=64] [--only=weights_int8] [--json]

Variants: the frozen judge's int8 weights (judge.weights), each narrower sampler.kv_dtype, and 'full': full precision against
itself, which is what rounding alone does. Texts: bundled demo prompts and the model's own answers at full precision; every
variant answers and judges through the engine, as a run does.

    log-prob       |log q - log p| of answers that the variant samples: q as it recorded, p at full precision
    KL(q||p)       over those tokens, mean of p/q - 1 - log(p/q), which estimates it without bias; nats a token
    exact KL(p||q) over every position of prompts and full-precision answers (weights only: it needs whole distributions)
    top-1          share of the variant's greedy tokens that are the most likely ones at full precision in the same context
    p(yes)         |difference| of the criterion_logits judge's answers; 'alike': pairs of answers to one question that it ranks
                   the same way (a tie against an order counts half)
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import jax
import jax.numpy as jnp
import numpy as np
from _sampler import (
    DEMO_PROMPTS,
    ModelConfig,
    Sampling,
    UserError,
    header,
    keep_programs,
    load_model,
    requests_of,
    sampler_config,
    say,
    workload,
)

from coevo_jax.config import JudgeConfig, SamplerConfig
from coevo_jax.config.limits import CHOICES
from coevo_jax.judges import JudgeItem, make_judge
from coevo_jax.models.forward import forward, unembed
from coevo_jax.models.quantize import quantize_params, weight_bytes
from coevo_jax.models.spec import ModelSpec
from coevo_jax.records.verdicts import Verdict
from coevo_jax.rubrics import Criterion, Rubric
from coevo_jax.sampler import Completion, Engine
from coevo_jax.text.chat import ChatTokenizer

KV_DTYPES = tuple(name for name in CHOICES["sampler.kv_dtype"] if name != "float32")
VARIANTS = ("full", "weights_int8", *(f"kv_{name}" for name in KV_DTYPES))
CRITERIA = ("The answer is correct.", "The answer is short and clear.", "The answer gives an example.")
RUBRIC = Rubric(tuple(Criterion(text, 1 / len(CRITERIA)) for text in CRITERIA))
JUDGE_ROOM = 384  # tokens of a judge's prompt beyond those of the answer


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="like judge.source")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4, help="answers a prompt")
    parser.add_argument("--max_new", type=int, default=64, help="longest answer, tokens")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--only", choices=VARIANTS, help="one variant")
    parser.add_argument("--json", action="store_true", help="the last line is one object")
    args = parser.parse_args(argv)
    for name, least in (("prompts", 1), ("samples", 2), ("max_new", 1), ("slots", 1)):
        if getattr(args, name) < least:
            raise UserError(f"--{name}={getattr(args, name)}", where="command line", expected=f"at least {least}")
    return args


# ---- what a variant does -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Subject:
    """Weights and an engine: full precision, or a variant."""

    params: Any
    engine: Engine
    tokenizer: ChatTokenizer

    def answers(self, prompts: list[list[int]], n: int, max_new: int, temperature: float) -> list[list[Completion]]:
        return self.engine.generate(self.params, requests_of(prompts, n, Sampling(temperature, max_new_tokens=max_new)))

    def verdicts(self, items: list[JudgeItem]) -> list[Verdict]:
        """Every item gets its numbers, however little the model says yes or no."""
        cfg = JudgeConfig(min_yes_no_mass=0.0)
        found = make_judge(cfg, self.engine, self.params, self.tokenizer, 0).judge(items, 0)
        failed = [v for v in found if v.status != "ok"]
        if failed:
            raise RuntimeError(f"{len(failed)} verdicts failed, the first: {failed[0].detail}")
        return found


@functools.partial(jax.jit, static_argnums=0)
def log_probs(spec: ModelSpec, params: Any, tokens_1xT: jax.Array) -> jax.Array:
    """[T,V] float32."""
    positions = jnp.arange(tokens_1xT.shape[1], dtype=jnp.int32)[None]
    hidden = forward(params, spec, tokens_1xT, positions, jnp.ones_like(tokens_1xT))
    return jax.nn.log_softmax(unembed(params, spec, hidden[0]), axis=1)


@jax.jit
def kl_and_agreement(p_TxV: jax.Array, q_TxV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """KL(p||q) and whether both have the same most likely token, [T]."""
    return jnp.sum(jnp.exp(p_TxV) * (p_TxV - q_TxV), axis=1), jnp.argmax(p_TxV, axis=1) == jnp.argmax(q_TxV, axis=1)


def padded(ids: np.ndarray, width: int) -> np.ndarray:
    """[1,width]: one length compiles once, and what follows a token does not reach it."""
    out = np.zeros((1, width), np.int32)
    out[0, : len(ids)] = ids
    return out


def exact(full: Subject, params: Any, texts: list[np.ndarray], width: int) -> dict[str, float]:
    """Whole distributions after every token of the texts."""
    kl, same = [], []
    for ids in texts:
        p, q = (log_probs(full.engine.spec, w, padded(ids, width)) for w in (full.params, params))
        k, s = kl_and_agreement(p, q)
        kl.append(np.asarray(k)[: len(ids)])
        same.append(np.asarray(s)[: len(ids)])
    values = np.concatenate(kl)
    return {"exact_kl_mean": float(values.mean()), "exact_kl_max": float(values.max()),
            "exact_top1": float(np.concatenate(same).mean()), "exact_positions": values.size}  # fmt: skip


def sampled(full: Subject, it: Subject, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, float]:
    """Answers that the variant samples, as it recorded them and at full precision."""
    rows = it.answers(prompts, args.samples, args.max_new, 1.0)
    pairs = [(prompt, completion) for prompt, row in zip(prompts, rows) for completion in row]
    scored = full.engine.score(full.params, [p for p, _ in pairs], [c.tokens for _, c in pairs])
    log_ratio = np.concatenate([p.astype(np.float64) - c.logprobs for p, (_, c) in zip(scored, pairs)])
    return {"logprob_mean": float(np.abs(log_ratio).mean()), "logprob_max": float(np.abs(log_ratio).max()),
            "kl": float((np.expm1(log_ratio) - log_ratio).mean()), "tokens": log_ratio.size}  # fmt: skip


def greedy(full: Subject, it: Subject, prompts: list[list[int]], width: int, max_new: int) -> dict[str, float]:
    """The variant's most likely tokens against those of full precision after the same tokens."""
    same = []
    for prompt, (completion,) in zip(prompts, it.answers(prompts, 1, max_new, 0.0)):
        ids = np.concatenate([np.asarray(prompt, np.int32), completion.tokens])
        best = np.asarray(jnp.argmax(log_probs(full.engine.spec, full.params, padded(ids, width)), axis=1))
        same.append(best[len(prompt) - 1 : len(ids) - 1] == completion.tokens)
    return {"top1": float(np.concatenate(same).mean()), "greedy_tokens": int(sum(len(s) for s in same))}


def judged(before: list[Verdict], after: list[Verdict], group: int) -> dict[str, float]:
    """Verdicts of the same items; each run of `group` items answers one question."""
    p, q = (np.asarray([v.parts for v in verdicts]) for verdicts in (before, after))
    x, y = (np.asarray([v.score for v in verdicts]).reshape(-1, group) for verdicts in (before, after))
    pairs = [(np.sign(x[:, i] - x[:, j]), np.sign(y[:, i] - y[:, j])) for i, j in itertools.combinations(range(group), 2)]
    alike = np.concatenate([1 - np.abs(a - b) / 2 for a, b in pairs])
    return {"p_yes_mean": float(np.abs(p - q).mean()), "p_yes_max": float(np.abs(p - q).max()),
            "ranked_alike": float(alike.mean()), "verdicts": len(after), "ranked_pairs": alike.size}  # fmt: skip


# ---- the run -----------------------------------------------------------------------------------------------------------


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    model = load_model(ModelConfig(source=args.model))
    tokenizer = ChatTokenizer.load(model.folder)
    questions, _ = workload(str(DEMO_PROMPTS), args.prompts)
    prompts = [tokenizer.render([{"role": "user", "content": q}], thinking=False, system=None) for q in questions]
    longest = max(map(len, prompts))
    width = -(-(longest + args.max_new) // 32) * 32
    what = f"{len(prompts)} of the bundled demo prompts, {args.samples} answers each, at most {args.max_new} tokens"
    header(model=f"{args.model} (float32)", workload=what)
    cfg = sampler_config(args.slots, longest + args.max_new + JUDGE_ROOM, args.max_new)
    full = Subject(model.params, _engine(model.spec, cfg, tokenizer), tokenizer)
    answered = full.answers(prompts, args.samples, args.max_new, 1.0)
    texts = [np.concatenate([np.asarray(p, np.int32), c.tokens]) for p, row in zip(prompts, answered) for c in row]
    answers = [(q, tokenizer.decode(c.tokens.tolist())) for q, row in zip(questions, answered) for c in row]
    items = [JudgeItem(question, RUBRIC, answer, i) for i, (question, answer) in enumerate(answers)]
    verdicts = full.verdicts(items)
    found: dict[str, Any] = {"model": args.model, "prompts": len(prompts), "samples": args.samples, "max_new": args.max_new}
    found["weight_bytes"] = {"full": weight_bytes(model.params)}
    found["variants"] = {}
    for name in [args.only] if args.only else VARIANTS:
        start = time.perf_counter()
        kind, _, choice = name.partition("_")
        it = full
        if kind == "weights":
            it = dataclasses.replace(full, params=quantize_params(full.params))
            found["weight_bytes"][choice] = weight_bytes(it.params)
        elif kind == "kv":
            it = dataclasses.replace(full, engine=_engine(model.spec, dataclasses.replace(cfg, kv_dtype=choice), tokenizer))
        figures = sampled(full, it, prompts, args) | greedy(full, it, prompts, width, args.max_new)
        figures |= judged(verdicts, it.verdicts(items), args.samples)
        if kind == "weights":
            figures |= exact(full, it.params, texts, width)
        found["variants"][name] = figures
        report(name, figures)
        say(f"  {time.perf_counter() - start:.0f} s")
    return found


def _engine(spec: ModelSpec, cfg: SamplerConfig, tokenizer: ChatTokenizer) -> Engine:
    return Engine(spec, cfg, tokenizer.stop_ids, seed=1)


def report(name: str, f: dict[str, float]) -> None:
    """One line a group of figures."""
    say(f"{name}:\n"
        f"  log-prob off by {f['logprob_mean']:.2e} on average, {f['logprob_max']:.2e} at most, KL(q||p) {f['kl']:.2e} "
        f"({f['tokens']} tokens)\n"
        f"  top-1 {f['top1']:.4f} ({f['greedy_tokens']} tokens)")  # fmt: skip
    if "exact_kl_mean" in f:
        say(f"  exact KL(p||q) {f['exact_kl_mean']:.2e} on average, {f['exact_kl_max']:.2e} at most, top-1 {f['exact_top1']:.4f} "
            f"({f['exact_positions']} positions)")  # fmt: skip
    say(f"  p(yes) off by {f['p_yes_mean']:.2e} on average, {f['p_yes_max']:.2e} at most ({f['verdicts']} verdicts); ranked "
        f"alike {f['ranked_alike']:.4f} ({f['ranked_pairs']} pairs)")  # fmt: skip


def main(argv: list[str]) -> int:
    keep_programs()
    try:
        args = parse(argv)
        found = benchmark(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sizes = found["weight_bytes"]
    say("weights: " + ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in sizes.items()))
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
