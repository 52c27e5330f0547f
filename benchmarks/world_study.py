"""The small-world study: what co-evolution does where the true quality of an answer is known (docs/world.md).

    python benchmarks/world_study.py --workdir=runs/world [--seeds=1,2,3] [--what=all] [--parallel=2] [--docs=docs] [--json]
    python benchmarks/world_study.py --gather            # tables and figure again, from the committed results

Runs the arms of configs/world with run.py, a process each, draws answers and rubrics of every cycle's weights on held-out
questions and measures them by instruments that no reward touched. Arms by --what:
  coevolution main · frozen main, frozen · reward main, binary · curriculum main
  judge main and five weaker judges · collapse main, three times the learning rate for 8 cycles
The same command goes on where it stopped: finished runs and drawn texts are not made again. In --workdir: runs/, logs/, texts/,
results.json, tables.md, world_study.svg. --docs writes the page's tables, the figure and the results there too.
Exit code: 0, 1 a run failed, 2 bad input, 130 stopped by a signal.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

REPO = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from _results import machine  # noqa: E402
from _world import training_pairs  # noqa: E402
from _world_plot import figure  # noqa: E402
from _world_report import Results, measure, put_tables, tables  # noqa: E402
from _world_runs import Counts, draw_texts, load_texts, run_members, save_texts  # noqa: E402

from coevo_jax.assemble import System, assemble  # noqa: E402
from coevo_jax.errors import UserError, nearest  # noqa: E402
from coevo_jax.progress import RunConsole  # noqa: E402
from coevo_jax.records.console import Console, duration  # noqa: E402
from coevo_jax.records.files import write_atomic  # noqa: E402
from coevo_jax.sweep.plan import Member, check_folders, members_of  # noqa: E402
from coevo_jax.sweep.runner import STOPPED, Ledger, open_sweep  # noqa: E402

NOISES = (20, 40, 60, 80, 95)
ARMS = {
    "coevolution": ("main",),
    "frozen": ("main", "frozen"),
    "reward": ("main", "binary"),
    "curriculum": ("main",),
    "judge": ("main", *(f"noise_{n}" for n in NOISES)),
    "collapse": ("main", "fast"),
}
RESULTS, FIGURE, PAGE = "world_study.json", "world_study", "world.md"


def arms_of(what: str) -> list[str]:
    """Names of configs, main first, each once. what: 'all', or names with commas between."""
    names = list(ARMS) if what == "all" else [name.strip() for name in what.split(",")]
    for name in names:
        if name not in ARMS:
            close = nearest(name, ARMS)
            raise UserError(f"--what={name}", where="command line", expected=f"all or some of {', '.join(ARMS)}", nearest=close)
    chosen = [arm for name in names for arm in ARMS[name]]
    return [f"world_{arm}" for arm in dict.fromkeys(chosen)]


def seeds_of(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words) or len({int(w) for w in words}) < len(words):
        raise UserError(f"--seeds={text}", where="command line", expected="different whole numbers, as --seeds=1,2,3")
    return tuple(map(int, words))


def members_for(what: str, seeds: Sequence[int], overrides: Sequence[str], root: pathlib.Path) -> list[Member]:
    files = [str(REPO / "configs" / "world" / f"{arm}.py") for arm in arms_of(what)]
    return members_of(files, seeds, overrides, root)


# ------------------------------------------------------------------------------------------------------------- measuring


def text_path(member: Member, counts: Counts) -> pathlib.Path:
    """Where a run's texts are kept; those of other counts are other files."""
    return member.root / "texts" / f"{member.name}_q{counts.questions}_a{counts.answers}_r{counts.rubrics}.json"


def draw_all(members: Sequence[Member], counts: Counts, console: Console) -> None:
    """Texts of every run that has none yet, by one engine."""
    todo = [member for member in members if not text_path(member, counts).exists()]
    system: System | None = None
    begin = time.monotonic()
    for done, member in enumerate(todo):
        if system is None:
            system = assemble(members[0].cfg, RunConsole())
            begin = time.monotonic()
        save_texts(text_path(member, counts), draw_texts(system, member.folder, member.cfg, counts))
        left = (time.monotonic() - begin) / (done + 1) * (len(todo) - done - 1)
        console.line(f"held-out texts {done + 1}/{len(todo)}: {member.name}, ETA {duration(left)}")


def training_of(member: Member) -> list[dict[str, float]]:
    """A finished run's pairs and groups by cycle, read from its rollouts once."""
    path = member.root / "texts" / f"{member.name}_training.json"
    if not path.exists():
        write_atomic(path, json.dumps(training_pairs(member.folder)))
    return json.loads(path.read_text(encoding="utf-8"))


def measured(member: Member, counts: Counts, main: Member | None) -> dict[str, Any]:
    """A run's numbers, kept beside its texts. main: the main arm's run of its seed, where it is part of the study."""
    own = text_path(member, counts)
    path = own.with_name(f"{own.stem}_measured{'' if main else '_alone'}.json")
    if not path.exists():
        noise, others = member.cfg.judge.oracle_noise, load_texts(text_path(main, counts)) if main else None
        found = measure(load_texts(own), training_of(member), noise, member.seed, others)
        write_atomic(path, json.dumps({"arm": member.group} | found))
    return json.loads(path.read_text(encoding="utf-8"))


