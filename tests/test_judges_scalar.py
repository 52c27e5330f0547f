"""Reward models: scores against transformers' (tests/golden/make_golden.py), packing, the conversation's tokens, verdicts."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import shutil

import numpy as np
import pytest
import text_support as tt
from safetensors.numpy import load_file, save_file

from coevo_jax.config import JudgeConfig, MeshConfig, ModelConfig, SamplerConfig
from coevo_jax.errors import UserError
from coevo_jax.judges import JudgeItem
from coevo_jax.judges.scalar import RewardModel, ScalarJudge, row_lengths
from coevo_jax.mesh import make_mesh
from coevo_jax.models.load import load_scalar
from coevo_jax.rubrics import Rubric
from coevo_jax.text.chat import ChatTokenizer

GOLDEN = pathlib.Path(__file__).parent / "golden"


def reward_model(family="llama_reward", mesh=None, tokenizer=None, **sampler):
    model = load_scalar(ModelConfig(source=str(GOLDEN / family)), mesh)
    cfg = SamplerConfig(**{"max_prompt": 256, "prefill_tokens": 256} | sampler)
    return RewardModel(model.spec, model.params, tokenizer, cfg, mesh=mesh)


def golden(family):
    data = np.load(GOLDEN / family / "golden.npz")
    return [row[:n].tolist() for row, n in zip(data["tokens"], data["lengths"])], data["scores"]


@pytest.mark.parametrize("family", ["llama_reward", "qwen3_reward"])
def test_scores_are_those_of_transformers(family):
    sequences, expected = golden(family)
    assert np.ptp(expected) > 1  # else a constant would pass
    model = reward_model(family)
    np.testing.assert_allclose(model.logits(sequences), expected, atol=1e-4)
    np.testing.assert_allclose(model.logits(sequences[::-1]), expected[::-1], atol=1e-4)
    assert model.logits([]).shape == (0,)


def test_a_score_depends_on_its_own_tokens_alone():
    """Packed into one row, over several batches, in a longer row: each sequence sees itself; the last token is by position."""
    sequences, expected = golden("llama_reward")
    model = reward_model()
    many = [sequences[i % 4] for i in range(40)]  # 910 tokens: more than the two rows of 128 that a batch has
    np.testing.assert_allclose(model.logits(many), expected[np.arange(40) % 4], atol=1e-4)
    long = [5] * 200  # rows of 256
    np.testing.assert_allclose(model.logits([long, *sequences])[1:], expected, atol=1e-4)
    ends = [[*sequences[0], 0, 0], [*sequences[0], 2]]  # padding and end ids inside a sequence are tokens like others
    assert np.abs(model.logits(ends) - expected[0]).min() > 1e-3


def test_row_lengths():
    assert row_lengths(100) == [128] and row_lengths(300) == [128, 256, 384] and row_lengths(1024) == [128, 256, 512, 1024]


def test_eight_devices_equal_one():
    sequences, expected = golden("qwen3_reward")
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    np.testing.assert_allclose(reward_model("qwen3_reward", mesh).logits(sequences), expected, atol=1e-4)


def test_everything_is_compiled_at_the_start():
    model = reward_model()
    model.warm_up()
    before = model._program._cache_size()
    model.logits(golden("llama_reward")[0])
    model.logits([[5] * 200] * 3)
    assert model._program._cache_size() == before == 2


# ---- what is no reward model


def changed(tmp_path, change):
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "llama_reward", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return ModelConfig(source=str(folder))


def test_a_folder_without_the_head_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"'score.weight' is missing") as caught:
        load_scalar(ModelConfig(source=str(GOLDEN / "llama")))
    assert "SequenceClassification" in caught.value.expected
    with pytest.raises(UserError, match=r"'score.weight' has shape \[2, 32\]"):
        load_scalar(changed(tmp_path, lambda t: t.update({"score.weight": np.zeros((2, 32), np.float32)})))
    with pytest.raises(UserError, match="has no scalar head"):
        (tmp_path / "some.gguf").write_bytes(b"GGUF")
        load_scalar(ModelConfig(source=str(tmp_path / "some.gguf")))


def test_a_head_of_the_vocabulary_beside_it_is_left_out(tmp_path):
    cfg = changed(tmp_path, lambda t: t.update({"lm_head.weight": np.zeros((128, 32), np.float32)}))
    assert sorted(load_scalar(cfg).params) == ["embed", "final_norm", "layers", "score"]


# ---- the judge


@pytest.fixture(scope="module")
def llama3(tmp_path_factory):
    return ChatTokenizer.load(tt.make_tokenizer(tmp_path_factory.mktemp("tok"), tt.LLAMA3, eos="<|eot_id|>", bos=True))


def test_b01_one_first_token_and_the_end_token_last(llama3):
    ids = reward_model(tokenizer=llama3).ids("Hi", "Lima <|eot_id|>!")
    first = llama3.encode("", add_special_tokens=True)
    assert len(first) == 1 and ids[0] == first[0] and ids.count(first[0]) == 1
    assert (
        llama3.decode(ids[-1:], keep_special=True) == "<|eot_id|>" and ids.count(ids[-1]) == 2
    )  # one a turn; none from the text
    text = llama3.decode(ids, keep_special=True)
    assert text.count("<|start_header_id|>assistant") == 1 and "system" not in text


class Fake:
    """Logits by rule: the length of the conversation, NaN for one that holds 'nan'."""

    limit = 60

    def ids(self, question, answer):
        return [ord(c) for c in question + answer]

    def logits(self, sequences):
        return np.asarray([math.nan if "nan" in "".join(map(chr, ids)) else len(ids) - 20.0 for ids in sequences], np.float32)


def items(*answers):
    return [JudgeItem("Q?", Rubric(()), answer, i) for i, answer in enumerate(answers)]


def test_verdicts():
    cfg = JudgeConfig(protocol="scalar")
    judge = ScalarJudge(cfg, Fake())
    good, long, broken = judge.judge(items("x" * 30, "x" * 100, "nan"), 0)
    assert (good.status, good.score, good.bounded, good.raw) == ("ok", 12.0, False, "12")
    assert long.status == "refused" and "102 tokens" in long.detail and broken.status == "parse_fail"
    squashed = dataclasses.replace(judge, cfg=dataclasses.replace(cfg, scalar="sigmoid")).judge(items("x" * 20, ""), 0)
    assert squashed[0].score == pytest.approx(1 / (1 + math.exp(-2))) and squashed[0].bounded
    assert [v.score for v in ScalarJudge(cfg, Fake()).judge(items("xx", "x"), 0)] == [-16.0, -17.0]  # logits may be negative
    json.dumps(dataclasses.asdict(good))
