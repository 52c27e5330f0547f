"""Golden scores of every rule of a benchmark: ties, failures, shared credit, lists of one, all failures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from coevo_jax.evaluate import reward_bench as rb
from coevo_jax.evaluate import rules_lists as rl
from coevo_jax.evaluate import rules_pairs as rp
from coevo_jax.evaluate.benchmarks import BENCHMARKS
from coevo_jax.evaluate.intervals import Stratum, bootstrap, estimate, mean_of, ratio_of
from coevo_jax.evaluate.records import Example, Judged, Scores

INF = math.inf


def pair(name: str, label: str, *games: Scores, subset: str = "", people: tuple[str, ...] = ()) -> tuple[Example, Judged]:
    return Example(name, "q", ("short", "a longer one"), label, annotators=people, subset=subset), Judged(name, games)


def ranked(name: str, reference: tuple[float, ...], scores: Scores, subset: str = "") -> tuple[Example, Judged]:
    return Example(name, "q", tuple("abcdef"[: len(reference)]), scores=reference, subset=subset), Judged(name, (scores,))


# ------------------------------------------------------------------------------------------------------ RewardBench 2


@pytest.mark.parametrize(
    ("scores", "credit", "strict"),
    [
        ((0.7, 0.7, 0.2, 0.1), 0.5, 0.0),  # M10
        ((0.6, 0.7, 0.2, 0.1), 0.0, 0.0),
        ((0.5, 0.5, 0.5, 0.5), 0.25, 0.0),
        ((0.9, 0.1, 0.2, 0.3), 1.0, 1.0),
        ((None, 0.1, 0.2, 0.3), 0.0, 0.0),  # the right answer's score failed: it can't be the highest
        ((0.2, None, 0.1, 0.1), 1.0, 0.0),  # a failed score is out of the highest, and not strict
        ((None, None, None, None), 0.25, 0.0),
        ((0.4,), 1.0, 1.0),
    ],
)
def test_best_of_four(scores: Scores, credit: float, strict: float) -> None:
    assert rb.best_of(scores) == credit
    assert rb.best_of_strict(scores) == strict


def test_scores_in_lists_of_one_are_unwrapped() -> None:
    """B32, reward-bench issue 240."""
    scores = tuple(rb.flat(s) for s in ([0.9], [0.1], (0.2,), np.asarray([0.3])))
    assert rb.best_of(scores) == 1.0 and rb.flat([None]) is None and rb.flat(0.5) == 0.5
    with pytest.raises(ValueError, match="list of 2"):
        rb.flat([0.1, 0.2])


def test_ties_by_hand() -> None:
    """Two ids, every term worked out by hand; a third that has one row only enters the accuracies alone."""
    tied = {"1": rb.ties_row((0.9, 0.8, 0.5), 2), "2": rb.ties_row((0.9, 0.5, 0.6), 2)}
    ref = {"1": rb.ties_row((0.9, 0.6), 1), "2": rb.ties_row((0.3, 0.4), 1), "3": rb.ties_row((0.3, 0.1), 1)}
    assert tied["1"].gap == pytest.approx(0.3) and tied["1"].spread == pytest.approx(0.1) and not tied["2"].accurate
    close = (math.tanh(0.3 / 0.1 - 1) + math.tanh(-0.1 / 0.4 - 1)) / 2
    by_hand = 0.3 * 1 / 2 + 0.3 * 2 / 3 + 0.2 * 1 / 2 + 0.2 * 1 / 2 + 0.01 * close
    assert rb.ties_score(tied, ref) == pytest.approx(by_hand, abs=1e-12)


def test_ties_at_the_edges() -> None:
    perfect = {"1": rb.ties_row((1.0, 1.0, 0.0), 2)}, {"1": rb.ties_row((1.0, 0.0), 1)}
    assert rb.ties_score(*perfect) == pytest.approx(1.01)  # spread 0 under a positive gap: tanh of infinity
    equal = {"1": rb.ties_row((0.5, 0.5, 0.5), 2)}, {"1": rb.ties_row((0.5, 0.5), 1)}
    assert rb.ties_score(*equal) == 0.0  # 0/0 counts nothing, equal scores are not accurate
    broken = {"1": rb.ties_row((1.0, None, 0.0), 2)}, {"1": rb.ties_row((1.0, 0.0), 1)}
    assert rb.ties_score(*broken) == pytest.approx(0.3)  # only the reference row is right: no failure helps or hides
    assert rb.ties_row((1.0, 0.9, None), 2) == rb.TiesRow(False, -INF, INF)
    assert rb.ties_id("tied:12") == ("tied", "12") and rb.ties_id("ref:a:b") == ("ref", "a:b") and rb.ties_id("7") == ("", "7")


def test_reward_bench_2_is_the_unweighted_mean_of_its_subsets() -> None:
    rows = [ranked(f"m{i}", (1.0, 0.0, 0.0, 0.0), (0.9, 0.1, 0.1, 0.1), "Math") for i in range(3)]
    rows += [ranked("f", (1.0, 0.0, 0.0, 0.0), (0.5, 0.5, 0.1, 0.1), "Focus")]
    rows += [ranked("tied:1", (1.0, 1.0, 0.0), (0.9, 0.8, 0.5), "Ties"), ranked("ref:1", (1.0, 0.0), (0.9, 0.6), "Ties")]
    score = BENCHMARKS["rewardbench2"].score(rows, BENCHMARKS["rewardbench2"].rule(draws=200))
    ties = 0.3 + 0.3 + 0.2 + 0.2 + 0.01 * math.tanh(2)
    assert {k: v for k, (v, _) in score.subsets.items()} == pytest.approx({"Focus": 0.5, "Math": 1.0, "Ties": ties})
    assert score.score == pytest.approx((0.5 + 1.0 + ties) / 3) and score.strict == pytest.approx((0.0 + 1.0 + ties) / 3)
    assert score.tie_share == 0.25 and score.failure_share == 0.0


# ------------------------------------------------------------------------------------------------------ RewardBench 1


def test_reward_bench_1_sections_and_both_tie_rules() -> None:
    assert sum(SECTION := [sum(s.values()) for s in rb.SECTIONS.values()]) == sum((358, 456, 740, 1968)) and SECTION[3] == 1968
    weights = rb.section_weights([*rb.SECTIONS["Reasoning"], "alpacaeval-easy", "shp"])
    assert sum(weights.values()) == pytest.approx(1.0)
    assert weights["math-prm"] == pytest.approx(0.5 * 2 / 5) and weights["shp"] == pytest.approx(1 / 5)
    rows = [pair("1", "A", (0.9, 0.1), subset="math-prm"), pair("2", "B", (0.5, 0.5), subset="hep-go")]
    rows += [pair("3", "A", (None, 0.1), subset="alpacaeval-easy"), pair("4", "A", (0.1, 0.4), subset="alpacaeval-hard")]
    bench = BENCHMARKS["rewardbench"]
    generative, scalar = (bench.score(rows, bench.rule(ties=ties, draws=100)) for ties in ("half", "wrong"))
    reasoning = (984 * 1.0 + 164 * 0.5) / 1148, 984 / 1148
    chat = (100 * 0.5 + 95 * 0.0) / 195, 0.0
    for score, r, c in zip((generative, scalar), reasoning, chat):
        assert score.score == pytest.approx((r + c) / 2)
        assert score.parts["section/Reasoning"] == pytest.approx(r) and score.parts["section/Chat"] == pytest.approx(c)
        assert score.strict == pytest.approx(984 / 1148 / 2)
    assert "generative" in generative.rule and "reward models" in scalar.rule
    assert rb.section_scores({"shp": 0.5, "summarize": 1.0}) == {"Prior Sets": 0.75}


# --------------------------------------------------------------------------------------------------------- JudgeBench


@pytest.mark.parametrize(
    ("choices", "right", "both"),
    [
        (("A", "A"), True, True),  # M12, decisions mapped back: (A>B, B>A) of the two games
        (("A", "B"), False, False),
        (("A", "tie"), True, False),
        (("A", None), True, False),
        (("tie", "tie"), False, False),
        (("B", "B"), False, False),
        ((None, None), False, False),
    ],
)
def test_judge_bench_votes(choices: tuple[str | None, ...], right: bool, both: bool) -> None:
    assert rp.vote(choices, "A") is right and rp.both_consistent(choices, "A") is both
    flipped = tuple({"A": "B", "B": "A"}.get(str(c), c) for c in choices)
    assert rp.vote(flipped, "B") is right


def test_judge_bench_categories_and_strict_score() -> None:
    rows = [pair("1", "A", (1.0, 0.0), (1.0, 0.0), subset=rp.category("mmlu-pro-law"))]
    rows += [pair("2", "B", (1.0, 0.0), (0.0, 1.0), subset=rp.category("livebench-math"))]
    rows += [pair("3", "B", (0.0, 1.0), (None, None), subset=rp.category("livebench-math"))]
    bench = BENCHMARKS["judgebench"]
    score = bench.score(rows, bench.rule(draws=100))
    assert score.score == pytest.approx(2 / 3) and score.strict == pytest.approx(1 / 3)
    assert score.parts["category_mean"] == pytest.approx((1.0 + 0.5) / 2) and score.subsets["Math"] == (0.5, 2)
    assert score.failure_share == pytest.approx(1 / 6)


# --------------------------------------------------------------------------------------------------------------- pairs


@pytest.mark.parametrize("scores", [(None, 0.9), (0.9, None), (None, None), (None, 0.0)])
def test_one_crashed_score_decides_no_pair(scores: Scores) -> None:
    """B32: a score of -1 for a failure would let the other answer win."""
    assert rp.choice_of(scores) is None
    for label in ("A", "B", "tie"):
        assert rp.credit(None, label) == 0.0


def test_ties_are_a_named_rule() -> None:
    assert rp.choice_of((0.5, 0.5)) == "tie" and rp.choice_of((0.5, 0.45), margin=0.05) == "tie"
    assert [rp.credit("tie", "A", rule) for rule in ("half", "wrong")] == [0.5, 0.0]
    assert math.isnan(rp.credit("tie", "A", "leave_out")) and rp.credit("tie", "tie", "wrong") == 1.0
    assert rp.credit("A", "tie", "half") == 0.0
    rows = [pair("1", "A", (0.9, 0.1)), pair("2", "B", (0.5, 0.5)), pair("3", "A", (None, 0.2)), pair("4", "A", (0.1, 0.2))]
    bench, found = BENCHMARKS["pairs"], {}
    for rule in rp.TIES:
        found[rule] = bench.score(rows, bench.rule(ties=rule, draws=100))
    assert {k: s.score for k, s in found.items()} == pytest.approx({"half": 1.5 / 4, "wrong": 1 / 4, "leave_out": 1 / 3})
    assert all(s.strict == 0.25 and s.failure_share == 0.25 and s.tie_share == pytest.approx(1 / 3) for s in found.values())
    assert found["half"].parts["answered"] == pytest.approx(0.5)


def test_order_and_slots() -> None:
    always_a = [("A", "B"), ("A", "B")]  # decisions mapped back: slot A held B in the second game
    assert rp.order_share(always_a) == 1.0 and rp.slot_share(always_a) == 1.0
    assert rp.game_credit(("A", "B"), "A") == 0.5 and rp.slot_share([("A", "A")]) == 0.5
    assert rp.order_share([("A", None)]) is None and rp.slot_share([("tie", None)]) is None
    assert rp.longer_share(["A", "B", "tie", None], [(3, 1), (3, 1), (3, 1), (3, 1)]) == 0.5


def test_several_annotators() -> None:
    people = [("A", "A", "B"), ("tie", "tie", "tie")]
    assert rp.annotator_agreement(["A", None], people) == pytest.approx((2 / 3 + 0) / 2)
    assert rp.human_agreement(people) == pytest.approx((0.5 + 0.5 + 0.0 + 1 + 1 + 1) / 6)
    macro = rp.macro_scores(["A", "B", None, "tie"], ["A", "A", "B", "tie"])
    assert macro["macro_precision"] == pytest.approx((1 + 0 + 1) / 3) and macro["macro_recall"] == pytest.approx(
        (0.5 + 0 + 1) / 3
    )
    assert macro["macro_f1"] == pytest.approx((2 / 3 + 0 + 1) / 3)
    rows = [pair("1", "A", (0.9, 0.1), people=people[0]), pair("2", "tie", (0.4, 0.4), people=people[1])]
    bench = BENCHMARKS["pandalm"]
    score = bench.score(rows, bench.rule(draws=100))
    assert score.score == 1.0 and score.parts["annotator_agreement"] == pytest.approx(5 / 6)
    assert score.parts["untied_labels"] == 1.0


# --------------------------------------------------------------------------------------------------------------- lists


def test_rankings() -> None:
    reference = (9.0, 8.0, 8.0, 7.0)
    counts = rl.pair_counts((0.9, 0.5, 0.1, 0.5), reference)
    assert counts == rl.PairCounts(right=3, tied=1, failed=0, total=5)
    assert rl.pair_counts((0.9, None, 0.1, 0.5), reference) == rl.PairCounts(2, 0, 2, 5)
    assert rl.tau((4, 3, 2, 1), (4, 3, 2, 1)) == 1.0 and rl.tau((1, 2, 3, 4), (4, 3, 2, 1)) == -1.0
    assert rl.tau((1, 1, 1), (3, 2, 1)) == 0.0 and rl.tau((3, None, 1), (3, 2, 1)) == 1.0
    assert rl.tau((None, None, 1.0), (3, 2, 1)) is None and rl.tau((1.0,), (2.0,)) is None and rl.tau((2, 1), (5, 5)) is None
    assert rl.top_one((0.9, 0.9, 0.1), (3, 2, 1)) == 0.5 and rl.top_one((None, 0.9, 0.1), (3, 2, 1)) == 0.0
    assert rl.top_one((None, None), (2, 1)) == 0.0 and rl.top_one((0.3,), (1.0,)) is None


def test_a_list_of_one_and_all_failures() -> None:
    bench = BENCHMARKS["listwise"]
    rows = [ranked("one", (9.0,), (0.3,)), ranked("dead", (9.0, 8.0), (None, None)), ranked("good", (9.0, 8.0), (0.9, 0.1))]
    score = bench.score(rows, bench.rule(draws=200))
    assert score.score == 0.5 and score.strict == 0.5 and score.failure_share == 0.5
    assert score.parts["lists_without_a_pair"] == 1.0 and score.parts["kendall_tau"] == 1.0 and score.parts["top_1"] == 0.5
    none = bench.score(rows[:1], bench.rule(draws=50))
    assert math.isnan(none.score) and math.isnan(none.low)


def test_alignment_at_a_gap() -> None:
    """HealthBench and ResearchQA: 0.1 apart as decimals are, though 0.3 - 0.2 is a little less in binary."""
    assert 0.3 - 0.2 < 0.1
    assert rl.pair_counts((1.0, 0.0), (0.3, 0.2), gap=0.1).total == 1
    bench = BENCHMARKS["healthbench"]
    rows = [
        ranked("1", (0.9, 0.85, 0.2), (0.5, 0.6, 0.6)),
        ranked("2", (0.3, 0.2), (0.2, 0.2)),
        ranked("3", (0.5, 0.1), (None, 0.1)),
    ]
    score = bench.score(rows, bench.rule(draws=200))
    # pairs: 0>1 wrong, 0>2 wrong, 1>2 tied; tied; failed
    assert score.score == 0.0 and score.tie_share == 0.5 and score.failure_share == 0.2
    assert score.parts["ties_as_half"] == pytest.approx(1 / 5) and score.parts["ties_as_half_at_0.1"] == pytest.approx(1 / 4)
    assert score.parts["pairs_at_0.1"] == 4 and bench.rule(gap=0.4).gap == 0.4
    assert BENCHMARKS["researchqa"].rule().gap == 0.05


def test_styles() -> None:
    """RM-Bench: hard is the chosen answer in a plainer style than the rejected one."""
    scores = (0.6, 0.7, 0.8, 0.5, 0.65, 0.75)  # chosen, then rejected, each from plain to rich
    matrix = rl.style_matrix(scores, 3)
    assert matrix.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    rows = [ranked("1", (1.0,) * 3 + (0.0,) * 3, scores), ranked("2", (1.0,) * 3 + (0.0,) * 3, (None, 0.7, 0.8, 0.5, 0.7, 0.1))]
    bench = BENCHMARKS["rm_bench"]
    score = bench.score(rows, bench.rule(draws=100))
    # of the second: chosen 0 failed in a normal and two hard cells; (1,1) is a tie
    assert score.parts == pytest.approx({"easy": (1 + 1) / 2, "normal": (1 + 1 / 3) / 2, "hard": (0 + 1 / 3) / 2})
    assert score.score == pytest.approx(np.mean(list(score.parts.values())))
    assert score.failure_share == pytest.approx(3 / 18) and score.tie_share == pytest.approx(1 / 15)


def test_copeland() -> None:
    nan = math.nan
    wins = np.asarray([[nan, 1.0, 1.0], [0.0, nan, 1.0], [0.0, 0.0, nan]])
    assert rl.copeland(wins) == (2.0, 1.0, 0.0)
    assert rl.copeland(np.asarray([[nan, 1.0, 1.0], [1.0, nan, 1.0], [1.0, 1.0, nan]])) == (1.0, 1.0, 1.0)  # always A
    failed = np.asarray([[nan, nan, 1.0], [0.0, nan, 1.0], [0.0, 0.0, nan]])
    assert rl.copeland(failed) == (2.0, 2.0, 0.0)  # 0 against 1 is out on both sides: one failed call decides nothing
    assert rl.copeland(np.full((2, 2), nan)) == (None, None)


def test_criteria() -> None:
    assert rl.criteria_counts((0.9, 0.1, 0.5, None), (True, True, False, True)) == (1, 1, 1)
    rows = [(Example("1", "q", ("a",), criteria=("x", "y"), met=(True, False)), Judged("1", ((0.9, 0.6),)))]
    rows += [(Example("2", "q", ("a",), criteria=("x",), met=(True,)), Judged("2", ((None,),)))]
    score = BENCHMARKS["infobench"].score(rows, BENCHMARKS["infobench"].rule(draws=100))
    assert score.score == pytest.approx(1 / 3) and score.failure_share == pytest.approx(1 / 3)
    assert score.parts["said_met"] == 1.0 and score.parts["reference_met"] == pytest.approx(2 / 3)


# ----------------------------------------------------------------------------------------------------------- intervals


def test_intervals_are_seeded_and_cover() -> None:
    random = np.random.RandomState(0)
    inside = 0
    for trial in range(100):
        values = (random.uniform(size=60) < 0.7).astype(float)
        low, high = bootstrap([Stratum("all", 60, mean_of(values))], seed=trial, draws=400)
        inside += low <= 0.7 <= high
    assert 86 <= inside <= 100
    values = list(random.uniform(size=30))
    one = [Stratum("a", 30, mean_of(values), 2.0), Stratum("b", 30, ratio_of(values, np.ones(30)), 1.0)]
    assert bootstrap(one, seed=3, draws=300) == bootstrap(one[::-1], seed=3, draws=300) != bootstrap(one, seed=4, draws=300)
    assert estimate(one) == pytest.approx(float(np.mean(values)))


def test_strata_without_a_value_stand_aside() -> None:
    strata = [Stratum("a", 2, mean_of([1.0, 1.0])), Stratum("b", 1, mean_of([math.nan])), Stratum("c", 0, mean_of([]))]
    assert estimate(strata) == 1.0 and bootstrap(strata, draws=20) == (1.0, 1.0)
    assert math.isnan(estimate(strata[1:])) and all(map(math.isnan, bootstrap(strata[1:], draws=20)))
