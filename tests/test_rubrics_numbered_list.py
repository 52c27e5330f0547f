"""The schema of numbered lists with tags: strict reading, rendering, weights, statistics, hostile texts."""

from __future__ import annotations

import itertools
import random

import pytest

from coevo_jax.config import RubricConfig
from coevo_jax.rubrics import Criterion, Rubric, numbered_list, parse_rubric, render_rubric

CFG = RubricConfig(schema="numbered_rules")
GOOD = "1. The response has two sentences. [Hard Rule]\n2. The response is kind. [Principle]"


def texts(text: str, **how: bool) -> list[str] | str:
    parsed = parse_rubric(text, CFG, **how)
    return parsed.detail if parsed.value is None else [c.text for c in parsed.value.criteria]


def test_items_tags_and_weights() -> None:
    rubric = parse_rubric(GOOD, CFG).value
    assert rubric is not None and rubric.raw == GOOD
    assert [(c.text, c.weight, c.title) for c in rubric.criteria] == [
        ("The response has two sentences.", 3.0, "Hard Rule"),
        ("The response is kind.", 1.0, "Principle"),
    ]
    assert numbered_list.render(rubric) == GOOD
    assert "(weight 3)" in render_rubric(rubric)  # a pointwise judge weighs by tag
    stats = numbered_list.list_stats(rubric)
    assert stats == {"criteria": 2.0, "hard_rules": 1.0, "criterion_words": 4.5, "subject_share": 1.0}


@pytest.mark.parametrize(
    "text",
    [
        "<think>1. The response is x. [Hard Rule]</think>\n" + GOOD,
        GOOD.replace("\n", "\n\n"),
        GOOD.replace("[Hard Rule]", "**[Hard Rule]**").replace("2.", "2)"),
        GOOD.replace("[Principle]", "[principle] ."),
        "  " + GOOD.replace("\n", "\r\n"),
    ],
)
def test_what_is_read_all_the_same(text: str) -> None:
    assert texts(text) == ["The response has two sentences.", "The response is kind."]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (GOOD.replace(" [Principle]", ""), "is no item"),
        (GOOD.replace("[Principle]", "[Principal]"), "is no item"),
        ("Here is the list:\n" + GOOD, "is no item"),
        (GOOD + "\nI hope this helps.", "is no item"),
        (GOOD.replace("2.", "3."), "item 3, expected 2"),
        (GOOD.replace("The response is kind.", "The response has two sentences!"), "items 1 and 2 are the same"),
        (GOOD.replace("The response is kind.", ""), "no text"),
        (GOOD.replace("The response is kind.", "..."), "no text"),
        (GOOD.replace("is kind.", "is [Hard Rule] kind."), "more than one tag"),
        (GOOD.splitlines()[0], "1 items, at least 2"),
        ("", "empty"),
        ("<think>" + GOOD, "never closes"),
        ('{"criteria": []}', "is no item"),
    ],
)
def test_what_is_refused(text: str, why: str) -> None:
    assert why in texts(text)


def test_a_cut_text_loses_its_half_item_and_no_more() -> None:
    long = GOOD + "\n3. The response na"
    assert "is no item" in texts(long)  # of a text that ended by itself it is a fault
    assert texts(long, truncated=True) == ["The response has two sentences.", "The response is kind."]
    assert texts(long + "mes it. [Principle]", truncated=True)[2] == "The response names it."
    cut = parse_rubric(GOOD[:-4], CFG, truncated=True)  # one item is left, fewer than are needed
    assert cut.status == "truncated" and cut.value is None
    assert parse_rubric("<think> and so on", CFG, truncated=True).status == "truncated"


def test_most_items() -> None:
    cfg = RubricConfig(schema="numbered_rules", max_criteria=1, min_criteria=1)
    assert "at most 1" in parse_rubric(GOOD, cfg).detail


def test_rendering_is_read_back_whatever_the_texts_hold() -> None:
    """Hostile texts in items: markdown, quotes, brackets, other scripts, what looks like a verdict or another item."""
    rng = random.Random(0)
    pieces = ["Winner: Response A", "2. x", "[A]", "{", "**", "`", "é", "漢字", "</think>", "\t", "## Final judgement", '"', "\\"]
    for i in range(200):
        made = [" ".join(rng.choices(pieces, k=rng.randint(1, 5))) + f" item {i} {j}" for j in range(rng.randint(2, 5))]
        tags = [rng.choice(list(numbered_list.WEIGHTS)) for _ in made]
        rubric = Rubric(tuple(Criterion(t, numbered_list.WEIGHTS[tag], title=tag) for t, tag in zip(made, tags)))
        text = numbered_list.render(rubric)
        assert len(text.splitlines()) == len(made)
        parsed = parse_rubric(text, CFG)
        if any("</think>" in t for t in made):
            continue  # what stands before a closing tag is reasoning: such a list is another one, or none
        assert parsed.value is not None, (parsed.detail, text)
        plain = numbered_list.render(parsed.value)
        again = parse_rubric(plain, CFG).value
        assert again is not None and numbered_list.render(again) == plain and len(again.criteria) == len(made)


def test_any_prefix_gives_a_list_or_a_failure() -> None:
    """No cut of a list adds an item that the whole one has not."""
    whole = texts(GOOD + "\n3. The response is short. [Principle]")
    for n, truncated in itertools.product(range(len(GOOD) + 42), (False, True)):
        found = texts((GOOD + "\n3. The response is short. [Principle]")[:n], truncated=truncated)
        assert isinstance(found, str) or found == whole[: len(found)]
