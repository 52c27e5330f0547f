"""The small-world study: instruments by hand, aggregation, what runs again and what does not; one whole study of tiny counts."""

from __future__ import annotations

import json
import pathlib
import random
import sys
from typing import Any

import jax
import pytest
from train_support import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

import _world
import world_study
from _world import (
    Scorer,
    Texts,
    accuracy,
    aged_pairs,
    covered_share,
    heldout_questions,
    ideal_rubric,
    judge_strength,
    pairs_of,
    pooled,
    relevant_share,
    temporal_pairs,
    training_pairs,
    true_gap,
    usable,
    valid_share,
)
from _world_plot import figure
from _world_report import measure, over_seeds, put_tables, right, runs_of, tables
from _world_runs import cycle_ends, load_texts, run_members, save_texts

from coevo_jax.config import DataConfig, RubricConfig
from coevo_jax.data import read_pairs, read_prompts
from coevo_jax.judges.base import JudgeItem
from coevo_jax.judges.world import WORDS, OracleJudge, true_quality
from coevo_jax.records.console import Console
from coevo_jax.records.rollouts import write_rollouts
from coevo_jax.rubrics import Criterion, Rubric
from coevo_jax.sweep.runner import Ledger

QUESTION = "write 3 words with owl first ant"  # weights 1, 2, 2
GOOD, FAIR, BAD = "ant owl bee", "ant bee cat", "bee cat dog"  # 1, 0.6, 0.2
OWL, ANT, NICE = [["includes owl", 1.0]], [["begins with ant", 1.0]], [["is nice", 1.0]]


def texts(answers: list[list[str]], rubrics: list[list[Any]]) -> Texts:
    """One question; by cycle its answers and rubrics."""
    return Texts([QUESTION], [[row] for row in answers], [[row] for row in rubrics])


# ----------------------------------------------------------------------------------------------------------- instruments


def test_held_out_questions_are_no_prompts_and_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found = heldout_questions(60)
    assert len(set(found)) == 60 and found[:20] == heldout_questions(20)
    known = [
        read(source).records[3]["prompt"] for read, source in ((read_prompts, DataConfig(prompts="tiny")), (read_pairs, "tiny"))
    ]
    drawn = iter([known[0], "write words with yak", known[1], "write words with yak", "write words with owl"])
    monkeypatch.setattr(_world, "make_question", lambda rng: (next(drawn), ""))
    assert heldout_questions.__wrapped__(2) == ("write words with yak", "write words with owl")


@pytest.mark.parametrize("noise", [0.0, 0.6])
def test_scores_are_the_judges_own_to_the_last_bit(noise: float) -> None:
    rng, judge = random.Random(1), OracleJudge(noise, seed=5)
    score = Scorer(judge)
    for i in range(300):
        question = heldout_questions(20)[i % 20]
        kinds = [f"includes {rng.choice(WORDS)}", f"avoids {rng.choice(WORDS)}", "is nice", "is sorted", "has 4 words"]
        written = [[text, rng.random()] for text in rng.sample(kinds, rng.randint(1, 4))]
        answer = " ".join(rng.choices(WORDS, k=rng.randint(0, 6)))
        rubric = Rubric(tuple(Criterion(text, weight) for text, weight in written))
        (verdict,) = judge.judge([JudgeItem(question, rubric, answer, i)], i)
        assert score(question, written, answer) == verdict.score


def test_pairs_have_the_better_answer_first_and_equal_ones_make_none() -> None:
    assert [true_quality(QUESTION, a) for a in (GOOD, FAIR, BAD)] == [1.0, 0.6, 0.2]
    t = texts([[GOOD, BAD, BAD, FAIR, BAD, BAD], [FAIR, BAD, BAD, GOOD, GOOD, GOOD]], [[OWL], [OWL]])
    assert pairs_of(t, 0) == [[(GOOD, BAD), (FAIR, BAD)]]
    # the first of two of now, the second of two of then: FAIR BAD, BAD FAIR, GOOD BAD
    assert aged_pairs(t, 1, 1) == [[(FAIR, BAD), (FAIR, BAD), (GOOD, BAD)]] and aged_pairs(t, 0, 0) == pairs_of(t, 0)
    assert temporal_pairs(t, 1)[0][:2] == [(FAIR, GOOD), (BAD, BAD)]  # the newer first, whichever is better
    assert true_gap(t, 1) == pytest.approx((0.6 + 0.2 + 0.2 + 3.0 - (1.0 + 0.2 * 4 + 0.6)) / 6)
    assert pooled([pairs_of(t, 0), pairs_of(t, 1)]) == [[(GOOD, BAD), (FAIR, BAD), (FAIR, BAD), (GOOD, BAD)]]


