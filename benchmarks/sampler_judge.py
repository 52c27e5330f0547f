"""What sharing the common beginning of prompts is worth to a judge that reads next-token probabilities.

    python benchmarks/sampler_judge.py [--what=both|answers|criteria] [--repeats=3] [--json] [--sampler.KEY=VALUE ...]

answers: 8 answers under one rubric, head 350 tokens, tails 190. criteria: 5 criteria x 8 rubrics on one answer, head 600, 40
tails of 100. Each is run with sampler.share_heads on and off, in turn; off is also run with programs no wider than one prompt
(less padding), and the faster of the two counts. Arithmetic gain: n(h + t) / (h + nt) tokens; `share_of_gain` is the measured
ratio over it. Also counted: tokens fed by prefill, positions that its programs computed (padding included), heads kept in the
store. The bytes of keys and values are those of the tokens fed; a shared head is fed once, into one row of the store.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import numpy as np
from _sampler import (
    Engine,
    SamplerConfig,
    UserError,
    apply_overrides,
    header,
    load_model,
    model_and_engine,
    paired_ratio,
    random_ids,
    say,
    split_overrides,
)

from coevo_jax.sampler.kv import bytes_per_token

FORMS = [[70], [71]]  # two answers that a judge tells apart, say yes and no
COUNTED = ("prefill_tokens", "prefill_positions", "heads_kept")


@dataclasses.dataclass(frozen=True)
class Workload:
    """`tails` prompts of head + tail tokens that begin with the same `head` tokens."""

    head: int
    tail: int
    tails: int

    @property
    def gain(self) -> float:
        return self.tails * (self.head + self.tail) / (self.head + self.tails * self.tail)

    @property
    def once(self) -> int:
        """Tokens with the head stored once."""
        return self.head + self.tails * self.tail

    def prompts(self, vocab: int, seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        head = random_ids(rng, self.head, vocab)
        return [np.concatenate([head, random_ids(rng, self.tail, vocab)]) for _ in range(self.tails)]


WORKLOADS = {"answers": Workload(350, 190, 8), "criteria": Workload(600, 100, 40)}


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny (seconds) or a Hugging Face folder")
    parser.add_argument("--what", choices=("both", *WORKLOADS), default="both")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turn, with prompts of their own")
    parser.add_argument("--json", action="store_true")
    args, extra = parser.parse_known_args(argv)
    if args.repeats < 1:
        raise UserError(f"--repeats={args.repeats}", where="command line", expected="at least 1")
    return args, split_overrides(extra)


def engines_for(model: str, work: Workload, overrides: list[str]) -> dict[str, tuple[Any, Engine]]:
    """Shared; not shared, same shapes; not shared, programs that hold one prompt."""
    budget = min(2048, work.tails * work.tail)  # a judge's engine is sized for its work: all tails in one program, or 2048 tokens
    shared = SamplerConfig(slots=8, max_prompt=work.head + work.tail, max_new=8, prefill_tokens=budget)
    shared = apply_overrides(shared, overrides)
    shared = dataclasses.replace(shared, share_heads=True)
    repeated = dataclasses.replace(shared, share_heads=False)
    configs = {"shared": shared, "repeated": repeated, "narrow": dataclasses.replace(repeated, prefill_tokens=1)}
    return {name: model_and_engine(model, cfg, (0,)) for name, cfg in configs.items()}


def timed(held: tuple[Any, Engine], prompts: list[np.ndarray]) -> tuple[float, dict[str, int], np.ndarray]:
    """Seconds, what prefill did (Stats.*), probabilities."""
    model, engine = held
    engine.stats.reset()
    start = time.perf_counter()
    probs = engine.next_token_probs(model.params, prompts, FORMS)
    seconds = time.perf_counter() - start
    return seconds, {name: getattr(engine.stats, name) for name in COUNTED}, probs


def benchmark(args: argparse.Namespace, overrides: list[str], name: str) -> dict[str, Any]:
    work = WORKLOADS[name]
    engines = engines_for(args.model, work, overrides)
    spec = engines["shared"][0].spec
    say(f"{name}: {work.tails} prompts, head {work.head}, tails {work.tail}; {engines['shared'][1].cfg}")
    for label, held in engines.items():
        begin = time.perf_counter()
        held[1].warmup(held[0].params)
        timed(held, work.prompts(spec.vocab_size, 0))
        say(f"  {label}: ready in {time.perf_counter() - begin:.0f} s")
    seconds: dict[str, list[float]] = {label: [] for label in engines}
    counts: dict[str, dict[str, int]] = {}
    gap = 0.0
    for repeat in range(1, args.repeats + 1):
        prompts, probs = work.prompts(spec.vocab_size, repeat), {}
        for label, held in engines.items():
            took, counts[label], probs[label] = timed(held, prompts)
            seconds[label].append(took)
            tokens, positions, heads = counts[label].values()
            say(f"  {repeat}/{args.repeats} {label}: {took:.2f} s, {tokens} tokens in {positions} positions, {heads} heads kept")
        gap = max(gap, *(float(np.abs(np.log(probs["shared"]) - np.log(p)).max()) for p in probs.values()))
    ratios = {label: paired_ratio(seconds[label], seconds["shared"]) for label in ("repeated", "narrow")}
    ratio = min(ratios.values(), key=lambda r: r["median"])
    shared = engines["shared"][1].cfg
    a_token, fed = bytes_per_token(spec, shared.kv_dtype), {label: found["prefill_tokens"] for label, found in counts.items()}
    return {
        "ratio": ratio["median"],
        "ratios": ratios,
        "gain": work.gain,
        "share_of_gain": ratio["median"] / work.gain,
        "seconds": seconds,
        "kv_bytes": {"shared": fed["shared"] * a_token, "repeated": fed["repeated"] * a_token, "once": work.once * a_token},
        "stored_once": fed["shared"] == work.once and counts["shared"]["heads_kept"] == 1,
        "counts": counts,
        "largest_log_prob_difference": gap,
    }


def main(argv: list[str]) -> int:
    try:
        args, overrides = parse(argv)
        apply_overrides(SamplerConfig(), overrides)
        header(model=f"{args.model} ({load_model(args.model).params['embed'].dtype})")
        found = {name: benchmark(args, overrides, name) for name in WORKLOADS if args.what in ("both", name)}
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, f in found.items():
        stored = f["kv_bytes"]
        sizes = ", ".join(f"{what} {size / 1e6:.1f}" for what, size in stored.items())
        say(f"{name}: {f['ratio']:.2f}x without sharing, arithmetic gain {f['gain']:.2f}x, share {f['share_of_gain']:.3f}")
        say(f"  MB of keys and values: {sizes}; heads kept {f['counts']['shared']['heads_kept']}; log-probs differ by at most "
            f"{f['largest_log_prob_difference']:.1e}")  # fmt: skip
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
