"""RaR: the schema, the weights of its categories, and query-specific weights."""

from __future__ import annotations

import json

import pytest

from coevo_jax.config import RubricConfig
from coevo_jax.judges.aggregate import weighted_mean
from coevo_jax.rubrics import Rubric, parse_rubric, rar, rubric_stats
from coevo_jax.rubrics.preference_weights import delta_weights, reweigh

RAR = RubricConfig(schema="rar")


def item(i, category="Essential", weight=5, **other):
    return {"title": f"Thing {i}", "description": f"{category}: does thing {i}", "weight": weight} | other


def rubric(n=7, **at):
    items = [item(i) for i in range(n)]
    for name, value in at.items():
        items[int(name[1:])] = value
    return items


def text(items):
    return json.dumps({"items": items})


def test_only_the_category_weighs():
    items = [
        item(0),
        item(1, "Important Criteria", 1),
        item(2, "**Optional**", 5),
        item(3, "Pitfall", -2),
        *(item(i) for i in (4, 5, 6)),
    ]
    found = parse_rubric(text(items), RAR)
    assert found.ok, found.detail
    assert [c.weight for c in found.value.criteria] == [1.0, 0.7, 0.3, 0.9, 1.0, 1.0, 1.0]
    assert found.value.criteria[1].text == "Important Criteria: does thing 1" and found.value.criteria[1].title == "Thing 1"
    assert rubric_stats(found.value)["criteria"] == 7


@pytest.mark.parametrize(("pitfall", "expected"), [(0.9, 0.7586207), (0.8, 0.75)])
def test_m6_explicit(pitfall, expected):
    items = [
        item(0),
        item(1, "Important", 3),
        item(2, "Optional", 1),
        item(3, "Pitfall", -1),
        *(item(i, "Optional", 1) for i in (4, 5, 6)),
    ]
    found = rar.rubric_of(items, pitfall_weight=pitfall).value
    assert found is not None
    first = Rubric(found.criteria[:4])  # one of each category; Important isn't satisfied
    assert weighted_mean(first, (1.0, 0.0, 1.0, 1.0)) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("wrap", ["{}", "```json\n{}\n```", "<think>[1]</think>\n{}", "\n {} \n"])
def test_a_list_may_stand_alone(wrap):
    assert parse_rubric(wrap.format(json.dumps(rubric())), RAR).ok


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (text(rubric(6)), "6 items"),
        (text(rubric(21)), "21 items"),
        (text(rubric(_3=item(3, "Necessary"))), "item 4: no description that begins"),
        (text(rubric(_3=item(3, "Essentially"))), "item 4: no description that begins"),
        (text(rubric(_0=item(0, weight=6))), "item 1: weight '6'"),
        (text(rubric(_0=item(0, weight=True))), "item 1: weight 'True'"),
        (text(rubric(_0=item(0, weight="NaN"))), "item 1: weight 'NaN'"),
        (text(rubric(_0=item(0, "Pitfall", 2))), "item 1: weight '2' is not a whole number from -2 to -1"),
        (text(rubric(_2=item(2, title=" "))), "item 3: no title"),
        (text(rubric(_2="words")), "item 3: not an object"),
        (text(rubric(_6=item(0) | {"title": "Other"})), "items 1 and 7 are the same"),
        ("Here it is: " + json.dumps(rubric()), "JSON"),
        (json.dumps(rubric()) + json.dumps(rubric()), ""),
        ('{"items": 3}', "no list"),
    ],
)
def test_what_is_no_rubric(given, why):
    found = parse_rubric(given, RAR)
    assert found.status == "parse_fail" and found.value is None and why in found.detail


def test_a_cut_rubric_is_truncated():
    assert parse_rubric(json.dumps(rubric()), RAR, truncated=True).status == "truncated"


def test_predefined_is_four_equal_items():
    assert [c.weight for c in rar.PREDEFINED.criteria] == [1.0] * 4
    assert weighted_mean(rar.PREDEFINED, (1.0, 0.0, 1.0, 1.0)) == 0.75


# ---- query-specific preference


def test_weights_are_what_tells_the_preferred_answer():
    assert delta_weights([1.0, 0.5, 0.2], [0.5, 0.5, 0.9]) == pytest.approx([1.0, 0.0, 0.0])
    assert delta_weights([1.0, 0.5], [0.4, 0.3]) == pytest.approx([0.75, 0.25])
    assert delta_weights([0.5, 0.2], [0.5, 0.9]) is None  # nothing favours the preferred answer: no weights, not uniform ones
    with pytest.raises(ValueError):
        delta_weights([1.0], [])
    found = reweigh(rar.PREDEFINED, [1, 1, 0, 1], [0, 1, 1, 0.5])
    assert [c.title for c in found.criteria] == ["Correct", "Helpful"]
    assert [c.weight for c in found.criteria] == pytest.approx([2 / 3, 1 / 3])
