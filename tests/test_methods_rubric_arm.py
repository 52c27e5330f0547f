"""Rubric-ARM's phases on roles that say what a test wants: rewards, slots, failures, kept lists, order of the schedule."""

from __future__ import annotations

import dataclasses

import pytest
from arm_support import LIST, RUBRIC, arm, arm_system, judgement, says, shown

from coevo_jax.config.validate import validate
from coevo_jax.errors import UserError
from coevo_jax.judges import JudgeItem
from coevo_jax.methods import arm_policy, rubric_arm
from coevo_jax.methods.arm_judge import ArmJudge, better_slot, judge_request
from coevo_jax.methods.arm_measure import measure_batch, vote
from coevo_jax.methods.stage import Step
from coevo_jax.rubrics import numbered_list
from coevo_jax.system import System


@pytest.fixture(scope="module")
def system() -> System:
    return arm_system("advantage.max_resample=0")


@pytest.fixture(autouse=True)
def nothing_kept(system: System) -> None:
    system.context.stores[rubric_arm.LISTS].clear()


def step(role: str, round_: int = 0, update: int = 5) -> Step:
    return Step(update, 0, round_, role)


def keep_lists(system: System, round_: int = 0, text: str = LIST) -> None:
    with says(system, rubric=lambda request, i: text):
        while sum(len(system.context.stores[rubric_arm.LISTS].of(s)) for s in range(4)) < 16:
            rubric_arm.cache_batch(system.context, step("rubric", round_))


# ------------------------------------------------------------------------------------------------------------ schedule


def names(*overrides: str) -> list[str]:
    return [f"{stage.name} {stage.cycle} x{stage.updates}" for stage in rubric_arm.stages(arm(*overrides))]


def test_the_schedule() -> None:
    round_ = ["cache {} x1", "judge {} x3", "generator {} x3"]
    rounds = [name.format(i) for i in range(2) for name in round_]
    assert names() == ["measure_start 0 x1", *rounds, "measure 1 x1", "policy 2 x3"]
    warm = names("arm.warmup_updates=2", "arm.policy=none")
    assert warm[:4] == ["measure_start 0 x1", "warm_generator 0 x2", "warm_judge 0 x2", "measure_warm 0 x1"] and len(warm) == 11


def test_the_other_order_keeps_lists_of_the_generator_that_it_has_trained() -> None:
    found = names("arm.order=generator_first", "arm.measure=none", "arm.policy=none")
    assert found == [f"{name} {i} {n}" for i in range(2) for name, n in (("generator", "x3"), ("cache", "x1"), ("judge", "x3"))]


def test_rules_have_no_phase_of_a_judge() -> None:
    found = names("arm.judge=oracle", "arm.policy=none", "arm.measure=rounds")
    assert found == ["measure_start 0 x1", "generator 0 x3", "measure 0 x1", "generator 1 x3", "measure 1 x1"]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        (["rubric.schema=json_criteria"], "rubric.schema"),
        (["generator.mode=single"], "generator.mode"),
        (["generator.frozen=true"], "generator.frozen"),
        (["warmup.updates=2"], "warmup.updates"),
        (["arm.judge=oracle", "arm.judge_lr=1e-3"], "arm.judge"),
        (["arm.judge_prompts=8"], "arm.judge_prompts"),
        (["arm.part=2"], "arm.part"),
        (["arm.order=judge_last"], "arm.order"),
        (["arm.judge_sampling.temperature=0"], "arm.judge_sampling.temperature"),
        (["schedule.mode=reward", "generator.mode=single"], "arm"),
        (["arm.rounds=0", "arm.policy=none", "generator.frozen=true"], "arm.rounds"),
    ],
)
def test_refused_configs(changes: list[str], where: str) -> None:
    with pytest.raises(UserError) as error:
        arm(*changes)
    assert where in error.value.where


# ------------------------------------------------------------------------------------------------------------ the judge


def test_golden_rewards_of_the_judge(system: System) -> None:
    """1 for the preferred answer's slot, 1 for a whole structure; what can't be read is 0 and no failure."""
    keep_lists(system)
    broken = judgement("A").replace("## Analysis of B", "")
    texts = [judgement("A"), judgement("B"), broken, (judgement("A"), "length")]
    with says(system, judge=lambda request, i: texts[i]):
        batch = rubric_arm.judge_batch(system.context, step("judge"))
    rows = batch.rollouts
    assert len(rows) == 16 and {row["better_in"] for row in rows} <= {"A", "B"}
    for row in rows:
        a = row["better_in"] == "A"
        assert row["reward"] == [1.0 + a, 1.0 + (not a), float(a), 0.0][row["sample"]], row["sample"]
        assert row["winner"] == ["A", "B", "A", None][row["sample"]] and row["trained"]
        first, second = row["answers"]
        shown_text = row["prompt"]
        assert shown_text.index(f"A\n{first}") < shown_text.index(f"B\n{second}")
    m = batch.metrics
    assert m["judge/unread_share"] == m["judge/truncated_share"] == 0.25 and m["judge/format_share"] == 0.5
    assert m["arm/accuracy"] == pytest.approx(sum(r["parts"]["correct"] for r in rows) / 16)
    assert m["groups/failed_sample_share"] == 0.0


