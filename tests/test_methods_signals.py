"""Pairs from frozen policies and from data, guards of conditioned pairs, panels and several policies, a batch at a time."""

from __future__ import annotations

import collections
import json
from typing import Any

import numpy as np
import pytest
from train_support import REPO, make_batch, system_of

from coevo_jax.config.several import frozen_models
from coevo_jax.methods.context import Context
from coevo_jax.methods.evolm import policy_batch, rubric_batch, stages
from coevo_jax.methods.rewards import panel_rewards
from coevo_jax.methods.stage import Step
from coevo_jax.records.fingerprint import fingerprint
from coevo_jax.system import System

ELSEWHERE = ("pairs.temporal=0", "schedule.order=generator_only")
FROZEN = (*ELSEWHERE, "pairs.frozen=1", *(f"pairs.frozen_models.{i}.source=tiny" for i in range(3)))
ORACLES = tuple(
    f"panel.judges.{i}.{field}" for i in range(2) for field in ("source=oracle", "protocol=oracle", f"oracle_noise=0.{4 + i}")
)


def pairs_of(rollouts: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {row["group"]: row["pair"] | {"question": row["question"]} for row in rollouts}


def test_a_data_sets_pair_is_judged_as_it_stands() -> None:
    path = REPO / "coevo_jax" / "data" / "tiny_pairs.jsonl"
    known = {row["prompt"]: row for row in map(json.loads, path.read_text().splitlines())}
    system = system_of(*ELSEWHERE, "pairs.dataset=1", "pairs.data=tiny")
    batch = make_batch(system, "rubric", 0, 0)
    pairs = pairs_of(batch.rollouts)
    assert len(pairs) == batch.metrics["groups/made"] >= 4 and batch.metrics["pairs/share_dataset"] == 1.0
    for pair in pairs.values():
        row = known[pair["question"]]
        assert (pair["accepted"], pair["rejected"]) == (row["chosen"], row["rejected"]) and pair["accepted_ids"] == []
    assert system.inputs["pairs.data"].hash == system.context.streams["pairs"].prompts.hash
    assert {pair["question"] for pair in pairs_of(make_batch(system, "rubric", 1, 0).rollouts).values()}.isdisjoint(
        pair["question"] for pair in pairs.values()
    )  # the stream goes on


def test_of_two_frozen_policies_the_one_named_first_wins() -> None:
    system = system_of(*FROZEN)
    context = system.context
    assert tuple(frozen_models(system.cfg)) == ("frozen_0", "frozen_1", "frozen_2")
    asked: list[tuple[str, int, int]] = []
    generate = Context.generate

    def listening(self: Context, role: str, requests: list[Any]) -> Any:
        asked.extend((role, r.update, r.request) for r in requests)
        assert all(r.role == role for r in requests) or role == "policy"
        return generate(self, role, requests)

    seen: collections.Counter[tuple[str, str]] = collections.Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Context, "generate", listening)
        for update in range(6):
            for pair in pairs_of(make_batch(system, "rubric", update, 0).rollouts).values():
                first, second = pair["writers"]
                assert first < second and pair["source"] == "frozen" and pair["accepted_ids"] and pair["rejected_ids"]
                seen[first, second] += 1
    assert set(seen) == {("frozen_0", "frozen_1"), ("frozen_0", "frozen_2"), ("frozen_1", "frozen_2")}
    assert {role for role, *_ in asked} == {"policy", "frozen_0", "frozen_1", "frozen_2"}
    assert len(set(asked)) == len(asked)
    assert set(system.frozen) == set(frozen_models(system.cfg)) == set(system.frozen_fingerprints)
    assert len(set(system.frozen_fingerprints.values())) == 1  # the same file three times
    assert context.voices["frozen_1"].weights() is system.frozen["frozen_1"]


def test_a_changed_frozen_policy_is_found_out() -> None:
    system = system_of(*FROZEN)
    system.check_frozen()
    held = system.frozen["frozen_2"]
    system.held["frozen_2"] = {**held, "final_norm": held["final_norm"] * np.float32(1.5)}
    with pytest.raises(RuntimeError, match="the frozen frozen_2 changed"):
        system.check_frozen()


