"""DynamicRubric's whole loop in the small world: rounds, what is frozen when, resume, continual anchors, devices."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import pytest
from test_methods_dynamic import config
from train_support import Recorder, Run, prints, run, same_bits, system_of

from coevo_jax.data import read_rankings
from coevo_jax.data.rankings import is_test
from coevo_jax.records.fingerprint import fingerprint
from coevo_jax.system import System

SHORT = ("schedule.k=1", "warmup.updates=2", "warmup.batch=8", "run.save_every=2")
ROLES = ["rubric", "rubric", "rubric", "policy", "rubric", "policy"]  # warm-up, warm-up, then two rounds of one update each


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, seen: list[dict[str, Any]]) -> Run:
    def hook(system: System, row: dict[str, Any], done: int) -> None:
        seen.append({"row": row, "prints": prints(system)})

    return run(tmp_path_factory.mktemp("dynamic") / "run", cfg=config(*SHORT), hook=hook)


def test_rounds_train_one_role_and_leave_the_other(whole: Run, seen: list[dict[str, Any]]) -> None:
    """The generator's stage leaves every bit of the policy alone, the policy's those of the generator."""
    assert whole.finished and [row["role"] for row in whole.rows] == ROLES
    before = prints(system_of(cfg=config(*SHORT)))
    for step in seen:
        role = step["row"]["role"]
        other = {"policy": "rubric", "rubric": "policy"}[role]
        assert step["prints"][other] == before[other]
        if not step["row"]["update/skipped"]:
            assert step["prints"][role] != before[role]
        before = step["prints"]
    last, written = whole.rows[-1], [row["rubric/valid_share"] for row in whole.rows if row["stage"] != "warmup"]
    assert all(0.3 < share <= 1 for share in written)  # the bundled model can do it and has something to learn
    assert {"dynamic/score_gap", "dynamic/score_gap/alarm", "dynamic/items", "rubric/valid_share", "judge/failure_share"} <= set(
        last
    )


SLOW = pytest.mark.slow


@pytest.mark.parametrize("stop_after", [pytest.param(1, marks=SLOW), 2, 3, 4, pytest.param(5, marks=SLOW)])
def test_stopped_in_any_stage_it_goes_on_to_the_same_end(stop_after: int, whole: Run, tmp_path: pathlib.Path) -> None:
    first = run(tmp_path / "run", cfg=config(*SHORT), stop_after=stop_after)
    assert not first.finished and len(first.rows) == stop_after
    assert_same(run(tmp_path / "run", cfg=config(*SHORT)), whole)


class Killed(BaseException):
    """The end of a process."""


@pytest.mark.parametrize("kill_after", [pytest.param(3, marks=SLOW), 4])
def test_killed_in_a_generator_or_a_policy_stage(kill_after: int, whole: Run, tmp_path: pathlib.Path) -> None:
    def kill(system: System, row: dict[str, Any], done: int) -> None:
        if done == kill_after:
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path / "run", cfg=config(*SHORT), hook=kill)
    assert_same(run(tmp_path / "run", cfg=config(*SHORT)), whole)


def assert_same(resumed: Run, whole: Run) -> None:
    assert resumed.finished and resumed.comparable == whole.comparable and resumed.rollouts() == whole.rollouts()
    assert same_bits(resumed.params, whole.params)
    assert same_bits(jax.device_get(resumed.system.states), jax.device_get(whole.system.states))


def test_without_a_learning_rate_nothing_moves(tmp_path: pathlib.Path) -> None:
    cfg = config("optimizer.lr=0", "schedule.cycles=1", "schedule.k=1")
    start = prints(system_of(cfg=cfg))
    done = run(tmp_path / "run", cfg=cfg)
    assert prints(done.system) == start
    assert all(row["ratio/mean"] == pytest.approx(1.0, abs=1e-5) for row in done.rows if "ratio/mean" in row)


def test_new_rankings_join_with_their_round(tmp_path: pathlib.Path) -> None:
    """Round 1 draws from the first source alone; from round 2 on the new one's train part is among the anchors."""
    question = next(
        q
        for i in range(50)
        for q in [f"write {3 + i % 4} words with {'owl' if i % 2 else 'ant'} first bee"]
        if not is_test(q, 0.25)
    )
    rows = [{"prompt": question, "answers": ["bee owl ant", "owl"], "ranks": [1, 2]}]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    cfg = config("schedule.k=1", f"dynamic.new_rankings={tmp_path / 'new.jsonl'}", "schedule.cycles=3")
    system = system_of(cfg=cfg)
    sets = [{r["prompt"] for r in system.context.streams[f"anchors_{t}"].prompts.records} for t in range(3)]
    old = {r["prompt"] for r in read_rankings("tiny").records if not is_test(r["prompt"], 0.25)}
    assert sets[0] == old and sets[1] == sets[2] == old | {question}
    assert not any(is_test(prompt, 0.25) for prompt in sets[2])
    sources = [str(entry) for name, entry in system.inputs.items() if name.startswith("data.rankings of round")]
    assert len(sources) == 3 and sum("new.jsonl" in where for where in sources) == 2


def test_a_static_generator_rests_from_its_round_on(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path / "run", cfg=config("schedule.k=1", "dynamic.static_from=2"))
    assert [row["role"] for row in done.rows] == ["rubric", "policy", "policy"]


@pytest.mark.slow
def test_a_verifier_with_weights_keeps_its_bytes_and_its_p_is_logged(tmp_path: pathlib.Path) -> None:
    """Yes/no log-probs of a frozen model; its p is in the dump, the objective takes hard votes."""
    judge = ("judge.source=tiny_dynamic", "judge.protocol=criterion_logits", "judge.min_yes_no_mass=0", "judge.max_prompt=256")
    frozen: list[str] = []

    def hook(system: System, row: dict[str, Any], done: int) -> None:
        frozen.append(fingerprint(system.frozen["judge"]))

    cfg = config("schedule.k=1", "schedule.cycles=1", "dynamic.yes_above=0.5", *judge)
    done = run(tmp_path / "run", cfg=cfg, hook=hook)
    assert set(frozen) == {done.system.frozen_fingerprints["judge"]} and len(frozen) == 2
    rows = [r for r in done.rollouts(0, "rubric") if r["rubric_status"] == "ok"]
    assert rows and all(row["judge/failure_share"] == 0 for row in done.rows)
    for row in rows:
        for votes, p in zip(row["votes"], row["p_yes"]):
            assert all(0 < x < 1 and v == (x > 0.5) for v, x in zip(votes, p))


@pytest.mark.slow
def test_eight_devices_train_as_one_does(tmp_path: pathlib.Path) -> None:
    from coevo_jax.train import train

    cfg = config("schedule.k=1", "schedule.cycles=1")
    one = run(tmp_path / "one", cfg=cfg)
    cache, console = jax.config.jax_compilation_cache_dir, Recorder()
    try:
        assert train(cfg, str(tmp_path / "eight"), console)
    finally:
        jax.config.update("jax_compilation_cache_dir", cache)
    eight = Run(tmp_path / "eight", True, console.notes, one.system)
    assert any("'data': 8" in note for note in eight.notes)
    for ours, theirs in zip(one.rows, eight.rows, strict=True):
        for name in ("reward/mean", "dynamic/score_gap", "dynamic/items"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
