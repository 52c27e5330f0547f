"""Runs a system over a benchmark's examples, batch by batch, each batch on the disk before the next begins."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import threading
from collections.abc import Sequence

from coevo_jax.evaluate.benchmarks import Benchmark
from coevo_jax.evaluate.checking import System, uniform
from coevo_jax.evaluate.records import Example, Judged
from coevo_jax.evaluate.reward_bench import ties_id
from coevo_jax.evaluate.store import VERSION, KeptWriter, RowStore, content_of, judged_of, judged_row
from coevo_jax.evaluate.systems import RubricSystem
from coevo_jax.evaluate.writers import Fixed, FromData, digest
from coevo_jax.records.console import Console
from coevo_jax.records.files import write_atomic


def system_hash(system: System, benchmark: Benchmark) -> str:
    """Names model, prompt and settings of a system on a benchmark."""
    return digest(VERSION, dict(system.identity), [benchmark.name, benchmark.kind, benchmark.games])


def folder_name(system: System, benchmark: Benchmark) -> str:
    """A folder of its own for each system: its sources, and the hash of all it depends on."""
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", system.name).strip("-")[-60:]
    return f"{plain}-{system_hash(system, benchmark)}"


def choose(examples: Sequence[Example], limit: int) -> list[Example]:
    """`limit` of the examples (0: all), in the file's order: those whose ids come first in an order of its own, so that they are
    spread over the file and a smaller choice lies inside a larger one. The two rows of an id of Ties go together."""
    if not limit or limit >= len(examples):
        return list(examples)
    order = sorted(range(len(examples)), key=lambda i: (uniform("limit", ties_id(examples[i].id)[1]), i))
    return [examples[i] for i in sorted(order[:limit])]


def run(
    system: System, benchmark: Benchmark, examples: Sequence[Example], out: pathlib.Path, console: Console, batch: int = 16,
    stop: threading.Event | None = None,
) -> list[Judged | None]:  # fmt: skip
    """What the system says of each example, None for those that were not reached when `stop` was set. Rows that an earlier run of
    the same system left in `out` are taken."""
    folder = out / folder_name(system, benchmark)
    rows = RowStore(folder / "rows.jsonl")
    write_atomic(folder / "system.json", json.dumps(dict(system.identity) | {"name": system.name}, indent=2) + "\n")
    if isinstance(system, RubricSystem) and not isinstance(system.writer, Fixed | FromData):
        system = dataclasses.replace(system, writer=KeptWriter(system.writer, out))
    keys = [content_of(example) for example in examples]
    missing = [i for i, key in enumerate(keys) if key not in rows.rows]
    done = len(examples) - len(missing)
    console.line(f"{benchmark.name}: {system.name}" + (f", {done} of {len(examples)} are there" if done else ""))
    console.phase("example", len(examples), done)
    failures = 0
    for start in range(0, len(missing), batch):
        if stop is not None and stop.is_set():
            break
        chosen = [examples[i] for i in missing[start : start + batch]]
        judged = system.judge(chosen, benchmark)
        rows.add([judged_row(example, one) for example, one in zip(chosen, judged)])
        failures += sum(any(s is None for game in one.games for s in game) for one in judged)
        console.step(done + start + len(chosen), {"failed": failures})
    return [judged_of(rows.rows[key]) if key in rows.rows else None for key in keys]
