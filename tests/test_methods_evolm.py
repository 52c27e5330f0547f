"""EvoLM's two phases, a batch at a time: what failures do, which rubrics are asked for again, golden rewards, identities."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from train_support import make_batch, system_of

from coevo_jax.config import RubricConfig
from coevo_jax.judges import JudgeItem
from coevo_jax.judges.world import OracleJudge
from coevo_jax.methods.context import KINDS, request_id
from coevo_jax.methods.evolm import rubric_reward
from coevo_jax.records.verdicts import Verdict, failed
from coevo_jax.system import System

# ---------------------------------------------------------------------------------------------------------------- rewards


def test_the_margin_reward_of_the_paper() -> None:
    """M5."""
    cfg = RubricConfig(reward="margin", alpha=0.7)
    assert rubric_reward(0.8, 0.35, 1.0, cfg) == pytest.approx(0.615, abs=1e-12)
    assert rubric_reward(0.35, 0.8, 1.0, cfg) == pytest.approx(-0.015, abs=1e-12)


@pytest.mark.parametrize(
    ("kind", "better", "equal", "worse"),
    [
        ("margin", 0.45, 0.0, -0.45),
        ("binary", 1.0, 0.0, 0.0),
        ("separation", 0.7 + 0.3 * 0.45, 0.0, 0.0),
        ("log_sigmoid", -0.4932489, -math.log(2), -0.9432489),
    ],
)
def test_the_four_rewards(kind: str, better: float, equal: float, worse: float) -> None:
    plain = RubricConfig(reward=kind, alpha=1.0)
    blend = RubricConfig(reward=kind, alpha=0.7)
    for (plus, minus), base in zip([(0.8, 0.35), (0.5, 0.5), (0.35, 0.8)], [better, equal, worse]):
        assert rubric_reward(plus, minus, 1.0, plain) == pytest.approx(base, abs=1e-7)
        assert rubric_reward(plus, minus, 1.0, blend) == pytest.approx(0.7 * base + 0.3, abs=1e-7)


def test_an_invalid_rubric_has_reward_0_by_the_margin() -> None:
    assert rubric_reward(0.0, 0.0, 0.0, RubricConfig()) == 0.0


@pytest.mark.parametrize("kind", ["margin", "binary", "separation", "log_sigmoid"])
def test_an_invalid_rubric_never_beats_a_valid_one_that_tells_the_answers_apart(kind: str) -> None:
    cfg = RubricConfig(reward=kind)
    assert rubric_reward(0.0, 0.0, 0.0, cfg) < rubric_reward(0.6, 0.5, 1.0, cfg)


# ------------------------------------------------------------------------------------------------------------- identities


def test_request_ids_are_unique_and_below_2_to_56() -> None:
    slots, few, samples = (0, 1, 63, 2**24 - 1), (0, 1, 255), (0, 1, 2**12 - 1)
    ids = [request_id(*identity) for identity in itertools.product(KINDS, slots, few, samples, few)]
    assert len(set(ids)) == len(ids) and min(ids) >= 0 and max(ids) < 2**56


def test_the_numbers_of_the_kinds_never_change() -> None:  # they are part of the noise of every run
    order = ["answer", "rubric", "policy_rubric", "accepted", "rejected", "infer", "pair_rubric", "judge", "heldout"]
    assert {name: i for i, name in enumerate(order)} == KINDS


# ----------------------------------------------------------------------------------------------------------- policy phase


@dataclasses.dataclass
class Flaky:
    """The oracle, failing on the items that `fails` names. It notes what it was asked."""

    fails: Callable[[JudgeItem], bool] = lambda item: False
    name: str = "flaky"
    asked: list[JudgeItem] = dataclasses.field(default_factory=list)

    def judge(self, items: list[JudgeItem], update: int) -> list[Verdict]:
        assert len({item.request for item in items}) == len(items)
        self.asked += items
        found = OracleJudge().judge(items, update)
        return [failed("timeout", "too slow") if self.fails(item) else v for item, v in zip(items, found)]


@pytest.fixture
def system() -> System:
    return system_of()


def by_group(rollouts: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in rollouts:
        groups.setdefault(row["group"], []).append(row)
    return groups


def test_a_failed_verdict_leaves_its_group_and_is_never_0(system: System) -> None:
    whole = make_batch(system_of(), "policy", 0, 0)
    group = next(r["group"] for r in whole.rollouts if r["trained"])  # a group of the first attempt: its id is its slot
    broken = request_id("judge", group, 0, 1)
    system.context.judge = Flaky(lambda item: item.request == broken)
    batch = make_batch(system, "policy", 0, 0)
    rows = by_group(batch.rollouts)[group]
    assert [r["reward"] is None for r in rows] == [False, True, False, False]
    assert rows[1]["judge"]["status"] == "timeout" and rows[1]["parts"] == {}
    assert not rows[1]["trained"] and rows[1]["advantage"] == 0.0
    # the baseline is the mean of the survivors
    left = [r for r in rows if r["reward"] is not None]
    mean = np.mean([r["reward"] for r in left])
    np.testing.assert_allclose([r["advantage"] for r in left], [r["reward"] - mean for r in left], atol=1e-12)
    assert (group, 1) not in {(s.group, s.index) for s in batch.samples}
    assert batch.metrics["judge/failure_share"] == pytest.approx(1 / batch.metrics["judge/verdicts"])
    assert batch.metrics["judge/timeout_share"] == batch.metrics["judge/failure_share"]
    assert batch.metrics["groups/failed_sample_share"] == pytest.approx(1 / len(batch.rollouts))
    assert batch.metrics["reward/mean"] == pytest.approx(
        np.mean([r["reward"] for r in batch.rollouts if r["reward"] is not None])
    )


def test_a_group_below_two_survivors_is_dropped_and_drawn_again(system: System) -> None:
    alive = {request_id("judge", 0, 0, 2)}
    first = {request_id("judge", 0, 0, i) for i in range(4)}
    system.context.judge = Flaky(lambda item: item.request in first - alive)
    batch = make_batch(system, "policy", 0, 0)
    groups = by_group(batch.rollouts)
    assert [r["trained"] for r in groups[0]] == [False] * 4 and [r["advantage"] for r in groups[0]] == [0.0] * 4
    again = [r for r in batch.rollouts if r["slot"] == 0 and r["group"] != 0]
    assert again and {r["group"] for r in again} <= {4, 8} and again[0]["question"] != groups[0][0]["question"]
    assert batch.metrics["groups/dropped_share"] > 0


def test_all_failed_trains_nothing(system: System) -> None:
    system.context.judge = Flaky(lambda item: True)
    batch = make_batch(system, "policy", 0, 0)
    assert batch.samples == [] and "reward/mean" not in batch.metrics
    assert batch.metrics["judge/failure_share"] == 1.0 and batch.metrics["groups/dropped_share"] == 1.0
    assert batch.metrics["judge/alarm"] == 1.0
    assert all(r["reward"] is None for r in batch.rollouts)


def test_the_alarm_is_silent_below_its_share(system: System) -> None:
    assert make_batch(system, "policy", 0, 0).metrics["judge/alarm"] == 0.0


@pytest.fixture
def requests(system: System, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every request that the engine got, in order."""
    engine, seen = system.engines[0], []
    generate = engine.generate

    def listening(params: Any, asked: Any, **kwargs: Any) -> Any:
        seen.extend(asked)
        return generate(params, asked, **kwargs)

    monkeypatch.setattr(engine, "generate", listening)
    return seen


