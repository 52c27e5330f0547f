"""The library: what a run or config says of a system, and rubrics, scores and comparisons from it."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import pytest
import train_support
from serve_support import BAD, GOOD, QUESTION, RUBRIC, rule_score, system_of

import coevo_jax
from coevo_jax.config import Experiment
from coevo_jax.config.load import load_config
from coevo_jax.config.override import to_dict
from coevo_jax.errors import UserError
from coevo_jax.judges.pairwise import both_orders
from coevo_jax.records.verdicts import Verdict, failed
from coevo_jax.rubrics import Criterion, Rubric
from coevo_jax.serve import library
from coevo_jax.serve.asks import ChatAsk, CompareAsk, RubricAsk, ScoreAsk, Written, read_rubric, rubric_json
from coevo_jax.serve.rounds import Stopped, compared_by_pairs
from coevo_jax.serve.settings import serving_settings

DOCS = train_support.REPO / "docs" / "serving.md"
QUESTIONS = [f"write {n} words with {word}" for n in (3, 5, 6) for word in ("owl", "bee", "yak", "sun")]


@pytest.fixture(scope="module")
def system():
    return system_of("tiny", "oracle")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> pathlib.Path:
    """A finished run of the small world."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    assert train_support.run(folder, "schedule.cycles=1", "schedule.k=1", "sampler.max_prompt=128").finished
    return folder


# ------------------------------------------------------------------------------------------------------------- a run's


def test_five_lines_of_the_docs(trained: pathlib.Path, capsys) -> None:
    """The example in docs/serving.md runs as it stands, but for the run's name, and says what its rules say."""
    (block,) = re.findall(r"```py\n(import coevo_jax\n.*?)```", DOCS.read_text(), re.S)
    assert len([line for line in block.splitlines() if line]) == 5 and "run:runs/tiny" in block
    names: dict = {}
    with train_support.shared_programs():
        exec(block.replace("run:runs/tiny", f"run:{trained}"), names)
    rubric, result = names["rubric"], names["result"]
    assert rubric.status == "ok" and rubric.text in capsys.readouterr().out
    assert result.ok and len(result.scores) == 2 and result.scores[0] > result.scores[1]
    criteria = rubric_json(rubric.rubric)["criteria"]
    assert result.scores == pytest.approx([rule_score(criteria, a) for a in ("bee owl yak sun ant", "fox")])


def test_a_run_brings_judge_prompts_and_sampling(trained: pathlib.Path) -> None:
    served = system_of(f"run:{trained}")
    run_cfg = train_support.tiny()
    for name in ("rubric", "rubric_sampling", "answer"):
        assert getattr(served.cfg, name) == getattr(run_cfg, name)
    assert (served.cfg.judge.protocol, served.judge.name) == ("oracle", "oracle") and set(served.cast.speakers) == {
        "generator",
        "policy",
    }
    other = system_of("tiny", "oracle", config=str(trained))
    assert served.identity() != other.identity()  # the run's weights have moved
    assert served.rubric(QUESTION).status in ("ok", "parse_fail", "truncated")


def test_prompts_are_those_of_training(trained: pathlib.Path) -> None:
    context = train_support.system_of().context
    served = system_of(f"run:{trained}")
    for question in QUESTIONS:
        assert served._rubric_ids(RubricAsk(question)) == context.rubric_prompt(question)
        ids = served.cast.speakers["policy"].prompt([{"role": "user", "content": question}])
        assert ids == context.answer_prompt(question)


def _config(folder: pathlib.Path, **changes) -> str:
    folder.mkdir()
    cfg = dataclasses.replace(train_support.tiny(), **changes)
    (folder / "config.json").write_text(json.dumps(to_dict(cfg)))
    return f"run:{folder}"


