"""Whole runs with judge.pairs=pairwise in every judge.order: stopped, killed and resumed; a judge that writes its verdicts."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from remote_support import Handler, completion, serving
from test_remote_run import judge_by_rule
from test_train_resume import Killed, assert_same
from train_support import Run, run, same_bits, system_of

ORDERS = ("first", "random", "both", "agree")
SHORT = ("judge.pairs=pairwise", "judge.oracle_noise=0.3", "schedule.cycles=2", "run.save_every=3")


def pair_rows(done: Run) -> list[dict[str, Any]]:
    return [row for row in done.rollouts(role="rubric") if "judge_pair" in row]


@pytest.mark.parametrize("order", ["random", *(pytest.param(o, marks=pytest.mark.slow) for o in ORDERS if o != "random")])
def test_it_trains_and_a_broken_run_ends_the_same(order: str, tmp_path: pathlib.Path) -> None:
    keys = (*SHORT, f"judge.order={order}")
    whole = run(tmp_path / "whole", *keys)
    rows, calls = pair_rows(whole), 2 if order in ("both", "agree") else 1
    assert rows and all(len(row["judge_pair"]) == calls for row in rows)
    sides = {call["better_in"] for row in rows for call in row["judge_pair"]}
    assert sides == ({"A"} if order == "first" else {"A", "B"})
    assert {row["parts"]["margin"] for row in rows} <= {-1.0, -0.5, 0.0, 0.5, 1.0}
    trained = [row for row in whole.rows if row["role"] == "rubric"]
    assert any(row["update/skipped"] == 0 for row in trained)
    assert all(("judge/order_flip_share" in row) == (calls == 2) for row in trained if row["judge/verdicts"])
    assert not same_bits(whole.params, {"policy": system_of().learners["policy"].state.params})

    assert not run(tmp_path / "stopped", *keys, stop_after=3).finished  # between the two rubric updates of the first cycle
    assert_same(run(tmp_path / "stopped", *keys), whole)

    def kill(system: Any, row: dict[str, Any], done: int) -> None:
        if done == 4:
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path / "killed", *keys, hook=kill)
    assert_same(run(tmp_path / "killed", *keys), whole)


def always_a(handler: Handler, body: dict[str, Any], number: int) -> None:
    """Side by side it likes slot A; alone, an answer is scored by the rules."""
    text = body["messages"][-1]["content"]
    handler.send(completion("Winner: A" if "winner" in text.lower() else judge_by_rule(text)))


@pytest.mark.parametrize("order", ["both", pytest.param("first", marks=pytest.mark.slow)])
def test_a_judge_of_slots_behind_an_endpoint_teaches_nothing_in_both_orders(order: str, tmp_path: pathlib.Path) -> None:
    """B24, through prompt, endpoint, parser and reward: its margins are 0 in both orders and 1 if the better comes first."""
    keys = ("judge.source=api:slots", "judge.protocol=json_score", "judge.pairs=pairwise", f"judge.order={order}")
    with serving(always_a) as server:
        done = run(tmp_path / "run", *keys, f"judge.endpoint.base_url={server.url}", "schedule.cycles=1")
        prompts = [json.dumps(body) for body in server.bodies if "inner" in json.dumps(body)]
    rows = pair_rows(done)
    assert rows and prompts and {row["parts"]["margin"] for row in rows} == {0.0 if order == "both" else 1.0}
    flips = [row["judge/order_flip_share"] for row in done.rows if "judge/order_flip_share" in row]
    assert flips == ([1.0] * len(flips) if order == "both" else []) and bool(flips) == (order == "both")
    assert all(row["judge/failure_share"] == 0 for row in done.rows)
