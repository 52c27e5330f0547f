"""The small world's rules: questions, true quality, criteria and the oracle judge, against cases made by hand."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from coevo_jax.config import DataConfig, RubricConfig
from coevo_jax.data import read_prompts
from coevo_jax.errors import UserError
from coevo_jax.judges import JudgeItem, world
from coevo_jax.judges.world import OracleJudge, Property, check, make_question, read_criterion, read_question, true_quality
from coevo_jax.rubrics import parse_rubric

QUESTION = "write 4 words with owl without fox first ant last yak sorted once"


def rubric(*criteria: tuple[str, float]):
    parsed = parse_rubric(world.write_rubric(criteria), RubricConfig())
    assert parsed.status == "ok", parsed.detail
    return parsed.value


def score(judge: OracleJudge, answer: str, *criteria: tuple[str, float]) -> float:
    (verdict,) = judge.judge([JudgeItem(QUESTION, rubric(*criteria), answer, 1)], 0)
    assert verdict.status == "ok"
    return verdict.score


def test_question_round_trip():
    props = read_question(QUESTION)
    assert [p.kind for p in props] == ["count", "includes", "avoids", "begins", "ends", "sorted", "distinct"]
    assert world.write_question(reversed(props)) == QUESTION
    assert read_question("write words with owl with ant") == (Property("includes", "owl"), Property("includes", "ant"))


@pytest.mark.parametrize(
    "text", ["", "write five words", "write words with banana", "write 4 words with", "write words please", "sort owl"]
)
def test_not_a_question(text):
    with pytest.raises(UserError, match="small world"):
        read_question(text)


@pytest.mark.parametrize(
    "answer, quality",
    [
        ("ant bee owl yak", 1.0),
        ("ant fox owl yak", 9 / 10),  # the avoided word, weight 1 of 10
        ("ant bee cat yak", 8 / 10),  # without owl, weight 2
        ("yak owl bee ant", 5 / 10),  # both ends wrong, no pair in order
        ("ant owl yak", (9 + 3 / 4) / 10),  # one word short of four
        ("ant owl owl yak", (9 + 3 / 4) / 10),  # a word twice
        ("ant", (0.25 + 0 + 1 + 2 + 0 + 1 + 1) / 10),
        ("", 0.0),
    ],
)
def test_true_quality_by_hand(answer, quality):
    assert true_quality(QUESTION, answer) == pytest.approx(quality)


@pytest.mark.parametrize(
    "text, prop",
    [
        ("includes owl", Property("includes", "owl")),
        ("  Avoids  fox. ", Property("avoids", "fox")),
        ("begins with ant", Property("begins", "ant")),
        ("ends with yak", Property("ends", "yak")),
        ("has 5 words", Property("count", number=5)),
        ("has at most 5 words", Property("at_most", number=5)),
        ("has at least 3 words", Property("at_least", number=3)),
        ("is sorted", Property("sorted")),
        ("repeats no word", Property("distinct")),
        ("is nice", None),
        ("includes owl and ant", None),
        ("", None),
    ],
)
def test_criterion_texts(text, prop):
    assert read_criterion(text) == prop
    if prop is not None:
        assert read_criterion(prop.criterion) == prop


def test_limits_of_length_are_graded():
    assert check(Property("at_most", number=2), "ant bee cat") == 0.5
    assert check(Property("at_most", number=3), "ant") == 1.0
    assert check(Property("at_least", number=4), "ant") == 0.25
    assert check(Property("count", number=2), "ant bee cat cow dog") == 0.0


def test_oracle_is_the_weighted_mean_of_its_checks():
    judge = OracleJudge()
    assert score(judge, "ant bee", ("includes ant", 0.7), ("includes owl", 0.3)) == pytest.approx(0.7)
    assert score(judge, "ant bee", ("includes ant", 0.5), ("is nice", 0.5)) == pytest.approx(0.75)
    assert score(judge, "ant bee", ("includes ant", 0.6), ("includes owl", 0.5)) == pytest.approx(0.6 / 1.1)  # normalised


def test_useless_criteria_do_not_discriminate():
    scores = {score(OracleJudge(), a, ("is nice", 0.5), ("reads well", 0.5)) for a in ("ant bee", "yak", "owl owl owl")}
    assert scores == {0.5}


def test_a_rubric_of_the_questions_own_requirements_is_the_true_quality():
    rng = random.Random(0)
    for _ in range(50):
        question, perfect = make_question(rng)
        props = read_question(question)
        total = sum(p.weight for p in props)
        mine = rubric(*[(p.criterion, round(p.weight / total, 6)) for p in props])
        answer = " ".join(rng.sample(world.WORDS, 4))
        for text in (perfect, answer):
            (verdict,) = OracleJudge().judge([JudgeItem(question, mine, text, 0)], 0)
            assert verdict.score == pytest.approx(true_quality(question, text), abs=1e-5)


def test_questions_can_be_met():
    rng = random.Random(3)
    for _ in range(300):
        question, perfect = make_question(rng)
        assert true_quality(question, perfect) == 1.0
        assert 3 <= len(read_question(question)) <= 5
        assert len(perfect.split()) in world.LENGTHS
        assert true_quality(question, "") == 0.0
        for answer in ("banana", " ".join(rng.choices(world.WORDS, k=9))):
            assert 0.0 <= true_quality(question, answer) <= 1.0


def test_noise_weakens_the_judge_by_degrees_and_repeats():
    """Accuracy on pairs of a perfect and a random answer falls with the noise; the same item gets the same verdict."""
    rng = random.Random(1)
    cases = []
    for _ in range(200):
        question, perfect = make_question(rng)
        props = read_question(question)[:3]
        mine = rubric(*[(p.criterion, round(1 / len(props), 4)) for p in props])
        cases.append((question, mine, perfect, " ".join(rng.sample(world.WORDS, 4))))
    accuracy = []
    for noise in (0.0, 0.25, 0.5, 1.0):
        judge = OracleJudge(noise=noise)
        good = judge.judge([JudgeItem(q, r, a, 0) for q, r, a, _ in cases], 0)
        bad = judge.judge([JudgeItem(q, r, b, 0) for q, r, _, b in cases], 0)
        again = judge.judge([JudgeItem(q, r, a, 7) for q, r, a, _ in cases], 5)
        assert [v.score for v in good] == [v.score for v in again]
        accuracy.append(np.mean([(x.score > y.score) + 0.5 * (x.score == y.score) for x, y in zip(good, bad)]))
    assert accuracy[0] > 0.95 and accuracy[0] > accuracy[1] > accuracy[2] > accuracy[3]
    assert abs(accuracy[3] - 0.5) < 0.1


def test_failures_are_records_and_repeat():
    mine = rubric(("includes ant", 0.5), ("includes owl", 0.5))
    items = [JudgeItem(QUESTION, mine, "ant bee", request) for request in range(400)]
    verdicts = OracleJudge(failure_rate=0.25).judge(items, 3)
    failed = [v for v in verdicts if v.status != "ok"]
    assert 70 < len(failed) < 130
    assert {v.status for v in failed} == {"parse_fail", "truncated", "timeout", "refused"}
    assert all(v.score is None for v in failed)
    assert verdicts == OracleJudge(failure_rate=0.25).judge(items, 3)
    assert verdicts != OracleJudge(failure_rate=0.25).judge(items, 4)
    assert all(v.status == "ok" for v in OracleJudge().judge(items, 3))


def test_order_of_items_does_not_matter():
    mine = rubric(("includes ant", 0.5), ("includes owl", 0.5))
    items = [JudgeItem(QUESTION, mine, answer, i) for i, answer in enumerate(["ant", "owl", "bee", "ant owl"])]
    judge = OracleJudge(noise=0.5, failure_rate=0.2)
    assert judge.judge(items, 2) == judge.judge(items[::-1], 2)[::-1]


def test_written_rubrics_are_the_real_schema():
    text = world.write_rubric([("includes owl", 0.5), ("is nice", 0.5)])
    assert list(json.loads(text)["criteria"][0]) == ["criterion", "weight", "scoring_levels"]
    assert parse_rubric(text, RubricConfig()).value.criteria[0].text == "includes owl"


def test_prompt_file():
    prompts = read_prompts(DataConfig(prompts="tiny")).records
    assert len(prompts) == 400
    assert len({r["id"] for r in prompts}) == len({r["prompt"] for r in prompts}) == 400
    kinds = {p.kind for r in prompts for p in read_question(r["prompt"])}
    assert kinds == set(world.KINDS)