def test_the_slot_holds_the_preferred_answer(system: System) -> None:
    keep_lists(system)
    pairs = {r["id"]: r for r in system.context.streams["arm_judge_0"].prompts.records}
    with says(system, judge=lambda request, i: judgement("AB"[i % 2])):
        rows = rubric_arm.judge_batch(system.context, step("judge")).rollouts
    for row in rows:
        pair = pairs[row["record"]]
        assert row["answers"][row["better_in"] == "B"] == pair["chosen"]
        assert row["better_in"] == better_slot(system.cfg.seed, 0, row["record"])
    slots = [better_slot(1, t, str(i)) for t in range(2) for i in range(400)]
    assert 0.4 < slots.count("A") / 800 < 0.6 and slots[:400] != slots[400:]  # drawn anew in each round


def test_without_the_format_reward_structure_counts_for_nothing() -> None:
    system = arm_system("arm.format_weight=0", "advantage.max_resample=0")
    keep_lists(system)
    with says(system, judge=lambda request, i: judgement("A") if i else "Winner: Response A"):
        rows = rubric_arm.judge_batch(system.context, step("judge")).rollouts
    assert all(row["reward"] == float(row["better_in"] == "A") for row in rows)


# ------------------------------------------------------------------------------------------------------------ kept lists


def test_lists_are_kept_once_a_pair_and_made_anew_each_round(system: System) -> None:
    keep_lists(system)
    store = system.context.stores[rubric_arm.LISTS]
    ids = [record["id"] for slot in range(4) for record in store.of(slot)]
    part = {r["id"] for r in system.context.streams["arm_judge_0"].prompts.records}
    assert sorted(ids) == sorted(part) and len(ids) == 16
    with pytest.raises(RuntimeError, match="no list was kept"):
        rubric_arm.judge_batch(system.context, step("judge", 1))  # a list of round 0 never serves in round 1
    with says(system, rubric=lambda request, i: LIST.replace("owl", "fox")):
        rubric_arm.cache_batch(system.context, step("rubric", 1))
    kept = [record for slot in range(4) for record in store.of(slot)]
    assert {record["round"] for record in kept} == {1} and all("fox" in record["list"] for record in kept)


def test_a_pair_whose_list_stays_invalid_leaves_the_judges_phase(system: System) -> None:
    tries: list[float] = []

    def write(request, i):
        tries.append(request.sampling.temperature)
        return "no list"

    with says(system, rubric=write):
        batch = rubric_arm.cache_batch(system.context, step("rubric"))
    assert sorted(set(tries)) == [0.1, 0.3, 0.6, 1.0] and batch.metrics["rubric/prompts_dropped"] == 16
    with says(system, judge=lambda request, i: judgement("A")):
        batch = rubric_arm.judge_batch(system.context, step("judge"))
    assert batch.samples == [] and batch.metrics["arm/no_list_share"] == 1.0


# ------------------------------------------------------------------------------------------------------------ the generator


def test_a_judge_that_always_says_a_pays_by_the_slot_alone(system: System) -> None:
    """Accuracy one half over slots that are shuffled, and no group of a pair whose members differ."""
    with says(system, rubric=lambda request, i: LIST, judge=lambda request, i: judgement("A")) as asked:
        batch = rubric_arm.generator_batch(system.context, step("rubric"))
    assert all(row["reward"] == float(row["better_in"] == "A") for row in batch.rollouts) and not batch.samples
    greedy = [request for request in asked if request.role == "judge"]
    assert len(greedy) == 4 and all(r.n == 1 and r.sampling.temperature == 0 for r in greedy)  # equal lists are asked once
    test = system.context.streams["arm_test"].prompts.records
    with says(system, rubric=lambda request, i: LIST, judge=lambda request, i: judgement("A")):
        m = measure_batch(system.context, step("judge")).metrics
    share = sum(better_slot(system.cfg.seed, 0, r["id"]) == "A" for r in test) / len(test)
    assert m["test/accuracy"] == m["test/vote_accuracy"] == share and m["test/judge/says_a"] == 1.0
    assert (m["test/accuracy_a"] + m["test/accuracy_b"]) / 2 == 0.5
    assert m["test/accuracy_both_orders"] == m["test/consistent_share"] == 0.0 and m["test/judge/format_share"] == 1.0