def kind_of(request: Any) -> str:
    return list(KINDS)[request.request >> 52]


def retry_of(request: Any) -> int:
    return request.request >> 44 & 0xFF


def slot_of(request: Any) -> int:
    return request.request >> 12 & 0xFFFFFF


def test_an_invalid_rubric_is_written_again_colder(system: System, requests: list[Any]) -> None:
    batch = make_batch(system, "policy", 0, 0)
    written = [r for r in requests if kind_of(r) == "policy_rubric"]
    by_retry = {i: [r for r in written if retry_of(r) == i] for i in range(4)}
    assert {r.sampling.temperature for r in by_retry[0]} == {1.0}
    for i, temperature in enumerate((0.6, 0.3, 0.1), start=1):
        assert {r.sampling.temperature for r in by_retry[i]} <= {temperature}
        assert {slot_of(r) for r in by_retry[i]} <= {slot_of(r) for r in by_retry[i - 1]}
    assert by_retry[1]  # about half of the small world's rubrics are invalid
    assert batch.metrics["rubric/retried"] == sum(len(by_retry[i]) for i in (1, 2, 3))
    assert len({r.request for r in requests}) == len(requests)
    assert len({(r["slot"], r["group"]) for r in batch.rollouts if r["rubric"]}) == batch.metrics["groups/made"]


