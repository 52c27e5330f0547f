"""The bundled labelled rankings: what the ranking says holds for every row, and the split is by prompt."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys

import pytest

from coevo_jax.data import read_chat, read_rankings
from coevo_jax.data.prompts import BUNDLED
from coevo_jax.data.rankings import as_pairs, best_first, is_test, split, why_unusable

REPO = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("make_labelled", REPO / "benchmarks" / "make_labelled.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def records():
    return read_rankings("labelled").records


def test_the_files_are_those_that_the_script_makes(maker, tmp_path):
    for path, rows in (
        (BUNDLED["rankings"]["labelled"], maker.rankings(maker.SEED)),
        (BUNDLED["chat"]["dynamic"], maker.warmup(maker.SEED)),
    ):
        maker.write_rows(tmp_path / "made.jsonl", rows)
        assert path.read_bytes() == (tmp_path / "made.jsonl").read_bytes()


def test_every_ranking_is_content_before_form(maker, records):
    """The best keeps content and form, the second breaks the form, the third says something false, the last is off the point."""
    assert len(records) >= 60 and len({r["prompt"] for r in records}) == len(records)
    topics = {maker.prompt_of(t, s): (t, s) for t in maker.TOPICS for s in maker.SHAPES}
    for record in records:
        topic, shape = topics[record["prompt"]]
        ranked = [record["answers"][i] for i in best_first(record["scores"])]
        assert len(set(ranked)) == 4 and sorted(record["scores"]) == [1, 2, 3, 4]
        keeps = [form_kept(text, topic, shape) for text in ranked]
        false = [topic.false in text or topic.wrong in text for text in ranked]
        about = [any(f in text for f in (*topic.facts, topic.answer, topic.wrong)) for text in ranked]
        assert (keeps[0], keeps[1], keeps[2]) == (True, False, True), record
        assert false == [False, False, True, False] and about == [True, True, True, False], record


def form_kept(text, topic, shape):
    if shape == "list":
        lines = text.split("\n")
        return len(lines) == 3 and all(line.startswith("- ") for line in lines)
    sentences = text.count(".") + text.count("!") + text.count("?")
    return (sentences == 2 and topic.word in text) if shape == "sentences" else (sentences == 1 and len(text.split()) <= 10)


def test_length_does_not_give_the_order_away(records):
    longer = [len(p["chosen"]) > len(p["rejected"]) for r in records for p in as_pairs(r)]
    assert len(longer) == 6 * len(records) and 0.3 < sum(longer) / len(longer) < 0.7


def test_warmup_prompts_are_not_in_the_labelled_set(records):
    rows = read_chat("dynamic").records
    assert not {r["question"] for r in rows} & {r["prompt"] for r in records}
    assert all(len(r["candidates"]) == 4 for r in rows)


def test_split_is_by_prompt(records):
    train, test = split(records, 0.3)
    assert len(train) + len(test) == len(records) and not {r["prompt"] for r in train} & {r["prompt"] for r in test}
    assert 0.15 < len(test) / len(records) < 0.45
    assert is_test("What  is it?", 0.5) == is_test("what is it?", 0.5)
    assert split(records, 0.0)[1] == [] and split(records, 1.0)[0] == []


@pytest.mark.parametrize(
    "change, why",
    [
        ({}, ""),
        ({"answers": ["a" * 60]}, "few_answers"),
        ({"scores": [1.0, 1.0]}, "all_tied"),
        ({"prompt": "short"}, "short"),
        ({"answers": ["b", "I'm sorry, but " + "x" * 60]}, "refusal"),
        ({"answers": ["b", "Hello there " + "x" * 60]}, "greeting"),
        ({"answers": ["b", "word " * 40]}, "degenerate"),
    ],
)
def test_which_rankings_serve(change, why):
    record = {"prompt": "p" * 60, "answers": ["b", "c" * 60], "scores": [1.0, 2.0]} | change
    assert why_unusable(record, 2, 50) == why


def test_responses_with_scores_are_rankings(tmp_path):
    row = {"prompt": "q", "responses": [{"model": "m", "text": "a", "score": 3}, {"text": "b", "score": 5.5}]}
    (tmp_path / "r.jsonl").write_text(json.dumps(row) + "\n")
    (record,) = read_rankings(str(tmp_path / "r.jsonl")).records
    assert (record["answers"], record["scores"]) == (["a", "b"], [3.0, 5.5])


def test_shared_listwise_is_readable(shared_data):
    for path in sorted((shared_data / "listwise").glob("*.jsonl")):
        train, test = split(read_rankings(str(path)).records, 0.5)
        assert len(train) > 20 and len(test) > 20
