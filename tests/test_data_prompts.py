"""Sources, mixtures, the token limit, the held-out part and procedural tasks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from coevo_jax.config import DataConfig, RubricConfig
from coevo_jax.data import PromptSet, read_chat, read_pairs, read_prompts, read_rankings
from coevo_jax.data.prompts import BUNDLED, parse_mixture
from coevo_jax.errors import UserError
from coevo_jax.judges.world import read_question
from coevo_jax.methods.fixed_rubrics import fixed_rubric


def jsonl(path, texts):
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return str(path)


def refused(**options) -> UserError:
    limit = options.pop("count_tokens", None)
    with pytest.raises(UserError) as caught:
        read_prompts(DataConfig(**options), limit)
    return caught.value


def texts(records):
    return [record["prompt"] for record in records]


def test_the_bundled_questions():
    demo, heldout = read_prompts(DataConfig(prompts="demo")), read_prompts(DataConfig(prompts="demo_heldout"))
    assert len(demo) >= 160 and len(heldout) == 64
    for prompts in (demo, heldout):
        assert len({record["kind"] for record in prompts.records}) >= 16
        assert max(map(len, texts(prompts.records))) < 160
    every = [text.casefold() for text in texts(demo.records) + texts(heldout.records)]
    assert len(set(every)) == len(every), "the two sets share nothing and repeat nothing"


@pytest.mark.shared
def test_the_bundled_questions_are_our_own(shared_data):
    lines = [line for path in (shared_data / "prompts").glob("*.jsonl") for line in path.open()]
    known = {json.loads(line)["prompt"].casefold().strip() for line in lines}
    for source in ("demo", "demo_heldout"):
        assert not known & {text.casefold().strip() for text in texts(read_prompts(DataConfig(prompts=source)).records)}


def test_columns_are_mapped_by_file(tmp_path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text(json.dumps({"question": "a", "gold": 4, "key": "k"}) + "\n")
    two.write_text(json.dumps({"prompt": "b", "reference": "5"}) + "\n")
    mixed = read_prompts(DataConfig(prompts=f"{one}?prompt=question&reference=gold&id=key:0.25,{two}:0.75"))
    assert mixed.records[0] == {"id": "0/k", "prompt": "a", "reference": "4"} and mixed.records[1]["reference"] == "5"
    assert [share for *_, share in mixed.parts] == [0.25, 0.75]
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"turns": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n")
    assert read_chat(f"{chat}?messages=turns").records[0]["messages"][1]["content"] == "b"
    odd = tmp_path / "what?.jsonl"
    odd.write_text(json.dumps({"prompt": "c"}) + "\n")
    assert texts(read_prompts(DataConfig(prompts=str(odd))).records) == ["c"]


@pytest.mark.parametrize(
    "query, close, where",
    [("promt=question", "prompt", "data.prompts="), ("prompt", "prompt", "data.prompts="), ("reference=gould", "gold", ":1")],
)
def test_a_wrong_map_of_columns_is_refused(query, close, where, tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"prompt": "a", "gold": 4}) + "\n")
    error = refused(prompts=f"{path}?{query}")
    assert error.nearest == close and where in error.where and str(path) in error.where


def test_a_misspelt_source_names_the_nearest():
    error = refused(prompts="dmo")
    assert error.nearest == "demo" and error.where == "data.prompts=dmo"


@pytest.mark.parametrize("kind, source", [(kind, source) for kind in BUNDLED for source in BUNDLED[kind]])
def test_every_bundled_file_is_there_and_valid(kind, source):
    readers = {"chat": read_chat, "pairs": read_pairs, "rankings": read_rankings}
    read = readers.get(kind, lambda name: read_prompts(DataConfig(prompts=name)))
    assert len(read(source)) >= 16


def test_bundled_chat_goes_by_name(tmp_path, monkeypatch):
    path = tmp_path / "demo.jsonl"
    path.write_text('{"question": "q", "rubric": {"criteria": [1]}}\n')
    monkeypatch.setitem(BUNDLED, "chat", {"demo": path})
    assert read_chat("demo", key="warmup.data").records[0]["question"] == "q"
    with pytest.raises(UserError) as caught:
        read_chat("demos", key="warmup.data")
    assert caught.value.nearest == "demo" and caught.value.where == "warmup.data=demos"


def test_over_the_limit_is_filtered_and_counted(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ["a b c", "a", "a b", "a b c d"])
    prompts = read_prompts(DataConfig(prompts=path, max_prompt_tokens=2), lambda text: len(text.split()))
    assert texts(prompts.records) == ["a", "a b"] and prompts.filtered == 2 and prompts.counts["read"] == 4
    assert read_prompts(DataConfig(prompts=path, max_prompt_tokens=2)).filtered == 0, "without a tokenizer nothing is dropped"


def test_over_the_limit_is_refused_with_the_first_offender(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ["a", "a b c", "a b c d"])
    options = {"prompts": path, "max_prompt_tokens": 2, "count_tokens": lambda text: len(text.split())}
    error = refused(over_limit="refuse", **options)
    assert error.where == f"{path}:2" and "3 tokens" in error.what and "at least 3" in error.expected
    assert "all 3 prompts" in refused(**(options | {"max_prompt_tokens": 0})).what


def test_held_out_records_leave_the_set_by_the_seeds_order(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [f"q{i}" for i in range(20)])
    cfg = DataConfig(prompts=path, heldout=5)
    one, again, other = read_prompts(cfg, seed=1), read_prompts(cfg, seed=1), read_prompts(cfg, seed=2)
    assert len(one) == 15 and len(one.heldout) == 5
    assert sorted(texts(one.records) + texts(one.heldout)) == sorted(f"q{i}" for i in range(20))
    fewer = read_prompts(DataConfig(prompts=path, heldout=3), seed=1)
    assert fewer.heldout == one.heldout[2:], "the last ones of one order"
    assert one.heldout == again.heldout and one.hash == again.hash and set(texts(other.heldout)) != set(texts(one.heldout))


def test_a_held_out_question_is_not_trained_on_under_another_id(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [f"q{i}" for i in range(10)] + [f"q{i} " for i in range(10)])
    prompts = read_prompts(DataConfig(prompts=path, heldout=4), seed=3)
    assert not {text.strip() for text in texts(prompts.records)} & {text.strip() for text in texts(prompts.heldout)}
    assert prompts.counts["heldout_duplicates"] == 20 - 4 - len(prompts) > 0


def test_holding_out_everything_is_refused(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ["a", "b"])
    assert "at most 1" in refused(prompts=path, heldout=2).expected


def test_the_hash_follows_the_content_and_its_order(tmp_path):
    def hashed(lines):
        return read_prompts(DataConfig(prompts=jsonl(tmp_path / "a.jsonl", lines))).hash

    assert hashed(["a", "b"]) == hashed(["a", "b"])
    assert len({hashed(["a", "b"]), hashed(["b", "a"]), hashed(["a", "c"]), hashed(["a"])}) == 4


def test_mixtures_are_parsed():
    assert parse_mixture("a.jsonl:0.7,b.jsonl:0.3") == [("a.jsonl", 0.7), ("b.jsonl", 0.3)]
    assert parse_mixture("reasoning_gym:chain_sum") == [("reasoning_gym:chain_sum", None)]
    assert parse_mixture("demo:1, reasoning_gym:chain_sum?size=5:2") == [("demo", 1.0), ("reasoning_gym:chain_sum?size=5", 2.0)]
    for source in ("a.jsonl:0.5,b.jsonl", "a.jsonl:0,b.jsonl:1", "a.jsonl:nan,b.jsonl:1", "a.jsonl:-1,b:1", "a.jsonl,"):
        with pytest.raises(UserError) as caught:
            parse_mixture(source, "data.prompts")
        assert caught.value.where == f"data.prompts={source}"


def test_a_mixture_keeps_ids_apart_and_normalises_shares(tmp_path):
    one, two = jsonl(tmp_path / "a.jsonl", ["x", "y"]), jsonl(tmp_path / "b.jsonl", ["x"])
    prompts = read_prompts(DataConfig(prompts=f"{one}:3,{two}:1"))
    assert prompts.parts == ((0, 2, 0.75), (2, 1, 0.25))
    assert len({record["id"] for record in prompts.records}) == 3
    assert read_prompts(DataConfig(prompts=f"{one}:1,{two}:1")).hash != prompts.hash, "other weights are another walk"
    assert read_prompts(DataConfig(prompts=f"{one},{two}")).parts[0][2] == pytest.approx(2 / 3)


def test_an_empty_set_is_refused():
    with pytest.raises(UserError, match="no records"):
        PromptSet.of([], "nothing")


def test_the_data_room_imports_no_jax():
    code = "import sys, coevo_jax.data; sys.exit('jax' in sys.modules or 'pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------------------------------------- procedural tasks


SOURCE = "reasoning_gym:chain_sum?size=5&seed=3&max_terms=2&max_digits=1"


def test_a_procedural_task_is_the_same_again_and_scores_answers():
    pytest.importorskip("reasoning_gym")
    from coevo_jax.data.reasoning import _dataset, score_answer

    first = read_prompts(DataConfig(prompts=SOURCE))
    _dataset.cache_clear()
    assert read_prompts(DataConfig(prompts=SOURCE)).hash == first.hash
    assert len(first) == 5 and first.records[0]["id"] == "chain_sum-3-0"
    other = read_prompts(DataConfig(prompts=SOURCE.replace("seed=3", "seed=4")))
    assert set(texts(other.records)) != set(texts(first.records))
    for record in first.records:
        assert score_answer(record, record["reference"]) == 1.0
        assert score_answer(record, str(int(record["reference"]) + 1)) < 1.0


@pytest.mark.parametrize(
    "source, what, close",
    [
        ("reasoning_gym:chain_summ", "no task", "reasoning_gym:chain_sum"),
        ("reasoning_gym:chain_sum?max_term=2", "no option", "max_terms"),
        ("reasoning_gym:chain_sum?size=0", "size=0", ""),
        ("reasoning_gym:chain_sum?size", "no option", ""),
        ("reasoning_gym:chain_sum?min_terms=9&max_terms=2", "refuses its options", ""),
    ],
)
def test_a_procedural_task_refuses(source, what, close):
    pytest.importorskip("reasoning_gym")
    error = refused(prompts=source)
    assert what in error.what and error.nearest == close and error.where == f"data.prompts={source}"


def test_a_procedural_task_gives_no_pairs():
    with pytest.raises(UserError, match="gives prompts, not pairs"):
        read_pairs(SOURCE)


def test_the_bundled_questions_with_rubrics_ask_for_what_they_say() -> None:
    """Each requirement of a question is a criterion of its rubric, of equal weights (rubric.source=data under scale=smoke)."""
    found = read_prompts(DataConfig(prompts="tiny_rubrics"))
    for record in found.records:
        rubric = fixed_rubric(RubricConfig(source="data"), record).value
        assert rubric is not None
        assert [c.text for c in rubric.criteria] == [p.criterion for p in read_question(record["prompt"])]
        assert len({c.weight for c in rubric.criteria}) == 1
