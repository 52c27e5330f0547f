"""Several judges: which serve in a cycle, what they cost and keep in memory, and the rewards that their margins make."""

from __future__ import annotations

import dataclasses
import statistics

import pytest

from coevo_jax.bench import Bench, Seat
from coevo_jax.config import Experiment, JudgeConfig, PanelConfig, RubricConfig
from coevo_jax.config.several import serving
from coevo_jax.judges import JudgeItem
from coevo_jax.judges.several import Panel, members
from coevo_jax.methods.rewards import combine_margins, panel_rewards, rubric_reward
from coevo_jax.records.verdicts import Verdict, failed
from coevo_jax.rubrics import Criterion, Rubric

THREE = (JudgeConfig(),) * 3
MARGINS = ((0.4, 0.2, -0.1), (0.3, 0.3, 0.3), (0.0, 0.0, 0.0))  # of three rubrics under three judges; the last one is invalid
FORMATS = (1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("judges", "first", "expected"),
    [
        (0, (), [(0,), (0,), (0,), (0,)]),
        (2, (), [(0, 1, 2)] * 4),
        (2, (1, 3), [(0,), (1,), (1,), (2,)]),
        (3, (2, 2, 3), [(0,), (0,), (1, 2), (3,)]),
        (1, (0,), [(0, 1)] * 4),
    ],
)
def test_the_latest_that_have_begun_serve(judges: int, first: tuple[int, ...], expected: list[tuple[int, ...]]) -> None:
    panel = PanelConfig(judges=(JudgeConfig(),) * judges, from_cycle=first)
    assert [serving(panel, cycle) for cycle in range(4)] == expected


# --------------------------------------------------------------------------------------------------------------- the bench


@dataclasses.dataclass
class Named:
    """Gives each item the score of its place, or fails."""

    name: str
    scores: tuple[float | None, ...] = (0.5,)
    asked: list[str] = dataclasses.field(default_factory=list)

    def judge(self, items: list[JudgeItem], update: int) -> list[Verdict]:
        self.asked += [item.answer for item in items]
        scores = [self.scores[int(item.answer) % len(self.scores)] for item in items]
        return [failed("timeout", "late") if s is None else Verdict("ok", s) for s in scores]


def test_a_judge_is_loaded_for_its_cycle_and_let_go_after_it() -> None:
    loaded: list[int] = []

    def make(number: int) -> Seat:
        loaded.append(number)
        return Seat(f"judge_{number}", JudgeConfig(), Named(str(number)), params=number)

    bench = Bench(Experiment(panel=PanelConfig(judges=THREE, from_cycle=(2, 2, 3))), make)
    assert [seat.name for seat in bench.sit(0)] == ["judge_0"] and bench.judge.name == "0"
    assert not bench.changes(1) and bench.sit(1) == []
    assert bench.changes(2) and len(bench.sit(2)) == 2
    assert isinstance(bench.judge, Panel) and [judge.name for judge in members(bench.judge)] == ["1", "2"]
    assert bench.weights == {"judge_1": 1, "judge_2": 2} and bench.later(2) == [("judge", "smollm2"), ("judge_3", "smollm2")]
    bench.sit(3)
    assert loaded == [0, 1, 2, 3] and bench.weights == {"judge_3": 3} and members(bench.judge) == (bench.judge,)


def test_a_panel_names_the_judge_that_failed_and_asks_the_others_no_more() -> None:
    items = [JudgeItem("q", Rubric((Criterion("c", 1.0),)), str(i), i) for i in range(3)]
    first, second = Named("json_score", (0.2, None, 0.6)), Named("json_score", (0.4, 0.4, 1.0))
    found = Panel((first, second), seats=("judge", "judge_1")).judge(items, 0)
    assert [v.score for v in found] == [pytest.approx(0.3), None, pytest.approx(0.8)] and found[0].parts == (0.2, 0.4)
    assert found[1].detail == "judge: late" and second.asked == ["0", "2"]
    swapped = Panel((second, first)).judge(items[::-1], 0)[::-1]
    assert [v.score for v in swapped] == [v.score for v in found]  # neither the judges' order nor the items' decides


# ----------------------------------------------------------------------------------------------------------------- rewards


def test_margins_are_combined_as_named() -> None:
    row = MARGINS[0]
    assert combine_margins(row, "mean") == pytest.approx(1 / 6)
    assert combine_margins(row, "majority") == 0.2
    assert combine_margins(row, "mean_minus_variance") == pytest.approx(1 / 6 - statistics.pvariance(row))


def test_a_panel_of_one_mind_is_one_judge() -> None:
    """Judges that agree to the digit give what one of them gives, by every rule that has no kappa."""
    for reward in ("margin", "separation", "log_sigmoid"):
        cfg = RubricConfig(reward=reward)
        for how in ("mean", "majority", "mean_minus_variance"):
            (found,) = panel_rewards([(0.45,) * 3], [1.0], cfg, PanelConfig(judges=THREE, aggregate=how))
            assert found == pytest.approx(rubric_reward(0.8, 0.35, 1.0, cfg)), (reward, how)


# Of the margins above: votes (for, for, against), (for, for, for), three ties. Fleiss: agreement 1/3, 1, 1; shares of the
# categories 5/9, 3/9, 1/9; chance 35/81; kappa = (7/9 - 35/81) / (46/81) = 28/46.
KAPPA = 28 / 46


@pytest.mark.parametrize(
    ("how", "base"),
    [
        ("majority", (1.0, 1.0, 0.0)),
        ("mean", (2 / 3, 1.0, 0.0)),
        ("mean_minus_variance", (2 / 3 - 1 + KAPPA, KAPPA, KAPPA - 1)),
    ],
)
def test_votes_follow_the_released_formulas(how: str, base: tuple[float, ...]) -> None:
    cfg = RubricConfig(reward="binary", alpha=0.7)
    found = panel_rewards(MARGINS, FORMATS, cfg, PanelConfig(judges=THREE[:2], aggregate=how))
    assert found == pytest.approx([0.7 * b + 0.3 * fmt for b, fmt in zip(base, FORMATS)])


def test_margin_kappa_format_weighs_by_itself() -> None:
    panel = PanelConfig(judges=THREE[:2], aggregate="margin_kappa_format")
    found = panel_rewards(MARGINS, FORMATS, RubricConfig(alpha=0.7), panel)
    assert found == pytest.approx([0.5 / 6 + 0.3 + 0.2 * KAPPA, 0.15 + 0.3 + 0.2 * KAPPA, 0.2 * KAPPA])
    assert found == panel_rewards(MARGINS, FORMATS, RubricConfig(alpha=0.2), panel)


def test_an_even_split_goes_by_the_tie_breaker() -> None:
    margins, cfg = [(-0.1, 0.5)], RubricConfig(reward="binary", alpha=1.0)
    by = {name: PanelConfig(judges=THREE[:1], aggregate="majority", tie_breaker=name) for name in ("mean_score", "first_judge")}
    assert panel_rewards(margins, [1.0], cfg, by["mean_score"]) == [1.0]
    assert panel_rewards(margins, [1.0], cfg, by["first_judge"]) == [0.0]
