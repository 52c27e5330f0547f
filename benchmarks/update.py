"""One GRPO update of SmolLM2-135M on two cores, ours and torch's in turns: equal rows, tokens, loss and optimizer.

    python benchmarks/update.py [--rounds=2] [--steps=3] [--json] [--update.KEY=VALUE ...]
    python benchmarks/sampler.py --install hf           # once: the peer's environment (torch and transformers)

Even rows: 8 x 256 random tokens, against the shared torch_train_step.py as it is. Mixed rows: 16 of 24 to 256 tokens, which the
peer pads in the order given, 8 at a time, and we pack; peers/torch_update.py is that script's update with masks. Tokens that are
no padding count; recomputation and micro-batches are each side's choice. On mixed rows both sides draw the same ids, and their
losses before the first update are compared. `ratio` and `ratio_mixed`: ours over torch's, each the median of a turn's steps; the
median [min, max] over rounds. `product_share`: useful tokens/s x 6N over this machine's rate of matrix products at 512 rows,
taken in our process after its steps (_sampler.ProductChain). Peak memory: each process's largest resident set.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import statistics
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import sampler
from _sampler import UserError, header, paired_ratio, say
from _turns import PEERS, Turn, our_environment, peer_environment, shared_peer, take_turn

EVEN = (8, 256)
STEP = re.compile(r"^step\s+([\d.]+) s\s+([\d.]+) tokens/s")


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Flags, and the KEY=VALUE of each --update.KEY=VALUE."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--steps", type=int, default=3, help="timed updates of ours and of the mixed peer; the shared script makes 3"
    )
    parser.add_argument("--rows", type=int, default=EVEN[0])
    parser.add_argument("--tokens", type=int, default=EVEN[1], help="of an even row, and the most of a mixed one")
    parser.add_argument("--peer", choices=("torch", "none"), default="torch")
    parser.add_argument("--model", default="smollm2", help="smollm2 or a Hugging Face folder of a Llama")
    parser.add_argument("--hf_python", default="", help="interpreter that has torch and transformers")
    parser.add_argument("--json", action="store_true")
    args, extra = parser.parse_known_args(argv)
    for name in ("rounds", "steps", "rows", "tokens"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}={getattr(args, name)}", where="command line", expected="at least 1")
    for text in extra:
        if not text.startswith("--update.") or "=" not in text:
            raise UserError(f"unknown argument {text!r}", where="command line", expected="--update.KEY=VALUE, or see --help")
    return args, [text.removeprefix("--update.") for text in extra]


def mixed_lengths(rows: int, longest: int, seed: int = 0) -> list[int]:
    """Two padded batches of lengths as answers have them: lognormal, median 0.4 of the longest, sigma 0.6, cut to 24..longest."""
    import numpy as np

    drawn = np.random.default_rng(seed).lognormal(0.0, 0.6, 2 * rows) * 0.4 * longest
    return [int(n) for n in np.clip(np.rint(drawn), min(24, longest), longest)]


def padded(lengths: list[int], rows: int) -> int:
    """Tokens that a peer computes when it pads `rows` rows at a time to the longest of them."""
    batches = [lengths[i : i + rows] for i in range(0, len(lengths), rows)]
    return sum(len(b) * max(b) for b in batches)


def read_steps(turn: Turn) -> list[float]:
    """Tokens/s of the shared script's timed steps. ValueError when it printed none."""
    found = [float(m[2]) for line in turn.lines if (m := STEP.match(line))]
    if not found:
        raise ValueError("the peer printed no line 'step ... s ... tokens/s':\n" + "\n".join(turn.lines))
    return found


