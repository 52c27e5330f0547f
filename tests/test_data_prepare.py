"""`prepare`: what is dropped and counted, the manifest, refusals, atomic writes and the command's exit codes."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest
from text_support import CHATML, make_tokenizer

from coevo_jax.config import DataConfig
from coevo_jax.data import read_prompts
from coevo_jax.data.__main__ import main
from coevo_jax.data.prepare import Benchmarks, Options, prepare, rendered_length, words
from coevo_jax.errors import UserError
from coevo_jax.text.chat import ChatTokenizer

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return str(path)


def run(tmp_path, rows, **options):
    source = jsonl(tmp_path / "in.jsonl", rows)
    return prepare(Options((source,), str(tmp_path / "out.jsonl"), **options), io.StringIO())


def written(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def refused(tmp_path, rows, **options) -> UserError:
    with pytest.raises(UserError) as caught:
        run(tmp_path, rows, **options)
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == [], "nothing is written"
    return caught.value


def chat(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def test_first_user_turns_without_duplicates(tmp_path):
    rows = [
        chat(("system", "s"), ("user", "a  b"), ("assistant", "x"), ("user", "later")),
        {"prompt": " a b\n"},
        {"prompt": "A b"},
        {"conversations": [{"from": "human", "value": "c"}]},
        chat(("assistant", "x")),
        {"prompt": " "},
    ]
    manifest = run(tmp_path, rows)
    assert [row["prompt"] for row in written(tmp_path)] == ["a  b", "A b", "c"], "case matters, white space does not"
    counts = manifest["counts"]
    assert (counts["read"], counts["kept"], counts["duplicate"], counts["no_user_turn"]) == (6, 3, 1, 2)
    assert sum(counts.values()) - counts["read"] == counts["read"], "every row is accounted for"


def test_the_manifest_holds_hashes_that_fit_and_no_time(tmp_path):
    manifest = run(tmp_path, [{"prompt": "a"}])
    assert manifest == json.loads((tmp_path / "out.manifest.json").read_text())
    for entry, name in [(manifest["output"], "out.jsonl"), (manifest["inputs"][0], "in.jsonl")]:
        assert entry["sha256"] == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    first = (tmp_path / "out.manifest.json").read_bytes()
    run(tmp_path, [{"prompt": "a"}], overwrite=True)
    assert (tmp_path / "out.manifest.json").read_bytes() == first


def test_what_is_written_is_a_prompt_file(tmp_path):
    run(tmp_path, [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}], keep=("answer",))
    prompts = read_prompts(DataConfig(prompts=str(tmp_path / "out.jsonl")))
    assert [record["answer"] for record in prompts.records] == ["1", "2"]
    ids = [row["id"] for row in written(tmp_path)]
    jsonl(tmp_path / "bare.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    assert ids == [record["id"] for record in read_prompts(DataConfig(prompts=str(tmp_path / "bare.jsonl"))).records]


def test_benchmark_questions_are_left_out(tmp_path):
    bench = jsonl(tmp_path / "bench.jsonl", [{"question": LONG + " end"}, {"turns": ["What's Up?", "And then?"]}])
    rows = [
        {"prompt": "what s up"},
        {"prompt": "AND  THEN?!"},
        {"prompt": "start " + LONG.title() + " other"},
        {"prompt": LONG.split(" ", 2)[2] + " END"},
        {"prompt": LONG.rsplit(" ", 2)[0] + " other"},
        {"prompt": "what s up today"},
    ]
    manifest = run(tmp_path, rows, benchmarks=(bench,))
    assert [row["prompt"] for row in written(tmp_path)] == [rows[4]["prompt"], rows[5]["prompt"]], "12 words in a row may stay"
    assert manifest["benchmarks"][0]["questions"] == 3
    assert (manifest["benchmarks"][0]["exact"], manifest["benchmarks"][0]["ngram"]) == (2, 2)
    assert (manifest["counts"]["benchmark_exact"], manifest["counts"]["benchmark_ngram"]) == (2, 2)


def test_words_of_scripts_without_blanks():
    assert words("Ａb, 你好 don't_x") == ["ab", "你", "好", "don", "t_x"]
    found = Benchmarks(4)
    found.files["f"] = {"questions": 0, "exact": 0, "ngram": 0}
    found._add_question(words("请为以下文本选择"), "f")
    assert found.overlap("今天为以下文写") == "ngram" and found.overlap("今天为以下写") == ""


def test_a_benchmark_file_without_questions_is_refused(tmp_path):
    bench = jsonl(tmp_path / "bench.jsonl", [{"qestion": "a"}])
    error = refused(tmp_path, [{"prompt": "a"}], benchmarks=(bench,), benchmark_column="question")
    assert error.nearest == "qestion" and error.where == f"{bench}:1"


def test_parquet_and_a_named_column(tmp_path):
    path = tmp_path / "in.parquet"
    rows = [{"chosen": chat(("user", f"q{i % 3}"), ("assistant", "x"))["messages"], "other": "y" * 10} for i in range(7)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    manifest = prepare(Options((str(path),), str(tmp_path / "out.jsonl"), column="chosen"), io.StringIO())
    assert manifest["counts"]["duplicate"] == 4 and [row["prompt"] for row in written(tmp_path)] == ["q0", "q1", "q2"]
    with pytest.raises(UserError) as caught:
        prepare(Options((str(path),), str(tmp_path / "two.jsonl"), column="choosen"), io.StringIO())
    assert caught.value.where == f"{path}, row 1"
    assert caught.value.nearest == "chosen" and "other" in caught.value.expected


@pytest.mark.parametrize(
    "rows, options, where",
    [
        ([{"prompt": "a"}, {"prompt": 3}], {}, "in.jsonl:2"),
        ([{"text": "a"}], {}, "in.jsonl:1"),
        ([{"prompt": "a"}], {"keep": ("answr",)}, "in.jsonl:1"),
        ([{"prompt": " "}], {}, "in.jsonl"),
        ([{"prompt": "a"}], {"max_tokens": 5}, "--max_tokens"),
        ([{"prompt": "a"}], {"max_tokens": 5, "tokenizer": "/no/such/folder"}, "--tokenizer"),
        ([{"prompt": "a"}], {"ngram": 1}, "--ngram"),
        ([{"prompt": "a"}], {"benchmarks": ("/no/such/file.jsonl",)}, "--benchmark"),
    ],
)
def test_bad_input_writes_nothing(tmp_path, rows, options, where):
    assert where in refused(tmp_path, rows, **options).where


def test_an_output_that_exists_is_kept(tmp_path):
    run(tmp_path, [{"prompt": "a"}])
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(UserError, match="the output exists"):
        run(tmp_path, [{"prompt": "b"}])
    with pytest.raises(UserError):  # a fault on the way leaves the old one in place
        run(tmp_path, [{"prompt": "b"}, {"prompt": 3}], overwrite=True)
    assert (tmp_path / "out.jsonl").read_bytes() == before
    run(tmp_path, [{"prompt": "b"}], overwrite=True)
    assert written(tmp_path)[0]["prompt"] == "b"
    with pytest.raises(UserError, match="one of the inputs"):
        prepare(Options((str(tmp_path / "out.jsonl"),), str(tmp_path / "out.jsonl"), overwrite=True), io.StringIO())


def test_the_command_and_its_exit_codes(tmp_path, capsys):
    source = jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "a"}])
    command = ["prepare", "--input", source, "--output", str(tmp_path / "out.jsonl")]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "1 prompts in" in out and "read 2, kept 1, duplicate 1" in err
    assert main(command) == 2
    assert "the output exists" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0


def test_python_m_runs_it(tmp_path):
    command = [
        sys.executable,
        "-m",
        "coevo_jax.data",
        "prepare",
        "--input",
        "/no/file.jsonl",
        "--output",
        str(tmp_path / "o.jsonl"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no such data file" in done.stderr and "Traceback" not in done.stderr


def test_rows_stream_through(tmp_path):
    """10,000 rows, 20 MB of text, pass with far less memory than they have."""
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps({"prompt": f"question {i} " + "x" * 2000}) + "\n" for i in range(10_000))
    tracemalloc.start()
    try:
        prepare(Options((str(path),), str(tmp_path / "out.jsonl")), io.StringIO())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * 2**20, f"{peak / 2**20:.1f} MiB"


# ---------------------------------------------------------------------------------------------------------- real files


@pytest.mark.shared
def test_real_files(tmp_path, shared_data):
    """The shared prompt files are clean: what is dropped is a few n-gram matches and what is too long for the tokenizer."""
    names = ("followbench_zh", "self_instruct_seed", "mbpp")
    options = Options(
        inputs=tuple(str(shared_data / "prompts" / f"train_{name}.jsonl") for name in names),
        output=str(tmp_path / "out.jsonl"),
        tokenizer=str(shared_data / "tokenizers" / "smollm2"),
        max_tokens=256,
        benchmarks=tuple(map(str, sorted((shared_data / "bench_policy").glob("*.jsonl")))),
    )
    counts = prepare(options, io.StringIO())["counts"]
    assert counts["read"] == 590 + 171 + 266 and counts["kept"] > 0.6 * counts["read"]
    assert counts["too_long"] > 0 and counts["benchmark_exact"] == 0
    assert len(read_prompts(DataConfig(prompts=str(tmp_path / "out.jsonl")))) == counts["kept"]


@pytest.mark.shared
def test_a_benchmark_prepared_against_itself_leaves_nothing(tmp_path, shared_data):
    path = str(shared_data / "bench_policy" / "gsm8k_test.jsonl")
    with pytest.raises(UserError, match="no prompt is left") as caught:
        prepare(Options((path,), str(tmp_path / "out.jsonl"), benchmarks=(path,)), io.StringIO())
    assert "benchmark exact 1,319" in caught.value.expected


@pytest.mark.shared
def test_lengths_are_those_of_the_rendered_prompt(shared_data):
    from transformers import AutoTokenizer

    folder = str(shared_data / "tokenizers" / "smollm2")
    tokenizer, ours = AutoTokenizer.from_pretrained(folder, local_files_only=True), ChatTokenizer.load(folder)
    for prompt in ["Why?", "Add 12 and 345, please.", "一 二 三"]:
        turns = [{"role": "system", "content": ""}, {"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert rendered_length(ours, prompt) == len(tokenizer.encode(text, add_special_tokens=False))


# ---------------------------------------------------------------------------------------------------------- tokenizers


def lengths_by(tmp_path, source) -> tuple[list[str], str]:
    """Prompts of at most 30 tokens by the command, and the tokenizer's hash in the manifest."""
    questions = [{"prompt": "write 3 words " * n} for n in (1, 2, 8, 60)]
    command = ["prepare", "--input", jsonl(tmp_path / "in.jsonl", questions), "--output", str(tmp_path / "out.jsonl")]
    assert main([*command, "--tokenizer", str(source), "--max_tokens", "30", "--overwrite"]) == 0
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    assert manifest["counts"]["too_long"] == 4 - len(written(tmp_path))
    return [row["prompt"] for row in written(tmp_path)], manifest["options"]["tokenizer_hash"]


