"""Baselines through the whole loop: two policy updates of the small world under each judge protocol; refused configs."""

from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from train_support import prints, run, system_of, tiny

from coevo_jax.config import RubricConfig
from coevo_jax.errors import UserError
from coevo_jax.judges import likert, rar_explicit
from coevo_jax.methods.fixed_rubrics import fixed_rubric
from coevo_jax.models.load import TINY
from coevo_jax.records.fingerprint import fingerprint
from coevo_jax.records.verdicts import Verdict, failed

TWO = ("schedule.order=policy_only", "schedule.cycles=1", "schedule.k=2")
MODEL = (
    "judge.source=tiny",
    "judge.retries=0",
    "judge.sampling.max_new_tokens=48",
    "sampler.max_prompt=256",
    "update.pack_length=256",
)
NO_RUBRIC = ("rubric.source=none",)
PREDEFINED = ("rubric.source=predefined",)


def by_length(text, item, truncated, opened):
    """The small model writes no rating: its text's length is one, and now and then a failure."""
    return failed("parse_fail", "", text) if len(text) % 7 == 0 else Verdict("ok", likert.scaled(1 + len(text) % 10), text)


def by_parity(text, item, truncated, opened):
    return Verdict("ok", float(len(text) % 2), text)


@pytest.fixture(autouse=True)
def a_judge_that_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likert, "read", by_length)
    monkeypatch.setattr(rar_explicit, "read", by_parity)


@pytest.fixture
def with_references(tmp_path: pathlib.Path) -> str:
    lines = [json.loads(line) for line in (TINY.parents[2] / "data" / "tiny_prompts.jsonl").read_text().splitlines()[:40]]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line | {"gold": "owl ant"}) + "\n" for line in lines))
    return f"{path}?reference=gold"


def check_run(done, protocol):
    """Two updates that train, rewards that are the judge's, a judge that stays as it is."""
    rows = done.rows
    assert [row["role"] for row in rows] == ["policy", "policy"] and done.finished
    assert all(row["update/skipped"] == 0 and row["groups/kept"] > 0 and row["reward/std"] > 0 for row in rows)
    assert prints(done.system) != prints(system_of(cfg=done.system.cfg)), "the policy did not move"
    for rollout in done.rollouts():
        verdict = rollout["judge"]
        assert rollout["reward"] == verdict["score"] and (verdict["status"] == "ok") == (rollout["reward"] is not None)
    assert done.system.context.judge.name == protocol
    return rows


@pytest.mark.parametrize(
    ("protocol", "overrides"),
    [("rar_explicit", PREDEFINED), ("likert", NO_RUBRIC), ("rar_implicit", PREDEFINED), ("rar_explicit", ())],
)
@pytest.mark.slow
def test_judges_that_write(tmp_path, protocol, overrides):
    done = run(tmp_path / "run", *TWO, *MODEL, *overrides, f"judge.protocol={protocol}")
    rows = check_run(done, protocol)
    assert {fingerprint(p) for p in done.system.frozen.values()} == set(done.system.frozen_fingerprints.values()) != set()
    seen = {rollout["rubric"] for rollout in done.rollouts()}
    criteria = {len(rollout["judge"]["parts"]) for rollout in done.rollouts()}
    if overrides == NO_RUBRIC:
        assert seen == {""} and "rubric/criteria" not in rows[0] and criteria == {0}
    elif overrides == PREDEFINED:
        assert len(seen) == 1 and rows[0]["rubric/criteria"] == 4 and criteria == ({4} if protocol == "rar_explicit" else {0})
    else:  # the policy's own rubrics
        assert len(seen) > 1 and min(criteria) >= 2
    if protocol != "rar_explicit":
        assert 0 < rows[0]["judge/failure_share"] < 1 and any(r["reward"] is None for r in done.rollouts())


def test_a_reference_beside_the_answer(tmp_path, with_references):
    done = run(tmp_path / "run", *TWO, *MODEL, *NO_RUBRIC, "judge.protocol=likert_reference", f"data.prompts={with_references}")
    check_run(done, "likert_reference")
    path = tmp_path / "bare.jsonl"
    path.write_text(json.dumps({"id": "bare-1", "prompt": "write 3 words"}) + "\n")
    with pytest.raises(UserError, match="'bare-1' has no reference"):
        system_of(*MODEL, *TWO, *NO_RUBRIC, "judge.protocol=likert_reference", f"data.prompts={path}")


