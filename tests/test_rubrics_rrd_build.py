"""RRD rubrics of a file: built once, kept, weighed three ways, by an endpoint or a model of ours; the data that run.py reads."""

from __future__ import annotations

import json

import numpy as np
import pytest
import text_support as tt
from remote_support import completion, serving
from test_judges_protocols import FakeEngine
from test_rubrics_rrd import SAMPLES, World

from coevo_jax.config import RubricConfig, Sampling
from coevo_jax.errors import UserError
from coevo_jax.methods.fixed_rubrics import fixed_rubric
from coevo_jax.rubrics.__main__ import main
from coevo_jax.rubrics.cache import RubricFolder
from coevo_jax.rubrics.rrd import Ask, whitened_uniform
from coevo_jax.rubrics.rrd_build import Builder, engine_asker
from coevo_jax.text.chat import ChatTokenizer
from coevo_jax.text.parse import parse_yes_no


def record(question="Q"):
    return {"prompt": question, "samples": SAMPLES, "strong": "strong", "weak": "weak"}


def world(**more):
    return World(["a", "b", "c"], {"a": 2, "b": 1, "c": 0}, **more)


def test_a_rubric_is_built_once_and_weighed(tmp_path):
    one = world()
    builder = Builder(one.ask, RubricFolder(tmp_path), "m")
    first, twin = builder.build([record(), record()])
    calls = len(one.calls)
    assert first == twin and [c["criterion"] for c in first["criteria"]] == ["a", "b"] and one.calls[0] == ["rrd_propose"]
    votes = np.asarray([[i < 2, i < 1] for i in range(8)], float)
    assert [c["weight"] for c in first["criteria"]] == pytest.approx(whitened_uniform(votes))
    later = world()
    assert Builder(later.ask, RubricFolder(tmp_path), "m").build([record()]) == [first] and later.calls == []
    equal = Builder(later.ask, RubricFolder(tmp_path), "m", weights="uniform").build([record()])
    assert [c["weight"] for c in equal[0]["criteria"]] == [0.5, 0.5] and later.calls == []
    Builder(later.ask, RubricFolder(tmp_path), "other").build([record()])
    assert len(later.calls) == calls  # another writer, another rubric


def test_weights_by_the_model_are_kept_too(tmp_path):
    one = world()
    plain = one.text
    one.text = lambda ask: '{"weights": [3, 1]}' if ask.template == "rrd_weights" else plain(ask)
    builder = Builder(one.ask, RubricFolder(tmp_path), "m", weights="model")
    (found,) = builder.build([record()])
    calls = len(one.calls)
    assert [c["weight"] for c in found["criteria"]] == [0.75, 0.25]
    assert builder.build([record()]) == [found] and len(one.calls) == calls
    one.text = lambda ask: "heavy" if ask.template == "rrd_weights" else plain(ask)
    (none,) = Builder(one.ask, RubricFolder(tmp_path / "b"), "m", weights="model").build([record()])
    assert none is None  # no weights are not equal ones


def test_weights_by_a_preferred_and_a_rejected_answer(tmp_path):
    """An item that both references satisfy tells nothing of the pair."""
    one = world(weak=["a"])
    builder = Builder(one.ask, RubricFolder(tmp_path), "m", weights="preference")
    (found,) = builder.build([record()])
    assert [(c["criterion"], c["weight"]) for c in found["criteria"]] == [("b", 1.0)]
    assert builder.build([record()]) == [found]  # from the folder
    none = Builder(world(weak=["a", "b"]).ask, RubricFolder(tmp_path / "b"), "m", weights="preference")
    assert none.build([record()]) == [None] and none.counts["none"] == 1


def test_what_failed_is_tried_again_by_a_further_run(tmp_path):
    broken = world(unreadable=["b"])
    (found,) = Builder(broken.ask, RubricFolder(tmp_path), "m").build([record()])
    assert [c["criterion"] for c in found["criteria"]] == ["a"]
    (whole,) = Builder(world().ask, RubricFolder(tmp_path), "m").build([record()])
    assert len(whole["criteria"]) == 2
    with pytest.raises(UserError, match="unknown weights") as caught:
        Builder(broken.ask, RubricFolder(tmp_path), "m", weights="whitend")
    assert caught.value.nearest == "whitened"


def test_a_model_of_ours_is_asked_with_noise_of_the_prompt(tmp_path):
    tokenizer = ChatTokenizer.load(tt.make_tokenizer(tmp_path, tt.CHATML))
    tries = []

    def say(prompt, request):
        tries.append((request.update, request.request))
        return ("hm" if request.update == 0 and "Criterion: b" in prompt else "yes"), "stop"

    engine = FakeEngine(tokenizer, say=say)
    ask = engine_asker(engine, "weights", tokenizer, Sampling())
    read = lambda text, truncated, opened: parse_yes_no(text, truncated=truncated, opened=opened)  # noqa: E731
    asks = [Ask("criterion_yes_no", {"question": "Q", "answer": a, "criterion": c}, read) for a, c in ("xa", "xb", "xa", "yb")]
    found = ask([*asks, Ask("criterion_yes_no", {"question": "Q", "answer": "long " * 1000, "criterion": "a"}, read)])
    assert [f.value for f in found] == [True, True, True, True, None] and found[4].status == "refused"
    assert len(set(tries)) == len(tries) == 5 and {r for u, r in tries if u == 1} < {r for u, r in tries if u == 0}


def test_the_program_writes_what_run_py_reads(tmp_path, capsys):
    source, output = tmp_path / "in.jsonl", tmp_path / "out" / "rrd.jsonl"
    source.write_text(json.dumps(record() | {"id": "one", "more": 1}) + "\n" + json.dumps(record("Unwritable")) + "\n")
    one = World(["a", "b"], {"a": 2, "b": 1})

    def script(h, body, number):
        text = body["messages"][-1]["content"]
        if "<answers" in text:
            h.send(completion("no items" if "Unwritable" in text else json.dumps({"items": ["a", "b"]})))
        elif "Criterion:" in text:
            item = text.split("Criterion: ")[1].split("\n")[0]
            answer = text.split("<answer ")[1].split("\n")[1]
            h.send(completion("yes" if one.satisfies(item, answer) else "no"))
        else:
            h.send(completion("no"))

    with serving(script) as server:
        where = ["--input", str(source), "--output", str(output), "--cache", str(tmp_path / "cache")]
        assert main([*where, "--source", "api:m", "--base_url", server.url, "--weights", "uniform"]) == 0
        asked = len(server.bodies)
        assert main([*where, "--source", "api:m", "--base_url", server.url]) == 0
        assert len(server.bodies) == asked + 3  # of the one that never read, its three tries
    (line,) = output.read_text().splitlines()
    row = json.loads(line)
    assert (row["id"], row["more"], row["prompt"]) == ("one", 1, "Q") and "1 of 2 questions" in capsys.readouterr().out
    found = fixed_rubric(RubricConfig(source="data"), row)
    assert found.ok and [c.text for c in found.value.criteria] == ["a", "b"]


def test_bad_input_ends_with_code_2(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(record() | {"samples": ["one"]}) + "\n")
    assert main(["--input", str(source), "--output", "x.jsonl", "--source", "api:m", "--cache", str(tmp_path / "c")]) == 2
    assert "in.jsonl:1" in capsys.readouterr().err
    source.write_text(json.dumps(record()) + "\n")
    assert main(["--input", str(source), "--output", "x.jsonl", "--source", "api:m", "--cache", str(tmp_path / "c")]) == 2
    assert "--base_url" in capsys.readouterr().err
