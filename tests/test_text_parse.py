"""Parsing of model output: cases B19, B20 and B21 of public reports, each with the wrong result that a real parser gave."""

from __future__ import annotations

import time

import pytest

from coevo_jax.text.parse import (
    MAX_CHARS,
    last_json_object,
    number_in,
    parse_criteria_scores,
    parse_rating,
    parse_score,
    parse_winner,
    parse_yes_no,
    split_reasoning,
    strip_reasoning,
)

FAIL = None


def same(parsed, expected):
    """A failure has no value; a value is exact up to rounding."""
    if expected is None:
        assert parsed.status != "ok" and parsed.value is None and parsed.detail, parsed
    else:
        assert parsed.status == "ok" and parsed.value == pytest.approx(expected), parsed


# ---- B19: the wrong number


@pytest.mark.parametrize(
    "text, expected",
    [
        ("1e-1", 0.1),  # wrong: 1
        ("Score: 8.5/10", 0.85),  # wrong: 0.5
        ("I read 2/3 of it. Final score: 9/10", 0.9),  # wrong: 0.667
        ("On the scale of 1 to 10 this earns 8", FAIL),  # wrong: 0
        ('"score": -0.5', FAIL),
        ('{"score": 8}', FAIL),  # out of range, never 0
        ('{"SCORE": "8/10"}', 0.8),  # wrong: 0
        ('{"SCORE": 0.8}', 0.8),
        ("Score: 0.8", 0.8),
        ("**Score:** 0.8 because it is short", 0.8),
        ("score = 8 out of 10", 0.8),
        ("Score: 0.2\nOn reflection, final score: 0.7.", 0.7),
        ("Score: 0.2 ... Score: unclear", FAIL),  # the last verdict is unreadable: the first doesn't stand in
        ("Score: 85%", FAIL),
        ("Score: 0.5-0.7", FAIL),
        ("Score: 0 to 1", FAIL),
        ("Score: 1/2/3", FAIL),
        ("Score: 0.1.2", FAIL),
        ("Score: 11/10", FAIL),
        ("Score: 1/0", FAIL),
        ("Score: nan", FAIL),
        ("0.4", 0.4),
        ("0.4 or so", FAIL),
        ("", FAIL),
        ("no number here", FAIL),
    ],
)
def test_score_in_prose(text, expected):
    same(parse_score(text), expected)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Reward: 10", 10),  # wrong: 1
        ("On the scale of 1 to 10 this earns 8", FAIL),
        ('{"rating": 15}', FAIL),  # wrong: clipped to 1.0
        ('{"rating": 7}', 7),
        ("Rating: 8/10", 8),
        ("Rating: 4/5", FAIL),  # another scale than the one asked for
        ("Rating: 0", FAIL),
        ("Rating: 1e1", 10),
    ],
)
def test_rating(text, expected):
    same(parse_rating(text), expected)


def test_key_in_other_case_keeps_its_value():
    same(parse_rating('{"score": 8}', key="SCORE"), 8)
    same(parse_score('{"score": 0.3, "SCORE": 0.8}'), FAIL)  # two spellings: no verdict


@pytest.mark.parametrize(
    "value", [True, False, None, float("nan"), float("inf"), 1.5, -0.1, "0.5 points", "nan", "", [0.5], {}, 10**400, "1" * 60]
)
def test_no_number(value):
    same(number_in(value, 0.0, 1.0), FAIL)


def test_bounds_are_inside():
    assert [number_in(v, 0.0, 1.0).value for v in (0, 1, 0.0, 1.0, "1", "5/10")] == [0.0, 1.0, 0.0, 1.0, 1.0, 0.5]


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "true", "null", '"high"', "1e999", "9" * 5000, "[0.5]"])
def test_json_values_that_are_no_score(word):
    same(parse_score(f'{{"score": {word}}}'), FAIL)


# ---- B21: JSON with fences, reasoning and braces


