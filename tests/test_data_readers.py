"""Every malformed row is an error with its file and line; every kind of record is read from JSONL and Parquet alike."""

from __future__ import annotations

import json
import os

import pyarrow
import pyarrow.parquet
import pytest

from coevo_jax.config import DataConfig
from coevo_jax.data import read_chat, read_pairs, read_prompts, read_rankings
from coevo_jax.data.readers import first_user_turn
from coevo_jax.errors import UserError


def jsonl(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def prompts(path, **options):
    return read_prompts(DataConfig(prompts=str(path), **options))


def refused(call, *arguments, **options) -> UserError:
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    return caught.value


GOOD = {"prompt": "Why is the sky blue?"}


@pytest.mark.parametrize(
    "line, what, expected",
    [
        ('{"prompt": "a"', "not JSON: Expecting ',' delimiter at column 15", "JSON object"),
        ("[1]", "a list, not an object", "JSON object"),
        ('{"promt": "a"}', "no column 'prompt'", "it has promt"),
        ('{"prompt": " "}', "prompt is empty", "not empty"),
        ('{"prompt": 3}', "prompt is a number", "a text"),
        ('{"prompt": null}', "prompt is null", "a text"),
        ('{"prompt": ["a"]}', "prompt is a list", "a text"),
        ('{"prompt": "\\ud800"}', "surrogate", "valid Unicode"),
        ('{"prompt": "a", "id": 1.5}', "id is a number", "whole number"),
        ('{"prompt": "a", "reference": {}}', "reference is an object", "a text"),
        ("[" * 100_000, "not JSON", "JSON object"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, what, expected):
    path = jsonl(tmp_path / "a.jsonl", [GOOD, "", line])
    error = refused(prompts, path)
    assert what in error.what and error.where == f"{path}:3" and expected in error.expected


def test_a_missing_column_names_the_nearest(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"question": "a"}])
    assert refused(prompts, path, prompt_column="qestion").nearest == "question"
    assert prompts(path, prompt_column="question").records[0]["prompt"] == "a"


def test_bytes_that_are_not_utf8(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    error = refused(prompts, path)
    assert "0xff at byte 13" in error.what and error.where == f"{path}:2"


def test_a_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n')
    assert prompts(path).records[0]["prompt"] == "a"


def test_files_that_are_none(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("\n \n")
    assert "no rows" in refused(prompts, tmp_path / "prompts.jsonl").what
    missing = refused(prompts, tmp_path / "promts.jsonl")
    assert missing.nearest.endswith("prompts.jsonl") and missing.where.startswith("data.prompts=")
    assert "folder" in refused(prompts, tmp_path).what
    (tmp_path / "a.csv").write_text("prompt\n")
    assert ".parquet" in refused(prompts, tmp_path / "a.csv").expected
    (tmp_path / "a.parquet").write_text("not parquet at all")
    assert "not a readable Parquet file" in refused(prompts, tmp_path / "a.parquet").what


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("{}")
    path.chmod(0)
    assert "could not read" in refused(prompts, path).what


def test_a_parquet_row_is_named_by_number(tmp_path):
    path = parquet(tmp_path / "a.parquet", [GOOD, {"prompt": ""}])
    assert refused(prompts, path).where == f"{path}, row 2"
    damaged = tmp_path / "b.parquet"
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[4:40] = b"x" * 36
    damaged.write_bytes(data)
    assert "Parquet" in refused(prompts, damaged).what


def test_parquet_and_jsonl_give_the_same_records(tmp_path):
    rows = [{"id": "x", "prompt": "a", "reference": "1", "level": 3}, {"id": "y", "prompt": "b", "reference": "2", "level": 4}]
    one, two = prompts(jsonl(tmp_path / "a.jsonl", rows)), prompts(parquet(tmp_path / "a.parquet", rows))
    assert one.records == two.records and one.hash == two.hash
    assert one.records[0] == {"id": "x", "prompt": "a", "reference": "1", "level": 3}


def test_ids_are_the_files_own_or_stay_when_rows_are_inserted(tmp_path):
    one = prompts(jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}]))
    two = prompts(jsonl(tmp_path / "b.jsonl", [{"prompt": "c"}, {"prompt": "a"}, {"prompt": "b"}]))
    ids = [record["id"] for record in one.records]
    assert len(set(ids)) == 3 and ids[:2] == [record["id"] for record in two.records[1:]]
    error = refused(prompts, jsonl(tmp_path / "c.jsonl", [{"prompt": "a", "id": 1}, {"prompt": "b", "id": 1}]))
    assert "c.jsonl:1" in error.what and error.where.endswith("c.jsonl:2")


