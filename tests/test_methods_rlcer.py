"""RLCER: rewards of both roles against NumPy, from votes and correctness; what gives no reward; the whole loop."""

from __future__ import annotations

import pathlib
import sys
import types

import numpy as np
import pytest
from train_support import run, same_bits, tiny

from coevo_jax.errors import UserError
from coevo_jax.judges import JudgeItem, points
from coevo_jax.methods import rlcer
from coevo_jax.methods.members import Member
from coevo_jax.records.facts import Facts
from coevo_jax.records.verdicts import Verdict, failed
from coevo_jax.rubrics import Criterion, Rubric, parse_rubric
from coevo_jax.text.parse import Parsed

VERIFIER = '''
def score(record, text):
    """Right where the answer begins with the word that the question asks for, or is long where it asks for none."""
    words, wanted = text.split(), record["prompt"].split()
    first = wanted[wanted.index("first") + 1] if "first" in wanted else ""
    return float(bool(words) and (words[0] == first if first else len(words) > 3))
'''
MODE = ("schedule.mode=rlcer", "schedule.verifier=rlcer_verifier:score", "schedule.cycles=1")


@pytest.fixture(autouse=True)
def verifier(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rlcer_verifier.py").write_text(VERIFIER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "rlcer_verifier", raising=False)


def by_hand(points_M, votes_GxM, correct_G, own):
    """(share of valid criteria, r_cot of answer `own` or None)."""
    valid = [votes_GxM[:, k].std() > 0 and np.corrcoef(votes_GxM[:, k], correct_G)[0, 1] > 0.2 for k in range(votes_GxM.shape[1])]
    chosen = [(p, v) for p, v, ok in zip(points_M, votes_GxM[own], valid) if ok]
    low, high = sum(p for p, _ in chosen if p < 0), sum(p for p, _ in chosen if p > 0)
    cot = (sum(p * v for p, v in chosen) - low) / (high - low) if chosen else None
    return float(np.mean(valid)), cot


CORRECT = np.asarray([1.0, 0.0, 1.0, 0.0])
VOTES = np.asarray([[1, 1, 0, 0.5], [0, 1, 1, 0.5], [1, 0, 0, 0.5], [0, 0, 1, 0.5]])
RUBRIC = Rubric(tuple(Criterion(f"c{i}", w) for i, w in enumerate((3.0, 2.0, -4.0, 1.0))))


def rewarded(parsed=None, verdicts=None, own=0, correct=CORRECT, *overrides):
    ctx = types.SimpleNamespace(cfg=tiny(*MODE, *overrides))
    member, author = (Member(None, "", None, parts={"outcome": 1.0}) for _ in range(2))
    verdicts = {j: Verdict("ok", 0.5, "", tuple(row)) for j, row in enumerate(VOTES)} if verdicts is None else verdicts
    rlcer._set_rewards(ctx, member, author, parsed or Parsed("ok", RUBRIC), verdicts, own, correct, Facts())
    return member, author


@pytest.mark.parametrize("own", range(4))
def test_rewards_by_hand(own):
    right = np.asarray([1.0, 0.0, 0.0, 0.0])
    share, cot = by_hand([3, 2, -4, 1], VOTES, right, own)
    member, author = rewarded(own=own, correct=right)
    assert share == 0.5 and member.reward == pytest.approx((1 if right[own] else -1) + cot)
    assert author.reward == pytest.approx(share + 1) and member.terms == {"outcome": 2 * right[own] - 1, "cot": cot}
    weighted, _ = rewarded(None, None, own, right, "rlcer.cot_weight=0.5", "rlcer.outcome_weight=2")
    assert weighted.reward == pytest.approx(2 * (2 * right[own] - 1) + 0.5 * cot)


def test_what_gives_no_reward():
    member, author = rewarded(Parsed("parse_fail", None, "no JSON"))
    assert member.reward is None and author.reward == 0.0  # an outcome of the writer
    member, author = rewarded(correct=np.ones(4))
    assert member.reward is None and author.reward is None  # validity is undefined: never 'keep all'
    ok = {j: Verdict("ok", 0.5, "", tuple(row)) for j, row in enumerate(VOTES)}
    member, author = rewarded(verdicts=ok | {0: failed("timeout")})
    assert member.reward is None and author.reward == pytest.approx(1 + 0.25)  # the judge failed on this answer alone
    member, author = rewarded(verdicts={j: failed("timeout") for j in range(4)})
    assert member.reward is None and author.reward is None
    member, author = rewarded(verdicts={j: Verdict("ok", 0.5, "", (0.0, 1.0, 0.0, 1.0)) for j in range(4)})
    assert member.reward is None and author.reward == 1.0  # readable, and no criterion that tells right from wrong
    member, author = rewarded(None, None, 0, CORRECT, "rlcer.correlation=1.0")
    assert member.reward is None and author.reward == 1.0


def test_the_judge_of_points_reads_whole_lists_and_sees_no_points():
    item = JudgeItem("q", RUBRIC, "a", 0)
    verdict = points.read('{"judgement": [true, false, true, true]}', item, False, False)
    assert verdict.parts == (1.0, 0.0, 1.0, 1.0) and verdict.score == 0.75
    assert points.read('{"judgement": [true]}', item, False, False).status == "parse_fail"
    assert points.slots(item) == {"question": "q", "answer": "a", "rubric": "1. c0\n2. c1\n3. c2\n4. c3"}


def test_points_are_a_schema_among_the_others():
    text = '{"rubrics": [' + ", ".join(f'{{"category": "method", "criterion": "c{i}", "points": {p}}}' for i, p in enumerate((5, -5, 1, 2, 3))) + "]}"  # fmt: skip # noqa: E501
    found = parse_rubric(text, tiny(*MODE, "rubric.schema=points").rubric)
    assert [c.weight for c in found.value.criteria] == [5, -5, 1, 2, 3] and found.value.criteria[0].title == "method"


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["schedule.order=generator_first"], "none of RLCER's"),
        (["judge.protocol=json_score", "judge.source=tiny", "judge.sampling.max_new_tokens=48"], "no score of each criterion"),
        (["rubric.source=predefined", "schedule.order=policy_only"], "written by the run's own weights"),
        (["generator.mode=two", "generator.frozen=true"], "trains it"),
        (["schedule.group=65"], "every rubric is checked on every answer"),
        (["sampler.max_prompt=70"], "up to 76 tokens, and sampler.max_prompt=70"),
        (["update.pack_length=120"], "question, answer and rubric, 124 tokens"),
        (["schedule.verifier="], "has no verifier"),
        (["schedule.mode=evolm", "rubric.schema=points"], "weights below 0"),
    ],
)
def test_refused(overrides, what):
    with pytest.raises(UserError, match=what):
        tiny(*MODE, *overrides)