def test_a_pair_is_right_by_a_higher_score_alone_and_a_tie_is_half() -> None:
    """GOOD against FAIR: 'includes owl' is right, 'begins with ant' and 'is nice' tie, no rubric is none."""
    score = Scorer()
    found = accuracy([QUESTION], [[OWL, ANT, NICE, None]], [[(GOOD, FAIR)]], score)
    assert found == {"accuracy": 0.25, "with ties": (1 + 0.5 * 3) / 4, "valid": 1 / 3, "margin": 1 / 3, "cases": 4}
    turned = accuracy([QUESTION], [[OWL, ANT]], [[(FAIR, GOOD)]], score)
    assert (turned["accuracy"], turned["with ties"], turned["margin"]) == (0.0, 0.25, -0.5)
    nothing = accuracy([QUESTION], [[None]], [[]], score)
    assert nothing["cases"] == 0 and nothing["accuracy"] != nothing["accuracy"]


def test_the_ideal_rubric_orders_every_pair_and_noise_takes_strength_away() -> None:
    rng = random.Random(3)
    questions = list(heldout_questions(60))
    answers = [[[" ".join(rng.sample(WORDS, 4)) for _ in range(8)] for _ in questions]]
    t = Texts(questions, answers, [[[ideal_rubric(q)] for q in questions]])
    strengths = [judge_strength(t, noise, 1) for noise in (0.0, 0.4, 0.95)]
    assert strengths[0] == 1.0 > strengths[1] > strengths[2] > 0.3
    assert relevant_share(t, 0) == pytest.approx(1.0) and covered_share(t, 0) == pytest.approx(1.0)


def test_what_rubrics_are_about() -> None:
    t = texts([[GOOD]], [[[["includes owl", 0.5], ["is nice", 0.5]], [["begins with ant", 1.0]], None]])
    assert valid_share(t, 0) == pytest.approx(2 / 3)
    assert relevant_share(t, 0) == pytest.approx((0.5 + 1.0) / 2)
    assert covered_share(t, 0) == pytest.approx((2 / 5 + 2 / 5) / 2)


# -------------------------------------------------------------------------------------------------------------- rollouts


def member(fmt: float, margin: float | None = None, reward: float | None = 1.0) -> dict[str, Any]:
    return {"parts": {"format": fmt} | ({} if margin is None else {"margin": margin}), "reward": reward}


def test_which_groups_are_usable() -> None:
    margin, binary = RubricConfig(reward="margin"), RubricConfig(reward="binary")
    graded = [member(1.0, 0.2), member(1.0, 0.4)]
    assert usable(graded, margin) and not usable(graded, binary)
    assert not usable([member(1.0, 0.2), member(1.0, 0.2)], margin)
    mixed = [member(1.0, 0.0), member(0.0)]  # one is invalid, and neither tells the answers apart
    assert usable(mixed, margin) and usable(mixed, binary)
    alone = RubricConfig(reward="margin", alpha=1.0)
    assert not usable(mixed, alone)
    assert not usable([member(1.0, 0.2), member(1.0, 0.4, reward=None)], margin)  # the judge failed on the second


def test_training_pairs_are_of_first_attempts_by_cycle(tmp_path: pathlib.Path) -> None:
    def rows(cycle: int, group: int, accepted: str, rejected: str, margins: list[float]) -> list[dict[str, Any]]:
        pair = {"accepted": accepted, "rejected": rejected}
        return [{"cycle": cycle, "slot": group % 2, "group": group, "update": cycle, "question": QUESTION, "pair": pair,
                 **member(1.0, m)} for m in margins]  # fmt: skip

    first = rows(0, 0, GOOD, BAD, [0.5, 0.1]) + rows(0, 1, BAD, FAIR, [0.3, 0.3]) + rows(0, 3, GOOD, GOOD, [9.0, 9.0])
    write_rollouts(tmp_path / "rollouts", 0, "rubric", first)
    write_rollouts(tmp_path / "rollouts", 1, "policy", [])
    write_rollouts(tmp_path / "rollouts", 2, "rubric", rows(1, 0, GOOD, FAIR, [-0.1, 0.2]))
    one, two = training_pairs(tmp_path)
    assert one["groups"] == 2 and one["true gap"] == pytest.approx((0.8 - 0.4) / 2)
    assert (one["better"], one["worse"], one["pair accuracy"]) == (0.5, 0.5, 1.0) and one["margin"] == pytest.approx(0.3)
    assert (one["usable margin"], one["usable binary"]) == (0.5, 0.0)
    assert (two["true gap"], two["pair accuracy"], two["usable binary"]) == (pytest.approx(0.4), 0.5, 1.0)