def test_what_a_run_says_of_its_roles(tmp_path: pathlib.Path) -> None:
    two = dataclasses.replace(Experiment().generator, mode="two")
    single, double = _config(tmp_path / "one"), _config(tmp_path / "two", generator=two)
    folder = single.removeprefix("run:")

    def roles(*args, **kwargs):
        cfg, found = serving_settings(*args, **kwargs)
        return found.generator, found.policy, cfg.judge.source, cfg.judge.protocol

    assert roles(single) == (single, single, "oracle", "oracle")
    assert roles(config=folder) == (f"{single}#policy", f"{single}#policy", "oracle", "oracle")
    assert roles(double) == (double, "", "oracle", "oracle")
    assert roles(judge=f"{double}@3")[0] == f"{double}#rubric@3"
    assert roles(judge=f"{double}@3")[2:] == (f"{double}@3", "criterion_logits")
    assert roles(single, "smollm2")[2:] == ("smollm2", "criterion_logits")
    assert roles(single, "")[2] == "" and roles("tiny")[2] == ""
    assert roles("", config=folder)[:2] == ("", "")
    remote = ["judge.endpoint.base_url=http://localhost:1/v1"]
    assert roles("tiny", "api:x", overrides=remote)[3] == "criterion_logits"
    assert roles(single, "api:x", overrides=remote)[3] == "json_score"
    assert roles("tiny", "smollm2", overrides=["judge.protocol=json_score"])[3] == "json_score"


def test_a_run_of_rubric_arm_brings_its_own_judge(tmp_path: pathlib.Path) -> None:
    cfg = load_config(str(train_support.REPO / "configs" / "tiny_arm.py"))
    fields = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    source = _config(tmp_path / "arm", **fields)
    found, roles = serving_settings(source)
    judge = found.judge
    assert (roles.generator, judge.source) == (source, f"{source}#judge")
    assert (judge.pairs, judge.pairs_prompt, judge.protocol) == ("comparison", "world_comparison", "criterion_logits")
    assert judge.sampling == cfg.arm.judge_sampling
    asked, _ = serving_settings(source, "oracle")
    assert asked.judge.pairs == "scores"


def test_a_run_of_another_mode_serves_too(tmp_path: pathlib.Path) -> None:
    checked = dataclasses.replace(Experiment().schedule, mode="verifiable", verifier="a:b")
    _config(tmp_path / "run", schedule=checked)
    judged = system_of("tiny", "oracle", config=str(tmp_path / "run"))
    assert judged.score(QUESTION, [GOOD], RUBRIC).scores == [1.0]


def test_a_bare_source_has_room(tmp_path: pathlib.Path) -> None:
    cfg, _ = serving_settings("smollm2", "smollm2")
    assert cfg.sampler.max_prompt == 1024 and cfg.sampler.max_new == cfg.judge.sampling.max_new_tokens == 256
    tight, _ = serving_settings(config=str(train_support.REPO / "configs" / "smollm2_demo.py"))
    assert tight.judge.sampling.max_new_tokens == tight.sampler.max_new == 128 and tight.judge.pairs == "pairwise"


BAD_SETTINGS = [
    ({}, "no role"),
    ({"generator": "run:/no/such/run"}, "not a run folder"),
    ({"generator": "tiny", "config": "/no/such/config.py"}, "no config file"),
    ({"generator": "tiny", "overrides": ["judge.protcol=x"]}, "unknown configuration key"),
    ({"generator": "tiny", "judge": "oracle", "overrides": ["judge.protocol=json_score"]}, "does not go with"),
    ({"generator": "tiny", "judge": "api:x"}, "address of an endpoint"),
    ({"generator": "tiny", "overrides": ["rubric_sampling.max_new_tokens=999"]}, "sampler.max_new"),
    ({"generator": "tiny", "overrides": ["sampler.slots=0"]}, "out of range"),
]


@pytest.mark.parametrize("given, what", BAD_SETTINGS)
def test_bad_settings_are_errors(given: dict, what: str) -> None:
    with pytest.raises(UserError, match=what):
        serving_settings(**given)


# ------------------------------------------------------------------------------------------------------------- results


def test_a_rubric_is_the_same_in_any_company_and_order(system) -> None:
    asks = [RubricAsk(question, seed=seed) for question in QUESTIONS for seed in (0, 1)]
    together = system.ask_all(asks)
    assert system.ask_all(asks[::-1])[::-1] == together
    assert [system.ask(ask) for ask in asks[:6]] == together[:6]
    tries = {written.tries for written in together}
    assert {written.status for written in together} >= {"ok"} and max(tries) > 1 >= min(tries)
    assert len({written.raw for written in together}) > len(QUESTIONS) // 2
    assert [a.raw != b.raw for a, b in zip(together[::2], together[1::2])].count(True) > 3  # another seed, another draw


