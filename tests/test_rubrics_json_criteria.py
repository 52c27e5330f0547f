"""The rubric schema: what is valid, what is refused and why, rendering, statistics."""

from __future__ import annotations

import copy
import json

import pytest

from coevo_jax.config import RubricConfig
from coevo_jax.errors import UserError
from coevo_jax.rubrics import Criterion, Rubric, format_reward, parse_rubric, render_rubric, rubric_stats

CFG = RubricConfig()
GOOD = {
    "criteria": [
        {"criterion": "Names Lima", "weight": 0.7, "scoring_levels": {"1.0": "named", "0.0": "not"}},
        {"criterion": "One sentence", "weight": 0.3, "scoring_levels": {"1.0": "one", "0.5": "two", "0.0": "more"}},
    ]
}


def changed(at=(), **new):
    """GOOD with fields of criterion `at` replaced; a field set to ... is removed."""
    record = copy.deepcopy(GOOD)
    item = record["criteria"][at]
    for key, value in new.items():
        item[key] = value
        if value is ...:
            del item[key]
    return json.dumps(record)


def test_a_valid_rubric():
    parsed = parse_rubric(json.dumps(GOOD), CFG)
    assert parsed.status == "ok" and format_reward(parsed) == 1.0
    assert parsed.value == Rubric(
        (
            Criterion("Names Lima", 0.7, (("1.0", "named"), ("0.0", "not"))),
            Criterion("One sentence", 0.3, (("1.0", "one"), ("0.5", "two"), ("0.0", "more"))),
        ),
        json.dumps(GOOD),
    )


@pytest.mark.parametrize(
    "text",
    [
        "```json\n" + json.dumps(GOOD, indent=2) + "\n```",
        '<think>{"criteria": []}</think>\n' + json.dumps(GOOD),
        "Here it is:\n" + json.dumps(GOOD) + "\nI hope this helps.",
        changed(0, scoring_levels=...),  # levels are no part of validity, as in the released check
        changed(0, scoring_levels={"1.0": 3}),
        changed(0, weight=0.55),
        changed(0, weight=0.85),
    ],
)
def test_still_valid(text):
    parsed = parse_rubric(text, CFG)
    assert parsed.status == "ok" and len(parsed.value.criteria) == 2, parsed


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "empty"),
        ("no json", "no JSON object"),
        (json.dumps(GOOD)[:-1], "broken"),
        (json.dumps(GOOD)[:-2], "broken"),
        (json.dumps(GOOD).replace("]}", "],}"), "broken"),  # not repaired
        (json.dumps(GOOD).replace('"', "'"), "broken"),
        (json.dumps({"Criteria": GOOD["criteria"]}), "not a list"),
        (json.dumps({"criteria": GOOD}), "not a list"),
        (json.dumps({"criteria": GOOD["criteria"][:1]}), "1 criteria"),
        (json.dumps({"criteria": []}), "0 criteria"),
        (json.dumps({"criteria": ["a", "b"]}), "not an object"),
        (json.dumps(GOOD["criteria"]), "no JSON object"),
        (changed(0, criterion=""), "criterion 1: no text"),
        (changed(1, criterion=" . "), "criterion 2: no text"),
        (changed(0, criterion=7), "no text"),
        (changed(0, criterion=...), "no text"),
        (changed(1, criterion="names  LIMA."), "criteria 1 and 2 are the same"),
        (changed(1, criterion="**Names Lima**"), "are the same"),
        (changed(0, weight=...), "no weight"),
        (changed(0, weight=True), "not a number"),
        (changed(0, weight="0.7"), "not a number"),
        (changed(0, weight="NaN"), "not a number"),
        (changed(0, weight=None), "not a number"),
        (changed(0, weight=[0.7]), "not a number"),
        (changed(0, weight=float("nan")), "not a positive number"),
        (changed(0, weight=float("inf")), "not a positive number"),
        (changed(0, weight=0), "not a positive number"),
        (changed(0, weight=-0.7), "not a positive number"),
        (changed(0, weight=10**30), "not a positive number"),
        (changed(0, weight=0.54), "add up to 0.84"),
        (changed(0, weight=0.86), "add up to 1.16"),
        (changed(0, weight=70), "add up to 70.3"),
    ],
)
def test_invalid(text, why):
    parsed = parse_rubric(text, CFG)
    assert parsed.status == "parse_fail" and parsed.value is None and why in parsed.detail, parsed
    assert format_reward(parsed) == 0.0


def test_truncated_is_invalid_whatever_it_holds():
    for parsed in (parse_rubric(json.dumps(GOOD), CFG, truncated=True), parse_rubric("<think>" + json.dumps(GOOD), CFG)):
        assert parsed.status == "truncated" and format_reward(parsed) == 0.0


def test_the_tolerance_is_meant_in_decimals():
    text = changed(0, weight=0.5).replace("0.3", "0.35")  # 0.85, in binary a little more than 0.15 away from 1
    assert abs(0.5 + 0.35 - 1) > 0.15 and parse_rubric(text, CFG).status == "ok"


def test_a_doubled_key_is_invalid():
    text = json.dumps(GOOD).replace('"weight": 0.7', '"weight": 0.7, "weight": 0.7')
    assert parse_rubric(text, CFG).status == "parse_fail"


def test_limits_of_the_config():
    assert parse_rubric(json.dumps(GOOD), RubricConfig(min_criteria=3)).status == "parse_fail"
    assert parse_rubric(json.dumps(GOOD), RubricConfig(min_criteria=1, max_criteria=1)).status == "parse_fail"
    assert parse_rubric(changed(0, weight=0.75), RubricConfig(weight_tolerance=0.01)).status == "parse_fail"
    with pytest.raises(UserError) as error:
        parse_rubric("", RubricConfig(schema="json_criterion"))
    assert error.value.nearest == "json_criteria"


def test_rendering_keeps_one_line_a_criterion():
    rubric = Rubric((Criterion("Names\nLima", 0.7, (("1.0", "a\nb"),)), Criterion("Short", 1 / 3)))
    assert render_rubric(rubric) == "1. (weight 0.7) Names Lima\n   1.0: a b\n2. (weight 0.3333) Short"


def test_statistics():
    stats = rubric_stats(parse_rubric(json.dumps(GOOD), CFG).value)
    assert stats == pytest.approx(
        {
            "criteria": 2,
            "criterion_words": 2,
            "criterion_chars": 11,
            "levels": 2.5,
            "weight_max": 0.7,
            "weight_std": 0.2,
            "weight_sum": 1.0,
            "effective_criteria": 1 / 0.58,
        }
    )
