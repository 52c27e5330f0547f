"""A long-tail workload: how full the slots stay, and what refilling them is worth.

    python benchmarks/sampler_tail.py [--model=tiny] [--slots=8] [--sequences=192] [--seed=0] [--json] [--sampler.KEY=VALUE]

Lengths come from --seed: a Pareto law of exponent 1 cut to 8..1024 tokens, forced by min_new_tokens = max_new_tokens. Occupancy:
active row-steps over slots x steps, the drain at the end included. `ratio`: seconds of the same engine without refill (batches of
--slots sequences in arrival order, each run to the end of its longest) over seconds with it. The engine knows each length as the
request's limit and starts the longest first; `arrival_order_occupancy` is the arithmetic for a scheduler that doesn't know them.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import numpy as np
from _sampler import (
    ROLE,
    Engine,
    Request,
    Sampling,
    UserError,
    header,
    heavy_tail,
    model_and_engine,
    random_ids,
    sampler_config,
    say,
    split_overrides,
    steps_with_refill,
    steps_without_refill,
)

PROMPT = 16  # tokens


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny (seconds; same lengths) or a Hugging Face folder")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=192)
    parser.add_argument("--longest", type=int, default=1024, help="tokens at which the law is cut")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and prompts")
    parser.add_argument("--json", action="store_true")
    args, extra = parser.parse_known_args(argv)
    for name, least in (("slots", 1), ("sequences", 1), ("longest", 9)):
        if getattr(args, name) < least:
            raise UserError(f"--{name}={getattr(args, name)}", where="command line", expected=f"at least {least}")
    return args, split_overrides(extra)


def requests_for(lengths: np.ndarray, vocab: int, seed: int) -> list[Request]:
    """One sequence a request, in arrival order, of exactly the length given."""
    rng = np.random.default_rng(seed + 1)
    return [
        Request(random_ids(rng, PROMPT, vocab), 1, ROLE, 0, i, Sampling(max_new_tokens=int(n), min_new_tokens=int(n)))
        for i, n in enumerate(lengths)
    ]


def timed(engine: Engine, params: Any, batches: list[list[Request]], what: str) -> dict[str, Any]:
    """Run batches one after the other: seconds, steps, occupancy, tokens."""
    engine.stats.reset()
    start = shown = time.perf_counter()
    done, total = 0, sum(len(batch) for batch in batches)
    for batch in batches:
        rows = engine.generate(params, batch)
        wrong = [r.request for r, row in zip(batch, rows) if len(row[0].tokens) != r.sampling.max_new_tokens]
        if wrong:
            raise RuntimeError(f"requests {wrong} have another length than was forced")
        done, now = done + len(batch), time.perf_counter()
        if now - shown > 10:
            shown = now
            say(f"  {what}: {done}/{total} sequences, {(now - start) / done * (total - done):.0f} s left")
    seconds = time.perf_counter() - start
    stats = engine.stats
    steps = stats.slot_steps // engine.cfg.slots
    say(f"{what}: {seconds:.1f} s, {stats.tokens / seconds:.1f} tokens/s, {steps} steps, occupancy {stats.occupancy:.3f}")
    return {
        "seconds": seconds,
        "occupancy": stats.occupancy,
        "steps": steps,
        "tokens": stats.tokens,
        "dispatches": stats.dispatches,
    }


def benchmark(args: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    lengths = heavy_tail(args.sequences, args.seed, high=args.longest)
    plan = {"refill": steps_with_refill(np.sort(lengths)[::-1], args.slots),
            "arrival": steps_with_refill(lengths, args.slots), "batches": steps_without_refill(lengths, args.slots)}  # fmt: skip
    cfg = sampler_config(args.slots, PROMPT, args.longest, overrides)
    model, engine = model_and_engine(args.model, cfg, ())
    header(model=f"{args.model} (float32)", config=repr(cfg),
           lengths=f"{len(lengths)} from seed {args.seed}: least {lengths.min()}, median {int(np.median(lengths))}, mean "
                   f"{lengths.mean():.1f}, longest {lengths.max()}",
           steps=f"at least {plan['refill']} with refill, {plan['batches']} without")  # fmt: skip
    say(f"compiled in {engine.warmup(model.params, next_token=False):.0f} s")
    requests = requests_for(lengths, model.spec.vocab_size, args.seed)
    refilled = timed(engine, model.params, [requests], "with refill")
    batches = [requests[i : i + args.slots] for i in range(0, len(requests), args.slots)]
    unfilled = timed(engine, model.params, batches, "without refill")
    row_steps = int(lengths.sum())
    return {
        "occupancy": refilled["occupancy"],
        "ratio": unfilled["seconds"] / refilled["seconds"],
        "with_refill": refilled,
        "without_refill": unfilled,
        "best_occupancy": row_steps / (args.slots * plan["refill"]),  # longest first, refill at every step
        "arrival_order_occupancy": row_steps / (args.slots * plan["arrival"]),
        "model": args.model,
        "slots": args.slots,
        "steps_per_dispatch": cfg.steps_per_dispatch,
        "read_lag": cfg.read_lag,
        "seed": args.seed,
        "lengths": {"count": len(lengths), "mean": float(lengths.mean()), "longest": int(lengths.max())},
    }


def main(argv: list[str]) -> int:
    try:
        args, overrides = parse(argv)
        found = benchmark(args, overrides)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    say(f"occupancy {found['occupancy']:.3f} (at best {found['best_occupancy']:.3f}; refilled in arrival order at every step "
        f"{found['arrival_order_occupancy']:.3f}), {found['ratio']:.2f}x the same engine without refill")  # fmt: skip
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
