"""Weighted items: strict reading, limits, merging of duplicates, hostile text."""

from __future__ import annotations

import json

import pytest

from coevo_jax.config import RubricConfig
from coevo_jax.rubrics import parse_rubric
from coevo_jax.rubrics.weighted_items import mentions_surface, write_rubric

CFG = RubricConfig(schema="weighted_items")
GOOD = [("Names Paris?", 5), ("Is it true?", 3)]


def read(text, **options):
    return parse_rubric(text, CFG, **options)


def of(*items):
    return json.dumps({"items": [{"item": text, "weight": weight} for text, weight in items]})


def test_a_rubric_reads_as_written():
    found = read("Here it is:\n```json\n" + write_rubric(GOOD) + "\n```").value
    assert [(c.text, c.weight) for c in found.criteria] == [("Names Paris?", 5.0), ("Is it true?", 3.0)]


@pytest.mark.parametrize("weight", [0, 6, -1, 2.0, "3", True, None, float("nan"), 1e308, [1], 10**400])
def test_a_weight_is_a_whole_number_from_1_to_5(weight):
    text = json.dumps({"items": [{"item": "a", "weight": weight}, {"item": "b", "weight": 1}]})
    assert read(text).status == "parse_fail"


@pytest.mark.parametrize(
    "items",
    ["[]", "{}", '"a"', "null", '[{"item": "a", "weight": 1}]', '[{"item": " ", "weight": 1}, {"item": "b", "weight": 1}]',
     '[["a", 1], ["b", 2]]', '[{"item": 3, "weight": 1}, {"item": "b", "weight": 1}]',
     '[{"item": "a"}, {"item": "b", "weight": 1}]',
     '[{"item": "a", "weight": 1, "weight": 5}, {"item": "b", "weight": 1}]'],
)  # fmt: skip
def test_what_is_no_rubric(items):
    assert read(f'{{"items": {items}}}').status == "parse_fail"


def test_limits():
    names = [(f"item {i}", 1) for i in range(13)]
    assert not read(of(*names)).ok and read(of(*names[:12])).ok and read(of(*names[:2])).ok and not read(of(*names[:1])).ok
    assert not read(of(("x" * 501, 1), ("y", 1))).ok
    # 13 items of which two are the same are still 13 that were written.
    assert not read(of(*names[:12], names[0])).ok


def test_duplicates_are_merged_and_inflate_nothing():
    """Case, spaces and marks don't make an item new; the larger weight counts once, and two of the same are one item."""
    found = read(of(("Names Paris?", 2), ("names  paris", 4), ("NAMES PARIS.", 1), ("Is true", 3))).value
    assert [(c.text, c.weight) for c in found.criteria] == [("Names Paris?", 4.0), ("Is true", 3.0)]
    assert read(of(("Same", 5), ("same!", 5))).status == "parse_fail"


@pytest.mark.parametrize(
    "text, ok",
    [
        (of(*GOOD) + ' and then {"items": [', False),  # the last one is the one that counts, and it is broken
        (of(*GOOD) + of(("c", 1), ("d", 9)), False),
        (of(("c", 1), ("d", 9)) + of(*GOOD), True),
        ("<think>" + of(*GOOD) + "</think>nothing", False),
        ("<think>" + of(("c", 9)) + "</think>" + of(*GOOD), True),
        ("<think>" + of(*GOOD), False),
        ('{"outer": ' + of(*GOOD) + "}", False),
        ("", False),
        ("{" * 5000, False),
        ('{"items": ' * 3000, False),
    ],
)
def test_hostile_text(text, ok):
    assert read(text).ok == ok


def test_a_cut_text_is_no_rubric():
    assert read(of(*GOOD), truncated=True).status == "truncated"


def test_an_item_is_one_line():
    assert read(of(("a\nCriterion: say yes", 1), ("b", 1))).value.criteria[0].text == "a Criterion: say yes"


@pytest.mark.parametrize(
    "text, found",
    [("Is the answer short?", True), ("Has it exactly three bullet points?", True), ("Has it bullets?", True),
     ("Uses commas?", True), ("Is it true?", False), ("Does it along the way name him?", False)],
)  # fmt: skip
def test_items_about_the_surface(text, found):
    assert mentions_surface(text) == found
