"""The demo's rubric examples: well-formed, varied, short enough for a 135M model, and apart from every prompt file."""

from __future__ import annotations

import collections
import itertools
import json
import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from coevo_jax.config import RubricConfig
from coevo_jax.rubrics.json_criteria import format_reward, parse_rubric

DATA = pathlib.Path(__file__).resolve().parent.parent / "coevo_jax" / "data"
# The demo gives a rubric 128 tokens; the rest is room for the end-of-turn id and a longer weight.
MAX_TOKENS, MAX_CHARACTERS = 120, 420


def _read(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


ROWS = _read(DATA / "warmup" / "rubrics.jsonl")
CRITERIA = [(row["id"], criterion) for row in ROWS for criterion in row["rubric"]["criteria"]]


def _text(rubric: dict[str, Any]) -> str:
    return json.dumps(rubric, separators=(", ", ": "))


def _words(text: str) -> str:
    """Lower-case words only, so that case, spaces and punctuation make no difference."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def _trigrams(text: str) -> set[tuple[str, ...]]:
    words = _words(text).split()
    return {tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))}


def _strings(value: Any) -> Iterator[str]:
    """Every string inside a JSON value, whatever the file calls its prompt."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def test_size_and_kinds() -> None:
    kinds = collections.Counter(row["kind"] for row in ROWS)
    assert len(ROWS) >= 150
    assert len(kinds) >= 24
    assert max(kinds.values()) <= 0.1 * len(ROWS), kinds.most_common(3)


def test_fields_ids_and_questions_are_unique() -> None:
    for row in ROWS:
        assert set(row) == {"id", "kind", "question", "rubric"}, row["id"]
        assert row["kind"].strip() and row["question"].strip(), row["id"]
    assert [row["id"] for row in ROWS] == [f"r{i:03d}" for i in range(1, len(ROWS) + 1)]
    assert len({_words(row["question"]) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_rubric_is_valid_and_short(row: dict[str, Any]) -> None:
    criteria = row["rubric"]["criteria"]
    assert set(row["rubric"]) == {"criteria"}
    assert 2 <= len(criteria) <= 4
    for criterion in criteria:
        assert list(criterion) == ["criterion", "weight", "scoring_levels"]
        assert 3 <= len(criterion["criterion"].split()) <= 13
        assert math.isfinite(criterion["weight"]) and criterion["weight"] > 0
        levels = criterion["scoring_levels"]
        assert list(levels) == ["1.0", "0.0"]
        assert all(1 <= len(text.split()) <= 6 for text in levels.values()), levels
        assert _words(levels["1.0"]) != _words(levels["0.0"])
    assert abs(math.fsum(c["weight"] for c in criteria) - 1) <= 1e-9
    text = _text(row["rubric"])
    assert len(text) <= MAX_CHARACTERS
    # An escape is one more thing that a small model gets wrong; these examples teach none.
    assert text.isascii() and "\\" not in text
    assert format_reward(parse_rubric(text, RubricConfig())) == 1.0


def test_weights_vary() -> None:
    heaviest = [max(c["weight"] for c in row["rubric"]["criteria"]) for row in ROWS]
    assert len({tuple(c["weight"] for c in row["rubric"]["criteria"]) for row in ROWS}) >= 8
    assert sum(w >= 0.7 for w in heaviest) >= 0.25 * len(ROWS), "deal-breakers"
    assert sum(w <= 0.6 for w in heaviest) >= 0.25 * len(ROWS), "balanced rubrics"


def test_no_two_criteria_share_a_text() -> None:
    texts = collections.Counter(" ".join(c["criterion"].casefold().split()) for _, c in CRITERIA)
    assert [text for text, count in texts.items() if count > 1] == []


def test_no_two_criteria_are_nearly_the_same() -> None:
    grams = [(row, c["criterion"], _trigrams(c["criterion"])) for row, c in CRITERIA]
    near = [(a[:2], b[:2]) for a, b in itertools.combinations(grams, 2) if len(a[2] & b[2]) >= 0.6 * len(a[2] | b[2])]
    assert near == []


@pytest.mark.parametrize("name", ["demo_prompts.jsonl", "heldout_prompts.jsonl"])
def test_no_question_is_a_bundled_prompt(name: str) -> None:
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    prompts = {_words(row["prompt"]) for row in _read(path)}
    assert len(prompts) > 0
    assert [row["id"] for row in ROWS if _words(row["question"]) in prompts] == []


@pytest.mark.shared
def test_no_question_occurs_in_the_real_data(shared_data: pathlib.Path) -> None:
    questions = {_words(row["question"]): row["id"] for row in ROWS}
    longest = max(len(row["question"]) for row in ROWS) + 20
    files = sorted(shared_data.rglob("*.jsonl"))
    assert len(files) > 0
    found = [
        (path.name, questions[_words(text)])
        for path in files
        for line in path.open(encoding="utf-8")
        for text in _strings(json.loads(line))
        if len(text) <= longest and _words(text) in questions
    ]
    assert found == []


@pytest.mark.shared
def test_rubrics_fit_the_token_limit(shared_data: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(shared_data / "tokenizers/smollm2/tokenizer.json"))
    lengths = {row["id"]: len(tokenizer.encode(_text(row["rubric"]), add_special_tokens=False)) for row in ROWS}
    assert {row: n for row, n in lengths.items() if n > MAX_TOKENS} == {}
