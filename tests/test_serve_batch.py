"""The batch: a file of questions to a file of verdicts, stopped and resumed, and what it refuses."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any
from unittest import mock

import pytest
import train_support
from serve_support import BAD, GOOD, QUESTION, RUBRIC, Client, system_of

from coevo_jax.config import RubricConfig
from coevo_jax.errors import UserError
from coevo_jax.serve import __main__ as program
from coevo_jax.serve import library
from coevo_jax.serve.asks import CompareAsk, RubricAsk, ScoreAsk
from coevo_jax.serve.batch import Output, read_asks, score_rows


@pytest.fixture(scope="module")
def system():
    return system_of("tiny", "oracle")


ROWS: list[dict[str, Any]] = [
    {"id": "both", "question": QUESTION, "answers": [GOOD, BAD], "rubric": RUBRIC},
    {
        "id": 7,
        "prompt": QUESTION,
        "answer": GOOD,
        "rubric": json.dumps(RUBRIC | {"more": 1}),
        "note": "other columns are no matter",
    },
    {"question": QUESTION, "a": BAD, "b": GOOD, "rubric": RUBRIC, "seed": 3},
    {"id": "alone", "question": QUESTION, "reference": "none"},
    *({"id": f"r{i}", "question": f"write {i} words with owl", "answers": [GOOD]} for i in range(3, 7)),
    {"id": "long", "question": "ant " * 300, "answers": [GOOD]},
]
ROWS[1]["rubric"] = RUBRIC


def write(path: pathlib.Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def lines(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(*flags: str) -> int:
    """The command line in this process, over shared programs."""
    with train_support.shared_programs():
        return program.main(["score", "--generator=tiny", "--judge=oracle", *flags])


def test_rows_become_asks(tmp_path: pathlib.Path) -> None:
    rows = read_asks(write(tmp_path / "in.jsonl", ROWS), RubricConfig())
    assert [row.id for row in rows] == ["both", "7", "3", "alone", "r3", "r4", "r5", "r6", "long"]
    assert [type(row.ask) for row in rows[:4]] == [ScoreAsk, ScoreAsk, CompareAsk, RubricAsk]
    assert rows[0].ask.answers == (GOOD, BAD) and rows[1].ask.answers == (GOOD,) and rows[2].ask.seed == 3
    assert [c.weight for c in rows[0].ask.rubric.criteria] == [2, 1] and rows[4].ask.rubric is None
    assert len({row.hash for row in rows}) == len(rows)


def test_a_file_is_answered(tmp_path: pathlib.Path, system, capsys) -> None:
    out = tmp_path / "deep" / "out.jsonl"
    assert command(f"--in={write(tmp_path / 'in.jsonl', ROWS)}", f"--out={out}", "--batch=4") == 0
    found = lines(out)
    assert [row["id"] for row in found] == ["both", "7", "3", "alone", "r3", "r4", "r5", "r6", "long"]
    assert [row["object"] for row in found[:4]] == ["scores", "scores", "verdict", "rubric"]
    assert [a["score"] for a in found[0]["answers"]] == [1, 0] and found[2]["winner"] == "b"
    assert "tokens" in found[8]["error"] and "answers" not in found[8]
    for row in found[4:8]:
        ours = system.score(f"write {row['id'][1:]} words with owl", [GOOD]).to_json()
        assert {key: row[key] for key in ours} == json.loads(json.dumps(ours))
    said = capsys.readouterr().err
    assert "rows 9/9" in said and "ETA" in said and "9 rows done, 0 before" in said and "1 refused" in said


class Killed(BaseException):
    """The end of a process, as far as one process can have it."""


def test_a_stop_keeps_what_is_done_and_the_same_command_goes_on(tmp_path: pathlib.Path, system) -> None:
    source = write(tmp_path / "in.jsonl", ROWS)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert command(f"--in={source}", f"--out={whole}") == 0
    rows = read_asks(source, system.cfg.rubric)

    def stop(done: int, total: int, counts: Any) -> None:
        if done >= 4:
            raise Killed

    with pytest.raises(Killed), Output(str(out), system.identity()) as output:
        score_rows(system, rows, output, 2, stop)
    assert out.read_text() == "".join(whole.read_text().splitlines(keepends=True)[:4])
    with open(out, "a") as file:
        file.write(whole.read_text().splitlines()[4][:50])  # a line that a kill cut off
    asked: list[int] = []
    plain = library.System.ask_all

    def count(self, asks, *args):
        asked.append(len(asks))
        return plain(self, asks, *args)

    with mock.patch.object(library.System, "ask_all", count):
        assert command(f"--in={source}", f"--out={out}", "--batch=3") == 0
    assert asked == [3, 2] and out.read_bytes() == whole.read_bytes()
    assert command(f"--in={source}", f"--out={out}") == 0 and out.read_bytes() == whole.read_bytes()


def test_ctrl_c_ends_with_130(tmp_path: pathlib.Path, capsys) -> None:
    with mock.patch.object(library.System, "ask_all", side_effect=KeyboardInterrupt):
        assert command(f"--in={write(tmp_path / 'in.jsonl', ROWS)}", f"--out={tmp_path / 'out.jsonl'}") == 130
    assert "the same command goes on" in capsys.readouterr().err


BAD_ROWS = [
    ({"answers": [GOOD]}, "no prompt"),
    ({"question": " "}, "no text"),
    ({"question": QUESTION, "answers": []}, "no list of texts"),
    ({"question": QUESTION, "answers": [GOOD, 5]}, "no list of texts"),
    ({"question": QUESTION, "answers": "one"}, "no list of texts"),
    ({"question": QUESTION, "a": GOOD}, "no b"),
    ({"question": QUESTION, "b": GOOD}, "several kinds"),
    ({"question": QUESTION, "answers": [GOOD], "answer": GOOD}, "several kinds"),
    ({"question": QUESTION, "answers": [GOOD], "rubric": 5}, "the rubric is no object"),
    ({"question": QUESTION, "answers": [GOOD], "rubric": {"criteria": [{}]}}, "no text"),
    ({"question": QUESTION, "seed": "x"}, "seed"),
    ({"question": QUESTION, "id": 1.5}, "the id"),
    ({"question": "half \ud800"}, "surrogate"),
]


def test_bad_rows_are_all_named_before_a_model_is_loaded(tmp_path: pathlib.Path, capsys) -> None:
    rows = [{"id": "same", "question": QUESTION}, *(row for row, _ in BAD_ROWS[:8]), {"id": "same", "question": QUESTION}]
    out = tmp_path / "out.jsonl"
    with mock.patch.object(program, "_load", side_effect=AssertionError("loaded")):
        assert command(f"--in={write(tmp_path / 'in.jsonl', rows)}", f"--out={out}") == 2
    said = capsys.readouterr().err
    assert "9 bad rows" in said and all(f"in.jsonl:{n}: " in said for n in range(2, 11)) and "in.jsonl:1 too" in said
    assert not out.exists()


@pytest.mark.parametrize("row, what", BAD_ROWS)
def test_a_bad_row_says_what_is_wrong(tmp_path: pathlib.Path, row: dict, what: str) -> None:
    with pytest.raises(UserError, match=what):
        read_asks(write(tmp_path / "in.jsonl", [row]), RubricConfig())


def test_bad_commands_end_with_2(tmp_path: pathlib.Path, capsys) -> None:
    source, out = write(tmp_path / "in.jsonl", ROWS), f"--out={tmp_path / 'out.jsonl'}"
    bad = [
        ([f"--in={tmp_path / 'none.jsonl'}", out], "no such data file"),
        ([f"--in={write(tmp_path / 'broken.jsonl', ['{'])}", out], "broken.jsonl:1"),
        ([f"--in={source}", f"--out={tmp_path / 'out.txt'}"], "no JSONL file"),
        ([f"--in={source}", out, "--batch=0"], "out of range"),
        ([f"--in={source}", out, "--config.judge.protocol=none"], "unknown choice"),
        ([f"--in={source}", out, "--jugde=tiny"], "--judge"),
        ([f"--in={source}", f"--out={tmp_path / 'in.jsonl'}", "--overwrite"], "would be the input"),
        ([f"--in={source}", f"--out={write(tmp_path / 'other.jsonl', ROWS)}"], "no result"),
    ]
    for flags, what in bad:
        assert command(*flags) == 2 and what in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        command(out)
    assert end.value.code == 2


def test_an_output_of_another_system_or_of_changed_rows_is_refused(tmp_path: pathlib.Path, capsys) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    flags = (f"--in={source}", f"--out={out}")
    write(source, ROWS[:2])
    assert command(*flags) == 0
    before = out.read_bytes()
    assert command(*flags, "--config.judge.oracle_noise=0.5") == 2 and "another system" in capsys.readouterr().err
    write(source, [ROWS[0] | {"answers": [BAD]}, ROWS[1]])
    assert command(*flags) == 2 and "has changed" in capsys.readouterr().err and out.read_bytes() == before
    assert command(*flags, "--overwrite") == 0 and [a["score"] for a in lines(out)[0]["answers"]] == [0]
    with Output(str(out), lines(out)[0]["system"]):
        assert command(*flags) == 2 and "another process" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ real processes


def start(*flags: str, **environ: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(train_support.REPO), "XLA_FLAGS": "", **environ}
    words = [sys.executable, "-m", "coevo_jax.serve", *flags]
    return subprocess.Popen(words, env=env, cwd=train_support.REPO, text=True, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_the_endpoint_as_a_process_ends_in_order() -> None:
    process = start(
        "http", "--generator=tiny", "--judge=oracle", "--port=0", "--token_env=TINY_TOKEN", TINY_TOKEN="a-secret-token"
    )
    assert process.stderr is not None
    try:
        said = process.stderr.readline()
        client = Client(int(said.split(":")[2].split(",")[0]))
        assert client.ask("GET", "/health").json["status"] == "starting"
        while not (line := process.stderr.readline()).startswith("ready"):
            assert line, "it ended"
            said += line
        key = {"Authorization": "Bearer a-secret-token"}
        assert client.scores([GOOD], timeout=60).status == 401
        body = {"question": QUESTION, "answers": [GOOD]}
        assert client.post("/v1/scores", body, headers=key).json["answers"][0]["status"] == "ok"
        process.send_signal(signal.SIGTERM)
        said += process.stderr.read()
        assert process.wait(30) == 0 and said.endswith("ending: no new requests\nended\n") and "a-secret-token" not in said
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_killed_batch_goes_on(tmp_path: pathlib.Path) -> None:
    rows = [{"id": i, "question": f"write {3 + i % 4} words with owl", "answers": [GOOD], "seed": i} for i in range(300)]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    flags = ("score", "--generator=tiny", "--judge=oracle", f"--in={source}", f"--out={out}", "--batch=4")
    process = start(*flags)
    end = time.monotonic() + 120
    while not out.exists() or out.read_bytes().count(b"\n") < 8:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    done = out.read_bytes().count(b"\n")
    assert 8 <= done < 300
    again = start(*flags)
    assert again.stderr is not None
    said = again.stderr.read()
    assert again.wait() == 0 and f"{300 - done} rows done, {done} before" in said
    assert [row["id"] for row in lines(out)] == [str(i) for i in range(300)]