def test_several_samples_of_a_judge(tmp_path):
    done = run(tmp_path / "run", *TWO, *MODEL, *NO_RUBRIC, "judge.protocol=likert", "judge.samples=3", "judge.combine=majority")
    check_run(done, "likert")
    scores = [r["judge"] for r in done.rollouts() if r["judge"]["status"] == "ok"]
    assert {len(v["parts"]) for v in scores} >= {2, 3}
    assert all(v["score"] == pytest.approx(float(np.median(v["parts"]))) for v in scores)


def test_random_reward(tmp_path):
    done = run(tmp_path / "run", *TWO, *NO_RUBRIC, "judge.protocol=random", "judge.source=smollm2")
    check_run(done, "random")
    assert {r["reward"] for r in done.rollouts()} == {0.0, 1.0} and done.system.frozen == {}
    again = run(tmp_path / "again", *TWO, *NO_RUBRIC, "judge.protocol=random", "judge.source=smollm2")
    assert again.comparable == done.comparable


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory) -> pathlib.Path:
    """The small world's model with a head of one label in place of its vocabulary's."""
    folder = tmp_path_factory.mktemp("reward") / "model"
    shutil.copytree(TINY, folder)
    tensors = load_file(TINY / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    width = tensors["model.norm.weight"].shape[0]
    tensors["score.weight"] = np.random.default_rng(0).normal(size=(1, width)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_reward_model(tmp_path, reward_folder):
    done = run(tmp_path / "run", *TWO, *NO_RUBRIC, "judge.protocol=scalar", f"judge.source={reward_folder}")
    rows = check_run(done, "scalar")
    assert {fingerprint(p) for p in done.system.frozen.values()} == set(done.system.frozen_fingerprints.values()) != set()
    rewards = np.asarray([r["reward"] for r in done.rollouts()])
    assert (np.abs(rewards) > 1).any() and rows[0]["judge/failure_share"] == 0  # raw logits
    judge = done.system.context.judge
    row = done.rollouts()[0]
    text = done.system.context.text(row["completion_ids"])
    assert row["reward"] == pytest.approx(
        float(judge.instrument.logits([judge.instrument.ids(row["question"], text)])[0]), abs=1e-4
    )


def test_rubrics_of_the_data_set(tmp_path):
    items = [{"title": f"T {i}", "description": f"Essential: thing {i}", "weight": 5} for i in range(7)]
    cfg = RubricConfig(source="data", schema="rar")
    for given in (items, json.dumps(items)):
        assert len(fixed_rubric(cfg, {"rubric": given}).value.criteria) == 7
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"id": "good", "prompt": "write words", "rubric": items}) + "\n"
                    + json.dumps({"id": "bad", "prompt": "write 3 words", "rubric": items[:6]}) + "\n")  # fmt: skip
    data = ("rubric.source=data", "rubric.schema=rar", f"data.prompts={path}", "judge.protocol=rar_implicit")
    with pytest.raises(UserError, match=r"'bad' has no rubric of the schema rar: 6 items"):
        system_of(*MODEL, *TWO, *data)


@pytest.mark.parametrize(
    ("overrides", "what", "nearest"),
    [
        (["judge.protocol=likret"], "unknown choice judge.protocol='likret'", "likert"),
        (["judge.protocol=rar_implict"], "unknown choice", "rar_implicit"),
        (["rubric.source=predefind"], "unknown choice rubric.source", "predefined"),
        (["rubric.schema=raar"], "unknown choice rubric.schema", "rar"),
        (["judge.protocol=likert"], "reads no rubric, and rubric.source=generator", ""),
        (["rubric.source=none"], "reads a rubric, and rubric.source=none", ""),
        (["rubric.source=predefined", "schedule.order=alternate"], "trains a generator whose rubrics nobody reads", ""),
        (["rubric.source=predefined", "generator.mode=two"], "generator.mode=two would be ignored", ""),
        (["judge.protocol=criterion_logits", "judge.samples=3"], "are all the same", ""),
        (["judge.protocol=scalar", "rubric.source=none", "judge.weights=int8"], "not made for reward models", ""),
        (
            ["judge.protocol=scalar", "rubric.source=none", "data.max_prompt_tokens=128", "update.pack_length=256"],
            "up to 140 tokens",
            "",
        ),
        (["judge.protocol=likert", "rubric.source=none", "judge.guided=true"], "no grammar", ""),
        (["rubric.guided=true", "rubric.schema=rar"], "no grammar for rubric.schema=rar", ""),
    ],
)
def test_configs_that_are_refused(overrides, what, nearest):
    judge = ["judge.source=tiny", "judge.protocol=json_score", "judge.sampling.max_new_tokens=48"]
    with pytest.raises(UserError) as caught:
        tiny("schedule.order=policy_only", *judge, *overrides)
    assert what in caught.value.what and (caught.value.nearest or "") == nearest
