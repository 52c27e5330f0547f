"""Systems, runs and the command: what a judge is asked, what failures become, how a run goes on, what the files say."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from remote_support import completion, serving
from test_judges_protocols import FakeEngine

from coevo_jax.bench import Seat
from coevo_jax.config import JudgeConfig, Sampling
from coevo_jax.errors import UserError
from coevo_jax.evaluate import __main__ as command
from coevo_jax.evaluate.benchmarks import BENCHMARKS
from coevo_jax.evaluate.checking import Checking, shown_order
from coevo_jax.evaluate.records import Example, Judged
from coevo_jax.evaluate.runner import choose, run, system_hash
from coevo_jax.evaluate.sources import DEFAULTS, Loader, parse_source
from coevo_jax.evaluate.store import KeptWriter, RowStore
from coevo_jax.evaluate.systems import RubricSystem
from coevo_jax.evaluate.writers import (
    GENERIC,
    Fixed,
    FromData,
    Written,
    colder,
    messages_of,
    shows_candidates,
    unknown_slots,
)
from coevo_jax.judges import JudgeItem
from coevo_jax.models.load import TINY
from coevo_jax.records.console import Console
from coevo_jax.records.verdicts import Verdict, failed
from coevo_jax.rubrics import Criterion, Rubric

PAIRS = [Example(f"p{i}", f"question {i}", (f"good {i}", f"bad {i}"), label="A") for i in range(9)]
LIST = Example("l", "q", ("best", "mid", "worst"), scores=(3.0, 2.0, 1.0))
CRITERIA = Example("c", "q", ("answer",), criteria=("short?", "blue?"), met=(True, False))
QUALITY = {"good": 0.9, "bad": 0.2, "best": 0.9, "mid": 0.5, "worst": 0.1, "answer": 0.8}


@dataclasses.dataclass
class FakeJudge:
    """Scores by `say(item)`; notes what it was asked."""

    say: Callable[[JudgeItem], float | None] = lambda item: QUALITY[item.answer.split()[0]]
    name: str = "fake"
    asked: list[JudgeItem] = dataclasses.field(default_factory=list)

    def judge(self, items: list[JudgeItem], update: int) -> list[Verdict]:
        assert len({item.request for item in items}) == len(items)
        self.asked += items
        return [failed("timeout") if (s := self.say(item)) is None else Verdict("ok", s) for item in items]


@dataclasses.dataclass
class FakeWriter:
    """A rubric that names the question; counts what it wrote."""

    name: str = "writer"
    version: int = 1
    wrote: list[str] = dataclasses.field(default_factory=list)

    @property
    def identity(self) -> dict[str, Any]:
        return {"fake": self.version}

    def write(self, examples: Sequence[Example]) -> list[Written]:
        self.wrote += [e.id for e in examples]
        return [Written(Rubric((Criterion(f"serves {e.prompt}", 1.0),), "text"), "text", "ok") for e in examples]


def system(judge: FakeJudge, writer: Any = None, pairs: bool = False, **cfg: Any) -> RubricSystem:
    config = JudgeConfig(**({"protocol": "json_score"} | cfg))
    seat = Seat("judge", config, judge, pairs=judge if pairs else None)
    return RubricSystem(writer or Fixed("none", GENERIC), seat)


def wins(item: JudgeItem) -> float:
    a, b = QUALITY[item.answer.split()[0]], QUALITY[item.other.split()[0]]
    return 0.5 + 0.5 * ((a > b) - (a < b))


# -------------------------------------------------------------------------------------------------------------- systems


def test_one_rubric_for_both_answers_and_both_orders() -> None:
    judge, writer = FakeJudge(wins), FakeWriter()
    judged = system(judge, writer, pairs=True).judge(PAIRS[:2], BENCHMARKS["pairs"])
    assert [(i.answer, i.other) for i in judge.asked[:2]] == [("good 0", "bad 0"), ("bad 0", "good 0")]
    assert {i.rubric.criteria[0].text for i in judge.asked[:2]} == {"serves question 0"} and writer.wrote == ["p0", "p1"]
    assert judged[0].games == ((1.0, 0.0), (1.0, 0.0)) and judged[0].calls == 2  # mapped back to the example's order


def test_alone_the_second_game_asks_again_unless_the_judge_has_no_noise() -> None:
    for changes, calls in (({}, 4), ({"protocol": "criterion_logits"}, 2), ({"sampling": Sampling(temperature=0.0)}, 2)):
        judge = FakeJudge()
        judged = system(judge, **changes).judge(PAIRS[:1], BENCHMARKS["judgebench"])
        assert len(judge.asked) == calls and judged[0].games == ((0.9, 0.2), (0.9, 0.2))


def test_a_judge_of_slots_gets_one_half_in_two_games() -> None:
    rows = list(zip(PAIRS, system(FakeJudge(lambda item: 1.0), pairs=True).judge(PAIRS, BENCHMARKS["pairs"])))
    score = BENCHMARKS["pairs"].score(rows, BENCHMARKS["pairs"].rule(draws=50))
    assert score.score == 0.5 and score.parts["both_consistent"] == 0.0 and score.parts["slot_a_share"] == 1.0
    assert BENCHMARKS["judgebench"].score(rows, BENCHMARKS["judgebench"].rule(draws=50)).score == 0.0


def test_what_is_asked_depends_on_the_example_alone() -> None:
    def identities(examples: list[Example]) -> dict[str, int]:
        judge = FakeJudge()
        system(judge).judge(examples, BENCHMARKS["pairs"])
        return {f"{i.answer}{n > 1}": i.request for n, i in enumerate(judge.asked) if i.question == "question 1"}

    judge = FakeJudge()
    system(judge).judge(PAIRS, BENCHMARKS["pairs"])
    assert {i.request for i in judge.asked if i.question == "question 1"} == set(identities([PAIRS[1]]).values())
    assert max(i.request for i in judge.asked) < 2**56


def test_lists_by_scores_and_by_copeland() -> None:
    judged = system(FakeJudge()).judge([LIST], BENCHMARKS["listwise"])
    assert judged[0].games == ((0.9, 0.5, 0.1),)
    judge = FakeJudge(wins)
    judged = system(judge, pairs=True).judge([LIST], BENCHMARKS["listwise"])
    assert judged[0].games == ((2.0, 1.0, 0.0),) and len(judge.asked) == 6
    once = system(FakeJudge(lambda i: None if i.answer == "best" and i.other == "mid" else wins(i)), pairs=True)
    assert once.judge([LIST], BENCHMARKS["listwise"])[0].games == ((2.0, 2.0, 0.0),)


def test_criteria_of_the_data_are_asked_one_by_one(tmp_path: pathlib.Path) -> None:
    judge = FakeJudge(lambda item: 0.9 if item.rubric.criteria[0].text == "short?" else 0.3)
    judged = system(judge, FromData(DEFAULTS)).judge([CRITERIA], BENCHMARKS["infobench"])
    assert judged[0].games == ((0.9, 0.3),) and [len(i.rubric.criteria) for i in judge.asked] == [1, 1]
    (found,) = run(system(judge, FromData(DEFAULTS)), BENCHMARKS["infobench"], [CRITERIA], tmp_path, Console())
    assert found == judged[0]
    judged = system(FakeJudge()).judge([CRITERIA], BENCHMARKS["infobench"])
    assert judged[0].games == ((0.8, 0.8),) and judged[0].calls == 1  # another rubric: the answer's score stands for each


def test_an_invalid_rubric_is_a_failure_of_its_example_and_asks_nothing() -> None:
    class Invalid(FakeWriter):
        def write(self, examples: Sequence[Example]) -> list[Written]:
            return [Written(None, "nonsense", "parse_fail", "no JSON") for _ in examples]

    judge = FakeJudge()
    (judged,) = system(judge, Invalid()).judge(PAIRS[:1], BENCHMARKS["pairs"])
    assert judged.games == ((None, None), (None, None)) and judge.asked == []
    assert (judged.rubric_status, judged.calls) == ("parse_fail", 0)


def test_rubrics_are_asked_for_again_colder_each_time() -> None:
    assert [s.temperature for s in colder(DEFAULTS)] == [0.6, 0.3, 0.1]


def test_a_model_writer_retries_what_is_invalid(tmp_path: pathlib.Path) -> None:
    import text_support as tt

    from coevo_jax.evaluate.writers import ModelWriter
    from coevo_jax.text.chat import ChatTokenizer

    tokenizer = ChatTokenizer.load(tt.make_tokenizer(tmp_path, tt.CHATML_THINKING))
    good = '{"criteria": [{"criterion": "is right", "weight": 0.5}, {"criterion": "is short", "weight": 0.5}]}'
    engine: Any = FakeEngine(
        tokenizer, say=lambda prompt, request: (good if request.sampling.temperature < 0.5 else "no", "stop")
    )
    writer = ModelWriter("fake", DEFAULTS, engine, "weights", tokenizer, "hash")
    (written,) = writer.write([PAIRS[0]])
    assert written.rubric is not None and written.status == "ok" and written.text == good
    temperatures = [r.sampling.temperature for call in engine.calls for r in call]
    assert temperatures == [0.6, 0.3] and len({r.request for call in engine.calls for r in call}) == 2
    engine.cfg = dataclasses.replace(engine.cfg, max_prompt=3)
    (refused,) = writer.write([PAIRS[0]])
    assert refused.status == "refused" and refused.rubric is None


# ----------------------------------------------------------------------------------------------------------------- runs


def test_a_judge_that_fails_on_a_third_of_its_calls(tmp_path: pathlib.Path) -> None:
    """Failures are counted, the rest is kept, and no failure decides a pair."""
    judge = FakeJudge(lambda item: None if int(item.answer.split()[1]) % 3 == 0 else QUALITY[item.answer.split()[0]])
    found = run(system(judge), BENCHMARKS["pairs"], PAIRS, tmp_path, Console(), batch=4)
    rows = [(e, j) for e, j in zip(PAIRS, found) if j is not None]
    score = BENCHMARKS["pairs"].score(rows, BENCHMARKS["pairs"].rule(draws=50))
    assert score.failure_share == pytest.approx(1 / 3) and score.score == pytest.approx(2 / 3) and score.parts["answered"] == 1.0
    assert sum(sum(j.failures.values()) for _, j in rows) == 12


def test_a_run_goes_on_where_it_stopped(tmp_path: pathlib.Path) -> None:
    judge, stop = FakeJudge(), threading.Event()
    judge.say = lambda item: stop.set() or 0.5 if item.answer == "good 4" else QUALITY[item.answer.split()[0]]
    first = run(system(judge), BENCHMARKS["pairs"], PAIRS, tmp_path, Console(), batch=2, stop=stop)
    assert [j is not None for j in first] == [True] * 6 + [False] * 3  # the batch under way was finished
    again = FakeJudge()
    second = run(system(again), BENCHMARKS["pairs"], PAIRS, tmp_path, Console(), batch=2)
    assert second[:6] == first[:6] and {i.question for i in again.asked} == {e.prompt for e in PAIRS[6:]}
    whole = run(system(FakeJudge()), BENCHMARKS["pairs"], PAIRS, tmp_path / "whole", Console())
    assert second[6:] == whole[6:]


def test_rows_of_another_prompt_or_changed_data_are_never_taken(tmp_path: pathlib.Path) -> None:
    bench = BENCHMARKS["pairs"]
    run(system(FakeJudge()), bench, PAIRS, tmp_path, Console())
    for changed in (system(FakeJudge(), retries=1), system(FakeJudge(), FakeWriter())):
        assert system_hash(changed, bench) != system_hash(system(FakeJudge()), bench)
    judge = FakeJudge()
    run(system(judge), bench, [dataclasses.replace(PAIRS[0], prompt="another"), *PAIRS[1:]], tmp_path, Console())
    assert {i.question for i in judge.asked} == {"another"}


def test_a_torn_last_row_is_done_again_and_a_spoiled_one_is_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.jsonl"
    RowStore(path).add([{"content": "a", "x": 1}, {"content": "b"}])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"content": "c", ')
    assert set(RowStore(path).rows) == {"a", "b"} and path.read_bytes() == whole
    path.write_bytes(b'{"content": "a"}\nrubbish\n{"content": "b"}\n')
    with pytest.raises(UserError) as error:
        RowStore(path)
    assert error.value.where.endswith("rows.jsonl:2")


def test_several_judges_execute_the_same_rubrics(tmp_path: pathlib.Path) -> None:
    writer = FakeWriter()
    for name in ("one", "two"):
        judge = FakeJudge(name=name)
        made = dataclasses.replace(system(judge, writer), weights=name)
        run(made, BENCHMARKS["pairs"], PAIRS[:3], tmp_path, Console())
        assert judge.asked[0].rubric.criteria[0].text == "serves question 0"
    assert writer.wrote == ["p0", "p1", "p2"]
    store = KeptWriter(FakeWriter(), tmp_path)
    assert [w.rubric for w in store.write(PAIRS[:1])] == [FakeWriter().write(PAIRS[:1])[0].rubric]


def test_what_an_endpoint_failed_to_write_is_asked_for_again(tmp_path: pathlib.Path) -> None:
    class Down(FakeWriter):
        def write(self, examples: Sequence[Example]) -> list[Written]:
            self.wrote += [e.id for e in examples]
            return [Written(None, "", "timeout", "no reply") for _ in examples]

    for _ in range(2):
        writer = Down()
        KeptWriter(writer, tmp_path).write(PAIRS[:1])
        assert writer.wrote == ["p0"]


def test_a_smaller_choice_lies_in_a_larger_one() -> None:
    many = [dataclasses.replace(PAIRS[0], id=str(i)) for i in range(100)]
    small, large = choose(many, 10), choose(many, 30)
    assert len(small) == 10 and {e.id for e in small} < {e.id for e in large} and choose(many, 0) == choose(many, 500) == many
    assert [int(e.id) for e in large] == sorted(int(e.id) for e in large) and small != many[:10]
    ties = [dataclasses.replace(PAIRS[0], id=f"{kind}:{i}") for i in range(20) for kind in ("ref", "tied")]
    assert len({e.id.split(":")[1] for e in choose(ties, 8)}) == 4


# -------------------------------------------------------------------------------------------------------------- command


@pytest.fixture(autouse=True)
def the_compile_cache_is_put_back() -> Iterator[None]:
    cache = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", cache)


@pytest.fixture
def data(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "pairs.jsonl"
    rows = [{"id": e.id, "prompt": e.prompt, "response_a": e.answers[0], "response_b": e.answers[1], "label": "AB"[i % 2]}
            for i, e in enumerate(PAIRS[:8])]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def results(out: pathlib.Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((out / "results.json").read_text())["results"]
    return found


def test_checking_judges_and_the_table_of_several(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    flags = [f"--data={data}", f"--out={out}", "--judge=oracle", "--judge", "always_a", "--judge=random"]
    assert command.main(["--benchmark=pairs", *flags]) == 0
    oracle, always_a, guess = results(out)
    assert oracle["score"] == oracle["strict"] == 1.0 and oracle["interval"] == [1.0, 1.0]
    assert always_a["score"] == 0.5 and always_a["parts"]["both_consistent"] == 0.0
    assert guess["interval"][0] <= 0.5 <= guess["interval"][1] and guess["tie_share"] == 0.0
    text = (out / "results.md").read_text()
    assert "## Transfer" in text and "| none | 1.000 [1.000, 1.000] | 0.500 [0.500, 0.500]" in text
    assert len(list(out.glob("*/rows.jsonl"))) == 3 and json.loads(next(out.glob("oracle-*/system.json")).read_text())
    assert command.main(["--benchmark=pairs", *flags, "--limit=4", "--ties=wrong"]) == 0
    assert results(out)[0]["n"] == 4


def test_lists_do_not_begin_with_the_right_answer_for_a_judge_of_slots() -> None:
    rows = [
        (e := dataclasses.replace(LIST, id=str(i)), Checking("always_a").judge([e], BENCHMARKS["listwise"])[0]) for i in range(90)
    ]
    assert 18 <= sum(judged.games[0][0] == 1.0 for _, judged in rows) <= 42
    assert sorted(shown_order(LIST)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--benchmark=pairs"], "--data is missing"),
        (["--bench=pairs"], "unknown flag"),
        (["--benchmark=pear", "--data={data}", "--judge=oracle", "--out={out}"], "no benchmark 'pear'"),
        (["--benchmark=pairs", "--data=no.jsonl", "--judge=oracle", "--out={out}"], "no such data file"),
        (["--benchmark=pairs", "--data={data}", "--judge=oracle", "--out={out}", "--limit=-1"], "--limit=-1"),
        (["--benchmark=pairs", "--data={data}", "--judge=oracle", "--out={out}", "--batch=0"], "--batch=0"),
        (["--benchmark=pairs", "--data={data}", "--judge=oracle", "--out={out}", "--ties=both"], "--ties=both"),
        (["--benchmark=pairs", "--data={data}", "--judge=oracle", "--out={out}", "--generator=tiny"], "reads no rubric"),
        (["--benchmark=pairs", "--data={data}", "--judge=tiny?protocol=likert", "--out={out}", "--generator=data"], "no rubric"),
        (["--benchmark=pairs", "--data={data}", "--judge=tiny?protocool=likert", "--out={out}"], "protocool"),
        (["--benchmark=pairs", "--data={data}", "--judge=tiny?protocol", "--out={out}"], "is no source"),
        (
            ["--benchmark=pairs", "--data={data}", "--judge=world", "--out={out}", "--generator=tiny?prompt=rubric_points"],
            "shows answer, which no example has",
        ),
        (["--benchmark=pairs", "--data={data}", "--judge=missing_folder", "--out={out}"], "missing_folder"),
        (["--benchmark=pairs", "--data={data}", "--judge=run:nowhere", "--out={out}"], "not a run folder"),
        (["--benchmark=pairs", "--evolution=run", "--out={out}"], "one of them"),
        (["--evolution={out}", "--out={out}"], "no rollouts"),
    ],
)  # fmt: skip
def test_bad_input_ends_with_code_2(
    flags: list[str], word: str, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [flag.format(data=data, out=tmp_path / "out") for flag in flags]
    assert command.main(given) == 2
    said = capsys.readouterr().err
    assert word in said and "Traceback" not in said


def test_help_lists_benchmarks_and_rows(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, word in (("--help", "--benchmark"), ("--help_data", "judgebench: pair_id")):
        with pytest.raises(SystemExit) as end:
            command.main([flag])
        assert end.value.code == 0 and word in capsys.readouterr().out


def test_a_stopped_command_keeps_what_was_judged(
    data: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    judge = Checking.judge

    def interrupted(self: Checking, examples: Sequence[Example], benchmark: Any) -> list[Judged]:
        signal.raise_signal(signal.SIGINT)
        return judge(self, examples, benchmark)

    flags = ["--benchmark=pairs", f"--data={data}", f"--out={tmp_path / 'out'}", "--judge=oracle", "--batch=3"]
    with monkeypatch.context() as patch:
        patch.setattr(Checking, "judge", interrupted)
        assert command.main(flags) == command.STOPPED
    (partial,) = results(tmp_path / "out")
    assert (partial["n"], partial["examples"], partial["complete"]) == (3, 8, False) and partial["score"] == 1.0
    assert "3 of 8" in (tmp_path / "out" / "results.md").read_text()
    assert command.main(flags) == 0 and results(tmp_path / "out")[0]["n"] == 8


def test_sources_have_settings_of_their_own() -> None:
    assert parse_source("run:a/b#rubric@3?prompt=x&schema=rar", "--generator").settings == ("prompt=x", "schema=rar")
    loader = Loader(overrides=("judge.retries=5", "rubric_sampling.temperature=0"))
    cfg = loader._settings(("judge.retries=7",))
    assert cfg.judge.retries == 7 and loader._settings().judge.retries == 5 and cfg.rubric_sampling.temperature == 0


def test_a_reward_model_judges_without_a_rubric(
    data: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.numpy import load_file, save_file

    monkeypatch.setattr(jax, "device_count", lambda: 1)
    folder = tmp_path / "reward"
    shutil.copytree(TINY, folder)  # the small world's model with a head of ours
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "score.weight": np.ones((1, 64), np.float32)}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config))
    flags = ["--benchmark=pairs", f"--data={data}", f"--out={tmp_path / 'out'}", f"--judge={folder}?protocol=scalar"]
    flags += ["--config.judge.max_prompt=128", "--config.sampler.prefill_tokens=256"]
    assert command.main(flags) == 0
    (found,) = results(tmp_path / "out")
    assert found["calls"] == 16 and found["failure_share"] == 0.0 and found["rubrics"] == {}
    row = json.loads(next((tmp_path / "out").glob("*/rows.jsonl")).read_text().splitlines()[0])
    assert row["games"][0] == row["games"][1] and row["rubric"] == ""  # no noise: asked once


def test_a_generator_that_sees_the_candidates(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DynamicRubric's templates show the example's answers, in an order that belongs to its id."""
    seen: list[tuple[str, str, list[str]]] = []

    class Candidates:
        @staticmethod
        def generator_messages(template: str, question: str, candidates: list[str]) -> list[dict[str, str]]:
            seen.append((template, question, list(candidates)))
            return [{"role": "user", "content": "..."}]

    monkeypatch.setitem(sys.modules, "coevo_jax.text.candidates", Candidates)
    template = tmp_path / "sees.txt"
    template.write_text("[user]\n{{question|raw}}\n{{candidates|raw}}\nWrite a checklist.\n")
    assert shows_candidates(str(template)) and not shows_candidates("rubric_long") and not unknown_slots(str(template))
    for _ in range(2):
        messages_of(str(template), LIST)
    assert seen[0] == seen[1] == (str(template), "q", [LIST.answers[i] for i in shown_order(LIST)])
    assert unknown_slots("rubric_points") == ["answer"]