def results_of(members: Sequence[Member], counts: Counts, console: Console) -> Results:
    """Every run's numbers."""
    mains = {member.seed: member for member in members if member.group == "world_main"}
    runs: dict[str, Any] = {}
    for member in members:
        runs[member.name] = measured(member, counts, mains.get(member.seed))
        console.line(f"measured {len(runs)}/{len(members)}: {member.name}")
    return {"questions": counts.questions, "answers": counts.answers, "rubrics": counts.rubrics, "runs": runs}


def write_results(results: Results, folder: pathlib.Path) -> str:
    """results, tables.md and the figure in a folder. Returns the tables."""
    found = tables(results)
    text = "\n\n".join(f"## {name}\n\n{body}" for name, body in found.items()) + "\n"
    write_atomic(folder / "results.json", dumped(results))
    write_atomic(folder / "tables.md", text)
    try:
        figure(results, folder, FIGURE)
    except UserError as error:  # matplotlib is an extra
        print(f"no figure: {error.what} ({error.expected})", file=sys.stderr)
    return text


def dumped(results: Results) -> str:
    """A line a run; five digits; NaN is null."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return None if value != value else round(value, 5)
        if isinstance(value, dict):
            return {name: rounded(item) for name, item in value.items()}
        return [rounded(item) for item in value] if isinstance(value, list) else value

    return json.dumps(rounded(results), separators=(",", ":")).replace('"world_', '\n"world_') + "\n"


def read_results(path: pathlib.Path) -> Results:
    """UserError: no such file."""
    if not path.is_file():
        raise UserError("no results to gather", where=f"--results={path}", expected="the results.json of a study")
    return loaded(path.read_text(encoding="utf-8"))


def loaded(text: str) -> Results:
    def numbers(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: numbers(item) for name, item in value.items()}
        if isinstance(value, list):
            return [numbers(item) for item in value]
        return float("nan") if value is None else value

    return numbers(json.loads(text))


def write_docs(results: Results, docs: pathlib.Path) -> None:
    """The page's tables, the figure and the results, as they are committed."""
    figure(results, docs / "plots", FIGURE)
    write_atomic(docs / "plots" / RESULTS, dumped(results))
    put_tables(docs / PAGE, tables(results))


# ------------------------------------------------------------------------------------------------------------------ main


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--workdir", default="runs/world")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--what", default="all", help=f"all, or some of {', '.join(ARMS)}, with commas between")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time; a run keeps about one core busy")
    parser.add_argument("--questions", type=int, default=Counts.questions, help="held-out questions")
    parser.add_argument("--answers", type=int, default=Counts.answers, help="answers a question and cycle; even")
    parser.add_argument("--rubrics", type=int, default=Counts.rubrics, help="rubrics a question and cycle")
    parser.add_argument("--docs", default="", help="write tables, figure and results there too, such as docs")
    parser.add_argument("--gather", action="store_true", help="run and measure nothing: tables and figure of --results")
    parser.add_argument("--results", default=str(REPO / "docs" / "plots" / RESULTS), help="of --gather")
    parser.add_argument("--json", action="store_true", help="print the results in the end")
    args, rest = parser.parse_known_args(argv)
    try:
        return run(args, overrides_of(rest))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def overrides_of(words: Sequence[str]) -> tuple[str, ...]:
    for word in words:
        if not word.startswith("--config.") or "=" not in word:
            raise UserError(f"unknown flag {word!r}", where="command line", expected="--config.KEY=VALUE, for every run")
    return tuple(word.removeprefix("--config.") for word in words)


def run(args: argparse.Namespace, overrides: tuple[str, ...]) -> int:
    if args.gather:
        return finish(read_results(pathlib.Path(args.results)), args)
    counts = Counts(args.questions, args.answers, args.rubrics)
    for flag, ok, expected in (
        ("parallel", args.parallel > 0, "at least 1"), ("questions", counts.questions > 0, "at least 1"),
        ("answers", counts.answers > 1 and counts.answers % 2 == 0, "an even number: they are compared in twos"),
        ("rubrics", counts.rubrics > 0, "at least 1"),
    ):  # fmt: skip
        if not ok:
            raise UserError(f"--{flag}={getattr(args, flag)}", where="command line", expected=expected)
    root, console = pathlib.Path(args.workdir), Console()
    members = members_for(args.what, seeds_of(args.seeds), overrides, root)
    check_folders(members)
    with open_sweep(root):
        ledger = Ledger(root)
        if not run_members(members, ledger, console, args.parallel):
            console.line("stopped; the same command goes on")
            return STOPPED
        failed = [member.name for member in members if not ledger.finished(member)]
        if failed:
            console.line(f"failed: {', '.join(failed)}; the same command tries them again")
            return 1
        draw_all(members, counts, console)
        results = {"machine": machine(), "seconds": {m.name: round(ledger.runs[m.name].seconds) for m in members}}
        return finish(results | results_of(members, counts, console), args)


def finish(results: Results, args: argparse.Namespace) -> int:
    results = loaded(dumped(results))  # tables and figure are made of the numbers that are kept, and so again by --gather
    folder = pathlib.Path(args.workdir)
    folder.mkdir(parents=True, exist_ok=True)
    print(write_results(results, folder))
    if args.docs:
        write_docs(results, pathlib.Path(args.docs))
    if args.json:
        print(dumped(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
