"""A reward model through the whole loop: training, kill and resume, export, and use as judge.scalar."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from train_support import REPO, run, same_bits, system_of, tiny

from coevo_jax.config import JudgeConfig, ModelConfig, SamplerConfig
from coevo_jax.errors import UserError
from coevo_jax.export import export_run
from coevo_jax.judges import JudgeItem
from coevo_jax.judges.scalar import RewardModel, ScalarJudge
from coevo_jax.learn.reward_model import segment_values
from coevo_jax.methods import reward_model
from coevo_jax.models.load import load_scalar
from coevo_jax.rubrics import Rubric
from coevo_jax.text.chat import ChatTokenizer

MODE = ("schedule.mode=reward", "schedule.cycles=1", "reward.pairs=8", "update.pack_length=64", "run.save_every=2")


class Killed(BaseException):
    """The end of a process, as far as one process can have it."""


@pytest.mark.slow
def test_it_learns_survives_a_kill_and_judges(tmp_path: pathlib.Path) -> None:
    cfg = (*MODE, "schedule.k=5", "reward.center=0.001", "reward.heldout=40", "reward.eval_every=2")
    whole = run(tmp_path / "whole", *cfg)
    assert [row["stage"] for row in whole.rows] == ["reward"] * 5 and whole.rows[0]["loss"] == pytest.approx(np.log(2), abs=0.05)
    assert all(row["grad_norm"] > 0 and 0 <= row["reward_model/accuracy"] <= 1 for row in whole.rows)
    stream = whole.system.context.streams[reward_model.STREAM].prompts
    assert whole.rows[-1]["epoch"] == pytest.approx(40 / len(stream)) and len(stream.heldout) == 40 and len(stream) <= 200
    assert not {r["prompt"] for r in stream.heldout} & {r["prompt"] for r in stream.records}
    assert [("heldout/accuracy" in row) for row in whole.rows] == [True, False, True, False, True]
    assert whole.rows[0]["heldout/loss/preference"] == pytest.approx(np.log(2), abs=0.05)

    def kill(system, row, done):
        if done == 3:
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path / "run", *cfg, hook=kill)
    again = run(tmp_path / "run", *cfg)
    assert any(note.startswith("resumed after update 2") for note in again.notes)
    assert again.comparable == whole.comparable and same_bits(again.params, whole.params)

    export_run(tmp_path / "run", tmp_path / "out")
    check_layout(tmp_path / "out")
    model = load_scalar(ModelConfig(source=str(tmp_path / "out")))
    assert same_bits(jax.device_get(model.params), again.params["policy"])
    tokenizer = ChatTokenizer.load(tmp_path / "out")
    judge = ScalarJudge(
        JudgeConfig(protocol="scalar"), RewardModel(model.spec, model.params, tokenizer, SamplerConfig(max_prompt=128))
    )
    record = again.system.context.streams[reward_model.STREAM].prompts.records[0]
    sides = [JudgeItem(record["prompt"], Rubric(()), record[side], i) for i, side in enumerate(("chosen", "rejected"))]
    verdicts = judge.judge(sides, 0)
    sample = reward_model.encode(tokenizer, record, again.system.cfg)
    batch = reward_model_batch(again.system, sample)
    values = np.asarray(segment_values(again.params["policy"], model.spec, batch, again.system.cfg))
    ((b, s),) = np.argwhere(batch.chosen)
    trained = values[b, s], values[b + batch.partner_rows[b, s], batch.partner[b, s]]
    assert [v.score for v in verdicts] == pytest.approx(trained, abs=1e-5)


def reward_model_batch(system, sample):
    from coevo_jax.learn.reward_model import pack_pairs

    return jax.tree.map(lambda x: x[0], pack_pairs([sample], system.cfg.update))


def check_layout(folder: pathlib.Path) -> None:
    """As transformers writes a LlamaForSequenceClassification: names, shapes and fields of tests/golden, which it made."""
    config = json.loads((folder / "config.json").read_text())
    golden = json.loads((REPO / "tests/golden/llama_reward/config.json").read_text())
    assert config["architectures"] == golden["architectures"] and config["id2label"] == golden["id2label"]
    assert config["label2id"] == golden["label2id"]
    tensors, wanted = load_file(folder / "model.safetensors"), load_file(REPO / "tests/golden/llama_reward/model.safetensors")
    layers = config["num_hidden_layers"]
    assert set(tensors) == {name for name in wanted if "layers." not in name or int(name.split(".")[2]) < layers}
    assert tensors["score.weight"].shape == (1, config["hidden_size"])
    tokenizer = ChatTokenizer.load(folder)
    ids = reward_model.conversation(tokenizer, "write words", "owl")
    assert config["pad_token_id"] not in ids and tokenizer._tok.pad_token_id == config["pad_token_id"]


@pytest.mark.slow
def test_it_learns_what_the_pairs_prefer(tmp_path: pathlib.Path) -> None:
    """Five passes over the small world's pairs: four in five are told apart, and half at the start; held-out ones too."""
    held = ("reward.heldout=40", "reward.eval_every=31")
    rows = run(tmp_path / "run", *MODE, *held, "schedule.k=32", "reward.pairs=32", "optimizer.lr=3e-3").rows
    first, last = (np.mean([r["reward_model/accuracy"] for r in part]) for part in (rows[:4], rows[-4:]))
    assert first < 0.75 and last > 0.8, (first, last)
    assert rows[31]["heldout/accuracy"] > rows[0]["heldout/accuracy"], [row.get("heldout/accuracy") for row in rows]


def test_pairs_that_are_too_long_are_left_out_or_refused(tmp_path: pathlib.Path) -> None:
    rows = [{"id": f"p{i}", "prompt": "write words", "chosen": "owl " * (2 + 40 * (i == 1)), "rejected": "fox"} for i in range(3)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    data = (*MODE, f"reward.data={path}", "reward.pairs=2", "reward.max_tokens=30")
    system = system_of(*data)
    assert len(system.context.streams[reward_model.STREAM].prompts) == 2
    with pytest.raises(UserError, match="of the pair 'p1' has"):
        system_of(*data, "data.over_limit=refuse")
    with pytest.raises(UserError, match="all 3 pairs are over the limit"):
        system_of(*data, "reward.max_tokens=2")
    with pytest.raises(UserError, match="leaves nothing of 2 pairs"):
        system_of(*data, "reward.heldout=2")
    with pytest.raises(UserError, match="leaves no other question"):
        system_of(*data, "reward.heldout=1")
    with pytest.raises(UserError, match="'p0' has no margin"):
        system_of(*data, "reward.data_margin=true")


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["generator.mode=two"], "trains one reward model and nothing else"),
        (["warmup.updates=1"], "trains one reward model and nothing else"),
        (["update.rows_per_micro=1"], "holds no pair"),
        (["reward.max_tokens=99"], "above update.pack_length=64"),
        (["reward.data="], "reward.data is empty"),
        (["reward.center=-1"], "out of range"),
    ],
)
def test_refused(overrides, what) -> None:
    with pytest.raises(UserError, match=what):
        tiny(*MODE, *overrides)