# ----------------------------------------------------------------------------------------------------------- aggregation


def results() -> dict[str, Any]:
    """Two seeds of the main arm, one of each other; generators learn to name 'owl' and 'ant'."""
    start = [None, NICE, OWL, None]
    runs: dict[str, Any] = {}
    training = [{"true gap": g, "better": 0.5, "worse": 0.3, "margin": g, "pair accuracy": 0.5, "groups": 4,
                 **{f"usable {r}{a}": u for r, u in (("margin", 0.9), ("binary", 0.6)) for a in ("", " alone")}}
                for g in (0.4, 0.1)]  # fmt: skip
    for arm, noise, seeds in (("world_main", 0.0, (1, 2)), ("world_frozen", 0.0, (1,)), ("world_binary", 0.0, (1,)),
                              ("world_noise_40", 0.4, (1,)), ("world_fast", 0.0, (1,))):  # fmt: skip
        for seed in seeds:
            end = [OWL, OWL, ANT, OWL if seed == 1 else None]
            t = texts([[BAD, FAIR, GOOD, BAD], [FAIR, GOOD, FAIR, GOOD], [GOOD, GOOD, FAIR, GOOD]], [start, start, end])
            runs[f"{arm}_seed{seed}"] = {"arm": arm} | measure(t, training, noise, seed, None)
    return world_study.loaded(world_study.dumped({"runs": runs}))


def test_a_run_is_measured_on_fixed_and_on_moving_pairs() -> None:
    one, two = runs_of(results(), "world_main")
    # fixed: FAIR>BAD, GOOD>BAD | GOOD>FAIR twice | GOOD>FAIR; owl tells GOOD, ant tells FAIR and GOOD from BAD
    assert one["fixed pairs"] == 5 and one["pairs"] == [2, 2, 1]
    assert one["fixed"][0][0] == pytest.approx(4 / 20) and one["fixed"][2][0] == pytest.approx(3 * 4 / 20 + 2 / 20, abs=1e-5)
    assert two["fixed"][2][0] == pytest.approx((2 * 4 + 2) / 20, abs=1e-5)
    assert one["own"][2][0] == 0.75 and one["frozen on own"][2][0] == 0.25 and one["main on own"] == one["own"]
    assert one["quality"] == pytest.approx([0.5, 0.8, 0.9]) and one["temporal gap"] == pytest.approx([0.3, 0.1])
    assert one["temporal margin, frozen"][0] == pytest.approx((1 - 0) / 4 / 2)  # owl: GOOD came twice and went once, of 4 pairs
    mean = over_seeds([one, two], right("fixed"))
    assert mean is not None and mean.mean == pytest.approx(0.6) and mean.high - mean.mean == pytest.approx(12.706 * 0.1, rel=1e-3)  # type: ignore[operator]


def test_tables_and_figure_come_again_from_the_results_file(tmp_path: pathlib.Path) -> None:
    found = results()
    path = tmp_path / "world_study.json"
    path.write_text(world_study.dumped(found))
    again = world_study.read_results(path)
    assert tables(again) == tables(found) and set(tables(found)) >= {"coevolution", "frozen", "reward", "curriculum", "judge"}
    assert "0.600 [-0.671, 1.871]" in tables(found)["coevolution"]
    (drawn,) = figure(again, tmp_path / "plots", "x")
    assert drawn.read_text().count('<g id="axes_') == 6
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin judge -->\nold\n<!-- end judge -->\nafter\n")
    put_tables(page, tables(found))
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text and "| 0.4 |" in text
    assert not tables({"runs": {}})


def test_the_committed_page_shows_the_committed_results(tmp_path: pathlib.Path) -> None:
    page = (REPO / "docs" / "world.md").read_text()
    copy = tmp_path / "world.md"
    copy.write_text(page)
    put_tables(copy, tables(world_study.read_results(REPO / "docs" / "plots" / world_study.RESULTS)))
    assert copy.read_text() == page


def test_texts_are_kept_as_they_are(tmp_path: pathlib.Path) -> None:
    t = texts([[GOOD, BAD]], [[OWL, None]])
    save_texts(tmp_path / "t.json", t)
    assert load_texts(tmp_path / "t.json") == t


