"""Resume: stopped at every phase boundary, killed, or on a corrupt checkpoint, a run ends as one that was never broken."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import sys
from typing import Any

import jax
import pytest
from train_support import REPO, Run, prints, run, same_bits, system_of

from coevo_jax.errors import UserError
from coevo_jax.records.metrics import comparable, read_metrics
from coevo_jax.records.rollouts import read_rollouts

# A warm-up stage, then two cycles of policy x2, rubric x2; checkpoints fall into phases and between them.
SHORT = ("schedule.cycles=2", "warmup.updates=2", "warmup.batch=8", "run.save_every=3", "warmup.lr=1e-4")
UPDATES = 10


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("whole") / "run", *SHORT)


def assert_same(resumed: Run, whole: Run) -> None:
    assert resumed.finished
    assert resumed.comparable == whole.comparable
    assert resumed.rollouts() == whole.rollouts()
    assert same_bits(resumed.params, whole.params)
    for name, learner in whole.system.learners.items():
        other = resumed.system.learners[name]
        assert same_bits(jax.device_get(learner.state.opt_state), jax.device_get(other.state.opt_state))
        assert same_bits(jax.device_get(learner.reference), jax.device_get(other.reference))


@pytest.mark.parametrize("stop_after", range(1, UPDATES))
def test_stopped_after_any_update(stop_after: int, whole: Run, tmp_path: pathlib.Path) -> None:
    first = run(tmp_path / "run", *SHORT, stop_after=stop_after)
    assert not first.finished and len(first.rows) == stop_after
    second = run(tmp_path / "run", *SHORT)
    assert any(note == f"resumed after update {stop_after}" for note in second.notes)
    assert_same(second, whole)


class Killed(BaseException):
    """The end of a process, as far as one process can have it: nothing after it runs but what unwinds."""


@pytest.mark.parametrize("kill_after", [1, 2, 4, 5, 7, 9])
def test_killed_after_an_update_loses_only_what_was_not_saved(kill_after: int, whole: Run, tmp_path: pathlib.Path) -> None:
    def kill(system: Any, row: dict[str, Any], done: int) -> None:
        if done == kill_after:
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path / "run", *SHORT, hook=kill)
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == kill_after
    assert_same(run(tmp_path / "run", *SHORT), whole)


def test_stopped_again_and_again(whole: Run, tmp_path: pathlib.Path) -> None:
    for stop_after in range(1, UPDATES):
        run(tmp_path / "run", *SHORT, stop_after=stop_after)
    assert_same(run(tmp_path / "run", *SHORT), whole)


def test_a_finished_run_does_nothing_more(whole: Run, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole.folder, folder)
    again = run(folder, *SHORT)
    assert again.finished and again.comparable == whole.comparable and same_bits(again.params, whole.params)
    assert not any(note.startswith("mark batch") for note in again.notes)


def test_two_models_resume(tmp_path: pathlib.Path) -> None:
    two = ("generator.mode=two", "schedule.cycles=2", "run.save_every=3")
    unbroken = run(tmp_path / "whole", *two)
    run(tmp_path / "run", *two, stop_after=3)
    assert_same(run(tmp_path / "run", *two), unbroken)


def newest(folder: pathlib.Path) -> pathlib.Path:
    return sorted((folder / "checkpoints").glob("step_*"))[-1]


def test_a_corrupt_newest_checkpoint_falls_back_and_says_so(whole: Run, tmp_path: pathlib.Path) -> None:
    run(tmp_path / "run", *SHORT, stop_after=7)
    bad = newest(tmp_path / "run")
    victim = max((p for p in bad.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 0xFF
    victim.write_bytes(bytes(data))
    second = run(tmp_path / "run", *SHORT)
    assert any(note.startswith(f"checkpoint skipped: {bad.name}: ") for note in second.notes)
    assert any(note.startswith("resumed after update 6; 1 later updates are done again") for note in second.notes)
    assert_same(second, whole)


def test_only_corrupt_checkpoints_are_an_error_and_nothing_is_written_over(tmp_path: pathlib.Path) -> None:
    run(tmp_path / "run", *SHORT, stop_after=7)
    for path in (tmp_path / "run" / "checkpoints").glob("step_*"):
        shutil.rmtree(path / "state")
    rows = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="every checkpoint is corrupt or partial") as error:
        run(tmp_path / "run", *SHORT)
    assert str(tmp_path / "run" / "checkpoints") in str(error.value)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == rows


def test_the_reference_of_a_resumed_run_is_that_after_the_warm_up(whole: Run) -> None:
    start = system_of(*SHORT)
    reference = jax.device_get(whole.system.learners["policy"].reference)
    assert not same_bits(reference, jax.device_get(start.learners["policy"].state.params))  # the warm-up moved the weights
    first = next(row for row in whole.rows if row["role"] == "policy" and row["stage"] == "policy")
    assert abs(first["kl"]) < 1e-6 and [row["stage"] for row in whole.rows[:2]] == ["warmup"] * 2
    assert prints(start)["policy"] != prints(whole.system)["policy"]


# ---------------------------------------------------------------------------------------------- real processes and signals


def start(folder: pathlib.Path, *overrides: str) -> subprocess.Popen[str]:
    env = {**os.environ, "COEVO_MARKS": "1", "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, str(REPO / "run.py"), f"--config={REPO / 'configs/tiny.py'}", f"--workdir={folder}"]
    command += [f"--config.{o}" for o in overrides]
    return subprocess.Popen(command, cwd=REPO, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def until(process: subprocess.Popen[str], beginning: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(beginning):
            return
    raise AssertionError(f"the run ended before {beginning!r}")


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=300)
    return process.returncode, out


def comparable_rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [comparable(row) for row in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """An unbroken run in a process of its own: bits are promised for the same devices, and this process has others."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    code, out = finish(start(folder, *SHORT))
    assert code == 0, out
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops_with_130_and_the_same_command_finishes(
    number: int, unbroken: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    process = start(tmp_path / "run", *SHORT)
    until(process, "mark batch 4")
    process.send_signal(number)
    code, out = finish(process)
    assert code == 130 and "stopped; the same command goes on" in out, out
    rows = comparable_rows(tmp_path / "run")
    assert 4 <= len(rows) < UPDATES
    code, out = finish(start(tmp_path / "run", *SHORT))
    assert code == 0 and f"resumed after update {len(rows)}" in out and "later updates" not in out, out
    assert comparable_rows(tmp_path / "run") == comparable_rows(unbroken)
    assert read_rollouts(tmp_path / "run" / "rollouts") == read_rollouts(unbroken / "rollouts")


@pytest.mark.slow
def test_sigkill_at_stage_marks(unbroken: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for mark in ("mark batch 0", "mark update 2", "mark batch 4", "mark update 6"):
        process = start(tmp_path / "run", *SHORT)
        until(process, mark)
        process.kill()
        process.wait()
    code, out = finish(start(tmp_path / "run", *SHORT))
    assert code == 0, out
    assert comparable_rows(tmp_path / "run") == comparable_rows(unbroken)
    assert read_rollouts(tmp_path / "run" / "rollouts") == read_rollouts(unbroken / "rollouts")