def test_a_judge_and_a_generator_behind_an_endpoint(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The replies are kept, so the same command asks for nothing again; the endpoint's failures are counted."""
    rubric = json.dumps({"criteria": [{"criterion": c, "weight": 0.5} for c in ("is good", "is short")]})

    def script(handler: Any, body: dict[str, Any], number: int) -> None:
        text = body["messages"][-1]["content"]
        if "Write a rubric" in text:
            handler.send(completion(rubric))
        elif "bad 3" in text:
            handler.send("down", status=404)
        else:
            handler.send(completion(json.dumps({"reasoning": "so", "score": 0.9 if "good " in text else 0.1})))

    out = tmp_path / "out"
    with serving(script) as server:
        where = f"endpoint.base_url={server.url}"
        flags = ["--benchmark=pairs", f"--data={data}", f"--out={out}", "--generator=api:writer", f"--config.generator.{where}",
                 f"--judge=api:model?protocol=json_score&{where}&endpoint.retries=0"]  # fmt: skip
        assert command.main(flags) == 0
        (found,) = results(out)
        assert found["rubrics"] == {"ok": 8} and found["calls"] == 16 and sum(found["failures"].values()) == 1
        assert found["failure_share"] == pytest.approx(1 / 8)
        asked = len(server.bodies)
        assert asked == 8 + 16 and command.main(flags) == 0 and len(server.bodies) == asked


def test_the_small_world_from_end_to_end(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of ours writes the rubrics, the world's rules execute them; the model judges too, alone and side by side."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    path, out = tmp_path / "pairs.jsonl", tmp_path / "out"
    rows = [{"prompt": f"write 3 words with {w}", "response_a": "owl yak", "response_b": f"{w} owl yak", "label": "B"}
            for w in ("ant", "bee", "cat", "cow", "dog", "elk")]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--benchmark=pairs", f"--data={path}", f"--out={out}", "--generator=tiny", "--config.sampler.slots=4"]
    flags += ["--judge=world", "--judge=tiny?protocol=json_score"]
    assert command.main(flags) == 0
    world, model = results(out)
    assert world["rubrics"] and world["failed_calls"] == 0.0 and world["score"] > 0.5
    # The same rubrics; the judge's prompt has no room in so small a model, which is counted and decides nothing.
    assert world["rubrics"] == model["rubrics"] and model["failures"] == {"refused": model["calls"]}
    assert model["score"] == 0.0 and model["failure_share"] == 1.0
    assert len(list(out.glob("rubrics-*.jsonl"))) == 1
    before = (out / "results.json").read_text()
    assert command.main(flags) == 0 and (out / "results.json").read_text() == before
    assert command.main(["--evolution=" + str(next(out.glob("rubrics-*.jsonl"))), f"--out={tmp_path / 'evolution'}"]) == 0


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "file", "slots", "chance"),
    [
        ("llmbar", "bench_preference/llmbar_visible.jsonl", 0.5, 0.5),
        ("pandalm", "bench_preference/pandalm_visible.jsonl", 0.46, 0.46),  # 40 of 500 labels are ties, which neither says
        ("listwise", "listwise/vicuna80_5models.jsonl", None, 0.5),
        ("infobench", "rubrics/infobench.jsonl", 0.876, 0.5),  # 1,971 of 2,250 criteria are met
    ],
)
def test_published_properties(
    name: str, file: str, slots: float | None, chance: float, shared_data: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """An oracle gives 100, a judge of slots one half of the pairs in two games, guessing gives chance within its interval."""
    flags = [f"--benchmark={name}", f"--data={shared_data / file}", f"--out={tmp_path}"]
    assert command.main([*flags, "--judge=oracle", "--judge=always_a", "--judge=random"]) == 0
    oracle, always_a, guess = results(tmp_path)
    assert oracle["score"] == oracle["strict"] == 1.0
    assert slots is None or always_a["score"] == pytest.approx(slots)
    assert guess["interval"][0] <= chance <= guess["interval"][1]
