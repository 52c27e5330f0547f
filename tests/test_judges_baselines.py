"""Judges of the baselines over an engine that says what a test wants: ratings, yes or no a criterion, coins, several at once."""

from __future__ import annotations

import dataclasses
import re

import pytest
import text_support as tt
from test_judges_protocols import FakeEngine

from coevo_jax.config import JudgeConfig
from coevo_jax.judges import JudgeItem, likert, rar_explicit
from coevo_jax.judges.base import Instrument
from coevo_jax.judges.coin import CoinJudge
from coevo_jax.judges.several import Panel, Sampled
from coevo_jax.records.verdicts import Verdict, failed
from coevo_jax.rubrics import Criterion, Rubric
from coevo_jax.text.chat import ChatTokenizer

RUBRIC = Rubric((Criterion("Essential: names Lima", 1.0), Criterion("Important: short", 0.7), Criterion("Optional: polite", 0.3)))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return ChatTokenizer.load(tt.make_tokenizer(tmp_path_factory.mktemp("tok"), tt.CHATML_THINKING))


def instrument(tokenizer, say, **fields):
    return Instrument(JudgeConfig(**fields), FakeEngine(tokenizer, say=say), "weights", tokenizer)


def items_of(n):
    return [JudgeItem("Capital of Peru?", RUBRIC, f"It is Lima {i}.", 1000 + i, reference="LIMA!") for i in range(n)]


# ---- ratings


def test_a_rating_is_scaled():
    """M6: 7 -> 0.6667."""
    assert [likert.scaled(r) for r in (1, 7, 10, 5.5)] == pytest.approx([0, 2 / 3, 1, 0.5])
    for outside in (0, 10.5, float("nan")):
        with pytest.raises(ValueError):
            likert.scaled(outside)


@pytest.mark.parametrize(
    ("protocol", "shown", "hidden"),
    [
        ("likert", ["Capital of Peru?", "It is Lima 0."], ["LIMA!", "names Lima"]),
        ("likert_reference", ["Capital of Peru?", "It is Lima 0.", "LIMA!"], ["names Lima"]),
        ("rar_implicit", ["Capital of Peru?", "It is Lima 0.", "2. (weight 0.7) Important: short"], ["LIMA!"]),
    ],
)
def test_what_a_rating_judge_sees_and_says(tokenizer, protocol, shown, hidden):
    model = instrument(tokenizer, lambda prompt, request: ('{"reasoning": "8/10 for style", "rating": 7}', "stop"))
    judge = likert.make(protocol)(model)
    assert judge.name == protocol
    (verdict,) = judge.judge(items_of(1), 0)
    assert verdict.score == pytest.approx(2 / 3) and verdict.parts == ()
    ((request,),) = model.engine.calls
    prompt = tokenizer.decode(request.prompt.tolist())
    assert all(text in prompt for text in shown) and not any(text in prompt for text in hidden)


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ('{"rating": 15}', None),  # B19: never clamped to 1
        ('{"rating": 0}', None),
        ('{"rating": "8/10"}', 7 / 9),
        ("Rating: 8/10", 7 / 9),
        ("On the scale of 1 to 10 this earns 8", None),
        ('{"score": 8}', None),
        ('<think>{"rating": 2}</think>{"rating": 10}', 1.0),
        ('{"rating": true}', None),
        ('{"reasoning": "good", "rating": ', None),
    ],
)
def test_a_rating_reads_strictly(said, score):
    verdict = likert.read(said, items_of(1)[0], False, False)
    assert verdict.score == (None if score is None else pytest.approx(score))
    assert verdict.status == ("ok" if score is not None else "parse_fail")


# ---- yes or no a criterion


def test_explicit_asks_every_criterion_and_weighs(tokenizer):
    """M6 in small: Essential and Optional are met, Important isn't: 1.3 / 2."""
    model = instrument(tokenizer, lambda prompt, request: ("no" if "Important" in prompt else "Yes.", "stop"))
    verdicts = rar_explicit.make(model).judge(items_of(2), 3)
    assert [v.score for v in verdicts] == pytest.approx([0.65, 0.65]) and verdicts[0].parts == (1.0, 0.0, 1.0)
    (requests,) = model.engine.calls
    assert len(requests) == 6 and {r.update for r in requests} == {3}
    identities = [(r.role, r.request) for r in requests]
    assert len(set(identities)) == 6 and {role for role, _ in identities} == {"judge/0", "judge/1", "judge/2"}