@pytest.mark.parametrize(
    "text, expected",
    [
        ('```json\n{"score":0.7}\n```', 0.7),
        ('{"reasoning":"use {x}","score":0.4}', 0.4),  # wrong: 0
        ('Plan {draft} and so on {"score":0.9}', 0.9),  # first brace to last brace breaks
        ('<think>{"score":0.1}</think>{"score":0.9}', 0.9),
        ('<think>"SCORE": "2"</think>{"REASONING":"x","SCORE":"0.9"}', 0.9),  # wrong: the reasoning's
        ('I had {"score":0.1} in mind</think>{"score":0.9}', 0.9),  # the opening tag was in the prompt
        ('<think>a</think>{"score":0.1}<think>b</think>{"score":0.9}', 0.9),
        ('{"reasoning":"the', FAIL),  # never 0
        ('{"reasoning":"it says Score: 0.9 so', FAIL),  # a number inside an unfinished object
        ('{"reasoning":"it says {\\"score\\": 1.0}', FAIL),
        ('{"score":0.2}\n{"score":0.6}', 0.6),
        ('{"score":0.2} then {"note":"done"}', 0.2),
        ('{"score":0.2}\n{"score":"bad"}', FAIL),
        ('{"score":0.2}\n{"score":', FAIL),  # the last verdict is unfinished
        ('{"score":0.2}\nFinal score: 0.6', 0.6),
        ('{"a": {"score": 0.2}, "score": 0.9,}', FAIL),  # not repaired, and the inner score isn't the answer's
        ('{"a": oops {"score": 0.2}', FAIL),
        ('{"result": {"score": 0.2}}', FAIL),
        ('[{"score": 0.2}, {"score": 0.9}]', FAIL),
        ('{"score": 0.9} [{"score": 0.2}]', FAIL),
        ('I answer as {"score": <number>}. {"score": 0.9}', 0.9),
        ("{'score': 0.9}", FAIL),  # not JSON
        ('{"score": 0.1, "score": 0.9}', FAIL),
        ('{"score": 0.9} // good', 0.9),
        ("\ufeff" + '{"score": 0.9}', 0.9),
        ('{"score": 0.9', FAIL),
        ("{" * 40, FAIL),
    ],
)
def test_json(text, expected):
    same(parse_score(text), expected)


def test_fence_marks_inside_a_string_stay():
    text = '```json\n{"reasoning": "the answer opens with ```python", "score": 0.3}\n```'
    found = last_json_object(text, "score")
    assert found.value == {"reasoning": "the answer opens with ```python", "score": 0.3}


# ---- reasoning


def test_reasoning():
    assert strip_reasoning("<think>a</think>\nb") == "\nb"
    assert strip_reasoning("a</think>b") == "b"
    assert strip_reasoning("<THINK>a</Think>b") == "b"
    assert strip_reasoning("plain") == "plain"
    assert strip_reasoning("<think>a</think>b</think>c") == "c"
    assert strip_reasoning("the <think> tag is a mark") == "the <think> tag is a mark"


@pytest.mark.parametrize("text", ["<think>never closes", "  <think>never", "<think>a</think> <think>again", "<reasoning>x"])
def test_reasoning_that_never_closes(text):
    assert strip_reasoning(text) == "" and split_reasoning(text)[2] is False
    assert parse_score(text + " Score: 0.5").status == "truncated"


def test_reasoning_opened_by_the_prompt():
    assert strip_reasoning("Score: 0.5", opened=True) == ""
    assert parse_score("Score: 0.5", opened=True).status == "truncated"
    same(parse_score("hm</think>Score: 0.5", opened=True), 0.5)


def test_a_cut_text_is_truncated_whatever_it_says():
    for parsed in (parse_score('{"score": 0.5}', truncated=True), parse_yes_no("yes", truncated=True)):
        assert (parsed.status, parsed.value) == ("truncated", None)


# ---- B20: verdicts in words


