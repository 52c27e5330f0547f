"""What a report shows of a run: columns, phases, alarms, whole histories within a budget; hostile text stays data."""

import base64
import gzip
import json
import re

import pytest

from coevo_jax.errors import UserError
from coevo_jax.report import __main__ as command
from coevo_jax.report.collect import alarms_of, collect, columns_of, flags_of, names_of, phases_of, short, trimmed
from coevo_jax.report.criteria import criteria_of, numbered, written
from coevo_jax.report.page import page

HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1"> \u202e {{SCRIPT}} <!--'


def verdict(score, status="ok"):
    return {"status": status, "score": score, "raw": json.dumps({"score": score}), "parts": [score], "detail": ""}


def policy_row(update, group, sample, reward, question="q", **more):
    return {
        "update": update, "role": "policy", "slot": group, "group": group, "sample": sample, "record": f"r-{question}",
        "question": question, "prompt": "the prompt", "completion": "an answer", "prompt_ids": [1], "completion_ids": [2],
        "finish": "stop", "reward": reward, "parts": {"judge": reward}, "advantage": 0.1, "trained": True,
        "rubric": "1. (weight 0.8) is short\n   1.0: yes\n2. (weight 0.2) is kind", "judge": verdict(reward), **more,
    }  # fmt: skip


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    metrics = [
        {"step": 0, "cycle": 0, "stage": "policy", "role": "policy", "reward/mean": 0.5, "judge/alarm": 1.0,
         "judge/failure_share": 0.25},
        {"step": 1, "cycle": 0, "stage": "policy", "role": "policy", "reward/mean": 1 / 3, "judge/alarm": 0.0},
        {"step": 2, "cycle": 0, "stage": "rubric", "role": "rubric", "rubric/valid_share": 1.0, "kl": float("nan")},
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (folder / "config.json").write_text(json.dumps({"name": "x"}))
    rows = {
        "update_000000_policy": [
            policy_row(0, 0, 0, 0.5), policy_row(0, 0, 1, 0.5), policy_row(0, 1, 0, 0.1, HOSTILE, completion=HOSTILE * 50),
            policy_row(0, 1, 1, None, HOSTILE, judge=verdict(None, "timeout"), finish="length", trained=False),
        ],
        "update_000001_policy": [policy_row(1, 0, 0, 0.9), policy_row(1, 0, 1, 0.2), policy_row(1, 2, 0, 0.3, "rare")],
        "update_000002_rubric": [
            {"update": 2, "role": "rubric", "slot": 0, "group": 0, "sample": 0, "record": "r-q", "question": "q",
             "completion": '{"criteria": [{"criterion": "is short", "weight": 0.5}, {"criterion": "is long", "weight": 0.5}]}',
             "finish": "stop", "reward": 0.3, "parts": {"margin": 0.0, "format": 1.0}, "advantage": 0.0, "trained": True,
             "rubric_status": "ok", "rubric_detail": "",
             "pair": {"source": "temporal", "gap": 1, "accepted": "b", "rejected": "a", "accepted_ids": [1], "rejected_ids": [2]},
             "judge_accepted": verdict(0.5), "judge_rejected": verdict(0.5)},
        ],
    }  # fmt: skip
    for name, own in rows.items():
        (folder / "rollouts" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    return folder


def test_metrics_become_columns_phases_and_alarms(run):
    data = collect(run, 10**6, 1000)
    assert data.steps == [0, 1, 2]
    assert data.columns["reward/mean"] == [0.5, 0.33333, None] and data.columns["kl"] == [None, None, None]
    assert [(p.stage, p.first, p.last) for p in data.phases] == [("policy", 0, 1), ("rubric", 2, 2)]
    assert data.alarms == [{"step": 0, "role": "policy", "name": "judge/failure_share", "value": 0.25}]


def test_phases_of_one_stage_are_parted_by_their_cycle():
    rows = [{"step": i, "cycle": i // 2, "stage": "policy", "role": "policy"} for i in range(4)]
    assert [(p.cycle, p.first, p.last) for p in phases_of(rows)] == [(0, 0, 1), (1, 2, 3)]
    assert columns_of([]) == {} and alarms_of([{"step": 1, "kl/alarm": 0.0}]) == []


def test_rows_are_found_by_what_went_wrong(run):
    data = collect(run, 10**6, 1000)
    by_text = {question.text: question for question in data.questions}
    assert data.questions[0].text == "q"  # it came back most often
    assert by_text["q"].flags == ["flat", "tie"]
    assert set(by_text[HOSTILE].flags) == {"failed", "truncated", "untrained"}
    assert by_text["rare"].flags == []
    assert (data.all_questions, data.all_rows, data.rows) == (3, 8, 8)
    assert "completion_ids" not in by_text["q"].rows[0] and "accepted_ids" not in by_text["q"].rows[-1]["pair"]
    assert flags_of({"reward": 1.0, "rubric_status": "parse_fail"}) == ["invalid"]


def test_a_budget_leaves_questions_out_whole(run):
    whole = {q.text: len(q.rows) for q in collect(run, 10**6, 1000).questions}
    for budget in (1, 1000, 2000, 3000):
        data = collect(run, budget, 1000)
        assert data.questions and all(len(q.rows) == whole[q.text] for q in data.questions)
        assert data.all_rows == 8 and data.rows == sum(len(q.rows) for q in data.questions)
    assert len(collect(run, 1, 1000).questions) == 1


def test_long_texts_lose_their_middle_and_numbers_their_tail():
    text = trimmed("a" * 60 + "b" * 60, 40)
    assert text.startswith("a" * 20 + "\n[... 80 characters left out ...]\n") and text.endswith("b" * 20)
    assert short(1 / 3) == 0.33333 and short(2.0) == 2 and short(float("inf")) is None and short(True) is True


@pytest.mark.parametrize(
    ("row", "criteria"),
    [
        ({"rubric": "1. (weight 0.8) is short\n   1.0: yes\n2. is kind"}, [("is short", 0.8), ("is kind", None)]),
        ({"role": "rubric", "completion": '{"criteria": [{"criterion": "a", "weight": 1}]}'}, [("a", 1.0)]),
        (
            {"role": "rubric", "completion": '<think>1. no</think>[{"description": "a", "weight": -2}, "b"]'},
            [("a", -2.0), ("b", None)],
        ),
        ({"role": "rubric", "completion": "1. The response is short [Hard Rule]"}, [("The response is short [Hard Rule]", None)]),
        ({"role": "rubric", "completion": '{"criteria": [{"criterion": "cut'}, []),
        ({"role": "policy", "completion": "1. a list in an answer"}, []),
    ],
)
def test_criteria_of_every_form(row, criteria):
    assert criteria_of(row) == criteria


def test_criteria_of_hostile_text():
    assert (
        written("[" * 100_000) == [] and written('{"a": NaN}') == [] and numbered("1. (weight x) y") == [("(weight x) y", None)]
    )
    assert written('{"criteria": [{"criterion": 3}, null, {"weight": true, "criterion": "a"}]}') == [("a", None)]


def test_the_page_holds_hostile_text_as_data_only(run):
    html = page([collect(run, 10**6, 1000)], HOSTILE)
    assert html.count("<script>") == 1 and "<img" not in html and HOSTILE not in html
    scripts = re.findall(r'<script type="([^"]+)" id="([^"]+)">([^<]*)</script>', html)
    assert [name for _, name, _ in scripts] == ["data", "q-0-0", "q-0-1", "q-0-2"]
    data = json.loads(scripts[0][2])
    assert data[0]["questions"][0]["updates"] == [0, 1, 2]
    texts = {q["text"] for q in data[0]["questions"]}
    assert HOSTILE in texts
    for (_, _, packed), question in zip(scripts[1:], data[0]["questions"]):
        rows = json.loads(gzip.decompress(base64.b64decode(packed)))
        assert len(rows) == question["rows"]
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "") and "https://" not in html
    assert page([collect(run, 10**6, 1000)], "t") == page([collect(run, 10**6, 1000)], "t")


def test_the_command_writes_one_file_and_names_what_is_wrong(run, tmp_path, capsys):
    assert command.main([str(run)]) == 0 and (run / "report.html").stat().st_size > 10_000
    assert "3 updates, 3 questions, 8 rows" in capsys.readouterr().out
    for argv, word in (([], "no run is named"), ([str(tmp_path / "no")], "no such folder"), ([str(tmp_path)], "no metrics.jsonl"),
                       (["--otu=x", str(run)], "--out"), (["--every=0", str(run)], "number above 0")):  # fmt: skip
        assert command.main(argv) == 2
        assert word in capsys.readouterr().err
    with pytest.raises(UserError, match="nearest:  out"):
        command.parse_flags(["--otu=x", str(run)])


def test_runs_get_names_that_differ(tmp_path):
    assert names_of([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert names_of([tmp_path / "a"]) == ["a"]


def test_plots_are_figures_and_tables(run, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "plots"
    assert command.main([str(run), f"--plots={out}"]) == 0
    assert (out / "reward_mean.csv").read_text() == "line,update,value\npolicy,0,0.5\npolicy,1,0.33333\n"
    assert (out / "reward_mean.svg").stat().st_size and (out / "reward_mean.png").stat().st_size
    assert not (out / "kl.svg").exists()  # it has no number
