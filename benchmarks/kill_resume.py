"""Kill a run of the small world at random points, resume each time, and compare its metrics with an unbroken run's.

    python benchmarks/kill_resume.py [--kills=10] [--seed=0] [--config=configs/tiny.py] [--json] [--config.KEY=VALUE ...]

SIGKILL comes a random moment after a metrics row or a stage mark. Equal means: every field of every row that is not a time or a
rate. Exit code 1 when a row differs, is missing or is there twice.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

REPO = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from coevo_jax.records.metrics import comparable, read_metrics  # noqa: E402


def command(workdir: pathlib.Path, config: str, overrides: list[str]) -> list[str]:
    return [sys.executable, str(REPO / "run.py"), f"--config={config}", f"--workdir={workdir}", *overrides]


def start(workdir: pathlib.Path, config: str, overrides: list[str]) -> subprocess.Popen[str]:
    env = {**os.environ, "COEVO_MARKS": "1", "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        command(workdir, config, overrides), cwd=REPO, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def is_event(line: str) -> bool:
    """A stage mark, or the line of a finished update (its metrics row is on disk)."""
    return line.startswith(("mark ", "update "))


def run_and_kill(process: subprocess.Popen[str], after: int, delay: float) -> tuple[bool, str]:
    """Read the log; SIGKILL `delay` seconds after event number `after`. (was it killed, the last event)."""
    assert process.stdout is not None
    seen, last, tail = 0, "start", [""]
    for line in process.stdout:
        tail = [*tail[-20:], line]
        if is_event(line):
            seen, last = seen + 1, line.strip()
            if seen >= after:
                time.sleep(delay)
                process.send_signal(signal.SIGKILL)
                process.wait()
                return True, last
    if process.wait() != 0:
        raise RuntimeError("the run failed:\n" + "".join(tail))
    return False, last


def differences(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[str]:
    """Lines that say where two runs' comparable rows differ."""
    out = [] if len(a) == len(b) else [f"{len(a)} rows against {len(b)}"]
    for i, (left, right) in enumerate(zip(map(comparable, a), map(comparable, b))):
        names = [n for n in sorted(left.keys() | right.keys()) if left.get(n) != right.get(n)]
        out += [f"row {i}: {n} is {left.get(n)} unbroken, {right.get(n)} resumed" for n in names]
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", default="configs/tiny.py")
    parser.add_argument("--json", action="store_true")
    args, overrides = parser.parse_known_args()
    draw, folder = random.Random(args.seed), pathlib.Path(tempfile.mkdtemp(prefix="coevo_kill_"))
    overrides = ["--config.run.save_every=2", *overrides]

    run_and_kill(start(folder / "whole", args.config, overrides), sys.maxsize, 0)
    whole = read_metrics(folder / "whole" / "metrics.jsonl")
    print(f"unbroken run: {len(whole)} rows", flush=True)

    kills: list[str] = []
    finished = False
    while len(kills) < args.kills or not finished:
        more = len(kills) < args.kills
        after = draw.randint(1, 14) if more else sys.maxsize  # an update has three events
        killed, last = run_and_kill(start(folder / "killed", args.config, overrides), after, draw.uniform(0, 0.3))
        if killed:
            kills.append(last)
            print(f"kill {len(kills)} after {last!r}", flush=True)
        elif more:  # finished before the kills were spent: begin another run to kill
            found = differences(whole, read_metrics(folder / "killed" / "metrics.jsonl"))
            if found:
                print("\n".join(found))
                return 1
            (folder / "killed").rename(folder / f"killed_{len(kills)}")
        finished = not killed
    found = differences(whole, read_metrics(folder / "killed" / "metrics.jsonl"))
    print("\n".join(found) if found else f"{len(kills)} kills, {len(whole)} rows, 0 differences")
    if args.json:
        print(json.dumps({"kills": len(kills), "rows": len(whole), "differences": len(found)}))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
