"""Data of Rubric-ARM: parts that share no question, a walk that stays with its slot, labelled files, demonstrations."""

from __future__ import annotations

import json
import pathlib

import pytest

from coevo_jax.config import RubricConfig
from coevo_jax.data import PromptSet
from coevo_jax.data.arm import (
    DEMONSTRATIONS,
    OwnStream,
    keep_short,
    named,
    overlap,
    read_demonstrations,
    read_labelled,
    split,
)
from coevo_jax.errors import UserError
from coevo_jax.judges import comparison
from coevo_jax.methods.arm_warmup import judgement_of, rubric_of
from coevo_jax.rubrics import numbered_list

RECORDS = [{"id": str(i), "prompt": f"q {i // 2}", "chosen": "a", "rejected": "b"} for i in range(40)]  # two pairs a question


def questions(part: object) -> set[str]:
    return {" ".join(record["prompt"].split()) for record in part}  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_parts_and_test_share_no_question(seed: int) -> None:
    test, parts = split(RECORDS, seed, 7, 8, 3, "data.pairs")
    sets = [questions(test), *map(questions, parts)]
    assert [len(test), *map(len, parts)] == [8, 8, 8, 8]  # a question's pairs stay together
    assert sum(map(len, sets)) == len(set.union(*sets))
    assert split(RECORDS, seed, 7, 8, 1, "")[0] == test  # whatever the rounds are, the same test pairs
    assert split(RECORDS, seed + 10, 7, 8, 3, "")[0] != test
    spaced = [{**r, "prompt": r["prompt"].replace(" ", "\n " if i % 2 else " ")} for i, r in enumerate(RECORDS)]
    again, _ = split(spaced, seed, 7, 8, 3, "")
    assert [r["id"] for r in again] == [r["id"] for r in test]  # white space makes no other question


def test_too_few_pairs() -> None:
    with pytest.raises(UserError, match="too few for 8 to test, 3 rounds of 16"):
        split(RECORDS, 1, 8, 16, 3, "data.pairs")


def test_a_slot_keeps_its_records_for_good() -> None:
    stream = OwnStream(PromptSet.of(RECORDS[:10]), 1, 4, "s")
    seen = {slot: [stream.next(slot)["id"] for _ in range(9)] for slot in range(4)}
    for slot in range(4):
        mine = {RECORDS[i]["id"] for i in stream.owned(slot)}
        assert set(seen[slot]) == mine
        size = len(mine)
        assert all(set(seen[slot][e * size : (e + 1) * size]) == mine for e in range(9 // size))
    assert sorted(i for slot in range(4) for i in stream.owned(slot)) == list(range(10))
    other = OwnStream(PromptSet.of(RECORDS[:10]), 1, 4, "s")
    other.restore(stream.state())
    assert [other.next(s)["id"] for s in range(4)] == [stream.next(s)["id"] for s in range(4)]


def write(path: pathlib.Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_labelled_files(tmp_path: pathlib.Path) -> None:
    rows = [
        {"id": "x", "prompt": "p", "response_a": "one", "response_b": "two", "label": "B"},
        {"prompt": "p", "response_a": "one", "response_b": "two", "label": "A"},
        {"prompt": "p", "response_a": "one", "response_b": "two", "label": "tie"},
        {"prompt": "p", "response_a": "", "response_b": "two", "label": "B"},
    ]
    found = read_labelled(write(tmp_path / "a.jsonl", rows))
    assert [(r["chosen"], r["rejected"]) for r in found.records] == [("two", "one"), ("one", "two")]
    assert found.records[0]["id"] == "x" and found.counts == {"ties": 1, "empty": 1}
    bad = write(tmp_path / "b.jsonl", [rows[0] | {"label": "first"}])
    with pytest.raises(UserError, match="the label is 'first'") as error:
        read_labelled(bad)
    assert "b.jsonl:1" in error.value.where
    plain = write(tmp_path / "c.jsonl", [{"prompt": "p", "chosen": "one", "rejected": "two"}])
    assert read_labelled(plain).records[0]["chosen"] == "one"
    with pytest.raises(UserError, match="no source or file"):
        read_labelled("demmo")


def test_real_labelled_files(shared_data: pathlib.Path) -> None:
    for name, ties in (("llmbar", False), ("pandalm", True)):
        found = read_labelled(str(shared_data / "bench_preference" / f"{name}_visible.jsonl"))
        assert len(found) > 200 and (found.counts["ties"] > 0) == ties


def test_short_pairs_stay() -> None:
    length = lambda record: int(record["id"])  # noqa: E731
    assert len(keep_short(RECORDS, length, 9, False, "x")) == 10
    with pytest.raises(UserError, match="takes 10 tokens"):
        keep_short(RECORDS, length, 9, True, "x")
    with pytest.raises(UserError, match="the longest takes 39 tokens"):
        keep_short(RECORDS[1:], length, 0, False, "x")


@pytest.mark.parametrize("source", list(DEMONSTRATIONS))
def test_every_demonstration_says_all_that_the_form_asks_for(source: str) -> None:
    found = read_demonstrations(source)
    assert len({r["prompt"] for r in found.records}) >= 64
    cfg = RubricConfig(schema="numbered_rules")
    for record in found.records:
        rubric = rubric_of(record)
        parsed = numbered_list.parse_rubric(numbered_list.render(rubric), cfg)
        assert parsed.value is not None and [c.title for c in parsed.value.criteria] == [c.title for c in rubric.criteria]
        for slot in "AB":
            read = comparison.read(judgement_of(record, rubric, slot), rubric)
            assert read.whole and read.winner == slot and "{" not in read.raw


def test_bundled_pairs_and_demonstrations_share_no_question() -> None:
    assert not overlap(read_labelled("demo").records, read_demonstrations("demo").records)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"rules": []}, "rules is no list"),
        ({"rules": [{"text": "x"}]}, "no column 'tag'"),
        ({"gate": 9}, "gate is 9"),
        ({"gate": True}, "gate is True"),
        ({"check": "yes"}, "check is no object"),
        ({"why": ""}, "why is empty"),
    ],
)
def test_a_faulty_demonstration_is_an_error_with_its_place(tmp_path: pathlib.Path, change: dict, what: str) -> None:
    good = dict(read_demonstrations("tiny").records[0])
    path = write(tmp_path / "d.jsonl", [good, {**good, "id": "other", **change}])
    with pytest.raises(UserError, match=what) as error:
        read_demonstrations(path)
    assert "d.jsonl:2" in error.value.where


def test_slot_names() -> None:
    assert named("{chosen} beats {rejected}", {"chosen": "B", "rejected": "A"}) == "B beats A"
