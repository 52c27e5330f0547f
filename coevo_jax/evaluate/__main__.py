"""`python -m coevo_jax.evaluate`: a benchmark for one system or several, or how the rubrics of a run evolved."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import sys
from collections.abc import Sequence

from coevo_jax.errors import UserError, nearest
from coevo_jax.evaluate.benchmarks import BENCHMARKS, Benchmark, benchmark_of
from coevo_jax.evaluate.records import Example
from coevo_jax.evaluate.rules_pairs import TIES
from coevo_jax.records.console import Console

HELP = """python -m coevo_jax.evaluate --benchmark=NAME --data=FILE --judge=SOURCE --out=DIR [--generator=SOURCE] [...]
python -m coevo_jax.evaluate --evolution=RUN --out=DIR

  --benchmark     {names}
  --data          its file, JSONL or Parquet; 'FILE?prompt=question' renames columns (--help_data shows what a row holds)
  --generator     whose rubrics: none (default), predefined, data, a model source, run:FOLDER, api:MODEL; several may be given
  --judge         a model source, run:FOLDER, api:MODEL; oracle, always_a, random, which check the harness; several: a table
                  Settings behind '?': 'smollm2?protocol=json_score&pairs=pairwise', 'smollm2?prompt=rubric_long'
  --out           the folder; the same command goes on where it stopped
  --limit         only so many examples, spread over the file
  --batch         examples judged together and written at once; default 16
  --ties          half | wrong | leave_out; default by the benchmark
  --margin        scores that differ by at most so much are a tie; default 0
  --gap           healthbench, researchqa: reference gap of the second accuracy
  --config        a config file whose settings of judge, rubric and sampler are taken; --config.KEY=VALUE changes one
  --evolution     a run folder: how its rubrics changed, from rollouts/ (tables, plot)

