"""The runs of world_study.py, several run.py processes at a time, and what their weights write on held-out questions."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import numpy as np
from _world import Texts, heldout_questions

from coevo_jax.assemble import System
from coevo_jax.config import Experiment
from coevo_jax.config.validate import generator_learns
from coevo_jax.records.console import Console, duration
from coevo_jax.records.files import write_atomic
from coevo_jax.rubrics import parse_rubric
from coevo_jax.sampler import Request
from coevo_jax.sweep.plan import Member
from coevo_jax.sweep.runner import STOPPED, Ledger, failure, last_line, run_command
from coevo_jax.trained import load_trained

# --------------------------------------------------------------------------------------------------------------- running


@dataclasses.dataclass
class Running:
    member: Member
    process: subprocess.Popen[bytes]
    started: float


@contextlib.contextmanager
def _signals(running: list[Running]) -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM go to the runs, which finish their updates and save."""
    stop = [False]

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop[0] = True
        for item in running:
            item.process.send_signal(number)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: stop[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_members(
    members: Sequence[Member],
    ledger: Ledger,
    console: Console,
    parallel: int,
    command: Callable[[Member], list[str]] = run_command,
) -> bool:
    """Run those that are not finished, `parallel` at a time; one that fails leaves the others alone. False: a signal came."""
    todo = [member for member in members if not ledger.finished(member)]
    console.line(f"{len(members) - len(todo)} of {len(members)} runs are finished; {parallel} at a time")
    running: list[Running] = []
    begin, ended, shown = time.monotonic(), 0, time.monotonic()
    with _signals(running) as stopped:
        while running or (todo and not stopped()):
            while todo and len(running) < parallel and not stopped():
                running.append(_start(todo.pop(0), command))
                console.line(f"start {running[-1].member.name}")
            time.sleep(0.5)
            for item in [item for item in running if item.process.poll() is not None]:
                running.remove(item)
                ended += 1
                _end(item, ledger, console, stopped(), _left(begin, ended, len(todo) + len(running)))
            if time.monotonic() - shown > 30:
                shown = time.monotonic()
                for item in running:
                    console.line(f"   {item.member.name}: {last_line(item.member.log)}")
    return not stopped()


def _left(begin: float, ended: int, left: int) -> str:
    return f"{left} left, ETA {duration((time.monotonic() - begin) / ended * left)}" if left else "none left"


def _start(member: Member, command: Callable[[Member], list[str]]) -> Running:
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"}
    with open(member.log, "ab") as log:
        process = subprocess.Popen(
            command(member), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env, start_new_session=True
        )
    return Running(member, process, time.monotonic())


def _end(item: Running, ledger: Ledger, console: Console, stopped: bool, left: str) -> None:
    code, seconds = item.process.returncode, time.monotonic() - item.started
    ledger.record(item.member, STOPPED if stopped and code else code, seconds)
    console.line(f"{item.member.name}: {ledger.state(item.member)} after {duration(seconds)}; {left}")
    if ledger.state(item.member) == "failed":
        for line in failure(item.member.log):
            console.line(f"    {line}")


# --------------------------------------------------------------------------------------------------------------- drawing


@dataclasses.dataclass(frozen=True)
class Counts:
    """How much is drawn at the end of each cycle."""

    questions: int = 96
    answers: int = 8  # a question; even
    rubrics: int = 4


def cycle_ends(cfg: Experiment) -> list[int]:
    """Updates done at the end of each cycle, 0 first."""
    phases = 2 if generator_learns(cfg) else 1
    return [cycle * cfg.schedule.k * phases for cycle in range(cfg.schedule.cycles + 1)]


def weights_of(system: System, folder: pathlib.Path, cfg: Experiment, update: int) -> dict[str, Any]:
    """Parameters by role after an update of the run; 0 and a role that does not train: those it began with."""
    start = system.learners["policy"].state.params
    if update == 0:
        return {"policy": start, "rubric": start}
    found = {"policy": load_trained(folder, "policy", update=update)[0].params, "rubric": start}
    if generator_learns(cfg):
        found["rubric"] = load_trained(folder, "rubric", update=update)[0].params
    return found


def draw_texts(system: System, folder: pathlib.Path, cfg: Experiment, counts: Counts) -> Texts:
    """What the run's weights write at temperature 1 at the end of each cycle. The noise belongs to (seed, cycle, question,
    sample), not to the arm: runs that differ in nothing but their training are asked with the same noise."""
    ctx, questions = system.context, list(heldout_questions(counts.questions))
    engine = ctx.voices["policy"].engine
    out = Texts(questions, [], [])

    def ask(role: str, params: Any, prompts: list[list[int]], n: int, cycle: int) -> list[Any]:
        sampling = cfg.rubric_sampling if role == "rubric" else cfg.answer
        who = f"heldout {role} {cfg.seed}"
        requests = [Request(np.asarray(ids, np.int32), n, who, cycle, i, sampling) for i, ids in enumerate(prompts)]
        return engine.generate(params, requests)

    for cycle, update in enumerate(cycle_ends(cfg)):
        params = weights_of(system, folder, cfg, update)
        answers = ask("policy", params["policy"], [ctx.answer_prompt(q) for q in questions], counts.answers, cycle)
        rubrics = ask("rubric", params["rubric"], [ctx.rubric_prompt(q) for q in questions], counts.rubrics, cycle)
        out.answers.append([[ctx.text(c.tokens) for c in row] for row in answers])
        out.rubrics.append([[_written(ctx, cfg, c) for c in row] for row in rubrics])
    return out


def _written(ctx: Any, cfg: Experiment, completion: Any) -> list[list[Any]] | None:
    parsed = parse_rubric(ctx.raw(completion.tokens, "rubric"), cfg.rubric, truncated=completion.finish == "length")
    return None if parsed.value is None else [[c.text, c.weight] for c in parsed.value.criteria]


def save_texts(path: pathlib.Path, texts: Texts) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(dataclasses.asdict(texts)) + "\n")


def load_texts(path: pathlib.Path) -> Texts:
    return Texts(**json.loads(path.read_text(encoding="utf-8")))
