"""lm_eval's model class over our engine: the numbers of the engine, cutting, stop texts, rolling windows, one task."""

from __future__ import annotations

import json
import pathlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed (extra 'harness')")

from coevo_jax.config import SamplerConfig, Sampling
from coevo_jax.errors import UserError
from coevo_jax.evaluate.harness import EngineLM, _fitting, _until, load, sampling_of
from coevo_jax.sampler import Request

CFG = SamplerConfig(slots=8, max_prompt=48, max_new=16, steps_per_dispatch=8, prefill_tokens=128)


@pytest.fixture(scope="module")
def model() -> EngineLM:
    return load("tiny", CFG)


def chat(model: EngineLM, text: str) -> str:
    return model.apply_chat_template([{"role": "user", "content": text}])


def asked(*args: Any) -> Any:
    return SimpleNamespace(args=args)


def test_log_likelihoods_are_those_of_the_model(model: EngineLM) -> None:
    context, tail = chat(model, "write 3 words with ant"), " bee cat"
    ((value, greedy),) = model.loglikelihood([asked(context, tail)], disable_tqdm=True)
    head, rest = model._encode_pair(context, tail)
    by_hand, best = 0.0, True
    every = [[i] for i in range(model.engine.spec.vocab_size)]
    for i, token in enumerate(rest):
        probs = model.engine.next_token_probs(model.params, [[*head, *rest[:i]]], every)[0]
        by_hand += float(np.log(probs[token]))
        best &= int(np.argmax(probs)) == token
    assert value == pytest.approx(by_hand, abs=1e-3) and greedy == best
    answer = model.generate_until([asked(context, {"max_gen_toks": 4})])[0]
    ids = model.engine.generate(
        model.params, [Request(np.asarray(head, np.int32), 1, "x", 0, 0, Sampling(temperature=0.0, max_new_tokens=4))]
    )[0][0].tokens.tolist()  # fmt: skip
    assert answer == model.text.decode(ids)
    assert model._score([(head, ids)])[0][1] is True  # what greedy decoding wrote is greedy


def test_generation_stops_at_texts(model: EngineLM) -> None:
    context = chat(model, "write 4 words")
    whole = model.generate_until([asked(context, {"max_gen_toks": 8})])[0]
    word = whole.split()[1]
    cut = model.generate_until([asked(context, {"until": ["never", word], "max_gen_toks": 8})])[0]
    assert cut == whole.split(word)[0] and _until("a\nb", "\n") == "a" and _until("ab", None) == "ab"


def test_sampling_arguments() -> None:
    assert sampling_of({}, 16) == Sampling(0.0, 1.0, 0, 16)
    assert sampling_of({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "max_new_tokens": 4}, 16) == Sampling(
        0.6, 0.95, 0, 4
    )
    assert sampling_of({"temperature": 0.6, "do_sample": False}, 16).temperature == 0.0
    with pytest.raises(UserError, match="asks for 20 tokens"):
        sampling_of({"max_gen_toks": 20}, 16)


def test_long_texts_are_cut_from_the_left(model: EngineLM) -> None:
    assert _fitting([1, 2, 3, 4], [5, 6], 4) == ([3, 4], [5, 6]) and _fitting([1], [2, 3, 4, 5], 3) == ([1], [4, 5])
    text = " ".join(["ant"] * 150)
    (rolling,) = model.loglikelihood_rolling([asked(text)])
    ids = model.tok_encode(text)
    first = model._score([([model.prefix_token_id], ids[: model.max_length - 1])])[0][0]
    assert len(ids) > model.max_length and rolling < first < 0
    long = model.loglikelihood([asked(text, " bee")], disable_tqdm=True)
    assert long == model.loglikelihood([asked(" ".join(["ant"] * (model.max_length - 1)), " bee")], disable_tqdm=True)


def test_conversations_are_rendered_as_everywhere(model: EngineLM) -> None:
    turns = [{"role": "user", "content": "write 3 words"}]
    assert model.tok_encode(model.apply_chat_template(turns)) == model.text.render(turns, thinking=False, system="")
    begun = model.apply_chat_template([*turns, {"role": "assistant", "content": "ant"}], add_generation_prompt=False)
    assert begun == model.apply_chat_template(turns) + "ant"


def test_a_task_of_the_harness_on_a_local_file(model: EngineLM, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its task code, unchanged, over our engine: one that generates and one that compares choices."""
    import lm_eval

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "rows.jsonl"
    rows = [{"q": f"write 3 words with {w}", "a": w, "c": [f"{w} {w} {w}", "owl"]} for w in ("ant", "bee", "cat", "cow")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "doc_to_text": "{{q}}",
    }
    writes = data | {"task": "writes", "output_type": "generate_until", "doc_to_target": "{{a}}",
                     "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
                     "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]}  # fmt: skip
    chooses = data | {"task": "chooses", "output_type": "multiple_choice", "doc_to_choice": "{{c}}", "doc_to_target": 0,
                      "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]}  # fmt: skip
    found = lm_eval.simple_evaluate(model=model, tasks=[writes, chooses], apply_chat_template=True, bootstrap_iters=0)
    assert set(found["results"]) == {"writes", "chooses"}
    said = [sample["resps"][0][0] for sample in found["samples"]["writes"]]
    by_hand = model.generate_until([asked(chat(model, row["q"]), {"until": ["\n"], "max_gen_toks": 8}) for row in rows])
    assert said == by_hand and all(text.split() for text in said)
    assert 0 <= found["results"]["chooses"]["acc,none"] <= 1