Exit code: 0 done, 2 bad input, 130 stopped by a signal (what was judged is in DIR)."""
VALUES = ("--benchmark", "--data", "--generator", "--judge", "--out", "--limit", "--batch", "--ties", "--margin", "--gap",
          "--config", "--evolution")  # fmt: skip
SEVERAL = ("--generator", "--judge")
STOPPED = 130


@dataclasses.dataclass
class Flags:
    """Parsed flags; `overrides` are 'key=value'."""

    benchmark: str = ""
    data: str = ""
    generator: tuple[str, ...] = ()
    judge: tuple[str, ...] = ()
    out: str = ""
    limit: int = 0
    batch: int = 16
    ties: str | None = None
    margin: float | None = None
    gap: float | None = None
    config: str = ""
    evolution: str = ""
    overrides: tuple[str, ...] = ()


def parse_flags(argv: Sequence[str]) -> Flags:
    """UserError for what is unknown, missing or no number. --help prints and exits 0."""
    flags, waiting = Flags(), list(argv)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        if word in ("--help", "-h", "--help_data"):
            rows = "\n".join(f"{b.name}: {b.expected}" for b in BENCHMARKS.values())
            print(rows if word == "--help_data" else HELP.format(names=", ".join(BENCHMARKS)))
            raise SystemExit(0)
        if name not in VALUES and not name.startswith("--config."):
            known = (*VALUES, "--config.KEY", "--help", "--help_data")
            raise UserError(
                f"unknown flag {word!r}", where="command line", expected=" ".join(known), nearest=nearest(name, known)
            )
        if not equals:
            if not waiting:
                raise UserError(f"{name} needs a value", where="command line", expected=f"{name}=VALUE")
            value = waiting.pop(0)
        if name.startswith("--config."):
            flags.overrides += (f"{name.removeprefix('--config.')}={value}",)
        elif name in SEVERAL:
            setattr(flags, name[2:], (*getattr(flags, name[2:]), value))
        else:
            setattr(flags, name[2:], _value(name, value))
    _check(flags)
    return flags


def _check(flags: Flags) -> None:
    needed = ("--out",) if flags.evolution else ("--benchmark", "--data", "--judge", "--out")
    for name in needed:
        if not getattr(flags, name[2:]):
            raise UserError(f"{name} is missing", where="command line", expected=f"{name}=...")
    if flags.evolution and flags.benchmark:
        raise UserError("--evolution reads a run and --benchmark a file", where="command line", expected="one of them")


def _value(name: str, value: str) -> object:
    kinds: dict[str, type] = {"--limit": int, "--batch": int, "--margin": float, "--gap": float}
    if name == "--ties" and value not in TIES:
        raise UserError(
            f"--ties={value}", where="command line", expected=f"one of {', '.join(TIES)}", nearest=nearest(value, TIES)
        )
    if name not in kinds:
        return value
    try:
        number = kinds[name](value)
    except ValueError:
        number = -1
    if not number >= (1 if name == "--batch" else 0) or number == float("inf"):
        kind = "whole number" if kinds[name] is int else "number"
        raise UserError(f"{name}={value}", where="command line", expected=f"a {kind} of at least {1 if name == '--batch' else 0}")
    return number


def main(argv: Sequence[str]) -> int:
    """Exit codes as in HELP."""
    try:
        flags = parse_flags(argv)
        return _evolution(flags) if flags.evolution else _benchmark(flags)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return STOPPED


def _evolution(flags: Flags) -> int:
    from coevo_jax.evaluate.evolution_report import report

    report(pathlib.Path(flags.evolution), pathlib.Path(flags.out), Console())
    return 0


def _benchmark(flags: Flags) -> int:
    from coevo_jax.evaluate.readers import read_examples
    from coevo_jax.evaluate.runner import choose
    from coevo_jax.records.stopping import stop_on_signals

    benchmark = benchmark_of(flags.benchmark)
    every = read_examples(flags.data, benchmark.source)
    examples = choose(every, flags.limit)
    out, console = pathlib.Path(flags.out), Console()
    with stop_on_signals(console.line, "finishing this batch") as stop:
        finished = _systems(flags, benchmark, examples, len(every), out, console, stop)
    return 0 if finished else STOPPED


def _systems(
    flags: Flags, benchmark: Benchmark, examples: list[Example], total: int, out: pathlib.Path, console: Console, stop: object
) -> bool:
    """Judge by every system and write the results after each; False: stopped before the end."""
    from coevo_jax.compiling import compilation_cache
    from coevo_jax.evaluate.report import Result, result_of
    from coevo_jax.evaluate.runner import run, system_hash
    from coevo_jax.evaluate.sources import DEFAULTS, Loader
    from coevo_jax.progress import RunConsole
    from coevo_jax.records.files import disk_errors
    from coevo_jax.records.run_folder import take_lock

    with disk_errors(out, "make the folder"):
        out.mkdir(parents=True, exist_ok=True)
    lock = take_lock(out)
    runs = RunConsole(console)
    compilation_cache(DEFAULTS, runs)
    loader, results = Loader(flags.config, flags.overrides, runs, out), list[Result]()
    rule = benchmark.rule(ties=flags.ties, margin=flags.margin, gap=flags.gap)
    try:
        for judge in flags.judge:
            for generator in flags.generator or ("none",):
                system = loader.system(generator, judge)
                found = run(system, benchmark, examples, out, console, flags.batch, stop)  # type: ignore[arg-type]
                rows = [(example, judged) for example, judged in zip(examples, found) if judged is not None]
                if rows:
                    score = benchmark.score(rows, rule)
                    sources = (generator, judge)
                    results.append(result_of(sources, system_hash(system, benchmark), score, [j for _, j in rows], len(examples)))
                    _write(flags, benchmark, examples, total, out, results)
                if len(rows) < len(examples):
                    return False
    finally:
        loader.close()
        lock.close()
    console.line((out / "results.md").read_text(encoding="utf-8"))
    console.line(f"in {out}: results.json, results.md, and rows.jsonl in a folder for each system")
    return True


def _write(
    flags: Flags, benchmark: Benchmark, examples: list[Example], total: int, out: pathlib.Path, results: Sequence[object]
) -> None:
    from coevo_jax.evaluate.report import markdown, to_json
    from coevo_jax.records.files import plain, write_atomic

    data = pathlib.Path(flags.data.partition("?")[0])
    facts = {
        "data": f"{data.name}, sha256 {hashlib.sha256(data.read_bytes()).hexdigest()[:16]}",
        "examples": f"{len(examples)} of {total}" if len(examples) < total else str(total),
        "command": "python -m coevo_jax.evaluate " + " ".join(_command(flags)),
    }
    content = {"benchmark": benchmark.name, **facts, "results": [to_json(r) for r in results]}  # type: ignore[arg-type]
    write_atomic(out / "results.json", json.dumps(plain(content), indent=2, ensure_ascii=False) + "\n")
    write_atomic(out / "results.md", markdown(benchmark.name, facts, results))  # type: ignore[arg-type]


def _command(flags: Flags) -> list[str]:
    words = [f"--benchmark={flags.benchmark}", f"--data={flags.data}"]
    words += [f"--generator={source}" for source in flags.generator] + [f"--judge={source}" for source in flags.judge]
    words += [f"--limit={flags.limit}"] if flags.limit else []
    words += [f"--config={flags.config}"] if flags.config else []
    return words + [f"--config.{override}" for override in flags.overrides]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
