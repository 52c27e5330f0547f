"""Supervised training as a mode: length in epochs, its learning rate, held-out conversations, every assistant turn, resume."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from train_support import run, same_bits, system_of, tiny

from coevo_jax.config.scale import shrink
from coevo_jax.config.validate import validate
from coevo_jax.errors import UserError
from coevo_jax.methods import supervised
from coevo_jax.methods.stage import Step

SFT = ("schedule.mode=sft", "warmup.batch=4", "warmup.lr=1e-3")


@pytest.fixture
def talks(tmp_path: pathlib.Path) -> str:
    """Eleven conversations, every second one of two assistant turns: 16 examples."""
    path = tmp_path / "chat.jsonl"
    with open(path, "w") as file:
        for i in range(11):
            turns = [("user", f"write words with owl {'fox ' * i}"), ("assistant", "owl ant")]
            turns += [("user", "write words once"), ("assistant", "bee")] * (i % 2)
            messages = [{"role": role, "content": text.strip()} for role, text in turns]
            file.write(json.dumps({"id": f"talk{i}", "messages": messages}) + "\n")
    return f"warmup.data={path}"


def test_epochs_cosine_and_held_out_loss_and_a_kill(tmp_path: pathlib.Path, talks: str) -> None:
    cfg = (*SFT, talks, "warmup.epochs=2", "warmup.heldout=3", "warmup.eval_every=3", "warmup.schedule=cosine",
           "warmup.warmup_steps=2", "run.save_every=2")  # fmt: skip
    whole = run(tmp_path / "whole", *cfg)
    stream = whole.system.context.streams["warmup"].prompts
    assert {r["id"].split("/")[0] for r in stream.records} & {r["id"].split("/")[0] for r in stream.heldout} == set()
    n, rows = len(stream.records), whole.rows
    assert n + len(stream.heldout) == 16 and len(rows) == round(2 * n / 4)
    assert rows[-1]["epoch"] == pytest.approx(len(rows) * 4 / n)
    lrs = [row["lr"] for row in rows]
    after = len(rows) - 2
    wanted = [5e-4, 1e-3, *(1e-3 * 0.5 * (1 + np.cos(np.pi * i / after)) for i in range(after))]
    np.testing.assert_allclose(lrs, wanted[: len(lrs)], rtol=1e-5)
    assert [("heldout/loss" in row) for row in rows] == [i % 3 == 0 for i in range(len(rows))]
    looked = [row["heldout/loss"] for row in rows if "heldout/loss" in row]
    assert looked[-1] < looked[0] and rows[-1]["loss"] < rows[0]["loss"]

    class Killed(Exception):
        pass

    def kill(system, row, done):
        if done == 3:
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path / "run", *cfg, hook=kill)
    again = run(tmp_path / "run", *cfg)
    assert again.comparable == whole.comparable and same_bits(again.params, whole.params)


def test_the_loss_covers_every_assistant_turn_and_nothing_else(talks: str) -> None:
    system = system_of(*SFT, talks, "warmup.updates=1", "warmup.batch=16")
    tokenizer = system.context.voices["policy"].tokenizer
    samples = supervised.sft_batch(system.context, Step(0, 0, 0, "policy")).samples
    texts = sorted(tokenizer.decode(s.completion.tolist()) for s in samples)
    assert texts == ["bee"] * 5 + ["owl ant"] * 11
    assert all(s.completion[-1] in tokenizer.stop_ids for s in samples)
    second = next(s for s in samples if tokenizer.decode(s.completion.tolist()) == "bee")
    before = tokenizer.decode(list(second.prompt))
    assert "owl ant" in before and "once" in before.split("owl ant")[1]


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["schedule.mode=sft"], "is no update"),
        ([*SFT, "warmup.updates=1", "warmup.epochs=1"], "both say how long"),
        ([*SFT, "warmup.epochs=-1"], "out of range"),
        ([*SFT, "warmup.updates=1", "warmup.schedule=linear"], "unknown choice"),
        (["warmup.heldout=2"], "would be ignored"),
        (["warmup.schedule=cosine"], "would be ignored"),
    ],
)
def test_refused(overrides, what) -> None:
    with pytest.raises(UserError, match=what):
        tiny(*overrides)


def test_nothing_left_to_train_on_is_refused_and_epochs_shrink(talks: str) -> None:
    with pytest.raises(UserError, match="leaves nothing of 11 conversations"):
        system_of(*SFT, talks, "warmup.updates=1", "warmup.heldout=11")
    small = shrink(tiny(*SFT, talks, "warmup.epochs=3", "warmup.heldout=9"))
    validate(small)
    assert (small.warmup.updates, small.warmup.epochs, small.warmup.heldout) == (2, 0.0, 4)