# ------------------------------------------------------------------------------------------------------------------ runs


def test_finished_runs_are_not_run_again_and_a_failure_leaves_the_others_alone(tmp_path: pathlib.Path) -> None:
    members = world_study.members_for("frozen", (1, 2), (), tmp_path)
    assert [m.name for m in members] == [f"world_{arm}_seed{seed}" for arm in ("main", "frozen") for seed in (1, 2)]
    (tmp_path / "logs").mkdir()
    ran: list[str] = []

    def command(member: Any) -> list[str]:
        ran.append(member.name)
        bad = member.name == "world_main_seed2" and ran.count(member.name) == 1
        script = f"import pathlib, sys; p = pathlib.Path({str(member.folder)!r}); p.mkdir(parents=True, exist_ok=True); " + (
            "sys.exit('error: broken')" if bad else "(p / 'config.json').write_text('{}')"
        )
        return [sys.executable, "-S", "-c", script]

    ledger = Ledger(tmp_path)
    assert run_members(members, ledger, Console(), 3, command) and sorted(ran) == sorted(m.name for m in members)
    assert [ledger.state(m) for m in members] == ["finished", "failed", "finished", "finished"]
    assert run_members(members, Ledger(tmp_path), Console(), 3, command) and ran[4:] == ["world_main_seed2"]


def test_the_ends_of_cycles() -> None:
    main, frozen = (world_study.members_for("frozen", (1,), (), pathlib.Path("x"))[i].cfg for i in (0, 1))
    assert cycle_ends(main)[:3] == [0, 40, 80] and cycle_ends(frozen)[:3] == [0, 20, 40]
    assert main.run.save_every == main.schedule.k and main.run.keep >= 2 * main.schedule.cycles  # or their weights are gone


def test_every_arm_has_a_config_and_differs_from_main_by_what_it_is_named_for() -> None:
    members = world_study.members_for("all", (1,), (), pathlib.Path("x"))
    names = sorted(p.stem for p in (REPO / "configs" / "world").glob("world_*.py"))
    assert sorted(m.group for m in members) == names
    noises = {m.group: m.cfg.judge.oracle_noise for m in members if "noise" in m.group}
    assert noises == {f"world_noise_{n}": n / 100 for n in world_study.NOISES}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--seeds=1,x"], "--seeds"), (["--seeds=1,1"], "--seeds"), (["--what=rewards"], "nearest:  reward"),
        (["--answers=3"], "--answers"),
        (["--parallel=0"], "--parallel"),
        (["--what=coevolution", "--cycles=3"], "--cycles"), (["--gather", "--results=none.json"], "none.json"),
        (["--config.schedule.cycle=2"], "schedule.cycle"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_code_2_and_one_error(words: list[str], shown: str, capsys: Any, tmp_path: pathlib.Path) -> None:
    assert world_study.main([f"--workdir={tmp_path}", *words]) == 2
    assert shown in capsys.readouterr().err


SMALL = ("schedule.cycles=2", "schedule.k=2", "schedule.prompts=2", "schedule.group=2", "run.save_every=2", "pairs.min_gap=1")


@pytest.mark.slow
def test_a_whole_study_of_tiny_counts(tmp_path: pathlib.Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every arm is run, drawn from and measured; the same command runs nothing again; another folder gives the same numbers."""
    jax.devices()  # this process keeps its fake devices; its runs, processes of their own, have one, and so draws from one
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    counts = ["--questions=6", "--answers=4", "--rubrics=2", *(f"--config.{text}" for text in SMALL)]
    words = [f"--workdir={tmp_path / 'a'}", "--seeds=1", "--parallel=2", *counts]
    assert world_study.main(words) == 0
    first = (tmp_path / "a" / "results.json").read_bytes()
    found = json.loads(first)
    assert len(found["runs"]) == 9 and all(len(run["quality"]) == 3 for run in found["runs"].values())
    assert "9 of 9" not in capsys.readouterr().out and (tmp_path / "a" / "world_study.svg").exists()
    assert world_study.main(words) == 0
    assert "9 of 9 runs are finished" in capsys.readouterr().out and (tmp_path / "a" / "results.json").read_bytes() == first
    assert world_study.main([f"--workdir={tmp_path / 'b'}", "--seeds=1", "--what=coevolution", *counts]) == 0
    again = json.loads((tmp_path / "b" / "results.json").read_text())["runs"]
    assert again == {"world_main_seed1": found["runs"]["world_main_seed1"]}
