"""Run folder, metrics, rollouts and console: nothing half written, nothing written over, errors that say where."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from coevo_jax import progress
from coevo_jax.errors import UserError
from coevo_jax.records.console import Console, duration, format_table, number
from coevo_jax.records.files import write_atomic
from coevo_jax.records.metrics import MetricsWriter, comparable, read_metrics
from coevo_jax.records.rollouts import drop_rollouts_after, read_rollouts, rollout_files, write_rollouts
from coevo_jax.records.run_folder import Input, check_run, config_differences, open_run, read_config

CONFIG = {"seed": 1, "schedule": {"k": 10, "cycles": 2}, "run": {"keep": 2}, "tags": ("a", "b")}


def changed(**groups):
    return {**CONFIG, **groups}


# ---- run folder ----


def test_new_folder_then_the_same_config_resumes(tmp_path):
    with open_run(tmp_path / "a" / "run", CONFIG) as run:
        assert not run.resumed and run.rollouts.is_dir() and run.checkpoints.is_dir()
        assert read_config(run.path) == json.loads(json.dumps(CONFIG))
    with open_run(tmp_path / "a" / "run", CONFIG) as run:
        assert run.resumed


def test_another_config_is_refused_and_nothing_is_written(tmp_path):
    open_run(tmp_path, CONFIG).close()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    other = changed(schedule={"k": 11, "cycles": 2}, extra={"new": True})
    with pytest.raises(UserError) as caught:
        open_run(tmp_path, other)
    assert "schedule.k: 10 -> 11" in str(caught.value) and "extra.new: absent -> true" in str(caught.value)
    assert "cycles" not in str(caught.value)
    assert {path: path.read_bytes() for path in before} == before
    open_run(tmp_path, CONFIG).close()  # the refused attempt holds no lock


def test_free_keys_may_change_and_are_recorded(tmp_path):
    open_run(tmp_path, CONFIG).close()
    with open_run(tmp_path, changed(run={"keep": 9})) as run:
        assert run.resumed and read_config(run.path)["run"]["keep"] == 9
    assert config_differences({"run": 1, "runner": 2}, {"run": 3, "runner": 4}) == ["runner: 2 -> 4"]


def test_resume_can_be_forbidden(tmp_path):
    open_run(tmp_path, CONFIG).close()
    with pytest.raises(UserError, match="holds a run already"):
        open_run(tmp_path, CONFIG, resume=False)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"not a run folder \(it holds thesis.tex\)"):
        open_run(tmp_path, CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match="path is a file"):
        open_run(tmp_path / "thesis.tex", CONFIG)


def test_a_kill_before_the_config_was_written_leaves_a_usable_folder(tmp_path):
    for name in ("config.json.tmp", ".lock"):
        (tmp_path / name).write_text("{")
    (tmp_path / "rollouts").mkdir()
    open_run(tmp_path, CONFIG).close()
    assert read_config(tmp_path)["seed"] == 1


def test_a_broken_config_is_an_error(tmp_path):
    open_run(tmp_path, CONFIG).close()
    (tmp_path / "config.json").write_text('{"seed": ')
    with pytest.raises(UserError, match="config cannot be read"):
        open_run(tmp_path, CONFIG)


def test_two_processes_cannot_share_a_folder_and_a_kill_frees_it(tmp_path):
    code = "import sys, time; from coevo_jax.records.run_folder import open_run; "
    code += f"run = open_run(sys.argv[1], {CONFIG!r}); print('open', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "open\n"
        with pytest.raises(UserError, match=rf"another process works on this run folder \(pid {child.pid} on "):
            open_run(tmp_path, CONFIG)
    finally:
        child.kill()
        child.wait()
    open_run(tmp_path, CONFIG).close()


def test_an_impossible_path_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"(?s)could not .* the run folder.*MiB free"):
        open_run(tmp_path / "file" / "run", CONFIG)


@pytest.mark.parametrize("enter", [check_run, open_run])
def test_a_bucket_is_refused_as_a_run_folder(enter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="can't lie in a bucket"):
        enter("gs://bucket/run", {"a": 1})
    assert list(tmp_path.iterdir()) == []


def test_other_processes_only_get_the_paths(tmp_path):
    run = open_run(tmp_path / "run", CONFIG, primary=False)
    assert run.metrics.name == "metrics.jsonl" and not run.path.exists()


def test_full_disk_while_writing_keeps_the_old_file(tmp_path, file_size_limit):
    write_atomic(tmp_path / "config.json", "old")
    with (
        file_size_limit(2048),
        pytest.raises(UserError, match=r"(?s)could not write config.json: File too large.*MiB free"),
    ):
        write_atomic(tmp_path / "config.json", "x" * 10_000)
    assert (tmp_path / "config.json").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


# ---- metrics ----


def test_rows_come_back_and_nonfinite_values_are_named(tmp_path):
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.write({"step": np.int32(1), "loss": jnp.float32(0.5), "bf": jnp.bfloat16(2), "role": "policy", "none": None})
    writer.write({"step": 2, "loss": float("nan"), "kl": np.float32(np.inf), "flag": np.bool_(True)})
    assert writer.cursor == 2
    assert read_metrics(tmp_path / "m.jsonl") == [
        {"step": 1, "loss": 0.5, "bf": 2.0, "role": "policy", "none": None},
        {"step": 2, "loss": None, "kl": None, "flag": True, "nonfinite": ["loss", "kl"]},
    ]
    with pytest.raises(TypeError, match="'vector' is not a scalar"):
        writer.write({"vector": np.zeros(3)})
    assert writer.cursor == 2


def test_truncation_to_the_cursor_and_appending_after_it(tmp_path):
    path = tmp_path / "m.jsonl"
    writer = MetricsWriter(path)
    for step in range(5):
        writer.write({"step": step, "text": "é" * step})
    again = MetricsWriter(path)
    assert again.cursor == 5 and again.truncate_to(3) == 2
    again.write({"step": 33})
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 33]
    assert MetricsWriter(path).truncate_to(0) == 4 and path.read_bytes() == b""
    with pytest.raises(UserError, match="has 0 rows, the checkpoint was saved after 3"):
        MetricsWriter(path).truncate_to(3)


def test_a_torn_last_line_is_repaired_at_every_cut(tmp_path):
    whole = b'{"step": 0}\n'
    last = b'{"step": 1, "x": "\xc3\xa9"}\n'
    for cut in range(len(last)):
        path = tmp_path / f"{cut}.jsonl"
        path.write_bytes(whole + last[:cut])
        assert [row["step"] for row in read_metrics(path)] == [0]
        writer = MetricsWriter(path)
        assert writer.cursor == 1 and path.read_bytes() == whole
        writer.write({"step": 7})
        assert [row["step"] for row in read_metrics(path)] == [0, 7]


def test_a_bad_row_before_the_last_is_an_error_with_its_line(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"a": 1}\nnot json\n{"a": 2}\n')
    with pytest.raises(UserError, match=r"m\.jsonl, line 2"):
        MetricsWriter(tmp_path / "m.jsonl")


def test_full_disk_while_writing_a_row(tmp_path, file_size_limit):
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.write({"step": 0})
    with file_size_limit(2048), pytest.raises(UserError, match="could not write a metrics row: File too large"):
        writer.write({"text": "x" * 10_000})
    assert writer.cursor == 1
    writer.write({"step": 1})
    assert [row["step"] for row in read_metrics(tmp_path / "m.jsonl")] == [0, 1]


def test_a_second_writer_is_noticed(tmp_path):
    writer = MetricsWriter(tmp_path / "m.jsonl")
    (tmp_path / "m.jsonl").write_text('{"step": 9}\n')
    with pytest.raises(UserError, match="something else changed it"):
        writer.write({"step": 0})


def test_comparable_drops_times_and_rates_only():
    row = {
        "step": 1, "reward/mean": 0.5, "time/rollout": 3.0, "sampler/tokens_per_second": 9, "seconds": 1, "seconds_total": 1,
        "judge/wait_seconds": 2, "rate/x": 1, "memory/peak": 1, "ratio/mean": 1.0, "timeouts": 0, "nonfinite": ["time/rollout"],
    }  # fmt: skip
    assert comparable(row) == {"step": 1, "reward/mean": 0.5, "ratio/mean": 1.0, "timeouts": 0}
    assert comparable({"nonfinite": ["kl", "rate/x"]}) == {"nonfinite": ["kl"]}


# ---- rollouts ----


def test_rollouts_are_overwritten_whole_and_read_in_order(tmp_path):
    folder = tmp_path / "rollouts"
    rows = [{"ids": np.arange(3), "reward": np.float32(0.5), "text": "line\u2028break\nand more \ud83d", "bad": float("nan")}]
    write_rollouts(folder, 12, "policy", [{"old": 1}] * 5)
    path = write_rollouts(folder, 12, "policy", rows)
    assert path.name == "update_000012_policy.jsonl"
    write_rollouts(folder, 2, "rubric", [{"n": 1}])
    write_rollouts(folder, 12, "policy", [{"n": 3}], process=1)
    assert read_rollouts(folder, 12, "policy") == [
        {"ids": [0, 1, 2], "reward": 0.5, "text": rows[0]["text"], "bad": None},
        {"n": 3},
    ]
    assert [item[:3] for item in rollout_files(folder)] == [(2, "rubric", 0), (12, "policy", 0), (12, "policy", 1)]
    assert read_rollouts(folder)[0] == {"n": 1}
    assert drop_rollouts_after(folder, 2) == 2 and len(rollout_files(folder)) == 1


def test_a_failed_dump_leaves_the_old_file(tmp_path):
    write_rollouts(tmp_path, 1, "policy", [{"n": 1}])
    with pytest.raises(TypeError):
        write_rollouts(tmp_path, 1, "policy", [{"n": 2}, {"n": object()}])
    assert read_rollouts(tmp_path, 1) == [{"n": 1}] and len(os.listdir(tmp_path)) == 1


def test_a_bad_rollout_row_is_named(tmp_path):
    (tmp_path / "update_000001_policy.jsonl").write_text('{"a": 1}\n{\n')
    with pytest.raises(UserError, match=r"update_000001_policy\.jsonl, line 2"):
        read_rollouts(tmp_path)


# ---- console ----


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_has_rate_and_time_left_from_the_last_steps():
    now = [0.0]
    stream = io.StringIO()
    console = Console(stream, clock=lambda: now[0], window=2)
    console.phase("policy", 10, done=2)
    for done, moment in ((3, 100.0), (4, 102.0), (5, 104.0)):
        now[0] = moment
        console.step(done, {"reward": 0.25})
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("policy 3/10 | 100.0 s/step | ETA 11 min 40 s")
    assert lines[-1] == "policy 5/10 | 2.0 s/step | ETA 10 s | reward 0.250"


def test_terminal_overwrites_its_line_and_keeps_tables():
    stream = Terminal()
    console = Console(stream, clock=lambda: 0.0)
    console.phase("policy", 2)
    console.step(1, {"a": 1})
    console.step(2)
    console.table(["name", "mean"], [["reward", 0.5], ["kl", None]], title="policy")
    assert stream.getvalue() == (
        "\rpolicy 1/2 | a 1\rpolicy 2/2      \npolicy\nname     mean\n------  -----\nreward  0.500\nkl          -\n"
    )


def test_number_duration_and_table_forms():
    assert [number(value) for value in (3, 0.0, 1e-6, 12345.6, 123.456, math.nan, None, "x")] == [
        "3", "0.000", "1.00e-06", "1.23e+04", "123.5", "-", "-", "x",
    ]  # fmt: skip
    assert [duration(value) for value in (42.4, 185, 7620)] == ["42 s", "3 min 05 s", "2 h 07 min"]
    assert format_table(["a", "b"], []) == "a  b\n-  -"


@pytest.mark.parametrize("platform, unit", [("linux", 2**20), ("darwin", 2**30)])
def test_peak_memory_is_in_gib_on_every_platform(platform, unit, monkeypatch):
    monkeypatch.setattr(progress.sys, "platform", platform)
    monkeypatch.setattr(progress.resource, "getrusage", lambda who: types.SimpleNamespace(ru_maxrss=3 * unit))
    assert progress.peak_gib() == 3.0


# ---------------------------------------------------------------------------------------------------------------- inputs


def inputs(rubric: str = "aa", data: str = "dd") -> dict[str, Input]:
    return {"rubric.prompt": Input(rubric, "/my/rubric.txt"), "data.prompts": Input(data, "data.prompts=p.jsonl")}


def hashes(folder) -> dict[str, str]:
    return json.loads((folder / "inputs.json").read_text())["hashes"]


def test_a_changed_input_is_refused_with_its_file_and_nothing_is_written(tmp_path):
    open_run(tmp_path, CONFIG, inputs=inputs()).close()
    open_run(tmp_path, CONFIG, inputs=inputs()).close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(UserError, match=r'rubric\.prompt: "aa" -> "bb"') as caught:
        open_run(tmp_path, CONFIG, inputs=inputs(rubric="bb"))
    assert caught.value.where == "/my/rubric.txt" and "--config.run.allow_changed_inputs=true" in caught.value.expected
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    open_run(tmp_path, CONFIG, inputs=inputs()).close()  # the refused attempt holds no lock


def test_a_changed_input_may_be_allowed_and_stays_on_record(tmp_path):
    open_run(tmp_path, CONFIG, inputs=inputs()).close()
    with open_run(tmp_path, CONFIG, inputs=inputs(rubric="bb"), allow_changed_inputs=True) as run:
        assert run.changed == ('rubric.prompt: "aa" -> "bb" (/my/rubric.txt)',)
    with open_run(tmp_path, CONFIG, inputs=inputs(rubric="bb")) as run:
        assert run.resumed and run.changed == ()
    assert hashes(tmp_path) == {"rubric.prompt": "bb", "data.prompts": "dd"}
    assert len(json.loads((tmp_path / "inputs.json").read_text())["changes"]) == 1


def test_changed_data_can_not_be_allowed(tmp_path):
    open_run(tmp_path, CONFIG, inputs=inputs()).close()
    with pytest.raises(UserError, match=r"data\.prompts: the content") as caught:
        open_run(tmp_path, CONFIG, inputs=inputs(data="ee"), allow_changed_inputs=True)
    assert "p.jsonl" in caught.value.where and "allow_changed_inputs" not in caught.value.expected


def test_a_run_from_before_inputs_were_recorded_takes_them_up(tmp_path):
    open_run(tmp_path, CONFIG).close()
    assert not (tmp_path / "inputs.json").exists()
    open_run(tmp_path, CONFIG, inputs=inputs()).close()
    assert hashes(tmp_path)["rubric.prompt"] == "aa"


def test_a_kill_between_inputs_and_config_leaves_a_usable_folder(tmp_path):
    (tmp_path / "inputs.json").write_text("{")
    open_run(tmp_path, CONFIG, inputs=inputs()).close()
    assert hashes(tmp_path)["rubric.prompt"] == "aa"
