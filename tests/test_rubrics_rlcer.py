"""RLCER: schema, verifier's answer, validity and rewards against an independent computation."""

from __future__ import annotations

import json

import numpy as np
import pytest

from coevo_jax.rubrics.rlcer import (
    parse_judgement,
    parse_points,
    reasoner_reward,
    reasoning_reward,
    render_points,
    valid_criteria,
    writer_reward,
)


def rubric(*points, **changes):
    items = [{"category": "method", "criterion": f"Does thing {i}", "points": p} for i, p in enumerate(points)]
    items[0] |= changes
    return json.dumps({"rubrics": items})


def test_a_rubric_with_points():
    found = parse_points("<think>x</think>" + rubric(5, -5, 1, 2, -1))
    assert found.ok and found.value.points.tolist() == [5, -5, 1, 2, -1]
    assert render_points(found.value).splitlines()[1] == "2. Does thing 1"  # the verifier doesn't see the points


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (rubric(1, 1, 1, 1), "4 criteria"),
        (rubric(*[1] * 16), "16 criteria"),
        (rubric(1, 2, 3, 4, 6), "criterion 5: points"),
        (rubric(1, 2, 3, 4, 0), "criterion 5: points"),
        (rubric(1, 2, 3, 4, 1.5), "criterion 5: points"),
        (rubric(1, 2, 3, 4, True), "criterion 5: points"),
        (rubric(*[1] * 5, category=""), "criterion 1: no category"),
        (rubric(*[1] * 5, criterion="does thing 1."), "the same"),
        ('{"rubrics": "five"}', "no list"),
        ("none", "no JSON object"),
    ],
)
def test_what_is_no_rubric(given, why):
    found = parse_points(given)
    assert found.status == "parse_fail" and why in found.detail


def test_a_judgement_reads_whole_or_not_at_all():
    assert parse_judgement('{"judgement": [true, false], "final_score": 3}', 2).value == (True, False)
    for bad in (
        '{"judgement": [true]}',
        '{"judgement": [true, 1]}',
        '{"judgement": [true, null]}',
        '{"judgement": "yes"}',
        "[true, false]",
    ):
        assert parse_judgement(bad, 2).status == "parse_fail"
    assert parse_judgement('{"judgement": [true, false]}', 2, truncated=True).status == "truncated"


Z = np.asarray([1, 1, 1, 0, 0, 1, 0, 0])
VOTES = np.stack(
    [
        Z,  # correlation 1
        1 - Z,  # -1
        np.ones(8),  # never varies
        [1, 1, 0, 0, 1, 1, 0, 0],  # 0.5
        [1, 0, 1, 0, 1, 0, 0, 0],  # about 0.26
        [1, 0, 1, 0, 1, 0, 1, 0],  # 0
    ],
    axis=1,
)


def test_validity_is_correlation_with_correctness():
    by_hand = [float(np.corrcoef(VOTES[:, k], Z)[0, 1]) if VOTES[:, k].std() else 0.0 for k in range(6)]
    assert by_hand == pytest.approx([1, -1, 0, 0.5, 0.2582, 0], abs=1e-4)
    assert valid_criteria(VOTES, Z).tolist() == [c > 0.2 for c in by_hand] == [True, False, False, True, True, False]
    assert valid_criteria(VOTES, Z, 0.26).tolist() == [True, False, False, True, False, False]
    assert valid_criteria(VOTES, np.ones(8)) is None and valid_criteria(VOTES, np.zeros(8)) is None  # never 'keep all'
    with pytest.raises(ValueError, match="belong together"):
        valid_criteria(VOTES, Z[:7])


def test_rewards_of_both_roles():
    points, valid = np.asarray([4, 3, 2, -2, 1, -5]), valid_criteria(VOTES, Z)
    votes = VOTES[0]  # of the valid ones (4, -2, 1): all satisfied
    assert reasoning_reward(points, votes, valid) == pytest.approx((4 - 2 + 1 + 2) / (5 + 2))
    assert reasoning_reward(points, np.asarray([1, 0, 0, 0, 1, 1]), valid) == 1.0
    assert reasoning_reward(points, np.asarray([0, 1, 1, 1, 0, 0]), valid) == 0.0
    assert reasoner_reward(True, 0.25) == 1.25 and reasoner_reward(False, 0.25) == -0.75
    assert writer_reward(valid, True) == pytest.approx(0.5 + 1) and writer_reward(None, False) == 0.0


def test_what_has_no_reward_is_none_and_not_0():
    none = np.zeros(2, bool)
    assert reasoning_reward(np.asarray([3, -2]), np.asarray([1, 1]), none) is None
    assert reasoner_reward(True, None) is None and writer_reward(None, True) is None
    assert reasoning_reward(np.asarray([-3, -2]), np.asarray([0, 1]), ~none) == pytest.approx(0.6)  # negative points only
