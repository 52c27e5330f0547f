"""`python -m coevo_jax.report RUN [RUN ...]`: one HTML file of one or several runs."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time
from collections.abc import Sequence

from coevo_jax.errors import UserError, nearest
from coevo_jax.records.console import Console
from coevo_jax.records.files import write_atomic
from coevo_jax.report.collect import collect, names_of
from coevo_jax.report.page import page
from coevo_jax.report.plots import write_plots

HELP = """python -m coevo_jax.report RUN [RUN ...] [--out=FILE] [--watch] [--every=30] [--rows_mb=30] [...]

  RUN        a run's folder (run.py --workdir); several are compared
  --out      default: report.html in the first run's folder
  --watch    write it again every --every seconds, until Ctrl-C; the page reads itself again
  --rows_mb  MB of JSON that all runs' rollout rows may take; compressed it is about a fifth. Questions are left out whole
  --longest  characters of one text; of longer ones the middle is left out
  --plots    instead of a page: every figure as SVG and PNG and its data as CSV, into a folder (extra 'eval')

Exit code: 0 written, 2 bad input."""


@dataclasses.dataclass
class Flags:
    """Parsed flags."""

    runs: list[pathlib.Path]
    out: str = ""
    watch: bool = False
    every: int = 30
    rows_mb: float = 30.0
    longest: int = 20000
    plots: str = ""


def parse_flags(argv: Sequence[str]) -> Flags:
    """UserError for what is unknown, missing or no number. --help prints and exits 0."""
    flags = Flags([])
    fields = {field.name: field for field in dataclasses.fields(Flags) if field.name != "runs"}
    for arg in argv:
        if arg in ("--help", "-h"):
            sys.stdout.write(HELP + "\n")
            raise SystemExit(0)
        if not arg.startswith("--"):
            flags.runs.append(pathlib.Path(arg))
            continue
        name, _, value = arg[2:].partition("=")
        if name not in fields:
            raise UserError(f"no flag --{name}", where="the command line", expected=f"one of --{', --'.join(fields)}",
                            nearest=nearest(name, fields))  # fmt: skip
        setattr(flags, name, _value(name, value, getattr(flags, name)))
    if not flags.runs:
        raise UserError("no run is named", where="the command line", expected="python -m coevo_jax.report RUN")
    return flags


def _value(name: str, text: str, default: object) -> object:
    if isinstance(default, bool):
        if text not in ("", "true", "false"):
            raise UserError(f"--{name}={text}", where=f"--{name}", expected="true or false")
        return text != "false"
    if isinstance(default, str):
        return text
    number: float
    try:
        number = int(text) if isinstance(default, int) else float(text)
    except ValueError:
        number = -1
    if not number > 0:
        raise UserError(f"--{name}={text} is no number above 0", where=f"--{name}", expected="a number above 0")
    return number


def write_report(flags: Flags, console: Console) -> pathlib.Path:
    """Read the runs and write the page, whole or not at all."""
    budget = int(flags.rows_mb * 1e6 / len(flags.runs))
    tell = _Progress(console)
    runs = [collect(folder, budget, flags.longest, tell) for folder in flags.runs]
    runs = [dataclasses.replace(run, name=name) for run, name in zip(runs, names_of(flags.runs))]
    out = pathlib.Path(flags.out) if flags.out else flags.runs[0] / "report.html"
    write_atomic(out, page(runs, "coevo-jax: " + ", ".join(run.name for run in runs), flags.every if flags.watch else 0))
    for run in runs:
        left = run.all_questions - len(run.questions)
        note = f"; {left} questions left out (--rows_mb)" if left else ""
        console.line(f"{run.name}: {len(run.steps)} updates, {len(run.questions)} questions, {run.rows} rows{note}")
    console.line(f"{out}: {out.stat().st_size / 1e6:.1f} MB")
    return out


class _Progress:
    """At most a line every five seconds."""

    def __init__(self, console: Console):
        self.console, self.last = console, time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.last > 5:
            self.last = now
            self.console.line(f"{what} {done}/{total}")


def main(argv: Sequence[str]) -> int:
    console = Console()
    try:
        flags = parse_flags(argv)
        if flags.plots:
            runs = [collect(folder, 1, flags.longest) for folder in flags.runs]
            runs = [dataclasses.replace(run, name=name) for run, name in zip(runs, names_of(flags.runs))]
            paths = write_plots(runs, pathlib.Path(flags.plots))
            console.line(f"{len(paths)} files in {flags.plots}")
            return 0
        write_report(flags, console)
        while flags.watch:
            time.sleep(flags.every)
            write_report(flags, console)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
