"""Sweeps: the table's arithmetic, what runs again and what does not, commands for pods; one sweep of real runs, killed once."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from train_support import REPO

from coevo_jax.errors import UserError
from coevo_jax.records.console import Console
from coevo_jax.records.metrics import comparable, read_metrics
from coevo_jax.sweep.__main__ import main, parse_flags
from coevo_jax.sweep.plan import Member, check_folders, config_files, members_of, pod_commands
from coevo_jax.sweep.plot import plot_table
from coevo_jax.sweep.runner import Ledger, failure, open_sweep, run_all, time_left
from coevo_jax.sweep.table import (
    Metric,
    RunValues,
    Table,
    known_metrics,
    markdown,
    parse_metric,
    runs_csv,
    summarize,
    table_csv,
    value_of,
)

TINY = str(REPO / "configs" / "tiny.py")
K10, K20 = (str(REPO / "configs" / "ablations" / f"{name}.py") for name in ("k_10", "k_20"))

# ------------------------------------------------------------------------------------------------------------ arithmetic


def test_the_t_interval_is_that_of_the_printed_table() -> None:
    """1, 2, 4: mean 7/3, s = sqrt(7/3); t of 2 degrees of freedom at 0.975 is 4.302653 (any printed table)."""
    found = summarize([1.0, 2.0, 4.0])
    assert found is not None and found.n == 3 and found.sd == pytest.approx(np.sqrt(7 / 3))
    half = 4.302653 * np.sqrt(7 / 3) / np.sqrt(3)
    assert (found.low, found.high) == pytest.approx((7 / 3 - half, 7 / 3 + half), rel=1e-6)
    wide, narrow = summarize([1.0, 2.0, 4.0], level=0.99), summarize([1.0, 2.0, 4.0], level=0.5)
    assert wide is not None and narrow is not None and wide.low < found.low < narrow.low < narrow.mean  # type: ignore[operator]
    assert narrow.high - narrow.mean == pytest.approx(0.816497 * np.sqrt(7 / 3) / np.sqrt(3), rel=1e-5)  # type: ignore[operator]


def test_t_intervals_hold_the_true_mean_as_often_as_they_say_and_bootstrap_ones_of_few_seeds_less_often() -> None:
    rng = np.random.RandomState(1)
    samples = rng.normal(3.0, 2.0, size=(4000, 4))
    t = [s for row in samples if (s := summarize(row)) is not None]
    assert 0.94 < np.mean([s.low <= 3.0 <= s.high for s in t]) < 0.96  # type: ignore[operator]
    b = [s for row in samples[:100] if (s := summarize(row, "bootstrap")) is not None]
    assert np.mean([s.low <= 3.0 <= s.high for s in b]) < 0.92  # type: ignore[operator]
    assert all(row.min() <= s.low <= s.mean <= s.high <= row.max() for row, s in zip(samples, b))  # type: ignore[operator]


def test_one_seed_has_no_interval_and_none_no_mean() -> None:
    one = summarize([0.5])
    assert one is not None and (one.n, one.mean, one.low, one.high) == (1, 0.5, None, None)
    assert summarize([]) is None
    same = summarize([0.25, 0.25])
    assert same is not None and same.low == same.high == 0.25


ROWS: list[dict[str, Any]] = [
    {"step": 0, "role": "policy", "stage": "warmup", "loss": 9.0},
    {"step": 1, "role": "policy", "stage": "policy", "reward/mean": 1.0, "kl": 0.5},
    {"step": 2, "role": "rubric", "stage": "rubric", "reward/mean": 10.0},
    {"step": 3, "role": "policy", "stage": "policy", "reward/mean": 3.0, "kl": None, "nonfinite": ["kl"]},
    {"step": 4, "role": "policy", "stage": "policy", "reward/mean": 8.0},
]


@pytest.mark.parametrize(
    "text, value",
    [
        ("reward/mean@policy:last", 8.0), ("reward/mean@policy:last2", 5.5), ("reward/mean@policy", 4.0),
        ("reward/mean@rubric:first", 10.0), ("reward/mean:mean", 5.5), ("reward/mean:max", 10.0), ("reward/mean:min", 1.0),
        ("kl@policy:last", 0.5), ("loss@warmup:last", 9.0), ("kl@rubric:last", None), ("absent", None),
    ],
)  # fmt: skip
def test_a_number_of_a_run(text: str, value: float | None) -> None:
    assert value_of(ROWS, parse_metric(text)) == value


def test_a_metric_that_no_run_has_is_an_error_when_asked_for() -> None:
    asked = [parse_metric("reward/maen@policy"), parse_metric("kl")]
    with pytest.raises(UserError) as error:
        known_metrics(asked, [ROWS], asked=True)
    assert error.value.nearest == "reward/mean"
    assert known_metrics(asked, [ROWS], asked=False) == (asked[1],)
    with pytest.raises(UserError) as error:
        parse_metric("kl:lost3")
    assert error.value.nearest == "last" or error.value.nearest == "last10"


def example() -> Table:
    runs = [
        RunValues("a_seed1", "a", 1, "finished", 8, (1.0, None)), RunValues("a_seed2", "a", 2, "finished", 8, (2.0, None)),
        RunValues("a_seed3", "a", 3, "finished", 8, (4.0, 0.5)), RunValues("b|_seed1", "b|", 1, "finished", 6, (7.0, 0.25)),
        RunValues("b|_seed2", "b|", 2, "failed", 3, (100.0, 100.0)), RunValues("c_seed1", "c", 1, "not run", 0, (None, None)),
    ]  # fmt: skip
    return Table((Metric("reward/mean", "policy"), Metric("kl", "", "last")), tuple(runs))


def test_the_table_in_markdown_says_its_interval_and_what_is_not_in_it() -> None:
    text = markdown(example())
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == "| config | seeds | updates | reward/mean@policy:last10 | kl:last |"
    assert lines[2] == "| a | 3 | 8 | 2.333 [-1.461, 6.128] | 0.500 |"
    assert lines[3] == "| b\\| | 1 of 2 | 6 | 7.000 | 0.250 |" and lines[4] == "| c | 0 of 1 | - | - | - |"
    assert "95 % Student's t interval over seeds" in text
    assert "- b|_seed2: failed" in text and "- c_seed1: not run" in text
    assert "bootstrap" in markdown(dataclasses.replace(example(), kind="bootstrap", level=0.9))


def test_the_tables_in_csv_hold_every_digit() -> None:
    rows = list(csv.DictReader(io.StringIO(table_csv(example()))))
    a = next(row for row in rows if row["config"] == "a" and row["metric"] == "reward/mean@policy:last10")
    assert float(a["mean"]) == 7 / 3 and a["seeds"] == "3" and a["interval"] == "t" and float(a["level"]) == 0.95
    c = next(row for row in rows if row["config"] == "c")
    assert c["seeds"] == "0" and c["mean"] == c["low"] == ""
    runs = list(csv.DictReader(io.StringIO(runs_csv(example()))))
    assert [row["state"] for row in runs] == ["finished"] * 4 + ["failed", "not run"]
    assert runs[4]["reward/mean@policy:last10"] == "100.0"


def test_the_plot_is_the_same_file_for_the_same_table(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    paths = plot_table(example(), tmp_path / "one")
    assert [path.name for path in paths] == ["plot.svg", "plot.png"]
    assert paths[0].read_bytes() == plot_table(example(), tmp_path / "two")[0].read_bytes()
    assert paths[1].read_bytes()[:4] == b"\x89PNG" and "reward/mean@policy" in paths[0].read_text()


# ------------------------------------------------------------------------------------------------------- which runs, flags


def members(root: pathlib.Path, *overrides: str, seeds: tuple[int, ...] = (1, 2)) -> list[Member]:
    return members_of([K10, K20], seeds, ("scale=smoke", *overrides), root)


def test_runs_are_configs_times_seeds_with_the_overrides_passed_through(tmp_path: pathlib.Path) -> None:
    found = members(tmp_path, "schedule.k=3")
    assert [m.name for m in found] == ["k_10_seed1", "k_10_seed2", "k_20_seed1", "k_20_seed2"]
    assert found[3].cfg.seed == 2 and found[3].cfg.schedule.k == 3 and found[3].cfg.policy.source == "tiny"
    folder = f"--workdir={tmp_path / 'runs' / 'k_20_seed2'}"
    assert found[3].flags == [f"--config={K20}", folder, "--config.scale=smoke", "--config.schedule.k=3", "--config.seed=2"]


def test_patterns_are_unfolded_in_order_and_each_file_counts_once() -> None:
    found = config_files([str(REPO / "configs/ablations/k_*.py"), K10, str(REPO / "configs/baselines/*.py")])
    assert found.count(K10) == 1 and len(found) > 5 and not any(name.endswith("__init__.py") for name in found)


@pytest.mark.parametrize(
    "change, words, expected",
    [
        ({"patterns": ["configs/ablations/k_11.py"]}, "no config file", ""),
        ({"overrides": ("seed=3",)}, "sets the seed itself", "--seeds"),
        ({"overrides": ("schedule.kk=3",)}, "unknown configuration key", ""),
        ({"overrides": ("name=same",)}, "have one name", ""),
        ({"overrides": ("name=a/b",), "patterns": [K10]}, "can't name a run folder", ""),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    change: dict[str, Any], words: str, expected: str, tmp_path: pathlib.Path
) -> None:
    given: dict[str, Any] = {"patterns": [K10, K20], "seeds": (1,), "overrides": (), "root": tmp_path} | change
    with pytest.raises(UserError, match=words) as error:
        members_of(**given)
    assert expected in error.value.expected


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--seeds=1,1"], "--seeds=1,1"), (["--seeds=a"], "--seeds=a"), (["--level=2"], "--level=2"), (["--sedes=1"], "--seeds"),
        (["--interval=tt"], "one of t, bootstrap"), (["--metrics=kl:lost"], "unknown reduction"),
        (["--pod=none.env"], "none.env"),
        (["--config.schedule.kk=1"], "schedule.k"), (["--workdir="], "--workdir is missing"),
    ],
)  # fmt: skip
def test_bad_flags_end_with_code_2_in_the_one_error_style(
    flags: list[str], words: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"--configs={K10}", f"--workdir={tmp_path / 'x'}", *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "expected:" in said and words in said
    assert not (tmp_path / "x").exists()


def test_a_pattern_that_the_shell_unfolded_is_taken_too() -> None:
    flags = parse_flags(["--configs", "a.py", "b.py", "--seeds", "4", "--workdir=x", "--gather", "--metrics=kl,loss:max"])
    assert flags.configs == ("a.py", "b.py") and flags.seeds == (4,) and flags.gather and flags.metrics == ("kl", "loss:max")


def test_commands_for_pods_are_resume_scripts_with_a_slice_each(tmp_path: pathlib.Path) -> None:
    env = tmp_path / "my.env"
    env.write_text((REPO / "tpu" / "example.env").read_text())
    lines = pod_commands(members(pathlib.Path("/mnt/shared/s")), str(env))
    assert lines[1].startswith(f"tpu/resume.sh --env={env} --name=k-10-seed2 --delete_when_done -- --config={K10} ")
    assert lines[1].endswith("--workdir=/mnt/shared/s/runs/k_10_seed2 --config.scale=smoke --config.seed=2")
    with pytest.raises(UserError, match="must lie in the share"):
        pod_commands(members(pathlib.Path("sweeps/s")), str(env))
    # The first of the commands that they stand for is the one that the script itself prints.
    out = subprocess.run([*lines[0].split()[:4], "--dry_run", *lines[0].split()[4:]], cwd=REPO, capture_output=True, text=True)
    assert out.returncode == 0 and "queued-resources create k-10-seed1" in out.stdout, out.stdout + out.stderr


# -------------------------------------------------------------------------------------------------- resuming, by a stub

STUB = """
import json, os, pathlib, sys, time
folder, code, wait = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.json").write_text(sys.argv[4])
print("start", flush=True)
with open(folder / "starts", "a") as file:
    file.write("x")
