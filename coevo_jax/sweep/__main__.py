"""`python -m coevo_jax.sweep`: run configs x seeds on this machine or print a pod's commands, and gather one table."""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
import sys
from collections.abc import Sequence

from coevo_jax.errors import UserError, nearest
from coevo_jax.records.console import Console
from coevo_jax.records.files import write_atomic
from coevo_jax.records.metrics import read_metrics
from coevo_jax.sweep.plan import Member, check_folders, members_of, pod_commands
from coevo_jax.sweep.runner import STOPPED, Ledger, open_sweep, run_all, run_command
from coevo_jax.sweep.table import DEFAULT, INTERVALS, RunValues, Table, known_metrics, markdown, parse_metric, runs_csv, table_csv
from coevo_jax.sweep.table import value_of as number_of

HELP = """python -m coevo_jax.sweep --configs=FILES --workdir=DIR [--seeds=1,2,3] [--config.KEY=VALUE ...] [--metrics=...] [...]

  --configs          files or patterns, with commas between: 'configs/ablations/k_*.py,configs/evolm/qwen3_8b.py'
  --seeds            default 1
  --workdir          the sweep's folder; the same command goes on where a sweep stopped
  --config.KEY       as in run.py, for every run; --config.scale=smoke first of all
  --metrics          NAME[@ROLE][:HOW] with commas between; HOW last, first, mean, min, max or lastN (default last10: the mean of
                     the last 10 rows of that role). Default: {default}
  --interval         t (Student's, over seeds) or bootstrap; default t
  --level            of the interval; default 0.95
  --stop_on_failure  stop at the first run that fails; else it is named and the others run
  --gather           run nothing: the table of what is there
  --print            run nothing: print run.py's commands
  --pod=ENV          run nothing: print tpu/resume.sh's commands with this settings file (docs/pods.md)

Exit code: 0 all runs finished, 1 some failed, 2 bad input, 130 stopped by a signal."""
VALUES = ("--configs", "--seeds", "--workdir", "--metrics", "--interval", "--level", "--pod")
SWITCHES = ("--stop_on_failure", "--gather", "--print")


@dataclasses.dataclass
class Flags:
    """Parsed flags; `overrides` are 'key=value'."""

    configs: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (1,)
    workdir: str = ""
    metrics: tuple[str, ...] = ()
    interval: str = "t"
    level: float = 0.95
    pod: str = ""
    stop_on_failure: bool = False
    gather: bool = False
    print: bool = False
    overrides: tuple[str, ...] = ()


def parse_flags(argv: Sequence[str]) -> Flags:
    """UserError for what is unknown, missing or no number. --help prints and exits 0."""
    flags, overrides, configs, waiting = Flags(), [], [], list(argv)
    while waiting:
        name, equals, value = (word := waiting.pop(0)).partition("=")
        if name in VALUES or name.startswith("--config."):
            if not equals:
                if not waiting:
                    raise UserError(f"{name} needs a value", where="command line", expected=f"{name}=VALUE")
                value = waiting.pop(0)
            if name.startswith("--config."):
                overrides.append(f"{name.removeprefix('--config.')}={value}")
            elif name == "--configs":
                configs += _list(value)
                while not equals and waiting and not waiting[0].startswith("--"):  # a pattern that the shell unfolded
                    configs.append(waiting.pop(0))
            else:
                setattr(flags, name[2:], _value(name, value))
        elif word in SWITCHES:
            setattr(flags, word[2:], True)
        elif word in ("--help", "-h"):
            print(HELP.format(default=",".join(DEFAULT)))
            raise SystemExit(0)
        else:
            known = (*VALUES, *SWITCHES, "--config.KEY", "--help")
            raise UserError(
                f"unknown flag {word!r}", where="command line", expected=" ".join(known), nearest=nearest(name, known)
            )
    for name, given in (("--configs", configs), ("--workdir", flags.workdir)):
        if not given:
            raise UserError(f"{name} is missing", where="command line", expected=f"{name}=...")
    return dataclasses.replace(flags, configs=tuple(configs), overrides=tuple(overrides))


def _list(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def _value(name: str, value: str) -> object:
    if name == "--metrics":
        return tuple(_list(value))
    if name == "--seeds":
        seeds = _list(value)
        if not seeds or not all(s.isdecimal() for s in seeds) or len({int(s) for s in seeds}) < len(seeds):
            raise UserError(f"--seeds={value}", where="command line", expected="different whole numbers, as --seeds=1,2,3")
        return tuple(map(int, seeds))
    if name == "--level":
        try:
            level = float(value)
        except ValueError:
            level = 0.0
        if not 0 < level < 1:
            raise UserError(f"--level={value}", where="command line", expected="a number between 0 and 1, as 0.95")
        return level
    if name == "--interval" and value not in INTERVALS:
        close = nearest(value, INTERVALS)
        raise UserError(f"--interval={value}", where="command line", expected=f"one of {', '.join(INTERVALS)}", nearest=close)
    return value


def gather(flags: Flags, members: Sequence[Member], ledger: Ledger) -> Table:
    """Read every run's metrics. UserError for a metric that no run has."""
    paths = [member.folder / "metrics.jsonl" for member in members]
    rows = [read_metrics(path) if path.exists() else [] for path in paths]
    metrics = known_metrics([parse_metric(text) for text in flags.metrics or DEFAULT], rows, asked=bool(flags.metrics))
    runs = tuple(
        RunValues(m.name, m.group, m.seed, ledger.state(m), len(r), tuple(number_of(r, metric) for metric in metrics))
        for m, r in zip(members, rows)
    )
    return Table(metrics, runs, flags.interval, flags.level)


def write_files(table: Table, root: pathlib.Path, console: Console) -> None:
    """table.md, table.csv, runs.csv and the plot, which is left out with a word where matplotlib is not installed."""
    from coevo_jax.sweep.plot import plot_table

    text = markdown(table, root.name)
    write_atomic(root / "table.md", text)
    write_atomic(root / "table.csv", table_csv(table))
    write_atomic(root / "runs.csv", runs_csv(table))
    console.line(text)
    names = ["table.md", "table.csv", "runs.csv"]
    try:
        names += [path.name for path in plot_table(table, root)] if any(table.groups.values()) else []
    except UserError as error:
        console.line(f"no plot: {error.what} ({error.expected})")
    console.line(f"in {root}: {', '.join(names)}")


def main(argv: Sequence[str]) -> int:
    """Exit codes as in HELP."""
    try:
        return _main(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _main(argv: Sequence[str]) -> int:
    flags, console = parse_flags(argv), Console()
    root = pathlib.Path(flags.workdir)
    for text in flags.metrics:
        parse_metric(text)
    members = members_of(flags.configs, flags.seeds, flags.overrides, root)
    if flags.print or flags.pod:
        commands = pod_commands(members, flags.pod) if flags.pod else [shlex.join(run_command(member)) for member in members]
        print("\n".join(commands))
        return 0
    check_folders(members)
    with open_sweep(root):
        ledger, finished = Ledger(root), True
        if not flags.gather:
            finished = run_all(members, ledger, console, stop_on_failure=flags.stop_on_failure)
        write_files(gather(flags, members, ledger), root, console)
    failed = [member.name for member in members if ledger.state(member) == "failed"]
    if failed and not flags.gather:
        console.line(f"failed: {', '.join(failed)}; the same command tries them again")
    if not finished:
        return STOPPED
    return 1 if failed and not flags.gather else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
