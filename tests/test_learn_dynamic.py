"""DynamicRubric's formulas against values by hand (float64), and what must not change them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from coevo_jax.config import AdvantageConfig
from coevo_jax.learn import dynamic

WEIGHTS = np.asarray([5.0, 3.0, 2.0])
VOTES = np.asarray([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], np.float64)
NAN = float("nan")
CFG = AdvantageConfig(kind="group_std", ddof=0, epsilon=0.0)


def test_golden_scores_and_discriminability():
    assert dynamic.scores(VOTES, WEIGHTS) == pytest.approx([1.0, 0.8, 0.3, 0.3], abs=1e-15)
    assert dynamic.discriminability(VOTES, WEIGHTS) == pytest.approx(0.1625, abs=1e-15)


@pytest.mark.parametrize(
    "scores, value",
    [((1.0, 0.8, 0.3), -1.0367703859), ((0.5, 0.5, 0.5), -1.3862943611), ((0.3, 0.8, 1.0), -1.9247394433)],
)
def test_golden_bt_anchor(scores, value):
    assert dynamic.bt_anchor(np.asarray(scores), (3, 2, 1)) == pytest.approx(value, abs=1e-10)


def test_bt_weights_of_four_answers():
    """By the formula's own terms: log sigmoid over (j - i) 2^(i-1), written out."""
    s = (0.9, 0.1, 0.7, 0.2)
    term = lambda i, j: -math.log1p(math.exp(-(s[i - 1] - s[j - 1])))  # noqa: E731
    by_hand = (term(1, 2) / 1 + term(1, 3) / 2 + term(1, 4) / 3) / 1 + (term(2, 3) / 1 + term(2, 4) / 2) / 2 + term(3, 4) / 4
    assert dynamic.bt_anchor(np.asarray(s), (4, 3, 2, 1)) == pytest.approx(by_hand, abs=1e-14)


def test_listnet_by_hand():
    """rel = (1, 0), S = (0.8, 0.2), tau 0.5: sum of softmax(rel) log softmax(S / tau)."""
    p = math.e / (math.e + 1)
    q = math.exp(1.6) / (math.exp(1.6) + math.exp(0.4))
    by_hand = p * math.log(q) + (1 - p) * math.log(1 - q)
    assert dynamic.listnet_anchor(np.asarray([0.8, 0.2]), (2, 1), 0.5) == pytest.approx(by_hand, abs=1e-14)
    s = np.asarray([0.3, 0.9, 0.4])
    assert dynamic.listnet_anchor(s, (3, 1, 2)) < dynamic.listnet_anchor(s[[1, 0, 2]], (3, 1, 2))


def test_the_order_of_the_answers_is_their_labels():
    s, labels = np.asarray([0.3, 1.0, 0.8]), (1, 3, 2)
    for form in (dynamic.bt_anchor, dynamic.listnet_anchor, dynamic.pair_accuracy, dynamic.kendall_tau):
        assert form(s, labels) == form(s[[1, 2, 0]], (3, 2, 1))


def test_ties():
    assert dynamic.bt_anchor(np.asarray([0.9, 0.1, 0.1]), (2, 1, 1)) == pytest.approx(
        dynamic.log_sigmoid(0.8) + dynamic.log_sigmoid(0.8) / 2
    )
    tied = dynamic.listnet_anchor(np.asarray([0.9, 0.1, 0.2]), (2, 1, 1))
    assert tied == pytest.approx(dynamic.listnet_anchor(np.asarray([0.9, 0.2, 0.1]), (2, 1, 1)), abs=1e-14)
    assert dynamic.pair_accuracy(np.asarray([0.5, 0.5]), (2, 1)) == 0.5 and math.isnan(dynamic.pair_accuracy([1, 2], (1, 1)))
    assert dynamic.kendall_tau([3, 2, 1], (3, 2, 1)) == 1 and dynamic.kendall_tau([1, 2, 3], (3, 2, 1)) == -1
    assert math.isnan(dynamic.kendall_tau([1, 1, 1], (3, 2, 1)))


def test_a_failed_vote_is_no_vote():
    """The mean is over valid votes; an item without one, or an answer with a failed vote, has no value: never 0."""
    votes = VOTES.copy()
    votes[0, 3] = NAN
    share = 2 / 3
    assert dynamic.discriminability(votes, WEIGHTS) == pytest.approx((5 * share * (1 - share) + 2 * 0.1875) / 10)
    assert np.isnan(dynamic.scores(votes, WEIGHTS)).tolist() == [False, False, False, True]
    votes[1] = NAN
    assert math.isnan(dynamic.discriminability(votes, WEIGHTS))
    with pytest.raises(ValueError, match="failed score"):
        dynamic.bt_anchor(np.asarray([1.0, NAN]), (2, 1))


def test_candidates_in_another_order_change_nothing():
    order = [2, 0, 3, 1]
    assert dynamic.discriminability(VOTES[:, order], WEIGHTS) == dynamic.discriminability(VOTES, WEIGHTS)
    assert dynamic.scores(VOTES[:, order], WEIGHTS).tolist() == dynamic.scores(VOTES, WEIGHTS)[order].tolist()


def test_two_rewards_are_normalised_apart():
    """Raw, 0.25 beside -8 would vanish; normalised, each has a std of 1."""
    disc, anchor = np.asarray([0.25, 0.0, 0.25, 0.0]), np.asarray([-8.0, -2.0, -2.0, -8.0])
    ids, valid = np.zeros(4, np.int64), np.ones(4, bool)
    found = dynamic.two_objectives(disc, anchor, ids, valid, (), CFG, "both", 0.5)
    assert found.values == pytest.approx([1 - 0.5, -1 + 0.5, 1 + 0.5, -1 - 0.5])
    assert dynamic.two_objectives(disc, anchor, ids, valid, (), CFG, "discriminability").values == pytest.approx([1, -1, 1, -1])
    assert dynamic.two_objectives(disc, anchor, ids, valid, (), CFG, "anchor").values == pytest.approx([-1, 1, 1, -1])


def test_groups_and_failures():
    disc = np.asarray([0.2, 9.0, 0.1, 0.2, 0.2, 0.0, 0.0])
    anchor = np.asarray([-1.0, 9.0, -1.0, -1.0, -1.0, -1.0, -2.0])
    ids = np.asarray([5, 5, 5, 3, 3, 8, 8])
    valid = np.asarray([1, 0, 1, 1, 1, 1, 1], bool)
    found = dynamic.two_objectives(disc, anchor, ids, valid, (8,), CFG)
    assert found.values == pytest.approx([1, 0, -1, 0, 0, 0, 0])  # failed samples enter no statistic; 3 is constant
    assert found.keep.tolist() == [True, False, True, False, False, False, False]
    assert sorted(found.dropped) == [3, 8] and list(found.zero_variance) == [3]
    again = dynamic.two_objectives(disc, anchor, ids, valid, (), CFG)
    assert again.values[5:] == pytest.approx([1, -1]) and list(again.dropped) == [3]


@pytest.mark.parametrize("votes, weights", [([[0.5]], [1]), ([[1]], [0]), ([[1]], [1, 2]), (np.zeros((0, 2)), [])])
def test_what_is_no_table_of_votes(votes, weights):
    with pytest.raises(ValueError):
        dynamic.scores(np.asarray(votes, np.float64), np.asarray(weights, np.float64))