def test_the_command_takes_a_source_of_a_policy_by_name_or_folder(tmp_path):
    from coevo_jax.models.load import TINY

    named, folder = lengths_by(tmp_path, "tiny"), lengths_by(tmp_path, TINY)
    assert named == folder and 0 < len(named[0]) < 4
    ours = ChatTokenizer.load(TINY)
    assert named[1] == ours.hash and all(rendered_length(ours, prompt) <= 30 for prompt in named[0])


def test_a_folder_with_a_tokenizer_alone_is_enough_and_its_template_counts(tmp_path):
    folder = make_tokenizer(tmp_path / "tok", CHATML)  # a token a byte
    frame = rendered_length(ChatTokenizer.load(folder), "")
    rows = [{"prompt": "a" * 9}, {"prompt": "a" * 10}]
    source = jsonl(tmp_path / "in.jsonl", rows)
    command = ["prepare", "--input", source, "--output", str(tmp_path / "out.jsonl"), "--tokenizer", str(folder)]
    assert frame > 10 and main([*command, "--max_tokens", str(frame + 9)]) == 0
    assert [row["prompt"] for row in written(tmp_path)] == ["a" * 9]


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path, capsys):
    folder = make_tokenizer(tmp_path / "tok", None)
    command = ["prepare", "--input", jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}]), "--output", str(tmp_path / "out.jsonl")]
    assert main([*command, "--tokenizer", str(folder), "--max_tokens", "9"]) == 2
    assert "no chat template" in capsys.readouterr().err and not (tmp_path / "out.jsonl").exists()


@pytest.mark.model
def test_the_command_takes_the_embedded_model_and_its_gguf_file(tmp_path):
    from coevo_jax.models.smollm2 import gguf_path

    assert lengths_by(tmp_path, "smollm2") == lengths_by(tmp_path, gguf_path())