def test_each_try_of_an_invalid_rubric_is_colder(system, monkeypatch) -> None:
    asked: list[float] = []
    plain = library.System._write

    def write(self, wants, stop):
        asked.extend(self._sampling(tries).temperature for _, tries in wants)
        return [dataclasses.replace(w, status="parse_fail", rubric=None) for w in plain(self, wants, stop)]

    monkeypatch.setattr(library.System, "_write", write)
    written = system.rubric(QUESTION)
    assert asked == [1.0, 0.6, 0.3, 0.1] and (written.status, written.tries) == ("parse_fail", 4)
    scored = system.score(QUESTION, [GOOD])
    assert scored.answers == () and not scored.ok and scored.rubric.status == "parse_fail"
    compared = system.compare(QUESTION, GOOD, BAD)
    assert (compared.status, compared.winner, compared.preference, compared.calls) == ("parse_fail", None, None, ())
    with pytest.raises(UserError, match="no rubric"):
        system.score(QUESTION, [GOOD], written)


def test_who_needs_only_the_judge_waits_for_no_text(system) -> None:
    given = read_rubric(RUBRIC, system.cfg.rubric)
    judged = [ScoreAsk(QUESTION, (BAD,), given), CompareAsk(QUESTION, GOOD, BAD, given)]
    asks = [RubricAsk(QUESTION), ScoreAsk(QUESTION, (GOOD,)), *judged]
    drafts = [system.begin(ask) for ask in asks]
    rounds: list[list[int]] = []
    while going := [draft for draft in drafts if draft.result is None]:
        rounds.append([])
        system.advance(going, deliver=lambda draft: rounds[-1].append(asks.index(draft.ask)))
    tries = drafts[0].tries
    assert tries > 1  # the rubric took a round for each try, and its score one more
    assert rounds == [[2, 3], *[[]] * (tries - 2), [0], [1]]


def test_scores_are_the_rules(system) -> None:
    found = system.score(QUESTION, [GOOD, BAD, "owl"], RUBRIC)
    assert found.scores == pytest.approx([1, 0, 2 / 3]) and found.answers[2].parts == (1.0, 0.0)
    written = system.rubric(QUESTION)
    assert system.score(QUESTION, [GOOD], written).answers == system.score(QUESTION, [GOOD]).answers
    assert found.rubric.tries == 0 and "includes owl" in found.rubric.text
    form = found.to_json()["answers"][2]["criteria"]
    assert form == [{"criterion": "includes owl", "score": 1.0}, {"criterion": "begins with ant", "score": 0.0}]


def test_equal_asks_are_one(system) -> None:
    ask = ScoreAsk(QUESTION, (GOOD, GOOD), read_rubric(RUBRIC, system.cfg.rubric))
    first, second = system.ask_all([ask, ask])
    assert first == second and first.answers[0] == first.answers[1]


def test_the_same_criteria_in_two_spellings_are_judged_once(system) -> None:
    written = system.rubric(QUESTION)
    spelt = read_rubric(rubric_json(written.rubric), system.cfg.rubric)
    assert spelt.raw != written.rubric.raw and spelt.criteria == written.rubric.criteria
    close = Rubric(tuple(dataclasses.replace(c, weight=c.weight * 1.00001) for c in spelt.criteria))  # rendered alike
    found = system.ask_all([ScoreAsk(QUESTION, (GOOD, "ant"), rubric) for rubric in (written.rubric, spelt, close)])
    assert found[0].answers == found[1].answers and found[2].scores == pytest.approx(found[0].scores, abs=1e-3)


def test_a_failing_judge_never_gives_a_score() -> None:
    broken = system_of("tiny", "oracle", overrides=["judge.oracle_failure_rate=1"])
    found = broken.score(QUESTION, [GOOD, BAD], RUBRIC)
    assert found.scores == [None, None] and not found.ok and all(a.status != "ok" and a.detail for a in found.answers)
    compared = broken.compare(QUESTION, GOOD, BAD, RUBRIC)
    assert not compared.ok and compared.winner is compared.preference is None and len(compared.calls) == 2


