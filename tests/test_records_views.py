"""Views of a run beside metrics.jsonl: Weights & Biases, a table of completions, a profiler trace of chosen updates."""

import io
import json
import sys
import types

import pytest

from coevo_jax.config import RunConfig
from coevo_jax.errors import UserError
from coevo_jax.progress import RunConsole
from coevo_jax.records.console import Console
from coevo_jax.records.profile import Profile, parse_window
from coevo_jax.records.wandb_view import WandbView


class Run:
    def __init__(self, **given):
        self.given, self.rows, self.metrics, self.finished = given, [], [], False

    def define_metric(self, *names, **options):
        self.metrics.append((names, options))

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.finished = True


def test_wandb_gets_numbers_over_updates_and_one_id_a_folder(tmp_path, monkeypatch):
    made = []
    module = types.ModuleType("wandb")
    module.init = lambda **given: made.append(Run(**given)) or made[-1]
    monkeypatch.setitem(sys.modules, "wandb", module)
    for _ in range(2):
        view = WandbView(tmp_path / "run", "offline", "mine", {"seed": 1})
        view.write({"step": 4, "role": "policy", "stage": "policy", "reward/mean": 0.5, "compat": True})
        view.close()
    first, second = made
    assert first.rows == [{"policy/reward/mean": 0.5, "update": 4}] and first.finished
    assert first.metrics == [(("update",), {}), (("*",), {"step_metric": "update"})]
    assert first.given["id"] == second.given["id"] and first.given["mode"] == "offline" and first.given["project"] == "mine"
    other = WandbView(tmp_path / "other", "offline", "mine", {})
    other.close()
    assert made[2].given["id"] != first.given["id"]


def test_wandb_off_needs_no_package_and_on_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    WandbView(tmp_path, "off", "p", {}).write({"step": 0, "role": "policy"})
    with pytest.raises(UserError, match=r"run\.wandb"):
        WandbView(tmp_path, "offline", "p", {})


def table(rows, update, cfg):
    text = io.StringIO()
    RunConsole(Console(text)).completions(rows, update, cfg)
    return text.getvalue()


def test_the_table_of_completions_spans_the_rewards_and_moves_no_cursor():
    rows = [
        {
            "question": "q",
            "completion": f"answer {i}\x1b[2J\nnext \u202e",
            "reward": i / 10,
            "parts": {"judge": i / 10},
            "advantage": 0.0,
        }
        for i in range(10)
    ]
    rows.append({"question": "q", "completion": "failed", "reward": None, "parts": {}})
    shown = table(rows, 4, RunConfig(show_every=2, show=3))
    assert "completions of update 4" in shown and "\x1b" not in shown and "\u202e" not in shown and "failed" not in shown
    assert [line.split()[1:3] for line in shown.splitlines()[3:]] == [["answer", str(i)] for i in (9, 5, 0)]
    assert (
        table(rows, 5, RunConfig(show_every=2)) == ""
        and table(rows, 4, RunConfig()) == ""
        and table([], 4, RunConfig(show_every=1)) == ""
    )
    assert "failed" in table(rows[-1:], 0, RunConfig(show_every=1))


def test_windows_of_a_trace():
    assert parse_window("") is None and parse_window("3:5") == (3, 5) and parse_window("3") == (3, 3)
    for wrong in ("5:3", "a", "1:2:3", "-1:2", ":"):
        with pytest.raises(UserError, match=r"run\.profile"):
            parse_window(wrong)


def test_a_trace_of_the_window_alone(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("jax.profiler.start_trace", lambda folder, **_: calls.append("start"))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls.append("stop"))
    profile = Profile(tmp_path, "2:3")
    written = []
    for update in range(6):
        profile.before(update)
        calls.append(update)
        written.append(profile.after(update, lambda: {"program": {"temporaries": 3}}))
    profile.close()
    assert calls == [0, 1, "start", 2, 3, "stop", 4, 5] and [bool(w) for w in written] == [False] * 3 + [True] + [False] * 2
    assert json.loads((tmp_path / "profile" / "programs.json").read_text()) == {"program": {"temporaries": 3}}
    cut = Profile(tmp_path, "2:9")
    cut.before(4)
    cut.close()
    assert calls[-2:] == ["start", "stop"]


@pytest.mark.slow
def test_a_run_writes_a_trace_and_the_memory_of_its_programs(tmp_path):
    from train_support import run

    run(tmp_path / "run", "schedule.cycles=1", "schedule.k=2", "run.profile=1:2")
    folder = tmp_path / "run" / "profile"
    assert list(folder.rglob("*.xplane.pb"))
    programs = json.loads((folder / "programs.json").read_text())["engine 0"]
    assert programs and all(p["results"] > 0 for p in programs.values())
