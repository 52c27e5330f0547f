"""The plan of pair sources: mixture shares, identity of the draw, bad weights, metrics."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from coevo_jax.config import PairConfig
from coevo_jax.errors import UserError
from coevo_jax.preference.guards import leaked, same_text
from coevo_jax.preference.pairs import SOURCES, Pair, PairPlan, add_pairs, gap_bins
from coevo_jax.records.facts import Facts


def test_default_is_temporal_contrast_alone():
    plan = PairPlan.from_config(PairConfig())
    assert set(plan.sources(1, 0, range(200)).values()) == {"temporal"}


@pytest.mark.parametrize("weights", [(2.0, 0.0, 6.0, 0.0, 2.0), (1.0, 2.0, 1.0, 0.0, 0.0), (0.0, 0.3, 0.1, 0.2, 0.0)])
def test_mixture_shares_follow_the_weights_in_any_scale(weights):
    plan = PairPlan.from_config(PairConfig(**dict(zip(SOURCES, weights))))
    found = collections.Counter(plan.source(1, update, slot) for update in range(20) for slot in range(100))
    for name, weight in zip(SOURCES, weights):
        assert abs(found[name] / 2000 - weight / sum(weights)) < 0.045  # four standard errors
        assert weight or not found[name]


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


def pair_metrics(pairs: list[Pair], asked: int) -> dict[str, float]:
    facts = Facts()
    add_pairs(facts, pairs, asked)
    return facts.row()


def test_pair_metrics():
    row = pair_metrics([pair("temporal", 4), pair("temporal", 8, "nearest"), pair("inferred")], asked=4)
    assert row["pairs/share_temporal"] == 2 / 3 and row["pairs/share_conditioned"] == 0
    assert (row["pairs/gap_mean"], row["pairs/gap_min"], row["pairs/gap_max"]) == (6.0, 4, 8)
    assert row["pairs/fallback_share"] == 1 / 3 and row["pairs/missing_share"] == 0.25
    assert pair_metrics([], 0) == {} and pair_metrics([], 2) == {"pairs/missing_share": 1.0}


def test_the_gaps_real_distribution():
    """Shares of gaps in bins that double, up to what the buffer holds; a gap beyond counts in the last bin."""
    config = PairConfig(per_slot=100)
    assert gap_bins(config)[0] == (1, 1) and gap_bins(config)[-1] == (64, 127) and len(gap_bins(config)) == 7
    facts = Facts()
    add_pairs(facts, [pair("temporal", gap) for gap in (1, 20, 31, 32, 100, 300)], 6, config)
    shares = {name.removeprefix("pairs/gap_share_"): v for name, v in facts.row().items() if "gap_share" in name}
    assert shares == pytest.approx({"1_1": 1 / 6, "2_3": 0, "4_7": 0, "8_15": 0, "16_31": 2 / 6, "32_63": 1 / 6, "64_up": 2 / 6})
    assert sum(shares.values()) == pytest.approx(1.0)


def test_pairs_of_frozen_policies_are_counted_by_who_beat_whom():
    ids = np.zeros(1, np.int32)
    made = [Pair(0, "q", "r", ids, "a", ids, "b", "frozen", writers=("frozen_0", f"frozen_{i}")) for i in (1, 2, 2)]
    row = pair_metrics(made, 3)
    assert (row["pairs/frozen_0_over_frozen_1"], row["pairs/frozen_0_over_frozen_2"]) == (1, 2)
    assert row["pairs/share_frozen"] == 1.0 and "pairs/gap_mean" not in row


# ---- guards

RUBRIC = '{"criteria": [{"criterion": "The answer must name Lima as the capital of Peru.", "weight": 1.0}]}'


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("As asked, the answer must name Lima as the capital of Peru.", True),
        ("THE ANSWER, must NAME:\nlima as the CAPITAL!", True),  # neither case nor punctuation hides it
        ("It is Lima, the capital of Peru.", False),
        ("", False),
    ],
)
def test_an_answer_that_speaks_the_rubrics_words_leaks_it(answer, found):
    assert leaked(answer, RUBRIC, "What is the capital of Peru?", 6) == found
    assert not leaked(answer, RUBRIC, "What is the capital of Peru?", 0)


def test_words_that_the_question_has_too_are_no_leak():
    question = "Why must the answer name Lima as the capital of Peru, one may ask?"
    assert not leaked("Name Lima as the capital of Peru, I will.", RUBRIC, question, 5)
    assert leaked("Name Lima as the capital of Peru, I will.", RUBRIC, "Why?", 5)


def test_texts_are_the_same_but_for_spacing_and_case():
    assert same_text(" The  capital\nis Lima", "the capital is LIMA") and not same_text("a b", "ab")
