"""Pairs judged side by side: what the judge sees, what its verdict means in either slot, and what the order does."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import text_support as tt
from test_judges_protocols import FakeEngine
from train_support import make_batch, system_of

from coevo_jax.config import Experiment, JudgeConfig
from coevo_jax.config.override import apply_overrides
from coevo_jax.config.validate import validate
from coevo_jax.errors import UserError
from coevo_jax.judges import JudgeItem, make_pair_judge
from coevo_jax.judges.pairwise import margin_of, sides
from coevo_jax.records.verdicts import Verdict, failed
from coevo_jax.rubrics import Criterion, Rubric
from coevo_jax.text.chat import ChatTokenizer

ORDERS = ("first", "random", "both", "agree")
RUBRIC = Rubric((Criterion("names Lima", 0.6), Criterion("is short", 0.4)))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.load(tt.make_tokenizer(tmp_path_factory.mktemp("tok"), tt.CHATML_THINKING))


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ('{"reasoning": "B is long", "winner": "A"}', 1.0),
        ("Winner: Response B", 0.0),
        ("<think>Winner: A</think>**Winner:** tie", 0.5),
        ("A or B, who knows", None),
        ('{"winner": "C"}', None),
    ],
)
def test_what_the_judge_sees_and_says(tokenizer: ChatTokenizer, said: str, score: float | None) -> None:
    engine = FakeEngine(tokenizer, say=lambda prompt, request: (said, "stop"))
    judge = make_pair_judge(JudgeConfig(pairs="pairwise", protocol="json_score", retries=0), engine, "weights", tokenizer, 0)
    assert judge is not None
    (verdict,) = judge.judge([JudgeItem("Capital of Peru?", RUBRIC, "Lima it is.", 7, other="Rather Cusco.")], 0)
    assert verdict.score == score and (verdict.status == "ok") == (score is not None)
    ((request,),) = engine.calls
    prompt = tokenizer.decode(request.prompt.tolist())
    assert (
        prompt.index("Capital of Peru?")
        < prompt.index("names Lima")
        < prompt.index("Lima it is.")
        < prompt.index("Rather Cusco.")
    )
    assert make_pair_judge(JudgeConfig(), engine, "weights", tokenizer, 0) is None


@pytest.mark.parametrize(
    ("order", "scores", "margin"),
    [
        ("first", (1.0,), 1.0),
        ("first", (0.5,), 0.0),
        ("both", (1.0, 0.0), 1.0),  # it wins from either slot
        ("both", (1.0, 1.0), 0.0),  # whoever sits in A wins
        ("both", (0.0, 0.0), 0.0),
        ("both", (1.0, 0.5), 0.5),
        ("both", (0.0, 1.0), -1.0),
        ("agree", (1.0, 0.0), 1.0),
        ("agree", (1.0, 0.5), 0.0),
        ("agree", (0.0, 1.0), -1.0),
        ("agree", (0.75, 0.5), 0.0),
    ],
)
def test_the_margin_of_the_better_answer(order: str, scores: tuple[float, ...], margin: float) -> None:
    assert margin_of(scores, sides(order, 1), order) == margin
    assert sides("random", 0) == ("B",) and margin_of((0.0,), ("B",), "random") == 1.0


@dataclasses.dataclass
class Slotty:
    """Says 'A' always, or names the answer that `likes` prefers; may fail on some. It notes what it was asked."""

    likes: Any = None
    fails: Any = lambda item: False
    name: str = "pairwise"
    asked: list[JudgeItem] = dataclasses.field(default_factory=list)

    def judge(self, items: list[JudgeItem], update: int) -> list[Verdict]:
        assert len({item.request for item in items}) == len(items)
        self.asked += items
        return [failed("timeout") if self.fails(i) else Verdict("ok", self._score(i)) for i in items]

    def _score(self, item: JudgeItem) -> float:
        return 1.0 if self.likes is None else float(self.likes(item.answer, item.other))


def rubric_batch(order: str, judge: Slotty) -> Any:
    system = system_of("judge.pairs=pairwise", f"judge.order={order}")
    make_batch(system, "policy", 0, 0)
    system.context.pair_judge = judge
    return make_batch(system, "rubric", 1, 1)


@pytest.mark.parametrize("order", ORDERS)
def test_a_judge_of_slots_is_found_out_unless_the_better_answer_always_comes_first(order: str) -> None:
    """B24: a judge that always says 'A' is right about every pair or about none, by the order alone."""
    judge = Slotty()
    batch = rubric_batch(order, judge)
    rows = [row for row in batch.rollouts if "judge_pair" in row]
    margins = {row["parts"]["margin"] for row in rows}
    assert rows and margins == {"first": {1.0}, "random": {1.0, -1.0}, "both": {0.0}, "agree": {0.0}}[order]
    assert len(judge.asked) == len(rows) * (2 if order in ("both", "agree") else 1)
    assert batch.metrics.get("judge/order_flip_share") == (1.0 if order in ("both", "agree") else None)
    for row in rows:
        assert row["reward"] == pytest.approx(0.7 * row["parts"]["margin"] + 0.3)
        assert all(call["better_in"] in "AB" for call in row["judge_pair"])


@pytest.mark.parametrize("order", ORDERS)
def test_a_judge_of_answers_says_the_same_in_every_order(order: str) -> None:
    batch = rubric_batch(order, Slotty(likes=lambda a, b: a > b))
    rows = [row for row in batch.rollouts if "judge_pair" in row]
    assert {row["parts"]["margin"] for row in rows} == {1.0, -1.0}
    for row in rows:
        assert row["parts"]["margin"] == (1.0 if row["pair"]["accepted"] > row["pair"]["rejected"] else -1.0)
    assert batch.metrics.get("judge/order_flip_share", 0.0) == 0.0


def test_a_failed_call_takes_the_rubric_out_of_its_group() -> None:
    judge = Slotty(fails=lambda item: item.request % 2 == 0 and item.request // 4096 % 2 == 0)
    batch = rubric_batch("both", judge)
    rows = [row for row in batch.rollouts if "judge_pair" in row]
    lost = [row for row in rows if any(call["status"] != "ok" for call in row["judge_pair"])]
    assert lost and len(lost) < len(rows) and all(row["reward"] is None and "margin" not in row["parts"] for row in lost)
    assert batch.metrics["judge/timeout_share"] > 0


def test_the_rules_of_the_small_world_compare_by_their_scores() -> None:
    system = system_of("judge.pairs=pairwise", "panel.judges.0.source=oracle", "panel.judges.0.protocol=oracle",
                       "panel.judges.0.oracle_noise=0.5", "panel.judges.0.pairs=pairwise")  # fmt: skip
    make_batch(system, "policy", 0, 0)
    rows = [row for row in make_batch(system, "rubric", 1, 1).rollouts if "judge_pair" in row]
    assert rows and {row["flipped"] for row in rows} == {False}
    values = set(itertools.chain(*(row["margins"] for row in rows)))
    assert values <= {-1.0, 0.0, 1.0} and len(values) > 1
    assert all(row["parts"]["margin"] == pytest.approx(sum(row["margins"]) / 2) for row in rows)


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (("judge.order=agree",), "judge.order"),
        (("judge.pairs=pairwise", "sampler.max_new=256", "schedule.order=policy_only"), "judge.pairs"),
        (("judge.pairs=pairwise", "sampler.max_new=256", "judge.guided=true", "judge.protocol=json_score"), "judge.guided"),
        (("judge.pairs=pairwise",), "sampler.max_new"),  # it writes, whatever the protocol of single answers
        (("judge.pairs=pairwise", "sampler.max_new=256", "panel.judges.0.source=/a"), "judge.pairs"),
    ],
)
def test_what_is_refused(overrides: tuple[str, ...], where: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(apply_overrides(Experiment(), overrides))
    assert where in caught.value.where.split(", ")