A, TIE, B = Verdict("ok", 1.0, "says A"), Verdict("ok", 0.5), Verdict("ok", 0.0, "says B")


@pytest.mark.parametrize("forward, reverse, winner, flipped", [
    (A, B, "a", False), (B, A, "b", False), (A, A, "tie", True), (B, B, "tie", True), (TIE, TIE, "tie", False),
    (A, TIE, "tie", True),
])  # fmt: skip
def test_both_orders_name_the_winner(forward: Verdict, reverse: Verdict, winner: str, flipped: bool) -> None:
    written = Written("q", "ok", Rubric((Criterion("x", 1.0),)))
    found = compared_by_pairs(written, forward, reverse)
    letters = [{1.0: "A", 0.5: "tie", 0.0: "B"}[v.score] for v in (forward, reverse)]
    assert (found.winner, found.flipped, found.preference) == (winner, flipped, both_orders(*letters))
    assert [call.raw for call in found.calls] == [forward.raw, reverse.raw] and [call.first for call in found.calls] == ["a", "b"]
    for bad in ((failed("timeout"), reverse), (forward, failed("truncated"))):
        lost = compared_by_pairs(written, *bad)
        assert lost.winner is lost.preference is None and lost.status in ("timeout", "truncated")


@dataclasses.dataclass(frozen=True)
class Longest:
    """A judge of pairs: the longer answer wins, under the rubric given."""

    name: str = "pairwise"

    def judge(self, items, update):
        assert len({item.request for item in items}) == len(items) and all(item.rubric.criteria for item in items)
        return [Verdict("ok", float(len(item.answer) > len(item.other)), f"{item.answer} | {item.other}") for item in items]


def test_a_judge_of_pairs_is_asked_in_both_orders() -> None:
    judged = system_of("", "api:x", overrides=["judge.endpoint.base_url=http://127.0.0.1:9/v1"])
    assert judged.pair_judge is not None
    judged.pair_judge = Longest()
    given = read_rubric(RUBRIC, judged.cfg.rubric)
    found = judged.ask_all([CompareAsk(QUESTION, a, b, given) for a, b in ((GOOD, BAD), (BAD, GOOD), (BAD, BAD))])
    assert [(c.winner, c.preference, c.flipped) for c in found] == [("a", 1, False), ("b", 0, False), ("tie", 0.5, True)]
    assert [call.raw for call in found[0].calls] == [f"{GOOD} | {BAD}", f"{BAD} | {GOOD}"]
    judged.close()


@pytest.mark.slow
def test_a_model_compares_two_answers_side_by_side() -> None:
    """The tiny model knows no verdict, so its calls fail: as failures, and with its text as evidence."""
    judged = system_of("tiny", "tiny", overrides=["judge.protocol=json_score", "sampler.max_prompt=448", "judge.retries=1"])
    found = judged.compare(QUESTION, GOOD, BAD, RUBRIC)
    assert found.method == "pairwise" and not found.ok and found.winner is None
    assert all(call.raw and call.status in ("parse_fail", "truncated") for call in found.calls)
    alone = judged.score(QUESTION, [GOOD, "owl " * 400], RUBRIC)
    assert alone.answers[0].status in ("parse_fail", "truncated") and alone.answers[0].raw
    assert alone.answers[1].status == "refused" and "sampler.max_prompt" in alone.answers[1].detail


def test_a_judge_without_rubrics_and_rubrics_without_a_generator() -> None:
    coin = system_of(judge="tiny", overrides=["judge.protocol=random"])
    assert coin.score(QUESTION, [GOOD, BAD]).ok and coin.score(QUESTION, [GOOD]).rubric.rubric.criteria == ()
    assert coin.compare(QUESTION, GOOD, BAD).method == "scores"
    fixed = system_of("", "oracle", overrides=["rubric.source=predefined"])
    assert [c.title for c in fixed.rubric(QUESTION).rubric.criteria] == ["Correct", "Complete", "Concise", "Helpful"]
    assert fixed.score(QUESTION, [GOOD]).scores == [0.5]
    with pytest.raises(UserError, match="no rubric generator"):
        system_of("", "oracle").rubric(QUESTION)
    assert system_of("", "oracle").score(QUESTION, [GOOD], RUBRIC).scores == [1.0]
    with pytest.raises(UserError, match="no judge"):
        system_of("tiny").score(QUESTION, [GOOD], RUBRIC)