def test_golden_rewards_of_the_generator(system: System) -> None:
    """Right 1, wrong 0, unreadable list 0 without a question; a verdict that fails leaves its list out of the group."""
    lists = [LIST, LIST.replace("owl", "fox"), "no list", LIST.replace("owl", "ant")]

    def verdict(request, i):
        text = shown(system, request)
        return "nothing" if "includes ant" in text else judgement("A" if "includes owl" in text else "B")

    with says(system, rubric=lambda request, i: lists[i], judge=verdict) as asked:
        batch = rubric_arm.generator_batch(system.context, step("rubric"))
    for row in batch.rollouts:
        a = row["better_in"] == "A"
        assert row["reward"] == [float(a), float(not a), 0.0, None][row["sample"]]
        assert row["trained"] == (row["sample"] != 3) and ("judge" in row) == (row["sample"] != 2)
    for group in range(4):  # the group's statistics are those of the three that are left
        values = [row["advantage"] for row in batch.rollouts if row["group"] == group and row["trained"]]
        assert len(values) == 3 and sum(values) == pytest.approx(0) and max(values) == pytest.approx(2**0.5, rel=1e-4)
    calls = [r for r in asked if r.role == "judge"]
    assert {r.sampling.temperature for r in calls} == {0.0, 1.0} and sum(r.sampling.temperature == 1.0 for r in calls) == 4
    assert batch.metrics["judge/failure_share"] == pytest.approx(1 / 3) and batch.metrics["judge/alarm"] == 1.0


# ------------------------------------------------------------------------------------------------------------ a frozen judge


def item(number: int = 0) -> JudgeItem:
    return JudgeItem(
        "write words with owl", RUBRIC, "owl ant", judge_request(0, 0, number), other=f"fox {['ant', 'bee'][number]}"
    )


def test_a_verdict_that_cannot_be_read_is_asked_for_once_more_at_temperature_1(system: System) -> None:
    texts = iter(["?", judgement("B")])
    with says(system, judge=lambda request, i: next(texts)) as asked:
        (found,) = ArmJudge(system.context).judge([item()], 3)
    assert found.score == 0.0 and [r.sampling.temperature for r in asked] == [0.0, 1.0] and asked[0].request != asked[1].request
    with says(system, judge=lambda request, i: (judgement("A"), "length")) as asked:
        (found,) = ArmJudge(system.context).judge([item()], 3)
    assert found.status == "truncated" and found.score is None and len(asked) == 2


def test_the_order_of_the_items_changes_no_verdict(system: System) -> None:
    items = [item(0), item(1)]
    winner = lambda request, i: judgement("A" if "fox ant" in shown(system, request) else "B")  # noqa: E731
    with says(system, judge=winner):
        one = ArmJudge(system.context).judge(items, 3)
        two = ArmJudge(system.context).judge(items[::-1], 3)
    assert [v.score for v in one] == [1.0, 0.0] == [v.score for v in two[::-1]]


def test_rules_judge_by_the_list(system: System) -> None:
    context = dataclasses.replace(system.context, cfg=arm("arm.judge=oracle"))
    items = [
        item(0),
        dataclasses.replace(item(1), answer="fox bee", other="owl"),
        dataclasses.replace(item(1), answer="ant", other="ant"),
    ]
    assert [v.score for v in ArmJudge(context).judge(items, 0)] == [1.0, 0.0, 0.5]


def test_votes() -> None:
    assert [vote(v) for v in (["A", "B", "A"], ["A", "B"], [None, "B", None], [], [None])] == ["A", None, "B", None, None]


# ------------------------------------------------------------------------------------------------------------ the policy


def policy_rewards(system: System, judge, answers=("owl ant", "owl bee", "owl cat", "owl dog")) -> list:
    say = lambda request, i: "owl" if request.n == 1 else answers[i]  # noqa: E731
    with says(system, rubric=lambda request, i: LIST, judge=judge, policy=say):
        batch = arm_policy.policy_batch(system.context, Step(5, 0, 2, "policy"))
    assert all(row["greedy"] == "owl" for row in batch.rollouts)
    return [row["reward"] for row in batch.rollouts][:4]


def test_a_judge_that_always_says_a_is_worth_one_half(system: System) -> None:
    assert policy_rewards(system, lambda request, i: judgement("A")) == [0.5] * 4
    assert policy_rewards(system, lambda request, i: judgement("B")) == [0.5] * 4


def test_golden_rewards_of_the_policy(system: System) -> None:
    """Both orders name it 1, one 1/2, none 0, one that fails: left out; an answer equal to the greedy one 1/2, unasked."""

    def verdict(request, i):
        first, _, second = shown(system, request).partition("\nA\n")[2].partition("\n1.")[0].partition("\nB\n")
        own_first = first.strip() != "owl"
        answer = first.strip() if own_first else second.strip()
        if answer == "owl ant":
            return judgement("A" if own_first else "B")
        if answer == "owl bee":
            return judgement("B" if own_first else "A")
        return "?" if own_first else judgement("B")

    assert policy_rewards(system, verdict, ("owl ant", "owl bee", "owl cat", "owl")) == [1.0, 0.0, None, 0.5]


def test_the_list_that_is_shown_is_the_one_that_was_read() -> None:
    assert numbered_list.render(RUBRIC) == LIST
    validate(arm())