@pytest.mark.slow
def test_evolving_in_the_whole_loop_and_resumed(tmp_path: pathlib.Path) -> None:
    cfg = (*MODE, "schedule.k=3", "schedule.prompts=6", "run.save_every=2", "optimizer.lr=1e-3")
    whole = run(tmp_path / "whole", *cfg)
    assert [row["stage"] for row in whole.rows] == ["rlcer"] * 3
    assert any(row["update/skipped"] == 0 for row in whole.rows) and any(row["writer/update/skipped"] == 0 for row in whole.rows)
    steps = sum((row["update/skipped"] == 0) + (row["writer/update/skipped"] == 0) for row in whole.rows)
    assert int(whole.system.learners["policy"].state.step) == steps  # two optimizer steps an update
    check_rows(whole)
    run(tmp_path / "run", *cfg, stop_after=1)
    again = run(tmp_path / "run", *cfg)
    assert again.comparable == whole.comparable and same_bits(again.params, whole.params)
    assert again.rollouts() == whole.rollouts()


def check_rows(done) -> None:
    """The dumped rewards follow from the dumped votes."""
    writers = {(r["update"], r["group"], r["sample"]): r for r in done.rollouts(role="rubric")}
    answers, checked = done.rollouts(role="policy"), 0
    outcome = {(r["update"], r["group"], r["sample"]): r["parts"]["outcome"] for r in answers}
    for row in answers:
        writer = writers.get((row["update"], row["group"], row["sample"]))
        if writer is None or "votes" not in writer:
            assert row["reward"] is None
            continue
        votes = np.asarray([writer["votes"][str(j)] for j in range(len(writer["votes"]))])
        correct = np.asarray([outcome[row["update"], row["group"], j] for j in range(len(votes))])
        weights = [c.weight for c in parse_rubric(writer["completion"], done.system.cfg.rubric).value.criteria]
        share, cot = by_hand(weights, votes, correct, row["sample"])
        assert writer["reward"] == pytest.approx(share + 1)
        assert row["reward"] == (None if cot is None else pytest.approx(2 * row["parts"]["outcome"] - 1 + cot))
        checked += 1
    assert checked > 10


@pytest.mark.slow
def test_plain_rlcer_trains_answers_alone_and_two_models_each_its_own(tmp_path: pathlib.Path) -> None:
    plain = run(tmp_path / "plain", *MODE, "schedule.k=1", "schedule.order=policy_only", "schedule.prompts=6")
    assert not any(name.startswith("writer/") for name in plain.rows[0]) and not plain.rollouts(role="rubric")
    two = run(tmp_path / "two", *MODE, "schedule.k=1", "generator.mode=two", "schedule.prompts=6")
    row, steps = two.rows[0], {name: int(learner.state.step) for name, learner in two.system.learners.items()}
    assert steps == {"policy": 1 - row["update/skipped"], "rubric": 1 - row["writer/update/skipped"]} and sum(steps.values()) > 0
