"""The small world's assets for DynamicRubric: model folder, vocabulary, rankings and warm-up are what their script says."""

from __future__ import annotations

import importlib.util
import random
import sys

import pytest
from train_support import REPO

from coevo_jax.config import RubricConfig
from coevo_jax.data import read_chat, read_rankings
from coevo_jax.judges import world
from coevo_jax.judges.criterion_logits import yes_no_forms
from coevo_jax.rubrics import parse_rubric
from coevo_jax.rubrics.weighted_items import write_rubric
from coevo_jax.text.candidates import generator_messages
from coevo_jax.text.chat import ChatTokenizer

FOLDER = world.MODEL_FOLDER.parent / "dynamic"
CFG = RubricConfig(schema="weighted_items")


@pytest.fixture(scope="module")
def maker():
    sys.path.insert(0, str(REPO / "benchmarks"))
    spec = importlib.util.spec_from_file_location("train_tiny_dynamic", REPO / "benchmarks" / "train_tiny_dynamic.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.load(str(FOLDER))


def test_size_and_folder():
    files = {f.name: f.stat().st_size for f in FOLDER.iterdir()}
    assert set(files) == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert sum(files.values()) <= 500_000


def test_rankings_and_warm_up_are_those_of_the_script(maker):
    rows = read_rankings("tiny").records
    assert [r["id"] for r in rows] == [r["id"] for r in maker.ranking_rows(0)]
    for row, made in zip(rows, maker.ranking_rows(0)):
        assert row["answers"] == made["answers"] and len(set(row["scores"])) == 4
        assert row["scores"] == [round(world.true_quality(row["prompt"], a), 4) for a in row["answers"]]
    chat = read_chat("tiny_dynamic").records
    assert [r["rubric"] for r in chat] == [r["rubric"] for r in maker.chat_rows(0)]
    assert all(parse_rubric(write_rubric([(i["item"], i["weight"]) for i in r["rubric"]["items"]]), CFG).ok for r in chat)


def test_every_prompt_and_rubric_is_in_the_vocabulary(tokenizer):
    unknown, rng = tokenizer.encode("banana")[0], random.Random(3)
    for record in read_chat("tiny_dynamic").records:
        for template in ("world_dynamic", "world_dynamic_blind"):
            messages = generator_messages(template, record["question"], record["candidates"])
            assert unknown not in tokenizer.render(messages, thinking=False, system="")
        items = [(i["item"], rng.randint(1, 5)) for i in record["rubric"]["items"]]
        ids = tokenizer.encode(write_rubric(items))
        assert unknown not in ids and tokenizer.decode(ids) == write_rubric(items) and len(ids) <= 39
    assert all(yes_no_forms(tokenizer))  # a judge by logits can be made of it


def test_demonstrations_are_as_they_say(maker):
    """The clean ones are valid and tell their candidates apart; about a quarter of the others is broken."""
    rng = random.Random(0)
    clean, mixed = ([maker.demonstration(rng, sort) for _ in range(300)] for sort in (True, False))
    rubrics = [text for messages, text in clean if text.startswith("{")]
    assert len(rubrics) > 150 and all(parse_rubric(text, CFG).ok for text in rubrics)
    valid = [parse_rubric(text, CFG).ok for messages, text in mixed if text.startswith("{")]
    assert 0.6 < sum(valid) / len(valid) < 0.9
