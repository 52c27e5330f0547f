"""Useful tokens a second of our engine and of its peers, run in turn on the same machine, and the share of the machine's rate.

    python benchmarks/sampler.py --peer=all [--rounds=3] [--slots=64] [--json] [--sampler.KEY=VALUE ...]
    python benchmarks/sampler.py --install tunix        # an environment of its own under the user cache; also: --install hf

Workload: 16 prompts x --samples, temperature 1, full support, SmolLM2's own end token, float32. Each side is a process that
loads and compiles once; then they run one at a time (ours, peer, ours, peer, ...), each run with noise of its own, the others
idle. Useful tokens: up to and including the end token; the time holds prefill. `ratio`: ours over the peer's of the same round,
median [min, max]. `roofline_share`: useful tokens/s x 2N over the rate at which this machine does the model's matrix products at
--slots rows (_sampler.ProductChain), taken before each round. With --json the last line is one object; with several peers its
`peer` and `ratio` are those of the fastest.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shlex
import statistics
import subprocess
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from _sampler import (
    UserError,
    Worker,
    header,
    load_model,
    paired_ratio,
    roofline_share,
    say,
    split_overrides,
    user_cache,
    workload,
)

from coevo_jax.models.export import export_hf
from coevo_jax.text.chat import ChatTokenizer

PACKAGES = {"tunix": ["google-tunix==0.1.7", "jax"], "hf": ["torch==2.13.0", "transformers", "safetensors"]}
WORKERS = pathlib.Path(__file__).resolve().parent / "peers"
PRODUCT_SECONDS = 3.0


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=("tunix", "hf", "all", "none"), default="all")
    parser.add_argument("--samples", type=int, default=8, help="completions a prompt")
    parser.add_argument("--max_new", type=int, default=192, help="longest completion, tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=64, help="rows that our engine decodes together")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of the workload that are used")
    parser.add_argument("--workload", default="", help='file with one {"prompt": ...} a line')
    parser.add_argument("--model", default="smollm2", help="smollm2 or a Hugging Face folder of a Llama")
    parser.add_argument("--tunix_python", default="", help="interpreter that has google-tunix")
    parser.add_argument("--hf_python", default="", help="interpreter that has torch and transformers")
    parser.add_argument("--install", choices=tuple(PACKAGES), help="make that peer's environment, and nothing else")
    parser.add_argument("--json", action="store_true")
    args, extra = parser.parse_known_args(argv)
    for name in ("samples", "max_new", "rounds", "slots", "prompts"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}={getattr(args, name)}", where="command line", expected="at least 1")
    return args, split_overrides(extra)


# ---- peers -------------------------------------------------------------------------------------------------------------


def environment(peer: str) -> pathlib.Path:
    return user_cache() / "peers" / peer


def install(peer: str) -> None:
    """A virtual environment with the peer's packages, by pip."""
    folder = environment(peer)
    commands = [[sys.executable, "-m", "venv", str(folder)]]
    commands.append([str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", *PACKAGES[peer]])
    for command in commands:
        say("$ " + shlex.join(command))
        if subprocess.run(command).returncode:
            raise UserError(f"the environment of {peer} could not be made", where=shlex.join(command), expected="exit code 0")


def interpreter(peer: str, given: str) -> str:
    """The peer's Python; UserError with the command that makes it."""
    path = pathlib.Path(given).expanduser() if given else environment(peer) / "bin" / "python"
    if not path.exists():
        raise UserError(f"no environment for peer {peer}", where=str(path),
                        expected=f"python benchmarks/sampler.py --install {peer}, or --{peer}_python=PYTHON")  # fmt: skip
    return str(path)


def peer_model(source: str) -> pathlib.Path:
    """The model as a Hugging Face folder in float32: `source` itself, or our export of a named one, kept in the user cache."""
    if pathlib.Path(source).is_dir():
        return pathlib.Path(source)
    folder = environment(source)
    if not folder.exists():
        say(f"exporting {source} to {folder}")
        model = load_model(source)
        export_hf(model.params, model.spec, model.folder, folder)
    return folder


# ---- the run -----------------------------------------------------------------------------------------------------------


def measure(workers: dict[str, Worker], rounds: int) -> tuple[dict[str, list[dict[str, Any]]], list[float], int]:
    """`rounds` turns of each worker, ours first. Runs by worker, the product rates, and N."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    rates, parameters = [], 0
    start, total = time.monotonic(), rounds * len(workers)
    for number in range(rounds):
        products = workers["ours"].ask("products", seconds=PRODUCT_SECONDS)
        rates.append(products["rate"])
        parameters = products["parameters"]
        say(f"round {number + 1}/{rounds}: matrix products {rates[-1] / 1e9:.1f} GFLOP/s")
        for position, (name, worker) in enumerate(workers.items()):
            found = worker.ask("run", seed=1 + number * len(workers) + position)
            found["tokens"] = sum(found["lengths"])
            found["rate"] = found["tokens"] / found["seconds"]
            runs[name].append(found)
            done = number * len(workers) + position + 1
            left = (time.monotonic() - start) / done * (total - done)
            say(f"  {name:6} {_line(found)}   [{left:.0f} s left]")
    return runs, rates, parameters


def _line(found: dict[str, Any]) -> str:
    count, stats = len(found["lengths"]), found.get("stats")
    more = f", occupancy {stats['occupancy']:.3f}, prefill {stats['prefill_seconds']:.1f} s" if stats else ""
    tokens = f"{found['tokens']} useful tokens (mean {found['tokens'] / count:.1f})"
    return f"{count} sequences, {tokens}, {found['seconds']:.1f} s, {found['rate']:.1f} tokens/s{more}"


def summary(runs: dict[str, list[dict[str, Any]]], rates: list[float], parameters: int) -> dict[str, Any]:
    """The figures of the last line. Rates are medians over rounds, ratios are of runs of the same round."""
    by_name = {name: [run["rate"] for run in found] for name, found in runs.items()}
    ours = by_name["ours"]
    shares = [roofline_share(t, parameters, rate) for t, rate in zip(ours, rates)]
    peers = {
        name: {"tokens_per_second": statistics.median(theirs), "runs": theirs, "ratio": paired_ratio(ours, theirs)}
        for name, theirs in by_name.items()
        if name != "ours"
    }
    fastest = min(peers, key=lambda name: peers[name]["ratio"]["median"]) if peers else None
    return {
        "ours": statistics.median(ours),
        "peer": peers[fastest]["tokens_per_second"] if fastest else None,
        "ratio": peers[fastest]["ratio"]["median"] if fastest else None,
        "roofline_share": statistics.median(shares),
        "peer_name": fastest,
        "peers": peers,
        "ours_runs": ours,
        "roofline_share_min": min(shares),
        "roofline_share_max": max(shares),
        "matmul_gflops": statistics.median(rates) / 1e9,
        "matmul_gflops_runs": [rate / 1e9 for rate in rates],
        "parameters": parameters,
    }


def report(found: dict[str, Any], slots: int) -> None:
    say(f"ours: {found['ours']:.1f} useful tokens/s")
    for name, peer in found["peers"].items():
        ratio = peer["ratio"]
        say(f"{name}: {peer['tokens_per_second']:.1f} useful tokens/s; ours is {ratio['median']:.2f}x "
            f"[{ratio['min']:.2f}, {ratio['max']:.2f}]")  # fmt: skip
    say(f"matrix products, {slots} rows: {found['matmul_gflops']:.1f} GFLOP/s; share reached by useful tokens x 2N "
        f"(N = {found['parameters'] / 1e6:.1f} M): {found['roofline_share']:.3f} "
        f"[{found['roofline_share_min']:.3f}, {found['roofline_share_max']:.3f}]")  # fmt: skip


def benchmark(args: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    names = {"all": ["tunix", "hf"], "none": []}.get(args.peer, [args.peer])
    commands = {"ours": [sys.executable, str(WORKERS / "ours_worker.py")]}
    for name in names:
        commands[name] = [interpreter(name, getattr(args, f"{name}_python")), str(WORKERS / f"{name}_worker.py")]
    folder = peer_model(args.model)
    texts, source = workload(args.workload, args.prompts)
    tokenizer = ChatTokenizer.load(folder)
    end = json.loads((folder / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
    prompts = [tokenizer.render([{"role": "user", "content": text}], thinking=False, system=None) for text in texts]
    header(workload=f"{len(prompts)} prompts of {source} x {args.samples}, at most {args.max_new} new tokens, end token {end}",
           model=f"{folder} (float32)")  # fmt: skip
    asked = {"model": str(folder), "prompts": prompts, "samples": args.samples, "max_new": args.max_new, "end": end,
             "slots": args.slots, "overrides": overrides}  # fmt: skip
    workers: dict[str, Worker] = {}
    versions: dict[str, Any] = {}
    try:
        for name, command in commands.items():
            workers[name] = Worker(name, command)
            loaded = workers[name].ask("load", **asked)
            versions[name] = loaded["versions"]
            begin = time.perf_counter()
            workers[name].ask("run", seed=0)  # compiles and warms; not counted
            first = time.perf_counter() - begin
            say(f"{name}: {loaded['versions']}, loaded in {loaded['seconds']:.0f} s, first run {first:.0f} s")
            say(f"  {loaded['config']}" if "config" in loaded else "  sampling: temperature 1, full support")
        runs, rates, parameters = measure(workers, args.rounds)
    finally:
        for worker in workers.values():
            worker.stop()
    return summary(runs, rates, parameters) | {"slots": args.slots, "versions": versions, "workload": source}


def main(argv: list[str]) -> int:
    try:
        args, overrides = parse(argv)
        if args.install:
            install(args.install)
            return 0
        found = benchmark(args, overrides)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report(found, args.slots)
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
