"""One run after another, each run.py in a process of its own, and state.json with how each ended.

A process a run: its memory and programs are given back, and a crash ends that run alone. A run's state is written when it ends;
one that was cut off has none and is started again, and run.py goes on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import IO

import coevo_jax
from coevo_jax.errors import UserError
from coevo_jax.records.console import Console, duration
from coevo_jax.records.files import disk_errors, write_atomic
from coevo_jax.records.metrics import read_metrics
from coevo_jax.records.run_folder import CONFIG, LOCK, take_lock
from coevo_jax.sweep.plan import Member

STATE = "state.json"
STOPPED = 130  # run.py's exit code after a signal, and the sweep's
TAIL = 6  # lines of a failed run's log that are shown

Command = Callable[[Member], list[str]]


@dataclasses.dataclass
class Ended:
    """How a run ended: its exit code, and the seconds of all its attempts."""

    code: int
    seconds: float

    @property
    def state(self) -> str:
        return {0: "finished", STOPPED: "stopped"}.get(self.code, "failed")


class Ledger:
    """state.json: run name -> Ended."""

    def __init__(self, root: pathlib.Path):
        self.path = root / STATE
        self.runs: dict[str, Ended] = {}
        if self.path.exists():
            try:
                found = json.loads(self.path.read_text(encoding="utf-8"))
                self.runs = {name: Ended(int(item["code"]), float(item["seconds"])) for name, item in found.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"the sweep's state cannot be read: {error}", where=str(self.path), expected="JSON") from error

    def finished(self, member: Member) -> bool:
        """Did it end well, and is its folder still there?"""
        ended = self.runs.get(member.name)
        return ended is not None and ended.code == 0 and (member.folder / CONFIG).exists()

    def record(self, member: Member, code: int, seconds: float) -> None:
        before = self.runs.get(member.name)
        self.runs[member.name] = Ended(code, seconds + (before.seconds if before else 0.0))
        write_atomic(self.path, json.dumps({n: dataclasses.asdict(e) for n, e in self.runs.items()}, indent=2) + "\n")

    def state(self, member: Member) -> str:
        """finished | failed | stopped | not run | unknown (it has rows that this sweep knows nothing of)."""
        ended = self.runs.get(member.name)
        if ended is not None:
            return ended.state
        return "unknown" if (member.folder / "metrics.jsonl").exists() else "not run"


def run_command(member: Member) -> list[str]:
    """run.py of this checkout."""
    program = pathlib.Path(coevo_jax.__file__).parent.parent / "run.py"
    if not program.is_file():
        raise UserError(
            "run.py is not beside the package", where=str(program), expected="a checkout, installed by pip install -e"
        )
    return [sys.executable, str(program), *member.flags]


def open_sweep(root: pathlib.Path) -> contextlib.closing[IO[str]]:
    """The sweep's folder with its lock, until closed. UserError: another sweep works there."""
    with disk_errors(root, "create the sweep's folder"):
        for name in ("runs", "logs"):
            (root / name).mkdir(parents=True, exist_ok=True)
        return contextlib.closing(take_lock(root, "sweep"))


def time_left(seconds: Sequence[float], left: int, elapsed: float) -> float | None:
    """Of the run under way and those after it (`left` in all), by the mean of those that finished; None before one has."""
    return max(sum(seconds) / len(seconds) * left - elapsed, 0.0) if seconds else None


def run_all(
    members: Sequence[Member],
    ledger: Ledger,
    console: Console,
    command: Command = run_command,
    *,
    stop_on_failure: bool = False,
    say_every: float = 30.0,
) -> bool:
    """Run those that are not finished, in order. False: a signal stopped it. Failures are named and don't stop the others."""
    todo = [member for member in members if not ledger.finished(member)]
    if len(todo) < len(members):
        console.line(f"{len(members) - len(todo)} of {len(members)} runs are finished already")
    with _signals() as child:
        for index, member in enumerate(todo):
            title = f"[{len(members) - len(todo) + index + 1}/{len(members)}] {member.name}"
            report = Report(console, title, _finished_seconds(members, ledger), len(todo) - index, say_every)
            if not _wait_for_owner(member, report, child):
                return False
            begin = time.monotonic()
            code = _run(command(member), member, report, child)
            if child.stop and code != 0:
                ledger.record(member, STOPPED, time.monotonic() - begin)
                console.line(f"{title}: stopped; the same command goes on")
                return False
            ledger.record(member, code, time.monotonic() - begin)
            report.end(code, member.log, ledger.runs[member.name].seconds)
            if child.stop or (code != 0 and stop_on_failure):
                return not child.stop
    return True