def test_pairs(tmp_path):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "good"}]
    rows = [{"prompt": "q", "chosen": turns, "rejected": "bad"}]
    assert read_pairs(jsonl(tmp_path / "a.jsonl", rows)).records[0].items() >= {"chosen": "good", "rejected": "bad"}.items()
    columns = {"prompt": "q", "chosen": "better", "rejected": "worse", "id": "key"}
    mapped = read_pairs(jsonl(tmp_path / "b.jsonl", [{"q": "x", "better": "1", "worse": "2", "key": 7}]), columns)
    assert mapped.records == ({"id": "7", "prompt": "x", "chosen": "1", "rejected": "2"},)
    for row, what in [
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "the same text"),
        ({"prompt": "q", "chosen": "a"}, "no column 'rejected'"),
        ({"prompt": "q", "chosen": turns[:1], "rejected": "b"}, "ends with the role user"),
        ({"prompt": "q", "chosen": [], "rejected": "b"}, "an empty list"),
    ]:
        assert what in refused(read_pairs, jsonl(tmp_path / "c.jsonl", [row])).what


def test_rankings(tmp_path):
    rows = [
        {"prompt": "q", "answers": ["a", "b", "c"], "scores": [1, 3, 3]},
        {"prompt": "r", "answers": ["a", "b"], "ranks": [2, 1]},
    ]
    first, second = read_rankings(jsonl(tmp_path / "a.jsonl", rows)).records
    assert first["scores"] == [1.0, 3.0, 3.0] and second["scores"] == [-2.0, -1.0]
    for row, what in [
        ({"prompt": "q", "answers": ["a"], "scores": [1]}, "a list of 1"),
        ({"prompt": "q", "answers": ["a", "b"], "scores": [1]}, "does not fit"),
        ({"prompt": "q", "answers": ["a", "b"], "scores": [1, True]}, "does not fit"),
        ({"prompt": "q", "answers": ["a", "b"], "scores": [1, float("nan")]}, "does not fit"),
        ({"prompt": "q", "answers": ["a", ""], "scores": [1, 2]}, "answers[2] is empty"),
        ({"prompt": "q", "answers": ["a", "b"]}, "no column 'scores'"),
    ]:
        assert what in refused(read_rankings, jsonl(tmp_path / "b.jsonl", [row])).what


def test_chat(tmp_path):
    turns = [{"role": "system", "content": ""}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    share = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    rubric = {"question": "q", "rubric": {"criteria": []}}
    path = jsonl(tmp_path / "a.jsonl", [{"messages": turns}, {"conversations": share}, rubric])
    records = read_chat(path).records
    assert records[0]["messages"] == turns and records[1]["messages"] == turns[1:]
    assert {key: records[2][key] for key in rubric} == rubric
    assert len({record["id"] for record in records}) == 3
    for messages, what in [
        (turns[:2], "no assistant turn"),
        (turns[2:], "begins with the assistant"),
        ([*turns, turns[0]], "[4] has the role 'system'"),
        ([{"role": "asistant", "content": "a"}], "has the role 'asistant'"),
        ([turns[1], {"role": "assistant", "content": ""}], "[2] is empty"),
        ([turns[1], {"role": "assistant"}], "[2] is null"),
        (["q"], "[1] is a text"),
        ("q", "messages is a text"),
    ]:
        assert what in refused(read_chat, jsonl(tmp_path / "b.jsonl", [{"messages": messages}])).what
    assert "no column 'messages'" in refused(read_chat, jsonl(tmp_path / "c.jsonl", [{"text": "a"}])).what


def test_first_user_turn():
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    assert first_user_turn(turns, "messages", "here") == "one"
    assert first_user_turn([{"from": "human", "value": "one"}], "c", "here") == "one"
    assert first_user_turn([{"role": "assistant", "content": "a"}], "c", "here") == ""
    assert first_user_turn([], "c", "here") == ""
    assert "an object" in refused(first_user_turn, {}, "c", "here").what
