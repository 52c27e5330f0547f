"""Verifiers: the answer in a text, the ready choice, one's own by dotted path, results out of range."""

import pytest

from coevo_jax.errors import UserError
from coevo_jax.learn.verifiers import check_needs, exact_answer, extract_answer, resolve_verifier


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("First <answer>1</answer>, no: <answer> 42\n</answer>.", "42"),
        ("Adding up.\n\n  42  \n\n", "42"),
        ("<think>maybe <answer>7</answer></think>It is <answer>42</answer>", "42"),
        ("maybe 7\n</think>\n42", "42"),
        ("<think>so <answer>42</answer> and", ""),  # cut while reasoning: no answer yet
        ("<ANSWER>a\nb</ANSWER>", "a\nb"),
        ("<answer>42", "<answer>42"),
        ("", ""),
    ],
)
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


def test_reasoning_gym_scores_by_the_task():
    pytest.importorskip("reasoning_gym")
    from coevo_jax.data.reasoning import generate

    records = list(generate("reasoning_gym:chain_sum?size=4&seed=3&max_terms=2"))
    for name in ("", "reasoning_gym"):
        verifier = resolve_verifier(name)
        for record in records:
            right = f"<think>{'9' * 9}</think>The sum is <answer>{record['reference']}</answer>"
            assert verifier(record, right) == verifier(record, right) == 1.0
            assert verifier(record, "The sum is\n" + record["reference"]) == 1.0
            assert verifier(record, f"<answer>{int(record['reference']) + 1}</answer>") < 1.0
            assert verifier(record, "") < 0.1


def test_ones_own_verifier(tmp_path, monkeypatch):
    source = "def exact(record, text):\n    return text == record['reference']\ndef points(record, text):\n    return 7\n"
    (tmp_path / "my_verifiers.py").write_text(source + "def broken(record, text):\n    return float('nan')\n")
    monkeypatch.chdir(tmp_path)
    record = {"id": "r1", "reference": "a"}
    exact = resolve_verifier("my_verifiers:exact")
    assert exact(record, "a") == 1.0 and exact(record, "b") == 0.0
    for name, shown in (("points", "7.0"), ("broken", "nan")):
        with pytest.raises(ValueError, match=rf"gave {shown} for record 'r1'"):
            resolve_verifier(f"my_verifiers:{name}")(record, "a")
    with pytest.raises(UserError) as error:
        resolve_verifier("my_verifiers:exakt")
    assert (error.value.nearest, error.value.where) == ("exact", "schedule.verifier")


@pytest.mark.parametrize(
    ("reference", "text", "right"),
    [
        ("34", r"<think>\boxed{3}</think> so \boxed{34}.", 1), ("1/2", r"\boxed{\frac{1}{2}}", 1), ("1000", r"\boxed{1,000}", 1),
        ("0.5", "Thus\n<answer>\\frac{1}{2}</answer>", 1), (r"\text{odd}", r"\boxed{Odd}", 1), ("7", r"\boxed{\dfrac{14}{2}}", 1),
        ("7", r"first \boxed{7}, no: \boxed{8}", 0), ("x+1", "So it is\n$x+1$", 1), (r"\frac{a}{b}", r"\boxed{\frac{a}{b}}", 1),
        ("3", r"<think>\boxed{3}", 0), ("3", "", 0), ("-2", "-2.0", 1), ("12", "112", 0),
    ],
)  # fmt: skip
def test_exact_answers(reference, text, right):
    assert exact_answer({"reference": reference}, text) == right


def test_a_record_without_what_the_verifier_reads_is_named():
    verifier = resolve_verifier("coevo_jax.learn.verifiers:exact_answer")
    check_needs(verifier, [{"id": "a", "reference": "1"}], "f")
    with pytest.raises(UserError, match="'b' has no reference"):
        check_needs(verifier, [{"id": "a", "reference": "1"}, {"id": "b", "reference": " "}], "f")