def _finished_seconds(members: Sequence[Member], ledger: Ledger) -> list[float]:
    return [ledger.runs[member.name].seconds for member in members if ledger.finished(member)]


def _run(words: list[str], member: Member, report: Report, child: Child) -> int:
    """Exit code of the command, whose output goes to the run's log."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with disk_errors(member.log, "write the run's log"), open(member.log, "ab") as log:
        # A session of its own: Ctrl-C in the terminal reaches the sweep alone, which passes it on once.
        child.process = subprocess.Popen(
            words, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env, start_new_session=True
        )
    try:
        report.begin()
        while True:
            try:
                return child.process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                report.progress(member)
    finally:
        child.process = None


def _wait_for_owner(member: Member, report: Report, child: Child) -> bool:
    """A sweep that was killed leaves its run going: let that process finish, then look what is left to do."""
    while _owned(member.folder):
        if child.stop:
            return False
        report.waiting(member)
        time.sleep(1.0)
    return True


def _owned(folder: pathlib.Path) -> bool:
    if not (folder / LOCK).exists():
        return False
    try:
        take_lock(folder).close()
    except UserError:
        return True
    return False


@dataclasses.dataclass
class Child:
    """The run under way, and whether a signal came."""

    process: subprocess.Popen[bytes] | None = None
    stop: bool = False


@contextlib.contextmanager
def _signals() -> Iterator[Child]:
    """Ctrl-C and SIGTERM go to the run, which finishes its update and saves; then the sweep ends."""
    child = Child()

    def on_signal(number: int, frame: FrameType | None) -> None:
        child.stop = True
        if child.process is not None:
            child.process.send_signal(number)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield child
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclasses.dataclass
class Report:
    """What is said about one run. `seconds`: of the runs that are finished; `left`: runs to do, this one included."""

    console: Console
    title: str
    seconds: list[float]
    left: int
    say_every: float
    started: float = 0.0
    said: float = 0.0

    def begin(self) -> None:
        self.started = self.said = time.monotonic()
        self.console.line(f"{self.title}{self._eta(0.0)}")

    def progress(self, member: Member) -> None:
        now = time.monotonic()
        if now - self.said >= self.say_every:
            self.said = now
            elapsed = now - self.started
            line = f"{self.title}: {_rows(member.folder)} updates in {duration(elapsed)}{self._eta(elapsed)}"
            self.console.line(" | ".join(part for part in (line, last_line(member.log)) if part))

    def waiting(self, member: Member) -> None:
        if not self.said or time.monotonic() - self.said >= self.say_every:
            self.said = time.monotonic()
            self.console.line(f"{self.title}: another process works on {member.folder}; waiting for its end")

    def end(self, code: int, log: pathlib.Path, seconds: float) -> None:
        if code == 0:
            self.console.line(f"{self.title}: finished after {duration(seconds)}")
            return
        self.console.line(f"{self.title}: FAILED with exit code {code}; its output is in {log}")
        for line in failure(log):
            self.console.line(f"    {line}")

    def _eta(self, elapsed: float) -> str:
        left = time_left(self.seconds, self.left, elapsed)
        return "" if left is None else f", about {duration(left)} left"


def _rows(folder: pathlib.Path) -> int:
    path = folder / "metrics.jsonl"
    return len(read_metrics(path)) if path.exists() else 0


def _tail(log: pathlib.Path) -> list[str]:
    with open(log, "rb") as file:
        file.seek(max(log.stat().st_size - 8192, 0))
        return [line.rstrip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]


def last_line(log: pathlib.Path) -> str:
    return (_tail(log) or [""])[-1][:160]


def failure(log: pathlib.Path) -> list[str]:
    """The end of a failed run's output: from its last 'error:' on, else the last lines."""
    lines = _tail(log)[-4 * TAIL :]
    errors = [i for i, line in enumerate(lines) if line.startswith("error:")]
    return lines[errors[-1] :][:TAIL] if errors else lines[-TAIL:]
