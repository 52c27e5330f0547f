"""How rubrics evolve: the paper's statistics by hand, ours without failed rubrics as zeros, the judge under them, the files."""

from __future__ import annotations

import csv
import json
import pathlib
from typing import Any

import pytest

from coevo_jax.config import RubricConfig
from coevo_jax.errors import UserError
from coevo_jax.evaluate import evolution as ev
from coevo_jax.evaluate.evolution_report import read_source, report
from coevo_jax.records.console import Console
from coevo_jax.records.rollouts import write_rollouts

CFG = RubricConfig()
LONG = "Explains at length why the answer holds for the question"  # 56 characters, no pattern


def rubric(*criteria: tuple[str, float]) -> str:
    return json.dumps({"criteria": [{"criterion": text, "weight": weight} for text, weight in criteria]})


def row(update: int, text: str, question: str = "q", **more: Any) -> dict[str, Any]:
    return {"update": update, "question": question, "completion": text, "finish": "stop", "parts": {}, **more}


@pytest.mark.parametrize(
    ("text", "true"),
    [
        (LONG, set()),
        ("x" * 40, {"label_only"}),
        ("x" * 41, set()),
        ("Gives the value 42 and shows the steps that lead there", {"expected_value"}),
        ("States that the ratio a = b follows from the theorem", {"expected_value"}),
        ("Uses the formula of the chapter to reach the result", {"expected_value"}),
        ("Decodes the message in the way that the text asks for", set()),  # not the word 'code'
        ("Avoids jargon where a plain word would serve as well", {"constraint"}),
        ("Excluding every claim that the source does not support", {"constraint", "negation", "completeness"}),
        ("It must not name the author of the quoted paragraph", {"constraint", "negation"}),
        ("Doesn't wander from the subject that the asker named", {"negation"}),
        ("Nothing in the notes would surprise a careful reader", set()),
        ("Backs the claim up with an example from daily routine", {"example"}),
        ("Is accurate about the dates of the reign of the king", {"correctness"}),
        ("Covers the causes and the outcome of the conflict too", {"completeness"}),
    ],
)
def test_what_a_criterion_is(text: str, true: set[str]) -> None:
    assert {name for name, found in ev.flags(text).items() if found} == true


def test_numbers_of_a_rubric_by_hand() -> None:
    found = ev.numbers([(LONG, 0.6), ("Avoids 3 errors", 0.3), ("Short", 0.3)])
    assert found["label_only"] == pytest.approx(2 / 3) and found["expected_value"] == pytest.approx(1 / 3)
    assert found["constraint"] == pytest.approx(1 / 3) and found["correctness"] == pytest.approx(1 / 3)
    assert found["chars"] == pytest.approx((56 + 15 + 5) / 3) and found["criteria"] == 3
    assert found["max_weight"] == 0.6 and found["top_1_share"] == pytest.approx(0.5)
    assert found["weight_std"] == pytest.approx(0.02**0.5)
    assert set(ev.numbers([])) == set(ev.NUMBERS) and set(ev.numbers([]).values()) == {0.0}


def test_a_failed_rubric_is_zeros_in_the_papers_means_alone() -> None:
    rows = [row(0, rubric((LONG, 0.5), ("Short", 0.5))), row(0, "no rubric at all")]
    found = ev.point(0, rows, [], CFG)
    assert found.valid_share == 0.5 and found.rubrics == 2
    assert found.paper["criteria"] == 1.0 and found.valid["criteria"] == 2.0
    assert found.paper["label_only"] == 0.25 and found.valid["label_only"] == 0.5
    nothing = ev.point(1, [row(1, "no")], [], CFG)
    assert nothing.paper["chars"] == 0.0 and nothing.valid["chars"] is None


def test_the_released_extraction() -> None:
    text = "<think>{draft}</think>Here: " + rubric(("a", 0.5), ("b", 0.5))
    assert ev.released_criteria(text) == [("a", 0.5), ("b", 0.5)]
    broken = '{"criteria": [{"criterion": "says \\"x\\"", "weight": 0.7}, {"criterion": "b", "wei'
    assert ev.released_criteria(broken) == [('says \\"x\\"', 0.7)]  # pairs are found where the object never closes
    assert ev.released_criteria("nothing {here}") == [] and ev.released_criteria("") == []
    cut = row(0, rubric(("a", 0.5), ("b", 0.5)), finish="length")
    assert ev.valid_criteria(cut, CFG) is None and ev.released_criteria(cut["completion"])  # cut at its limit: not valid