def test_a_prompt_that_never_gets_a_valid_rubric_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    system = system_of("rubric.min_criteria=50")
    judge = system.context.judge = Flaky()
    batch = make_batch(system, "policy", 0, 0)
    assert batch.samples == [] and batch.rollouts == [] and judge.asked == []
    attempts = 1 + system.cfg.advantage.max_resample
    assert batch.metrics["rubric/prompts_dropped"] == 4 * attempts
    assert batch.metrics["rubric/retried"] == 3 * 4 * attempts and batch.metrics["rubric/valid_share"] == 0.0
    assert batch.metrics["groups/dropped_share"] == 1.0
    assert len(system.context.buffer) == 4  # their answers are stored all the same


def test_invalid_rubrics_of_all_prompts_are_written_again_in_one_call_a_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step costs the same for one row as for all slots, so calls are what count."""
    system = system_of("rubric.min_criteria=50", "advantage.max_resample=0")
    engine, calls = system.engines[0], list[list[Any]]()
    generate = engine.generate

    def listening(params: Any, asked: Any, **kwargs: Any) -> Any:
        calls.append(list(asked))
        return generate(params, asked, **kwargs)

    monkeypatch.setattr(engine, "generate", listening)
    make_batch(system, "policy", 0, 0)
    assert [{retry_of(r) for r in call} for call in calls] == [{0}, {1}, {2}, {3}]
    assert all(sorted(slot_of(r) for r in call) == [0, 1, 2, 3] for call in calls[1:])
    assert {kind_of(r) for r in calls[0]} == {"answer", "policy_rubric"}  # the first try rides with the answers


def test_one_rubric_judges_a_whole_group(system: System) -> None:
    judge = system.context.judge = Flaky()
    batch = make_batch(system, "policy", 0, 0)
    for group in by_group(batch.rollouts).values():
        assert len({row["rubric"] for row in group}) == 1
    by_question: dict[str, set[str]] = {}
    for item in judge.asked:
        by_question.setdefault(item.question, set()).add(item.rubric.raw)
    assert all(len(raws) == 1 for raws in by_question.values())


def test_a_group_without_variance_is_drawn_again_up_to_the_limit(system: System) -> None:
    class Same(Flaky):
        def judge(self, items: list[JudgeItem], update: int) -> list[Verdict]:
            return [dataclasses.replace(v, score=0.1 + 0.2) for v in super().judge(items, update)]

    system.context.judge = Same()
    batch = make_batch(system, "policy", 0, 0)
    assert batch.samples == [] and batch.metrics["groups/zero_variance_share"] == 1.0
    assert {r["group"] // 4 for r in batch.rollouts} == {0, 1, 2}
    assert batch.metrics["judge/tie_share"] == 1.0


def test_a_batch_trains_the_tokens_that_were_sampled(system: System) -> None:
    batch = make_batch(system, "policy", 0, 0)
    rows = {(r["group"], r["sample"]): r for r in batch.rollouts}
    assert batch.samples
    for sample in batch.samples:
        row = rows[sample.group, sample.index]
        assert list(sample.prompt) == row["prompt_ids"] and sample.completion.tolist() == row["completion_ids"]
        assert sample.advantage == row["advantage"] and sample.truncated == (row["finish"] == "length")
        assert sample.sampler_logp.shape == sample.completion.shape and (sample.sampler_logp <= 0).all()


# ----------------------------------------------------------------------------------------------------------- rubric phase


def rubric_phase(system: System) -> Any:
    """A rubric batch after one policy batch, so that the buffer holds older answers."""
    make_batch(system, "policy", 0, 0)
    return make_batch(system, "rubric", 1, 1)


def test_an_invalid_rubric_stays_in_its_group_and_the_judge_is_not_asked(system: System) -> None:
    make_batch(system, "policy", 0, 0)
    judge = system.context.judge = Flaky()
    batch = make_batch(system, "rubric", 1, 1)
    invalid = [r for r in batch.rollouts if r["rubric_status"] != "ok"]
    mixed = [g for g in by_group(batch.rollouts).values() if len({r["rubric_status"] == "ok" for r in g}) == 2]
    assert invalid and mixed
    assert all(r["reward"] == 0.0 and r["parts"] == {"format": 0.0} for r in invalid)
    assert len(judge.asked) == 2 * (len(batch.rollouts) - len(invalid))
    for group in mixed:  # it counts in the group's mean, and trains
        mean = np.mean([r["reward"] for r in group])
        np.testing.assert_allclose([r["advantage"] for r in group], [r["reward"] - mean for r in group], atol=1e-12)
        assert all(r["trained"] for r in group)


@pytest.mark.parametrize("side", [0, 1])
def test_a_judge_that_fails_on_one_answer_takes_the_rubric_out_of_its_group(side: int, system: System) -> None:
    whole = rubric_phase(system_of())
    good = next(r for r in whole.rollouts if r["rubric_status"] == "ok" and r["trained"] and r["group"] < 4)
    make_batch(system, "policy", 0, 0)
    broken = request_id("judge", good["slot"], 0, good["sample"], retry=side)
    system.context.judge = Flaky(lambda item: item.request == broken)
    batch = make_batch(system, "rubric", 1, 1)
    group = by_group(batch.rollouts)[good["group"]]
    row = group[good["sample"]]
    assert row["reward"] is None and not row["trained"] and row["parts"] == {"format": 1.0}
    assert row["judge_accepted" if side == 0 else "judge_rejected"]["status"] == "timeout"
    left = [r for r in group if r["reward"] is not None]
    assert len(left) == 3
    mean = np.mean([r["reward"] for r in left])
    np.testing.assert_allclose(sum(r["advantage"] for r in left), 0.0, atol=1e-12)
    np.testing.assert_allclose([r["advantage"] for r in left if r["trained"]], [r["reward"] - mean for r in left if r["trained"]])
    assert batch.metrics["judge/failure_share"] == pytest.approx(1 / batch.metrics["judge/verdicts"])


def test_without_stored_answers_there_is_no_temporal_pair(system: System) -> None:
    batch = make_batch(system, "rubric", 0, 0)
    assert batch.samples == [] and batch.rollouts == []
    assert batch.metrics["pairs/no_stored_answer"] == 12 and batch.metrics["pairs/missing_share"] == 1.0


def test_equal_answers_make_no_pair(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    make_batch(system, "policy", 0, 0)
    monkeypatch.setattr(system.context, "text", lambda tokens, role="policy": "The  same" if role == "policy" else "")
    batch = make_batch(system, "rubric", 1, 1)
    assert batch.rollouts == [] and batch.metrics["pairs/identical_answers"] == 12


def test_an_empty_answer_is_not_the_better_one_of_a_pair(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of a thinking policy whose reasoning never ended."""
    make_batch(system, "policy", 0, 0)
    answers = iter(["worse", " "] * 100)  # the stored answer's text is asked for first
    monkeypatch.setattr(system.context, "text", lambda tokens, role="policy": next(answers) if role == "policy" else "")
    batch = make_batch(system, "rubric", 1, 1)
    assert batch.rollouts == [] and batch.metrics["pairs/accepted_empty"] == 12