def test_one_unreadable_criterion_fails_the_verdict_after_its_retries(tokenizer):
    tries: dict[str, int] = {}

    def say(prompt, request):
        key = re.search(r"Lima (\d)\.", prompt)[1] + re.search(r"Criterion: (\w+)", prompt)[1]
        tries[key] = tries.get(key, 0) + 1
        if key == "0Important":
            return "hard to say", "stop"
        return ("maybe" if key == "1Optional" and tries[key] == 1 else "yes"), "stop"

    verdicts = rar_explicit.make(instrument(tokenizer, say, retries=1)).judge(items_of(2), 0)
    assert [v.status for v in verdicts] == ["parse_fail", "ok"] and verdicts[0].score is None
    assert verdicts[0].detail.startswith("criterion 2: ") and verdicts[1].score == 1.0
    assert tries == {"0Essential": 1, "0Important": 2, "0Optional": 1, "1Essential": 1, "1Important": 1, "1Optional": 2}


# ---- coins, samples, panels


def test_a_coin_is_fair_and_belongs_to_its_item():
    items = [dataclasses.replace(items_of(1)[0], request=i) for i in range(2000)]
    judge = CoinJudge(seed=1)
    scores = [v.score for v in judge.judge(items, 0)]
    assert set(scores) == {0.0, 1.0} and abs(sum(scores) / len(scores) - 0.5) < 0.04
    assert [v.score for v in judge.judge(items[::-1], 0)][::-1] == scores
    for other in (CoinJudge(seed=2).judge(items, 0), judge.judge(items, 1)):
        same = sum(v.score == s for v, s in zip(other, scores))
        assert abs(same / len(items) - 0.5) < 0.04


@dataclasses.dataclass(frozen=True)
class Scripted:
    """A judge whose verdict on item i, sample s is `script[i][s]`; None fails."""

    script: tuple
    name: str = "scripted"

    def judge(self, items, update):
        values = [self.script[item.request - 1000][item.branch[0] if item.branch else 0] for item in items]
        return [failed("timeout", "late", "?") if v is None else Verdict("ok", v, str(v)) for v in values]


def test_samples_that_failed_are_left_out():
    judge = Sampled(Scripted(((0.2, None, 0.6), (None, None, None), (1.0, 0.0, 1.0))), samples=3)
    verdicts = judge.judge(items_of(3), 0)
    assert [v.score for v in verdicts] == [pytest.approx(0.4), None, pytest.approx(2 / 3)]
    assert verdicts[0].parts == (0.2, 0.6) and verdicts[1].status == "timeout" and verdicts[1].detail == "none of 3 samples: late"
    assert [v.score for v in dataclasses.replace(judge, how="majority").judge(items_of(3), 0)][2] == 1.0


def test_samples_have_noise_of_their_own(tokenizer):
    model = instrument(tokenizer, lambda prompt, request: ('{"rating": 4}', "stop"))
    Sampled(likert.make("likert")(model), samples=3).judge(items_of(2), 0)
    ((requests),) = model.engine.calls
    assert len({(r.role, r.request) for r in requests}) == 6


def test_one_failing_judge_fails_the_panel():
    lenient, strict = Scripted(((0.9,), (None,)), "lenient"), Scripted(((0.1,), (0.1,)), "strict")
    first, second = Panel((lenient, strict)).judge(items_of(2), 0)
    assert first.score == pytest.approx(0.5) and first.parts == (0.9, 0.1)
    assert second.status == "timeout" and second.detail == "lenient: late"  # not 0.1, the strict one's
    assert Panel((lenient, strict), "mean_minus_variance").judge(items_of(1), 0)[0].score == pytest.approx(0.5 - 0.16)
