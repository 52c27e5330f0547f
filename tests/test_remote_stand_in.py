"""endpoint.base_url=stand-in: a role behind an API, played over HTTP by this process; what every kind of it says is readable."""

from __future__ import annotations

import dataclasses
import pathlib
import socket
import urllib.parse

import pytest
from train_support import REPO, Recorder, shared_programs

from coevo_jax.cli import parse_flags, resolve
from coevo_jax.config import EndpointConfig, Experiment, JudgeConfig, RubricConfig
from coevo_jax.config.model import STAND_IN
from coevo_jax.config.override import apply_overrides
from coevo_jax.config.validate import validate
from coevo_jax.errors import UserError
from coevo_jax.judges import make_pair_judge
from coevo_jax.judges.base import JudgeItem
from coevo_jax.judges.endpoint import make
from coevo_jax.records.metrics import read_metrics
from coevo_jax.remote.stand_in import SAYS, Played
from coevo_jax.rubrics import Criterion, Rubric
from coevo_jax.rubrics.endpoint import EndpointWriter
from coevo_jax.train import train

HOW = EndpointConfig(base_url=STAND_IN, cache="off", concurrency=4)
ITEM = JudgeItem("What?", Rubric((Criterion("Is short", 0.5), Criterion("Is right", 0.5))), "That.", 0, reference="That")


def items(count: int) -> list[JudgeItem]:
    return [JudgeItem(ITEM.question, ITEM.rubric, f"That {i}.", i, reference="That") for i in range(count)]


@pytest.mark.parametrize("protocol", [kind for kind in SAYS if " " not in kind])
def test_every_protocol_reads_what_it_says_and_answers_get_several_scores(protocol: str) -> None:
    ends = [Played("judge", "m", HOW, protocol, {}) for _ in range(2)]
    try:
        first, second = ([v.score for v in make(JudgeConfig(protocol=protocol), e).judge(items(8), 0)] for e in ends)
    finally:
        for e in ends:
            e.close()
    assert None not in first and first == second and len(set(first)) > 1  # another process would say the same


def test_a_judge_of_pairs_reads_both_of_its_forms() -> None:
    cfg, played = JudgeConfig(protocol="json_score", pairs="pairwise"), Played("judge", "m", HOW, "json_score pairwise", {})
    try:
        alone = make(cfg, played).judge(items(8), 0)
        pairs = make_pair_judge(cfg, None, None, None, 0, played)
        assert pairs is not None
        beside = pairs.judge([dataclasses.replace(item, other="This.") for item in items(8)], 0)
    finally:
        played.close()
    assert None not in {v.score for v in alone} and {v.score for v in beside} == {0.0, 1.0}


@pytest.mark.parametrize("schema", ["json_criteria", "rar"])
def test_its_rubrics_are_valid(schema: str) -> None:
    prompt = {"json_criteria": "rubric_dealbreaker", "rar": "rubric_rar"}[schema]
    played = Played("generator", "m", HOW, f"rubric {schema}", {})
    try:
        cfg = RubricConfig(prompt=prompt, schema=schema)
        found = EndpointWriter(played, cfg).start(["What?", "Why?"], Experiment().rubric_sampling)()
    finally:
        played.close()
    assert all(one is not None and one.value is not None for one in found)


def test_nothing_listens_after_it_is_closed_and_what_it_can_not_play_is_said() -> None:
    played = Played("judge", "m", HOW, "json_score", {})
    port = urllib.parse.urlsplit(played.url).port
    socket.create_connection(("127.0.0.1", port)).close()
    played.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port))
    with pytest.raises(UserError, match="can't play 'points'") as caught:
        Played("judge", "m", HOW, "points", {})
    assert caught.value.where == "judge.endpoint.base_url"
    with pytest.raises(UserError, match="not the address"):  # no other word is one
        validate(apply_overrides(Experiment(), ["judge.source=api:m", "judge.endpoint.base_url=standin"]))


@pytest.mark.parametrize("name, role", [("ablations/judge_gpt41", "judge"), ("baselines/gpt41_prompted", "generator")])
def test_a_config_behind_an_api_runs_by_one_flag(name: str, role: str, tmp_path: pathlib.Path, monkeypatch) -> None:
    """Its rubric prompt is that of the small world, which the small model can follow: so the judge is asked."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    flags = [f"--config={REPO}/configs/{name}.py", "--config.scale=smoke", "--config.rubric.prompt=world_rubric"]
    cfg = resolve(parse_flags(flags, ""))
    with shared_programs():
        assert train(cfg, str(tmp_path / "run"), Recorder())
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) >= 2 and sum(row[f"api/{role}/requests"] for row in rows) > 0
    assert all(row[f"api/{role}/gave_up"] == 0 for row in rows)
    if role == "judge":
        assert all(row["judge/failure_share"] == 0 for row in rows) and any(row["update/skipped"] == 0 for row in rows)