def test_the_question_is_rendered_alike_for_training_and_for_use(system: System) -> None:
    context = system.context
    assert context.rubric_prompt("write 3 words", training=True) == context.rubric_prompt("write 3 words")


def test_the_system_prompt_of_answers_is_in_no_rubric_prompt(system: System) -> None:
    other = system_of("policy.system_prompt=write 3 words").context
    assert other.rubric_prompt("write 3 words") == system.context.rubric_prompt("write 3 words")
    assert len(other.answer_prompt("write")) > len(system.context.answer_prompt("write"))
    assert len(other.conditioned_prompt("write", "cat")) > len(system.context.conditioned_prompt("write", "cat"))


def test_oracle_failures_are_counted_by_status() -> None:
    system = system_of("judge.oracle_failure_rate=0.4")
    batch = rubric_phase(system)
    shares = [batch.metrics[f"judge/{status}_share"] for status in ("parse_fail", "truncated", "timeout", "refused")]
    assert sum(shares) == pytest.approx(batch.metrics["judge/failure_share"]) and batch.metrics["judge/failure_share"] > 0.1
    failed_rows = [r for r in batch.rollouts if r["reward"] is None]
    assert failed_rows and not any(r["trained"] for r in failed_rows)
    assert batch.metrics["groups/failed_sample_share"] == pytest.approx(len(failed_rows) / len(batch.rollouts))
