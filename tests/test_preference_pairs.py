"""The plan of pair sources: mixture shares, identity of the draw, bad weights, metrics."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from coevo_jax.config import PairConfig
from coevo_jax.errors import UserError
from coevo_jax.preference.pairs import SOURCES, Pair, PairPlan, pair_metrics


def test_default_is_temporal_contrast_alone():
    plan = PairPlan.from_config(PairConfig())
    assert set(plan.sources(1, 0, range(200)).values()) == {"temporal"}


def test_mixture_shares_follow_the_weights_in_any_scale():
    plan = PairPlan.from_config(PairConfig(temporal=2.0, inferred=0.0, conditioned=6.0))
    found = collections.Counter(plan.source(1, update, slot) for update in range(20) for slot in range(100))
    assert found["inferred"] == 0
    assert abs(found["temporal"] / 2000 - 0.25) < 0.04  # four standard errors


def test_source_depends_on_seed_update_slot_and_attempt_and_on_no_other_slot():
    plan = PairPlan.from_weights(dict.fromkeys(SOURCES, 1.0))
    whole = plan.sources(1, 3, range(64))
    assert plan.sources(1, 3, range(32, 64)) == {slot: whole[slot] for slot in range(32, 64)}
    others = [plan.sources(2, 3, range(64)), plan.sources(1, 4, range(64)), plan.sources(1, 3, range(64), attempt=1)]
    assert all(other != whole for other in others)


@pytest.mark.parametrize(
    "weights", [{}, {"temporal": 0.0}, {"temporal": -1.0, "inferred": 2.0}, {"temporal": float("nan")}, {"temporl": 1.0}]
)
def test_bad_weights_are_refused(weights):
    with pytest.raises(UserError, match="mixture of pair sources"):
        PairPlan.from_weights(weights)


def pair(source: str, gap: int | None = None, fallback: str | None = None) -> Pair:
    ids = np.zeros(1, np.int32)
    return Pair(0, "q", "r", ids, "a", ids, "b", source, gap, fallback)


def test_pair_metrics():
    row = pair_metrics([pair("temporal", 4), pair("temporal", 8, "nearest"), pair("inferred")], asked=4)
    assert row["pairs/share_temporal"] == 2 / 3 and row["pairs/share_conditioned"] == 0
    assert (row["pairs/gap_mean"], row["pairs/gap_min"], row["pairs/gap_max"]) == (6.0, 4, 8)
    assert row["pairs/fallback_share"] == 1 / 3 and row["pairs/missing_share"] == 0.25
    assert pair_metrics([], 0)["pairs/gap_mean"] is None