def test_the_judge_under_them() -> None:
    pair = {"accepted": "long answer", "rejected": "short"}
    rubrics = [row(3, "x", parts={"margin": m}, pair=p) for m, p in ((0.4, pair), (-0.1, pair), (0.0, pair), (0.2, {}))]
    rubrics += [row(3, "x", judge_pair=[{"score": 1.0}, {"score": 0.0}, {"score": 0.5}, {"score": None}], flipped=True)]
    rubrics += [row(3, "x", margins=[0.1, 0.4]), row(3, "x", margins=[0.1, -0.4])]
    answers = [
        row(2, "a" * n, group=g, reward=r, parts={"judge": r, "heldout": h})
        for g, n, r, h in ((0, 1, 0.1, 0.2), (0, 3, 0.3, 0.4), (1, 5, 0.9, 0.8), (1, 9, 0.5, 0.9))
    ]
    found = ev.judge_numbers(rubrics, answers)
    assert found["pair_accuracy"] == 0.5 and found["tie_share"] == 0.25
    assert found["longer_preferred"] == 0.5 and found["accepted_longer"] == 1.0
    assert found["slot_a_share"] == 0.5 and found["order_flip_share"] == 1.0 and found["all_agree"] == 0.5
    # lengths around their group's mean: -1, 1, -2, 2; rewards: -.1, .1, .2, -.2
    assert found["length_correlation"] == pytest.approx((0.1 + 0.1 - 0.4 - 0.4) / (10 * 0.1) ** 0.5)
    assert found["heldout_agreement"] is not None and found["heldout_agreement"] > 0.8
    assert set(ev.judge_numbers([], []).values()) == {None}


def test_the_same_question_over_time() -> None:
    one, two = rubric(("names Lima", 0.5), ("is short", 0.5)), rubric(("names Lima", 0.5), ("is kind", 0.5))
    rows = [
        row(0, one, "capital"),
        row(0, "bad", "capital"),
        row(4, two, "capital"),
        row(4, two, "capital"),
        row(4, one, "other"),
    ]
    found = ev.histories(rows, CFG)
    assert list(found) == ["capital", "other"]
    assert [(v.update, v.written, len(v.rubrics)) for v in found["capital"]] == [(0, 2, 1), (4, 2, 2)]
    assert ev.likeness([("A b.", 1.0)], [("a  b", 1.0)]) == 1.0
    inside, between = ev.drift(found["capital"])
    assert inside == 1.0 and between == pytest.approx(3 / 5)


# ---------------------------------------------------------------------------------------------------------------- files


def test_a_report_of_a_run(tmp_path: pathlib.Path) -> None:
    folder, out = tmp_path / "run" / "rollouts", tmp_path / "out"
    good = rubric((LONG, 0.8), ("Short", 0.2))
    write_rollouts(folder, 0, "policy", [row(0, "a", group=0, reward=0.1), row(0, "abc", group=0, reward=0.9)])
    for update in (1, 2, 3):
        rows = [row(update, good, f"q{i}", parts={"margin": 0.1}) for i in range(2)] + [row(update, "x" * update, "q0")]
        write_rollouts(folder, update, "rubric", rows[:2])
        write_rollouts(folder, update, "rubric", rows[2:], process=1)
    points = report(tmp_path / "run", out, Console())
    assert [(p.update, p.rubrics) for p in points] == [(1, 3), (2, 3), (3, 3)]
    lines = list(csv.DictReader((out / "evolution.csv").open()))
    assert [float(line["valid_share"]) for line in lines] == pytest.approx([2 / 3] * 3)
    assert float(lines[0]["paper/criteria"]) == pytest.approx(4 / 3) and float(lines[0]["valid/criteria"]) == 2.0
    assert lines[0]["judge/pair_accuracy"] == "1.0" and lines[0]["judge/slot_a_share"] == ""
    text = (out / "evolution.md").read_text()
    assert (
        "the paper's definitions" in " ".join(text.lower().split()) and "2 questions, 2 of them in more than one update" in text
    )
    assert "update 1, 1 of 2 valid" in (out / "questions.md").read_text()
    assert (out / "evolution.svg").exists() and (out / "evolution.png").exists()


def test_a_file_of_rubrics(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rubrics.jsonl"
    rows = [{"generation": rubric(("a", 0.5), ("b", 0.5)), "question": "q"}, {"rubric": "nothing", "question": "q", "update": 7}]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    updates, _ = read_source(path)
    assert sorted(updates) == [0, 7]
    assert [p.valid_share for p in report(path, tmp_path / "out", Console())] == [1.0, 0.0]
    path.write_text('{"question": "q"}\n')
    with pytest.raises(UserError, match="no rubric's text") as error:
        read_source(path)
    assert error.value.where.endswith("rubrics.jsonl:1")


def test_a_run_without_rubrics_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="no rollouts"):
        read_source(tmp_path)
    write_rollouts(tmp_path / "rollouts", 0, "policy", [row(0, "a")])
    with pytest.raises(UserError, match="no rubrics of a generator"):
        read_source(tmp_path)
