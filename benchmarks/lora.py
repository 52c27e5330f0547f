"""One GRPO update of SmolLM2-135M with full weights and with adapters, in turns: tokens/s and the largest resident set.

    python benchmarks/lora.py [--ranks=0,16] [--rounds=1] [--steps=3] [--rows=8] [--tokens=256] [--update.KEY=VALUE ...]

Rank 0 trains all weights. Even rows of random tokens, as in benchmarks/update.py; a fresh process a turn; float32. The last line
is one object: of each rank the median tokens/s of each round and the peak in GiB.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import sampler
from _sampler import UserError, header, say
from _turns import PEERS, our_environment, take_turn


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="0,16")
    for name, value in {"rounds": 1, "steps": 3, "rows": 8, "tokens": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--model", default="smollm2", help="smollm2 or a Hugging Face folder of a Llama")
    args, extra = parser.parse_known_args(argv)
    try:
        if wrong := [text for text in extra if not text.startswith("--update.") or "=" not in text]:
            raise UserError(f"unknown argument {wrong[0]!r}", where="command line", expected="--update.KEY=VALUE, or see --help")
        if not all(rank.isdigit() for rank in args.ranks.split(",")):
            raise UserError(f"--ranks={args.ranks}", where="command line", expected="whole numbers with commas, 0 = full weights")
        folder = sampler.peer_model(args.model)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    asked = {"model": str(folder), "rows": args.rows, "steps": args.steps, "lengths": [args.tokens] * args.rows}
    asked["overrides"] = [text.removeprefix("--update.") for text in extra]
    header(rows=f"{args.rows} x {args.tokens} tokens", model=f"{folder} (float32)")
    found: dict[str, dict[str, list[float]]] = {rank: {"tokens_per_second": [], "peak_gib": []} for rank in args.ranks.split(",")}
    for _ in range(args.rounds):
        for rank, kept in found.items():
            command = [sys.executable, str(PEERS / "ours_update.py"), json.dumps({**asked, "rank": int(rank)})]
            last = take_turn("ours", command, our_environment()).last
            kept["tokens_per_second"].append(statistics.median(last["rates"]))
            kept["peak_gib"].append(last["peak_gib"])
            say(f"rank {rank:>3}: {kept['tokens_per_second'][-1]:.0f} tokens/s, peak {last['peak_gib']:.2f} GiB")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
