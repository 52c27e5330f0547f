"""Agreement statistics against scipy and textbook examples; rewards by several judges against hand-made numbers; order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.stats

from coevo_jax.judges.aggregate import combine_scores, group_kappa, rubric_rewards
from coevo_jax.judges.agreement import cohen_kappa, fleiss_kappa, kendall, pair_accuracy, pearson, ranks, spearman, tie_rate
from coevo_jax.judges.pairwise import agreed, both_orders, order_flipped


@pytest.mark.parametrize(("ties", "expected"), [("half", 2.5 / 4), ("wrong", 2 / 4), ("leave_out", 2 / 3)])
def test_pair_accuracy_names_its_rule_for_ties(ties, expected):
    margins = [0.3, 0.1, 0.0, -0.2, None]  # None: the judge failed, no rule counts it
    assert pair_accuracy(margins, ties) == pytest.approx(expected)
    assert tie_rate(margins) == 0.25


def test_statistics_of_nothing_are_none():
    assert pair_accuracy([None], "half") is None and pair_accuracy([0.0], "leave_out") is None and tie_rate([]) is None
    assert fleiss_kappa([]) is None and fleiss_kappa([[3, 0], [3, 0]]) is None and fleiss_kappa([[1, 0], [0, 1]]) is None
    assert cohen_kappa([], []) is None and cohen_kappa(["a"], ["a"]) is None
    assert pearson([1, 1, 1], [1, 2, 3]) is None and kendall([1, 1], [1, 2]) is None and spearman([1.0], [1.0]) is None
    with pytest.raises(ValueError, match="rule for ties"):
        pair_accuracy([0.1], "fair")


def test_fleiss_kappa_of_the_published_example():
    """Fleiss (1971), as tabled in the literature: 10 subjects, 14 raters, 5 categories, kappa 0.210."""
    counts = [
        [0, 0, 0, 0, 14], [0, 2, 6, 4, 2], [0, 0, 3, 5, 6], [0, 3, 9, 2, 0], [2, 2, 8, 1, 1],
        [7, 7, 0, 0, 0], [3, 2, 6, 3, 0], [2, 5, 3, 2, 2], [6, 5, 2, 1, 0], [0, 2, 2, 3, 7],
    ]  # fmt: skip
    assert fleiss_kappa(counts) == pytest.approx(0.2099, abs=1e-4)
    with pytest.raises(ValueError, match="same number"):
        fleiss_kappa([[1, 1], [2, 1]])


def test_cohen_kappa_of_a_table():
    """20 yes/yes, 5 yes/no, 10 no/yes, 15 no/no: observed 0.7, by chance 0.5, kappa 0.4."""
    table = {("y", "y"): 20, ("y", "n"): 5, ("n", "y"): 10, ("n", "n"): 15}
    pairs = [pair for pair, n in table.items() for _ in range(n)]
    assert cohen_kappa([a for a, _ in pairs], [b for _, b in pairs]) == pytest.approx(0.4)


def test_correlations_are_those_of_scipy():
    rng = np.random.default_rng(0)
    for n in (2, 3, 9, 30):
        x, y = rng.integers(0, 6, n).astype(float), rng.integers(0, 6, n).astype(float)
        x[0], x[-1], y[0], y[-1] = 0, 5, 5, 0  # both vary; the others tie often
        assert ranks(x) == pytest.approx(scipy.stats.rankdata(x))
        assert pearson(x, y) == pytest.approx(scipy.stats.pearsonr(x, y)[0])
        assert spearman(x, y) == pytest.approx(scipy.stats.spearmanr(x, y)[0])
        assert kendall(x, y) == pytest.approx(scipy.stats.kendalltau(x, y)[0])


# ---- several judges


def test_scores_of_an_answer_are_combined():
    scores = [0.2, 0.4, 0.9]
    assert combine_scores(scores) == pytest.approx(0.5)
    assert combine_scores(scores, "majority") == 0.4
    assert [combine_scores(s, "majority") for s in ([1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 0.0])] == [1.0, 0.0, 0.5]
    assert combine_scores(scores, "mean_minus_variance") == pytest.approx(0.5 - np.var(scores))
    assert combine_scores([0.0, 0.0, 0.1], "mean_minus_variance") >= 0
    for bad in ("median", "margin_kappa_format"):
        with pytest.raises(ValueError, match="combined"):
            combine_scores(scores, bad)


MARGINS = [[0.4, 0.2, -0.1], [-0.3, -0.1, -0.2], [0.5, 0.0, -0.6], [0.1, 0.3, 0.2]]  # 4 rubrics under 3 judges
FORMATS = [1.0, 0.0, 1.0, 1.0]


def kappa_by_hand():
    votes = np.sign(MARGINS)
    agree = np.mean([[a == b for a, b in itertools.combinations(row, 2)] for row in votes])
    shares = np.asarray([(votes == c).mean() for c in (-1, 0, 1)])
    return (agree - (shares**2).sum()) / (1 - (shares**2).sum())


def test_rewards_of_several_judges():
    kappa = kappa_by_hand()
    assert group_kappa(MARGINS) == pytest.approx(kappa) and 0 < kappa < 1
    assert rubric_rewards(MARGINS, FORMATS, "majority") == [1.0, 0.0, 0.0, 1.0]
    assert rubric_rewards(MARGINS, FORMATS, "majority", "first_judge") == [1.0, 0.0, 1.0, 1.0]  # only the third is split evenly
    assert rubric_rewards(MARGINS, FORMATS, "mean") == pytest.approx([2 / 3, 0, 1 / 3, 1])
    assert rubric_rewards(MARGINS, FORMATS, "mean_minus_variance") == pytest.approx(
        [s - (1 - kappa) for s in (2 / 3, 0, 1 / 3, 1)]
    )
    expected = [0.5 * np.mean(row) + 0.3 * f + 0.2 * kappa for row, f in zip(MARGINS, FORMATS)]
    assert rubric_rewards(MARGINS, FORMATS, "margin_kappa_format") == pytest.approx(expected)


def test_a_panel_that_disagrees_by_more_than_chance_counts_as_kappa_0_in_the_variance():
    margins = [[0.1, -0.1], [-0.1, 0.1]]
    assert group_kappa(margins) == pytest.approx(-1.0)
    assert rubric_rewards(margins, [1.0, 1.0], "mean_minus_variance") == pytest.approx([-0.5, -0.5])
    assert rubric_rewards([[0.1, 0.2], [0.3, 0.1]], [1.0, 1.0], "mean_minus_variance") == [1.0, 1.0]  # all alike: kappa 1
    with pytest.raises(ValueError, match="none of"):
        rubric_rewards(margins, [1.0, 1.0], "vote")
    with pytest.raises(ValueError, match="tie breaker"):
        rubric_rewards(margins, [1.0, 1.0], "majority", "coin")


# ---- the order of a pair


@pytest.mark.parametrize(
    ("forward", "reverse", "reward"),
    [
        ("A", "B", 1.0),
        ("A", "A", 0.5),
        ("B", "B", 0.5),
        ("B", "A", 0.0),
        (None, "B", None),
        ("A", None, None),
        ("tie", "B", 0.75),
    ],
)
def test_both_orders(forward, reverse, reward):
    """M9; a failed call is no half of a reward."""
    assert both_orders(forward, reverse) == reward


def test_a_judge_that_always_says_a_tells_nothing():
    """B24: 1/2 for every rollout, no pair agreed on, every order flipped."""
    assert both_orders("A", "A") == 0.5 and agreed("A", "A") is None and order_flipped("A", "A") is True
    assert agreed("A", "B") == "own" and agreed("B", "A") == "other" and order_flipped("A", "B") is False
    assert agreed("tie", "tie") is None and agreed(None, "B") is None and order_flipped(None, "B") is None
    with pytest.raises(ValueError, match="winner"):
        both_orders("Response A", "B")