def benchmark(args: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    folder = sampler.peer_model(args.model)
    lengths = {"even": [args.tokens] * args.rows, "mixed": mixed_lengths(args.rows, args.tokens)}
    torch = args.peer == "torch" and sampler.interpreter("hf", args.hf_python)
    script = shared_peer("torch_train_step.py") if torch else None
    waste = padded(lengths["mixed"], args.rows) / sum(lengths["mixed"])
    header(even=f"{args.rows} x {args.tokens} tokens", model=f"{folder} (float32)",
           mixed=f"{len(lengths['mixed'])} rows, {sum(lengths['mixed'])} tokens, {waste:.2f} times as many padded")  # fmt: skip
    asked = {"model": str(folder), "rows": args.rows, "steps": args.steps}
    found: dict[str, Any] = {"ours": [], "torch": [], "ours_mixed": [], "torch_mixed": [], "peak": [], "products": []}
    for number in range(args.rounds):
        say(f"round {number + 1}/{args.rounds}")
        for kind, own in lengths.items():
            spec = json.dumps({**asked, "lengths": own, "overrides": overrides, "products": kind == "even"})
            turn = take_turn("ours", [sys.executable, str(PEERS / "ours_update.py"), spec], our_environment())
            _keep(found, "ours" if kind == "even" else "ours_mixed", turn.last["rates"], turn, turn.last)
            if torch and kind == "even":
                command = [torch, str(script), str(folder), str(args.rows), str(args.tokens)]
                turn = take_turn("torch", command, peer_environment())
                _keep(found, "torch", read_steps(turn), turn, {})
            elif torch:
                turn = take_turn("torch", [torch, str(PEERS / "torch_update.py"), spec], peer_environment())
                _keep(found, "torch_mixed", turn.last["rates"], turn, turn.last)
    return summary(found, waste)


def _keep(found: dict[str, Any], name: str, rates: list[float], turn: Turn, last: dict[str, Any]) -> None:
    """Note a turn's median rate, its memory and what else it says. Our memory is what it held before the products were timed."""
    peak = last.get("peak_gib", turn.peak_gib)
    found[name].append(statistics.median(rates))
    found["peak"].append((name, peak))
    if last.get("product_rate"):
        found["products"].append((last["product_rate"], last["parameters"]))
    if "loss" in last:
        found.setdefault("losses", {})[name] = last["loss"]
    say(f"  {name:11} {', '.join(f'{r:.0f}' for r in rates)} tokens/s, peak {peak:.2f} GiB, {turn.seconds:.0f} s in all")


def summary(found: dict[str, Any], waste: float) -> dict[str, Any]:
    """The figures of the last line."""
    out: dict[str, Any] = {"padded_over_useful": waste}
    for name, ours, theirs in (("ratio", "ours", "torch"), ("ratio_mixed", "ours_mixed", "torch_mixed")):
        ratio = paired_ratio(found[ours], found[theirs]) if found[theirs] else None
        out |= {name: ratio and ratio["median"], f"{name}_range": ratio and [ratio["min"], ratio["max"]]}
    for name in ("ours", "torch", "ours_mixed", "torch_mixed"):
        out |= {
            f"{name}_tokens_per_second": found[name],
            f"{name}_peak_gib": max((p for n, p in found["peak"] if n == name), default=None),
        }
    shares = [rate * 6 * n / products for rate, (products, n) in zip(found["ours"], found["products"])]
    out |= {"product_share": statistics.median(shares), "product_share_range": [min(shares), max(shares)]}
    out["matmul_gflops"] = [products / 1e9 for products, _ in found["products"]]
    losses = found.get("losses", {})
    if {"ours_mixed", "torch_mixed"} <= losses.keys():
        out["loss_difference"] = abs(losses["ours_mixed"] - losses["torch_mixed"]) / abs(losses["torch_mixed"])
    return out


def report(found: dict[str, Any]) -> None:
    for name, what in (("ratio", "even rows"), ("ratio_mixed", "mixed rows")):
        if found[name]:
            low, high = found[f"{name}_range"]
            say(f"{what}: ours is {found[name]:.2f} times as fast as torch [{low:.2f}, {high:.2f}]")
    low, high = found["product_share_range"]
    say(f"useful tokens x 6N over the rate of matrix products: {found['product_share']:.3f} [{low:.3f}, {high:.3f}]")
    for name in ("ours", "torch", "ours_mixed", "torch_mixed"):
        if found[f"{name}_peak_gib"]:
            say(f"{name}: peak memory {found[f'{name}_peak_gib']:.2f} GiB")
    if "loss_difference" in found:
        say(f"losses before the first update differ by {found['loss_difference']:.1e} of their size")


def main(argv: list[str]) -> int:
    try:
        args, overrides = parse(argv)
        found = benchmark(args, overrides)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report(found)
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
