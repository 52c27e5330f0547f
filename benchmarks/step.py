"""One whole GRPO step (G1) of SmolLM2-135M on two cores, ours and its peers' in turns: seconds by part and peak memory.

    python benchmarks/step.py [--peer=tunix] [--rounds=2] [--steps=1] [--json] [--config.KEY=VALUE ...]
    python benchmarks/sampler.py --install tunix        # once: the peer's environment

G1: 8 prompts x 8 samples of at most 128 new tokens, temperature 1, reward the share of vowels, KL 0.001 to the start, one AdamW
update at 1e-6. Ours is `coevo_jax.train` as run.py calls it on benchmarks/_g1.py (engine, packing, reference log-probs, update,
publishing, fingerprints, rollouts written); Tunix's and TRL's are the shared tunix_grpo_step.py and trl_grpo_step.py as they are.
Each turn is a process; its first step compiles and is left out. A step's length varies with what was drawn, so seconds are given
a step and a completion token. `ratio`: the peer's median seconds a step over ours, of a round; median [min, max] over rounds.
`ratio_per_token`: the same of seconds a completion token. Peak memory: each process's largest resident set, compiling included.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import statistics
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import sampler
from _g1 import PROMPTS
from _sampler import UserError, header, paired_ratio, say, workload
from _turns import PEERS, Turn, our_environment, peer_environment, shared_peer, take_turn

SCRIPTS = {"tunix": "tunix_grpo_step.py", "trl": "trl_grpo_step.py"}
STEP = re.compile(r"^step \d+ ([\d.]+) s: (.*); (\d+) completion tokens")


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Flags, and the KEY=VALUE of each --config.KEY=VALUE."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=(*SCRIPTS, "none"), default="tunix")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1, help="timed steps of a turn, after the one that compiles")
    parser.add_argument("--model", default="smollm2", help="smollm2 or a Hugging Face folder of a Llama")
    parser.add_argument("--workload", default="", help='file with one {"prompt": ...} a line')
    parser.add_argument("--peer_python", default="", help="interpreter of the peer's environment")
    parser.add_argument("--json", action="store_true")
    args, extra = parser.parse_known_args(argv)
    for name in ("rounds", "steps"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}={getattr(args, name)}", where="command line", expected="at least 1")
    for text in extra:
        if not text.startswith("--config.") or "=" not in text:
            raise UserError(f"unknown argument {text!r}", where="command line", expected="--config.KEY=VALUE, or see --help")
    return args, [text.removeprefix("--config.") for text in extra]


def read_peer(turn: Turn) -> list[dict[str, float]]:
    """The timed steps that a peer's script printed. ValueError when it printed none."""
    steps = []
    for line in turn.lines:
        if m := STEP.match(line):
            parts = dict(part.rsplit(" ", 1) for part in m[2].split(", "))
            steps.append({"seconds": float(m[1]), "tokens": float(m[3])} | {k: float(v) for k, v in parts.items()})
    if not steps:
        raise ValueError("the peer printed no line 'step N ... s: ...':\n" + "\n".join(turn.lines))
    return steps


def our_turn(args: argparse.Namespace, overrides: list[str], prompts: list[str]) -> tuple[list[dict[str, float]], float]:
    """Steps after the first, and peak memory in GiB."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts), encoding="utf-8")
        asked = {
            "prompts": str(file),
            "workdir": f"{folder}/run",
            "updates": args.steps + 1,
            "model": args.model,
            "overrides": overrides,
        }
        turn = take_turn("ours", [sys.executable, str(PEERS / "ours_step.py"), json.dumps(asked)], our_environment())
    steps = turn.last["steps"][1:]
    if any(step["skipped"] for step in steps):
        raise ValueError("a step trained nothing: every group had equal rewards")
    return steps, turn.last["peak_gib"]


def peer_turn(args: argparse.Namespace, folder: pathlib.Path) -> tuple[list[dict[str, float]], float]:
    command = [
        sampler.interpreter(args.peer, args.peer_python),
        str(shared_peer(SCRIPTS[args.peer])),
        str(folder),
        str(args.steps),
    ]
    turn = take_turn(args.peer, command, peer_environment())
    return read_peer(turn), turn.peak_gib


def benchmark(args: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    prompts, source = workload(args.workload, PROMPTS)
    folder = sampler.peer_model(args.model) if args.peer != "none" else None
    header(workload=f"{len(prompts)} prompts of {source}", model=args.model)
    turns: dict[str, list[tuple[list[dict[str, float]], float]]] = {"ours": [], args.peer: []}
    for number in range(args.rounds):
        say(f"round {number + 1}/{args.rounds}")
        for name in turns:
            if name == "none":
                continue
            turns[name].append(
                our_turn(args, overrides, prompts) if name == "ours" or folder is None else peer_turn(args, folder)
            )
            steps, peak = turns[name][-1]
            for step in steps:
                say(f"  {name:6} " + ", ".join(f"{k} {v:.1f}" for k, v in step.items()) + f"; peak {peak:.2f} GiB")
    return summary({name: found for name, found in turns.items() if found})


def summary(turns: dict[str, list[tuple[list[dict[str, float]], float]]]) -> dict[str, Any]:
    """The figures of the last line."""
    out: dict[str, Any] = {"peer": next((n for n in turns if n != "ours"), None), "ratio": None}
    by_step, by_token = {}, {}
    for name, found in turns.items():
        by_step[name] = [statistics.median(s["seconds"] for s in steps) for steps, _ in found]
        by_token[name] = [statistics.median(s["seconds"] / s["tokens"] for s in steps) for steps, _ in found]
        out |= {f"{name}_seconds": by_step[name], f"{name}_peak_gib": max(peak for _, peak in found)}
        out |= {f"{name}_steps": [step for steps, _ in found for step in steps]}
    if peer := out["peer"]:
        step, token = paired_ratio(by_step[peer], by_step["ours"]), paired_ratio(by_token[peer], by_token["ours"])
        out |= {"ratio": step["median"], "ratio_range": [step["min"], step["max"]]}
        out |= {"ratio_per_token": token["median"], "ratio_per_token_range": [token["min"], token["max"]]}
        out["memory_share"] = out["ours_peak_gib"] / out[f"{peer}_peak_gib"]
    return out


def report(found: dict[str, Any]) -> None:
    say(f"ours: {statistics.median(found['ours_seconds']):.1f} s a step, peak memory {found['ours_peak_gib']:.2f} GiB")
    if peer := found["peer"]:
        low, high = found["ratio_range"]
        say(f"{peer}: {statistics.median(found[f'{peer}_seconds']):.1f} s a step, {found[f'{peer}_peak_gib']:.2f} GiB; ours is "
            f"{found['ratio']:.2f} times as fast [{low:.2f}, {high:.2f}], {found['ratio_per_token']:.2f} times by the token, "
            f"with {found['memory_share']:.2f} of the memory")  # fmt: skip


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
