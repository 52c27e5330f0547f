"""Whole runs of the small world whose judge, or judge and rubric generator, are behind an endpoint."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
from remote_support import Handler, completion, serving
from train_support import run, same_bits, system_of

from coevo_jax.errors import UserError
from coevo_jax.judges.world import check, read_criterion

KEY = "sk-tiny-secret-42"


def judge_by_rule(text: str) -> str:
    """The oracle's rules on what the prompt shows."""
    answer = re.search(r"<answer \w+>\n(.*?)\n</answer", text, re.S)
    assert answer is not None
    parts = []
    for weight, words in re.findall(r"^\d+\. \(weight ([\d.]+)\) (.*)$", text, re.M):
        prop = read_criterion(words)
        parts.append((float(weight), 0.5 if prop is None else check(prop, answer[1])))
    return json.dumps({"score": sum(w * p for w, p in parts) / sum(w for w, _ in parts)})


def write_rubric(text: str) -> str:
    """A rubric that every question has a use for."""
    levels = {"1.0": "yes", "0.0": "no"}
    words = ["has 4 words", "repeats no word"]
    return json.dumps({"criteria": [{"criterion": w, "weight": 0.5, "scoring_levels": levels} for w in words]})


def play(h: Handler, body: dict, number: int) -> None:
    text = body["messages"][-1]["content"]
    if number % 7 == 3:  # now and then a fault, which a retry mends
        return h.send("{}", 503)
    h.send(completion(judge_by_rule(text) if "<answer " in text else write_rubric(text)))


def judge(url: str) -> tuple[str, ...]:
    return (
        *("judge.source=api:rules", "judge.protocol=json_score", f"judge.endpoint.base_url={url}", "schedule.cycles=1"),
        *("judge.endpoint.backoff_s=0.001", "judge.endpoint.key_env=TINY_KEY", "judge.endpoint.price_in=1", "run.save_every=2"),
    )


def writer(url: str) -> tuple[str, ...]:
    return (
        *("generator.source=api:author", "generator.mode=two", f"generator.endpoint.base_url={url}", "schedule.k=3"),
        *("generator.endpoint.backoff_s=0.001", "schedule.order=policy_only"),
    )


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("TINY_KEY", KEY)


def test_a_remote_judge_trains_and_a_broken_run_ends_the_same(tmp_path: pathlib.Path) -> None:
    with serving(play) as server:
        whole = run(tmp_path / "whole", *judge(server.url))
        asked = len(server.bodies)
        first = run(tmp_path / "run", *judge(server.url), stop_after=3)
        assert not first.finished
        second = run(tmp_path / "run", *judge(server.url), "judge.endpoint.concurrency=2")  # how it is reached may change
    assert asked and second.finished and second.comparable == whole.comparable and second.rollouts() == whole.rollouts()
    assert same_bits(second.params, whole.params)
    assert not same_bits(whole.params, {"policy": system_of().learners["policy"].state.params})
    for row in whole.rows:
        assert row["judge/failure_share"] == 0 and row["api/judge/asked"] == row["judge/verdicts"] > 0
        assert row["api/judge/requests"] == row["api/judge/asked"] - row["api/judge/cached"] + row["api/judge/retries"]
        assert row["api/judge/cost"] == row["api/judge/prompt_tokens"] / 1e6
    assert sum(row["api/judge/failures/server_error"] for row in whole.rows) > 0
    assert sum(row["api/judge/requests"] for row in whole.rows) == asked
    text = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert KEY.encode() not in text and KEY not in "\n".join(whole.notes)
    assert any("unencrypted" in note for note in whole.notes)


class Killed(BaseException):
    """The end of a process, as far as one process can have it."""


def test_after_a_kill_the_lost_updates_are_judged_from_the_cache(tmp_path: pathlib.Path) -> None:
    def kill(system, row, done):
        if done == 1:  # before the first checkpoint
            raise Killed

    with serving(play) as server:
        with pytest.raises(Killed):
            run(tmp_path / "run", *judge(server.url), "schedule.order=policy_only", hook=kill)
        asked = len(server.bodies)
        done = run(tmp_path / "run", *judge(server.url), "schedule.order=policy_only")
    row = done.rows[0]
    assert asked > 0 and row["api/judge/requests"] == 0 and row["api/judge/cached"] == row["api/judge/asked"] > 0


def test_a_remote_rubric_generator(tmp_path: pathlib.Path) -> None:
    with serving(play) as server:
        remote = (*judge(server.url), *writer(server.url))
        done = run(tmp_path / "run", *remote)
        again = run(tmp_path / "again", *remote, stop_after=1)
        again = run(tmp_path / "again", *remote)
        models = {body["model"] for body in server.bodies}
    assert models == {"rules", "author"} and list(done.system.learners) == ["policy"]
    assert [row["role"] for row in done.rows] == ["policy"] * 3 and done.comparable == again.comparable
    for row in done.rows:
        assert row["rubric/valid_share"] == 1 and row["rubric/endpoint_failed"] == 0 and row["update/skipped"] == 0
        assert row["api/generator/asked"] >= 4 and row["reward/mean"] > 0
    assert "has 4 words" in done.rollouts(0)[0]["rubric"]


def test_an_endpoint_that_is_down_trains_nothing_and_stays(tmp_path: pathlib.Path) -> None:
    down = lambda h, body, number: h.send("{}", 404)  # noqa: E731
    with serving(down) as server:
        remote = (*judge(server.url), *writer(server.url), "schedule.k=1", "advantage.max_resample=0")
        done = run(tmp_path / "run", *remote)
        kept = run(
            tmp_path / "other", *judge(server.url), "schedule.order=policy_only", "schedule.k=1", "advantage.max_resample=0"
        )
    (row,), (other,) = done.rows, kept.rows
    assert row["update/skipped"] == other["update/skipped"] == 1
    assert row["rubric/endpoint_failed"] == row["rubric/prompts_dropped"] == 4 and row["rubric/retried"] == 0
    assert other["judge/refused_share"] == 1 and other["judge/alarm"] == 1 and "reward/mean" not in other
    assert same_bits(done.params, {"policy": system_of().learners["policy"].state.params})


def test_a_missing_key_is_said_before_anything_is_written(tmp_path: pathlib.Path, monkeypatch) -> None:
    monkeypatch.delenv("TINY_KEY")
    with pytest.raises(UserError, match="TINY_KEY is not set"):
        run(tmp_path / "run", *judge("http://127.0.0.1:1/v1"))
    assert not (tmp_path / "run").exists()