time.sleep(wait)
with open(folder / "metrics.jsonl", "a") as file:
    file.write(json.dumps({"role": "policy", "stage": "policy", "loss": float(sys.argv[5])}) + "\\n")
if code:
    print("error: what went wrong\\n  expected: better", flush=True)
sys.exit(code)
"""


class Stub:
    """Plays run.py: writes a config and a row, and ends with the code that `codes` has for the run."""

    def __init__(self, root: pathlib.Path, wait: float = 0.0):
        self.codes: dict[str, int] = {}
        self.wait = wait
        self.program = root / "stub.py"
        self.program.write_text(STUB)

    def __call__(self, member: Member) -> list[str]:
        from coevo_jax.config.override import to_json

        code = str(self.codes.get(member.name, 0))
        return [sys.executable, "-S", "-E", str(self.program), str(member.folder), code, str(self.wait), to_json(member.cfg),
                str(member.seed)]  # fmt: skip


def starts(member: Member) -> int:
    return len((member.folder / "starts").read_text()) if (member.folder / "starts").exists() else 0


def sweep(found: list[Member], stub: Stub, **options: Any) -> tuple[bool, Ledger, str]:
    said = io.StringIO()
    with open_sweep(found[0].root):
        ledger = Ledger(found[0].root)
        return run_all(found, ledger, Console(said), stub, **options), ledger, said.getvalue()


def test_a_failed_run_is_named_and_the_others_run_and_only_it_runs_again(tmp_path: pathlib.Path) -> None:
    found, stub = members(tmp_path), Stub(tmp_path)
    stub.codes["k_10_seed2"] = 3
    finished, ledger, said = sweep(found, stub)
    assert finished and [ledger.state(m) for m in found] == ["finished", "failed", "finished", "finished"]
    assert "k_10_seed2: FAILED with exit code 3" in said and "    error: what went wrong" in said and "expected: better" in said
    stub.codes.clear()
    _, ledger, said = sweep(found, stub)
    assert "3 of 4 runs are finished already" in said and [starts(m) for m in found] == [1, 2, 1, 1]
    assert all(ledger.finished(m) for m in found)
    assert sweep(found, stub)[1].runs == ledger.runs and [starts(m) for m in found] == [1, 2, 1, 1]


def test_stop_on_failure_leaves_the_rest_for_the_next_time(tmp_path: pathlib.Path) -> None:
    found, stub = members(tmp_path), Stub(tmp_path)
    stub.codes["k_10_seed2"] = 1
    _, ledger, _ = sweep(found, stub, stop_on_failure=True)
    assert [ledger.state(m) for m in found] == ["finished", "failed", "not run", "not run"]
    assert [starts(m) for m in found] == [1, 1, 0, 0]


def test_a_finished_run_whose_folder_is_gone_runs_again(tmp_path: pathlib.Path) -> None:
    found, stub = members(tmp_path, seeds=(1,)), Stub(tmp_path)
    sweep(found, stub)
    (found[0].folder / "config.json").unlink()
    sweep(found, stub)
    assert [starts(m) for m in found] == [2, 1]


def test_more_seeds_join_a_sweep_and_another_config_is_refused(tmp_path: pathlib.Path) -> None:
    stub = Stub(tmp_path)
    sweep(members(tmp_path, seeds=(1,)), stub)
    more = members(tmp_path, seeds=(1, 2))
    check_folders(more)
    sweep(more, stub)
    assert [starts(m) for m in more] == [1, 1, 1, 1]
    with pytest.raises(UserError, match=r"holds another k_10_seed1: loss\.clip_low: 0\.2 -> 0\.3"):
        check_folders(members(tmp_path, "loss.clip_low=0.3"))


def test_a_signal_goes_to_the_run_and_ends_the_sweep_which_goes_on_later(tmp_path: pathlib.Path) -> None:
    found, stub = members(tmp_path), Stub(tmp_path, wait=60.0)

    class Interrupt(Stub):
        def __call__(self, member: Member) -> list[str]:
            if member.name == "k_10_seed2":
                signal.setitimer(signal.ITIMER_REAL, 0.4)
            self.wait = 60.0 if member.name == "k_10_seed2" else 0.0
            return super().__call__(member)

    before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        finished, ledger, said = sweep(found, Interrupt(tmp_path))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not finished and "k_10_seed2: stopped; the same command goes on" in said
    assert [ledger.state(m) for m in found] == ["finished", "stopped", "not run", "not run"]
    stub.wait = 0.0
    assert sweep(found, stub)[0] and next(starts(m) for m in found) == 1


def test_two_sweeps_do_not_work_in_one_folder(tmp_path: pathlib.Path) -> None:
    with open_sweep(tmp_path), pytest.raises(UserError, match="another process works on this sweep"):
        open_sweep(tmp_path)


def test_time_left_and_the_end_of_a_failed_log(tmp_path: pathlib.Path) -> None:
    assert time_left([], 3, 5.0) is None and time_left([10.0, 20.0], 3, 5.0) == 40.0 and time_left([1.0], 1, 9.0) == 0.0
    log = tmp_path / "log"
    log.write_text("error: old\n" + "x\n" * 40 + "error: new\n  where: there\n")
    assert failure(log) == ["error: new", "  where: there"]
    log.write_text("".join(f"line {i}\n" for i in range(40)))
    assert failure(log) == [f"line {i}" for i in range(34, 40)]


# ------------------------------------------------------------------------------------------------------------- real runs

SMALL = ("schedule.cycles=1", "schedule.k=2", "run.save_every=1", "update.rows_per_micro=8")


@pytest.mark.slow
def test_a_sweep_of_real_runs_is_killed_once_and_goes_on(tmp_path: pathlib.Path) -> None:
    """Two configs, two seeds. The sweep and its run are killed inside the second run; then every row is that of a run alone."""
    other = tmp_path / "other.py"
    other.write_text(
        "import dataclasses\nfrom configs.tiny import get_config as main\n\n\ndef get_config():\n"
        "    cfg = main()\n    return dataclasses.replace(cfg, name='other', rubric=dataclasses.replace(cfg.rubric, alpha=0.5))\n"
    )
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(REPO)}
    small = [f"--config.{text}" for text in SMALL]
    words = [sys.executable, "-m", "coevo_jax.sweep", f"--configs={TINY},{other}", "--seeds=1,2", f"--workdir={tmp_path / 's'}",
             "--metrics=reward/mean@policy:last2,rubric/valid_share@rubric:last", *small]  # fmt: skip
    second = tmp_path / "s" / "runs" / "tiny_seed2"
    process = subprocess.Popen(words, cwd=REPO, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until = time.monotonic() + 1200
    while not (second / "metrics.jsonl").exists() or not read_metrics(second / "metrics.jsonl"):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    process.kill()
    process.wait()
    owner = int((second / ".lock").read_text().split()[1])
    os.kill(owner, signal.SIGKILL)
    out = subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True, timeout=3000)
    assert out.returncode == 0, out.stdout + out.stderr
    assert "1 of 4 runs are finished already" in out.stdout
    alone = [sys.executable, "run.py", f"--config={TINY}", f"--workdir={tmp_path / 'alone'}", *small, "--config.seed=2"]
    subprocess.run(alone, cwd=REPO, env=env, check=True, stdout=subprocess.DEVNULL)
    rows = {folder: [comparable(r) for r in read_metrics(folder / "metrics.jsonl")] for folder in (second, tmp_path / "alone")}
    assert rows[second] == rows[tmp_path / "alone"] and len(rows[second]) == 4
    state = json.loads((tmp_path / "s" / "state.json").read_text())
    assert {name: item["code"] for name, item in state.items()} == dict.fromkeys(
        ("tiny_seed1", "tiny_seed2", "other_seed1", "other_seed2"), 0
    )
    table = (tmp_path / "s" / "table.md").read_text()
    assert "| tiny | 2 | 4 |" in table and "| other | 2 | 4 |" in table and "Not in the table" not in table
    lines = {(r["config"], r["metric"]): r for r in csv.DictReader(io.StringIO((tmp_path / "s" / "table.csv").read_text()))}
    own = [np.mean([r["reward/mean"] for r in read_metrics(tmp_path / "s" / "runs" / f"tiny_seed{seed}" / "metrics.jsonl")
                    if r["role"] == "policy"][-2:]) for seed in (1, 2)]  # fmt: skip
    assert float(lines["tiny", "reward/mean@policy:last2"]["mean"]) == pytest.approx(np.mean(own))