BAD_ASKS = [
    (RubricAsk(" "), "empty"),
    (RubricAsk("ant " * 300), "tokens"),
    (RubricAsk("ant" * 10_000), "characters"),
    (ScoreAsk(QUESTION, ()), "no answers"),
    (CompareAsk(QUESTION, GOOD, "x" * 10_000), "characters"),
    (ChatAsk("oracle", (("user", "hello"),), Experiment().answer), "no model"),
    (ChatAsk("generator", (("user", "ant " * 300),), dataclasses.replace(Experiment().answer, max_new_tokens=4)), "tokens"),
    (ChatAsk("generator", (("user", "hello"),), Experiment().answer), "max_new_tokens"),
]


@pytest.mark.parametrize("ask, what", BAD_ASKS)
def test_a_bad_ask_is_an_error_of_its_own(system, ask, what: str) -> None:
    good = ScoreAsk(QUESTION, (GOOD,), read_rubric(RUBRIC, system.cfg.rubric))
    first, bad, last = system.ask_all([good, ask, good])
    assert isinstance(bad, UserError) and what in str(bad) and first == last and first.scores == [1.0]


BAD_RUBRICS = [
    "nothing", "{}", {}, {"criteria": {}}, {"criteria": ["x"]}, {"criteria": [{"criterion": "x"}]},
    {"criteria": [{"criterion": "x", "weight": True}]}, {"criteria": [{"criterion": "x", "weight": float("nan")}]},
    {"criteria": [{"criterion": "x", "weight": -1}]}, {"criteria": [{"criterion": " ", "weight": 1}]},
    {"criteria": [{"criterion": "x", "weight": 1}, {"criterion": "X.", "weight": 1}]},
    {"criteria": [{"criterion": "x", "weight": 1, "levels": "yes"}]}, {"criteria": [{"criterion": "x", "weight": 1, "title": 1}]},
]  # fmt: skip


@pytest.mark.parametrize("given", BAD_RUBRICS)
def test_a_bad_rubric_is_an_error(given) -> None:
    with pytest.raises(UserError):
        read_rubric(given, Experiment().rubric)


def test_a_rubric_comes_back_as_it_went(system) -> None:
    rubric = system.rubric(QUESTION).rubric
    again = read_rubric(json.loads(json.dumps(rubric_json(rubric))), system.cfg.rubric)
    assert again.criteria == rubric.criteria and read_rubric(rubric.raw, system.cfg.rubric) == rubric
    assert read_rubric(None, system.cfg.rubric) is None


def test_threads_may_share_a_system(system) -> None:
    answers = [" ".join([word, *GOOD.split()[:n]]) for n in range(5) for word in ("owl", "fox", "ant", "bee")]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda answer: system.score(QUESTION, [answer], RUBRIC).scores[0], answers))
    assert found == pytest.approx([rule_score(RUBRIC["criteria"], answer) for answer in answers])


def test_it_stops_when_nobody_waits(system) -> None:
    with pytest.raises(Stopped):
        system.ask_all([RubricAsk(QUESTION)], lambda: True)
    looks: list[int] = []

    def later() -> bool:
        looks.append(0)
        return len(looks) > 2  # in the engine

    with pytest.raises(Stopped):
        system.ask_all([RubricAsk(question) for question in QUESTIONS], later)
    assert system.score(QUESTION, [GOOD], RUBRIC).scores == [1.0]


def test_the_identity_is_of_what_decides() -> None:
    plain = system_of("tiny", "oracle").identity()
    assert system_of("tiny", "oracle", overrides=["sampler.slots=8"]).identity() == plain
    for other in ("seed=2", "rubric.min_criteria=3", "judge.oracle_noise=0.5", "rubric_sampling.temperature=0.9"):
        assert system_of("tiny", "oracle", overrides=[other]).identity() != plain


def test_importing_the_package_is_cheap() -> None:
    code = "import coevo_jax, sys; assert 'jax' not in sys.modules and 'load_system' in dir(coevo_jax); coevo_jax.UserError"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=train_support.REPO)
    with pytest.raises(AttributeError, match="nothing"):
        coevo_jax.nothing  # noqa: B018