@pytest.mark.parametrize(
    "text, expected",
    [
        ("INCORRECT", False),  # wrong: yes
        ("The answer is not correct.", False),  # wrong: 1.0
        ("The answer isn't correct.", False),
        ("The answer is not incorrect.", FAIL),
        ("There is no doubt: YES", True),  # wrong: NO
        ("No doubt this is good", FAIL),
        ("yes", True),
        (" No. ", False),
        ("**Yes**", True),
        ("Yes, the answer names Lima.", True),
        ("No, it names Cusco.", False),
        ("Is there an error? No", False),
        ("Yes, at first. But in the end no", FAIL),
        ("Verdict: **no**", False),
        ("Verdict: yes\nOn reflection:\nVerdict: no", False),
        ("Verdict: yes. But no", FAIL),
        ("Yes, maybe. Verdict: unclear", FAIL),
        ('{"answer": true}', True),
        ('{"answer": "No"}', False),
        ('{"answer": "perhaps"}', FAIL),
        ('{"answer": 1}', FAIL),
        ("<think>Yes</think>no", False),
        ("eyes", FAIL),
        ("nothing", FAIL),
        ("", FAIL),
    ],
)
def test_yes_no(text, expected):
    parsed = parse_yes_no(text)
    same(parsed, expected)
    assert parsed.value is expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ('I must output "Winner: Response A" or "Winner: Response B". Winner: Response B', "B"),  # wrong: A
        ("<think>Winner: Response A seems likely</think>Winner: Response B", "B"),  # wrong: A
        ("**Winner:** Response B", "B"),  # wrong: none
        ("Winner: Response A\nI changed my mind.\nWinner: Response B", "B"),
        ("Winner:\n**Response A**", "A"),
        ("The winner is B.", "B"),
        ("winner: a", "A"),
        ("Winner: Response A or Response B", FAIL),
        ("Winner: A clear case", FAIL),
        ("Winner: Response A. Winner: neither", FAIL),
        ("Winner: tie", FAIL),
        ('{"winner": "Response A"}', "A"),
        ('{"winner": 1}', FAIL),
        ("Response A is better", FAIL),
        ("Winner:", FAIL),
    ],
)
def test_winner(text, expected):
    parsed = parse_winner(text)
    assert parsed.value == expected and (parsed.status == "ok") == (expected is not None)


def test_ties_and_other_labels():
    assert parse_winner("Winner: tie", ties=True).value == "tie"
    assert parse_winner("Winner: Response 2", labels=("1", "2")).value == "2"


# ---- scores of criteria


@pytest.mark.parametrize(
    "text, expected",
    [
        ('{"reasoning": "x", "scores": [0, 0.5, 1]}', (0.0, 0.5, 1.0)),
        ('{"scores": {"1": 0, "2": 0.5, "3": 1}}', (0.0, 0.5, 1.0)),
        ('{"scores": {"3": 1, "2": 0.5, "1": 0}}', (0.0, 0.5, 1.0)),
        ('{"scores": [0, 0.5]}', FAIL),
        ('{"scores": [0, 0.5, 1, 1]}', FAIL),
        ('{"scores": [0, true, 1]}', FAIL),
        ('{"scores": [0, NaN, 1]}', FAIL),
        ('{"scores": [0, 2, 1]}', FAIL),
        ('{"scores": {"1": 0, "2": 0.5, "4": 1}}', FAIL),
        ('{"scores": 0.5}', FAIL),
        ('{"scores": [0, 0.5, ', FAIL),
    ],
)
def test_criteria_scores(text, expected):
    parsed = parse_criteria_scores(text, 3)
    assert parsed.value == expected and (parsed.status == "ok") == (expected is not None)


# ---- time


@pytest.mark.parametrize(
    "text",
    [
        "{" * MAX_CHARS,
        '{"a":' * (MAX_CHARS // 5),
        '{"a":[' * (MAX_CHARS // 6),
        '{"' * (MAX_CHARS // 2),
        '{"a":"' + "{" * (MAX_CHARS - 6),
        ('{"a":1}' * (MAX_CHARS // 7)),
        '{"a": oops' + "{}" * (MAX_CHARS // 2 - 10),
        '{"a": oops ' * (MAX_CHARS // 12),
        '{"x": {"score": 0.5}' * (MAX_CHARS // 20),
        "{" + " " * (MAX_CHARS - 1),
        "Score: " * (MAX_CHARS // 7),
        "Winner: " * (MAX_CHARS // 8),
        "yes " * (MAX_CHARS // 4),
        '{"winner": "' + " " * (MAX_CHARS - 20) + '"}',
        "</think>" * (MAX_CHARS // 8),
        "9" * MAX_CHARS,
        "x" * (MAX_CHARS + 1),
        "x" * (20 * MAX_CHARS),
    ],
    ids=lambda t: f"{t[:12]}...{len(t)}",
)
def test_bounded_time(text):
    start = time.perf_counter()
    for read in (parse_score, parse_yes_no, parse_winner, lambda t: parse_criteria_scores(t, 2)):
        assert read(text).status in ("parse_fail", "ok", "truncated")
    assert parse_score(text).status != "ok"
    assert time.perf_counter() - start < 5.0