def test_a_conditioned_answer_that_repeats_its_rubric_makes_no_pair() -> None:
    system = system_of("pairs.temporal=0", "pairs.conditioned=1", "schedule.order=generator_only", "pairs.leak_words=2")
    text = system.context.text

    def repeating(tokens: Any, role: str = "policy") -> str:
        return text(tokens, role) + (" may includes sun now" if role == "rubric" else f" includes sun {len(tokens)}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(system.context, "text", repeating)
        leaking = make_batch(system, "rubric", 0, 0)
    assert leaking.rollouts == [] and leaking.metrics["pairs/rubric_leaked"] == 12.0
    assert (
        "pairs/rubric_leaked"
        not in make_batch(system_of("pairs.temporal=0", "pairs.conditioned=1", ELSEWHERE[1]), "rubric", 0, 0).metrics
    )


# ----------------------------------------------------------------------------------------------------------------- panels


def test_a_panels_rewards_are_those_of_its_judges_margins() -> None:
    system = system_of(*ORACLES, "panel.aggregate=mean_minus_variance")
    answers = make_batch(system, "policy", 0, 0)
    assert all(len(row["judge"]["parts"]) == 3 for row in answers.rollouts)
    batch = make_batch(system, "rubric", 1, 1)
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in batch.rollouts:
        groups.setdefault(row["group"], []).append(row)
    disagreed = 0
    for group in groups.values():
        margins = [row.get("margins", [0.0] * 3) for row in group]
        for row in group:
            if "margins" in row:
                both = [row[f"judge_{side}"]["parts"] for side in ("accepted", "rejected")]
                assert row["margins"] == [a - b for a, b in zip(*both)]
                disagreed += len(set(row["margins"])) > 1
        expected = panel_rewards(margins, [row["parts"]["format"] for row in group], system.cfg.rubric, system.cfg.panel)
        assert [row["reward"] for row in group] == expected
    assert all(batch.metrics[f"panel/failure_share_{i}"] == answers.metrics[f"panel/failure_share_{i}"] == 0 for i in range(3))
    assert disagreed and 0 <= batch.metrics["panel/agreement"] < 1
    assert {f"panel/pair_accuracy_{i}" for i in range(3)} <= batch.metrics.keys()


def test_the_judge_of_a_panel_that_fails_is_told_by_its_number() -> None:
    system = system_of(*ORACLES, "panel.judges.1.oracle_failure_rate=0.3")
    row = make_batch(system, "policy", 0, 0).metrics
    assert row["panel/failure_share_2"] == row["judge/failure_share"] > 0.1
    assert row["panel/failure_share_0"] == row["panel/failure_share_1"] == 0


# -------------------------------------------------------------------------------------------------------- several policies


def test_policies_take_turns_in_giving_the_pairs() -> None:
    cfg = system_of("policies.0.source=tiny", "policies.1.source=tiny", "generator.mode=two").cfg
    found = [(s.name, s.role, s.policy, s.cycle) for s in stages(cfg)]
    names = ["policy", "policy_1", "policy_2"]
    assert found == [
        entry
        for cycle in range(3)
        for entry in [*((name, name, name, cycle) for name in names), ("rubric", "rubric", names[cycle], cycle)]
    ]


@pytest.fixture(scope="module")
def two() -> System:
    return system_of("policies.0.source=tiny", "policies.0.system_prompt=write 3 words", "generator.mode=two")


def test_each_policy_has_its_own_answers_prompts_and_store(two: System) -> None:
    context, asked = two.context, set[str]()
    generate = Context.generate

    def listening(self: Context, role: str, requests: list[Any]) -> Any:
        asked.update(f"{role} as {r.role}" for r in requests)
        return generate(self, role, requests)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Context, "generate", listening)
        batches = {name: policy_batch(context, Step(i, 0, 0, name, name)) for i, name in enumerate(("policy", "policy_1"))}
    assert asked == {f"{name} as {name}" for name in ("policy", "policy_1", "rubric")}  # the role is part of the noise
    held = {entry.slot: entry for entry in context.buffer._all()}
    assert sorted(held) == list(range(8))  # four slots each
    for i, (name, batch) in enumerate(batches.items()):
        assert all(row["role"] == name for row in batch.rollouts)
        assert all(row["prompt_ids"] == context.answer_prompt(row["question"], name) for row in batch.rollouts)
        stored = {held[4 * i + slot].question for slot in range(4)}
        assert stored <= {row["question"] for row in batch.rollouts} | stored and stored
    assert context.answer_prompt("write", "policy_1") != context.answer_prompt("write")
    # Their pairs: the fresh answer and the stored one are the same policy's.
    mine = {tuple(held[4 + slot].tokens.tolist()) for slot in range(4)}
    pairs = pairs_of(rubric_batch(context, Step(2, 1, 0, "rubric", "policy_1")).rollouts)
    assert pairs and {tuple(pair["rejected_ids"]) for pair in pairs.values()} <= mine
    assert {fingerprint(learner.state.params) for learner in two.learners.values()} == {
        fingerprint(two.learners["policy"].state.params)
    }
    assert set(two.learners) == {"policy", "policy_1", "rubric"}


def test_noise_differs_between_policies_of_the_same_weights(two: System) -> None:
    context, question = two.context, "write 3 words"
    ids = context.answer_prompt(question)
    asked = {
        name: context.generate(name, [context.request(ids, 8, "answer", name, 0, two.cfg.answer, slot=0)])[0]
        for name in ("policy", "policy_1")
    }
    assert [c.tokens.tolist() for c in asked["policy"]] != [c.tokens.tolist() for c in asked["policy_1"]]
