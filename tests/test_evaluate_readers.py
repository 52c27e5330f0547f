"""Column maps of the benchmarks' published files, and faults of a file: each a named error with its line."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from coevo_jax.errors import UserError
from coevo_jax.evaluate.benchmarks import BENCHMARKS, benchmark_of
from coevo_jax.evaluate.readers import conversation, read_examples
from coevo_jax.evaluate.records import Example

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "fine"}]
OURS = {"id": "x", "prompt": "q", "response_a": "one", "response_b": "", "label": "tie", "annotators": ["A", "tie", "tie"]}
# benchmark -> a row as published, and what it must become (of the first example)
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pairs": (OURS, {"label": "tie", "answers": ("one", ""), "annotators": ("A", "tie", "tie"), "id": "x"}),
    "llmbar": (
        {"input": "q", "output_1": "one", "output_2": "two", "label": 2},
        {"label": "B", "answers": ("one", "two"), "id": "1"},
    ),
    "pandalm": (
        {"instruction": "do", "input": "this", "response1": "one", "response2": "two",
         "annotator1": 1, "annotator2": 0, "annotator3": 1},
        {"prompt": "do\n\nthis", "label": "A", "annotators": ("A", "tie", "A")},
    ),
    "autoj": (
        {"prompt": "q", "response 1": "one", "response 2": "two", "label": 2, "scenario": "coding"},
        {"label": "tie", "subset": "coding"},
    ),
    "ppe_ifeval": (
        {"question_id": "p", "prompt": "q", "response_1": "a", "response_2": "b", "response_3": "c",
         "scores": [True, False, False], "conflict_pairs": [[0, 1], [2, 0]]},
        {"id": "p/0-1", "label": "A", "answers": ("a", "b")},
    ),
    "helpsteer3": (
        {"context": TURNS[:1], "response1": "one", "response2": "two", "overall_preference": -2, "domain": "general"},
        {"prompt": "hi", "label": "A", "subset": "general"},
    ),
    "rewardbench2": (
        {"id": "tied:3", "prompt": "q", "chosen": ["a", "b"], "rejected": ["c"], "subset": "Ties"},
        {"id": "tied:3", "answers": ("a", "b", "c"), "scores": (1.0, 1.0, 0.0), "subset": "Ties"},
    ),
    "rm_bench": (
        {"prompt": "q", "chosen": ["a", "b", "c"], "rejected": ["d", "e", "f"], "domain": "chat"},
        {"answers": tuple("abcdef"), "scores": (1.0, 1.0, 1.0, 0.0, 0.0, 0.0), "subset": "chat"},
    ),
    "judgebench": (
        {"pair_id": "j", "source": "livebench-math", "question": "q", "response_A": "one", "response_B": "two", "label": "B>A"},
        {"id": "j", "label": "B", "subset": "Math"},
    ),
    "listwise": (
        {"prompt": "q", "responses": [{"text": "a", "score": 7}, {"text": "b", "score": 9}], "category": "generic"},
        {"answers": ("a", "b"), "scores": (7.0, 9.0), "subset": "generic"},
    ),
    "healthbench": ({"prompt": "q", "answers": ["a", "b"], "ranks": [1, 2]}, {"scores": (-1.0, -2.0)}),
    "researchqa": ({"prompt": "q", "answers": ["a", "b"], "scores": [0.5, 0.25]}, {"scores": (0.5, 0.25)}),
    "infobench": (
        {"id": "i", "prompt": "q", "criteria": ["x?", "y?"], "gpt4_response": "a", "gpt4_verdicts": [True, False],
         "subset": "Easy_set"},
        {"criteria": ("x?", "y?"), "met": (True, False), "answers": ("a",)},
    ),
}  # fmt: skip
CHOSEN = ("writing_preference", "ultrafeedback", "rewardbench")


def write(path: pathlib.Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(name: str, path: str, limit: int = 0) -> list[Example]:
    return read_examples(path, benchmark_of(name).source, limit)


def test_every_benchmark_is_covered() -> None:
    assert {*PUBLISHED, *CHOSEN} == set(BENCHMARKS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_fields(name: str, tmp_path: pathlib.Path) -> None:
    row, wanted = PUBLISHED[name]
    example = read(name, write(tmp_path / "rows.jsonl", row))[0]
    assert {key: getattr(example, key) for key in wanted} == wanted


@pytest.mark.parametrize("name", CHOSEN)
def test_chosen_sits_in_either_slot_by_its_id(name: str, tmp_path: pathlib.Path) -> None:
    rows = [{"id": i, "prompt_id": i, "prompt": "q", "chosen": [*TURNS[:1], {"role": "assistant", "content": "good"}],
             "rejected": "bad", "subset": "shp"} for i in range(40)]  # fmt: skip
    found = read(name, write(tmp_path / "rows.jsonl", *rows))
    assert all(e.answers["AB".index(e.label)] == "good" for e in found)
    assert 8 < sum(e.label == "A" for e in found) < 32
    assert found == read(name, str(tmp_path / "rows.jsonl"))
    tied = read(name, write(tmp_path / "tied.jsonl", rows[0] | {"score_chosen": 8, "score_rejected": 8}))
    assert tied[0].label == "tie"


def test_pairs_of_best_of_k_and_its_faults(tmp_path: pathlib.Path) -> None:
    row = PUBLISHED["ppe_ifeval"][0]
    assert [(e.id, e.label) for e in read("ppe_ifeval", write(tmp_path / "a.jsonl", row))] == [("p/0-1", "A"), ("p/2-0", "B")]
    for pairs in ([[1, 2]], [[0, 3]], [[-1, 0]]):
        with pytest.raises(UserError, match="names the pair"):
            read("ppe_ifeval", write(tmp_path / "b.jsonl", row | {"conflict_pairs": pairs}))


def test_our_own_form_serves_every_benchmark_of_pairs(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "ours.jsonl", OURS)
    assert read("llmbar", path) == read("pandalm", path) == read("autoj", path) == read("pairs", path)
    other = write(tmp_path / "other.jsonl", {"uid": 7, "q": "why", "response_a": "x", "response_b": "y", "label": "B"})
    assert read("pairs", f"{other}?prompt=q&id=uid") == [Example("7", "why", ("x", "y"), "B")]


def test_a_conversation_is_one_text() -> None:
    assert conversation(TURNS[:1], "context", "here") == "hi"
    assert (
        conversation([*TURNS, {"role": "user", "content": "more"}], "context", "here")
        == "User: hi\n\nAssistant: fine\n\nUser: more"
    )


@pytest.mark.parametrize(
    ("lines", "what", "where"),
    [
        (['{"prompt": "q", "response_a": "x", "response_b": "y", "label": "A"}', '{"prompt": "q", "resp'], "not JSON", ":2"),
        (['{"prompt": "q", "response_a": "x", "label": "A"}'], "no column 'response_b'", ":1"),
        (["[1]"], "not an object", ":1"),
        (["not json"], "not JSON", ":1"),
        ([""], "no rows", ""),
        (['{"prompt": "q", "response_a": "x", "response_b": "y", "label": "C"}'], "the label is 'C'", ":1"),
        (['{"prompt": "q", "response_a": "x", "response_b": "y", "label": true}'], "the label is True", ":1"),
        (['{"prompt": "q", "response_a": 3, "response_b": "y", "label": "A"}'], "response_a is not a text", ":1"),
        (['{"prompt": " ", "response_a": "x", "response_b": "y", "label": "A"}'], "prompt is empty", ":1"),
        (['{"id": 1, "prompt": "q", "response_a": "x", "response_b": "y", "label": "A"}'] * 2, "comes twice", ":2"),
    ],
)  # fmt: skip
def test_faults_of_a_file_name_the_line(lines: list[str], what: str, where: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=what) as error:
        read("pairs", str(path))
    assert error.value.where.endswith(f"rows.jsonl{where}")


@pytest.mark.parametrize(
    ("name", "change", "what"),
    [
        ("infobench", {"gpt4_verdicts": [True]}, "do not fit the criteria"),
        ("infobench", {"gpt4_verdicts": [1, 0]}, "do not fit the criteria"),
        ("infobench", {"criteria": []}, "not a list of texts"),
        ("rm_bench", {"rejected": ["d"]}, "3 chosen and 1 rejected"),
        ("listwise", {"responses": [{"text": "a", "score": None}]}, r"responses\[1\].score is None"),
        ("listwise", {"responses": "x"}, "not a list of objects"),
        ("researchqa", {"scores": [0.5]}, "do not fit the answers"),
        ("researchqa", {"scores": [0.5, float("nan")]}, "is nan"),
        ("judgebench", {"label": "A=B"}, "the label is"),
        ("helpsteer3", {"overall_preference": "2"}, "overall_preference is"),
    ],
)
def test_faults_of_a_row(name: str, change: dict[str, Any], what: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=what) as error:
        read(name, write(tmp_path / "rows.jsonl", PUBLISHED[name][0] | change))
    assert error.value.where.endswith("rows.jsonl:1")


def test_an_unknown_benchmark_and_a_missing_file() -> None:
    with pytest.raises(UserError) as error:
        benchmark_of("llmbarr")
    assert error.value.nearest == "llmbar"
    with pytest.raises(UserError, match="no such data file"):
        read("pairs", "missing.jsonl")


@pytest.mark.shared
def test_published_sizes_of_the_data_at_hand(shared_data: pathlib.Path) -> None:
    llmbar = read("llmbar", str(shared_data / "bench_preference/llmbar_visible.jsonl"))
    assert (len(llmbar), sum(e.label == "A" for e in llmbar)) == (234, 117)
    pandalm = read("pandalm", str(shared_data / "bench_preference/pandalm_visible.jsonl"))
    assert len(pandalm) == 500 and sum(e.label == "tie" for e in pandalm) == 40 and all(len(e.annotators) == 3 for e in pandalm)
    infobench = read("infobench", str(shared_data / "rubrics/infobench.jsonl"))
    assert (len(infobench), sum(len(e.criteria) for e in infobench)) == (500, 2250)
    lists = read("listwise", str(shared_data / "listwise/vicuna80_5models.jsonl"))
    assert {len(e.answers) for e in lists} == {5} and len(lists) == 80
    levels = read("listwise", str(shared_data / "listwise/prometheus_vicuna80_4models.jsonl"))
    assert all(len(e.rubric["criteria"][0]["scoring_levels"]) == 5 and e.reference for e in levels)
