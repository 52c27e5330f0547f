"""Evaluation inside a run: it changes nothing in the training, resumes exactly, and keeps the best checkpoint."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from train_support import Run, run, same_bits, tiny

from coevo_jax.config.override import apply_overrides
from coevo_jax.config.validate import validate
from coevo_jax.errors import UserError
from coevo_jax.evaluate.during import Evaluation
from coevo_jax.trained import load_trained, split

BASE = ("schedule.cycles=1", "data.heldout=8", "run.keep=1")
NAMES = {
    "eval/score/mean", "eval/score/std", "eval/failure_share", "eval/rubric/valid_share", "eval/completions/length/mean",
    "eval/completions/truncated_share", "eval/probe/accuracy", "eval/probe/strict", "eval/probe/failure_share",
    "eval/probe/tie_share", "eval/probe/valid_share",
}  # fmt: skip


def evaluated(probe: pathlib.Path, *more: str) -> tuple[str, ...]:
    return (
        *BASE, "evaluate.every=1", "evaluate.prompts=6", "evaluate.answer.max_new_tokens=12", "evaluate.rubric.max_new_tokens=48",
        "evaluate.rubric.temperature=1", f"evaluate.pairs={probe}", "evaluate.probe=5", *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Pairs of the small world, whose better answer has what is asked for."""
    path = tmp_path_factory.mktemp("probe") / "pairs.jsonl"
    words = ["ant", "bee", "cat", "cow", "dog", "elk", "fig", "fox"]
    rows = [
        {
            "id": word,
            "prompt": f"write 3 words with {word}",
            "response_a": f"{word} owl yak",
            "response_b": "owl yak",
            "label": "A",
        }
        for word in words
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("plain"), *BASE)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, probe: pathlib.Path) -> Run:
    return run(tmp_path_factory.mktemp("watched"), *evaluated(probe, "evaluate.best=eval/score/mean"))


def training(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith("eval/")}


def test_it_changes_nothing_in_the_training(plain: Run, watched: Run) -> None:
    assert [training(row) for row in watched.comparable] == plain.comparable
    assert watched.rollouts() == plain.rollouts()
    assert same_bits(watched.params, plain.params)


def test_every_look_measures_prompts_and_probe(watched: Run) -> None:
    for row in watched.rows:
        assert {name for name in row if name.startswith("eval/")} == NAMES
        assert 0 <= row["eval/score/mean"] <= 1 and row["eval/probe/strict"] <= row["eval/probe/accuracy"] <= 1
    assert watched.rows[0]["eval/completions/length/mean"] > 1
    assert any(row["eval/score/mean"] != watched.rows[0]["eval/score/mean"] for row in watched.rows)


def test_the_best_checkpoint_stays_beside_the_newest(watched: Run) -> None:
    values = [row["eval/score/mean"] for row in watched.rows]
    wanted = values.index(max(values)) + 1  # the first of equals
    best = json.loads((watched.folder / "best.json").read_text())
    assert best == {"metric": "eval/score/mean", "value": max(values), "update": wanted}
    kept = {int(p.name.split("_")[1].split(".")[0]) for p in (watched.folder / "checkpoints").glob("step_*")}
    assert kept == {wanted, len(values)}
    assert split(f"run:{watched.folder}@best")[2] == wanted
    assert load_trained(watched.folder, update=wanted)[1] == wanted


def test_a_run_that_goes_on_gives_the_same_rows(watched: Run, probe: pathlib.Path, tmp_path: pathlib.Path) -> None:
    flags = evaluated(probe, "evaluate.best=eval/score/mean")
    assert not run(tmp_path, *flags, stop_after=2).finished
    again = run(tmp_path, *flags)
    assert again.finished and again.comparable == watched.comparable
    assert (tmp_path / "best.json").read_text() == (watched.folder / "best.json").read_text()


def test_it_may_be_switched_on_in_a_run_that_goes_on(plain: Run, probe: pathlib.Path, tmp_path: pathlib.Path) -> None:
    run(tmp_path, *BASE, stop_after=2)
    again = run(tmp_path, *evaluated(probe, "evaluate.every=3"))
    assert [training(row) for row in again.comparable] == plain.comparable
    assert ["eval/score/mean" in row for row in again.rows] == [False, False, True, True]  # the last one too


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (("evaluate.every=2", "evaluate.prompts=4"), "data.heldout"),
        (("evaluate.best=eval/score/mean",), "evaluate.every"),
        (("evaluate.every=1", "evaluate.prompts=0"), "evaluate.pairs"),
        (("evaluate.every=1", "data.heldout=4", "evaluate.prompts=4"), "sampler.max_new"),
        (("evaluate.every=1", "schedule.mode=sft", "warmup.updates=1"), "evaluate.every"),
    ],
)
def test_what_could_measure_nothing_is_refused(overrides: tuple[str, ...], where: str) -> None:
    with pytest.raises(UserError) as error:
        validate(apply_overrides(tiny(), overrides))
    assert where in error.value.where


def test_a_probe_that_is_no_pairs_is_refused_at_the_start(probe: pathlib.Path, watched: Run) -> None:
    for flags, word in (
        (("evaluate.benchmark=infobench",), "no pairs"),
        (("evaluate.pairs=missing.jsonl",), "no such data file"),
    ):
        watched.system.cfg, kept = tiny(*evaluated(probe, *flags)), watched.system.cfg
        try:
            with pytest.raises(UserError, match=word):
                Evaluation(watched.system)
        finally:
            watched.system.cfg = kept
