"""run.py from its flags: bad input is an error of exit code 2 that names the path or key, and nothing is written over."""

from __future__ import annotations

import json
import pathlib
import shutil
import sys
from collections.abc import Iterator

import jax
import pytest
from train_support import TINY, files_of, load_program, run, shared_programs, tiny

from coevo_jax.config.load import load_config
from coevo_jax.config.override import apply_overrides

program = load_program()
RULES = ["write 4 words with owl", "write 5 words with ant last bee", "write 6 words without cat once", "write 4 words first elk"]


@pytest.fixture(autouse=True)
def programs() -> Iterator[None]:
    with shared_programs():
        yield


SHORT_JUDGE = "--config.judge.sampling.max_new_tokens=48"


class Outcome:
    """What main(argv) gave and printed."""

    def __init__(self, code: int, out: str, err: str):
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def call(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> object:
    def main(*argv: str, workdir: pathlib.Path | None = None) -> Outcome:
        first = [f"--config={TINY}", "--config.update.rows_per_micro=8", f"--workdir={workdir or tmp_path / 'run'}"]
        code = program.main([*first, *argv])
        out, err = capfd.readouterr()
        return Outcome(code, out, err)

    return main


@pytest.fixture
def refused(call: object, tmp_path: pathlib.Path) -> object:
    def check(*argv: str, names: tuple[str, ...], workdir: pathlib.Path | None = None) -> Outcome:
        """Exit code 2; stderr is one error that holds every name; the run folder is as it was."""
        folder = workdir or tmp_path / "run"
        existed, before = folder.exists(), files_of(folder)
        done = call(*argv, workdir=folder)
        assert done.code == 2, done.out + done.err
        assert done.err.startswith("error: ") and "Traceback" not in done.err
        for name in names:
            assert name in done.err, done.err
        assert folder.exists() == existed
        after = files_of(folder)
        assert {k: v for k, v in after.items() if k != ".lock"} == {k: v for k, v in before.items() if k != ".lock"}
        return done

    return check


def prompts(tmp_path: pathlib.Path, *lines: str) -> pathlib.Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


# ------------------------------------------------------------------------------------------------------------------ models


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the small world's model folder, to spoil."""
    from coevo_jax.config import ModelConfig
    from coevo_jax.models.load import load_model

    folder = tmp_path / "model"
    shutil.copytree(load_model(ModelConfig(source="tiny")).folder, folder)
    return folder


def weights(folder: pathlib.Path) -> pathlib.Path:
    return next(folder.glob("*.safetensors"))


def test_a_missing_model(refused, tmp_path) -> None:
    refused("--config.policy.source=/no/such/model", names=("/no/such/model", "policy.source"))


def test_a_missing_judge(refused) -> None:
    refused(
        "--config.judge.source=/no/such/judge",
        "--config.judge.protocol=json_score",
        SHORT_JUDGE,
        names=("/no/such/judge", "judge.source"),
    )


def test_a_missing_generator(refused) -> None:
    refused("--config.generator.source=/no/such/one", "--config.generator.mode=two", names=("/no/such/one", "generator.source"))


def test_unreadable_weights(refused, model) -> None:
    weights(model).write_bytes(b"not weights at all")
    refused(f"--config.policy.source={model}", names=(str(weights(model)),))


def test_a_truncated_weight_file(refused, model) -> None:
    weights(model).write_bytes(weights(model).read_bytes()[:-1000])
    refused(f"--config.policy.source={model}", names=(str(model),))


def test_a_wrong_sha256(refused, model) -> None:
    refused(f"--config.policy.source={model}", f"--config.policy.sha256={'0' * 64}", names=("sha256", "0" * 64))


def test_a_tokenizer_without_a_template(refused, model) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    for extra in model.glob("chat_template*"):
        extra.unlink()
    refused(f"--config.policy.source={model}", names=("template", str(model)))


# ------------------------------------------------------------------------------------------------------------------- data


def test_a_missing_prompt_file(refused) -> None:
    refused("--config.data.prompts=/no/such/prompts.jsonl", names=("/no/such/prompts.jsonl", "data.prompts"))


def test_a_malformed_prompt_file_names_file_and_line(refused, tmp_path) -> None:
    path = prompts(tmp_path, *(json.dumps({"prompt": rule}) for rule in RULES[:2]), '{"prompt": "write', '{"prompt": "x"}')
    refused(f"--config.data.prompts={path}", names=(f"{path}:3",))


def test_an_empty_prompt_file(refused, tmp_path) -> None:
    path = prompts(tmp_path)
    refused(f"--config.data.prompts={path}", names=(str(path),))


def test_a_prompt_over_the_limit_is_refused(refused, tmp_path) -> None:
    path = prompts(tmp_path, *(json.dumps({"prompt": rule}) for rule in [*RULES, "write 4 words " + "with owl " * 40]))
    refused(f"--config.data.prompts={path}", "--config.data.over_limit=refuse", names=(str(path), "5", "64"))


def test_a_prompt_over_the_limit_is_filtered_and_counted(call, tmp_path) -> None:
    path = prompts(tmp_path, *(json.dumps({"prompt": rule}) for rule in [*RULES, "write 4 words " + "with owl " * 40]))
    done = call(f"--config.data.prompts={path}", "--dry_run")
    assert done.code == 0 and "4 prompts, 1 over the limit left out" in done.out


def test_an_example_longer_than_a_packed_row_is_found_before_the_run(refused, tmp_path) -> None:
    turns = [{"role": "user", "content": RULES[0]}, {"role": "assistant", "content": "owl " * 200}]
    short = [{"role": "user", "content": RULES[0]}, {"role": "assistant", "content": "owl"}]
    path = prompts(tmp_path, *(json.dumps({"id": f"c{i}", "messages": short}) for i in range(3)))
    with path.open("a") as file:
        file.write(json.dumps({"id": "talk", "messages": turns}) + "\n")
    sft = ("--config.schedule.mode=sft", "--config.warmup.updates=2", "--config.warmup.batch=2")
    refused(*sft, f"--config.warmup.data={path}", names=(str(path), "talk", "update.pack_length", "210"))


# ------------------------------------------------------------------------------------------------------- flags and config


def test_an_unknown_key_names_the_nearest(refused) -> None:
    refused("--config.shedule.k=4", names=("shedule.k", "schedule.k"))


def test_an_unknown_flag_names_the_nearest(refused) -> None:
    refused("--work_dir=x", names=("--work_dir", "--workdir"))


def test_a_flag_without_a_value(refused) -> None:
    refused("--config.schedule.k", names=("--config.schedule.k",))


def test_a_value_of_another_type(refused) -> None:
    refused("--config.schedule.k=many", names=("schedule.k", "many"))


def test_a_missing_config_file(capsys, tmp_path) -> None:
    assert program.main([f"--config={TINY.replace('tiny', 'tinny')}", f"--workdir={tmp_path / 'run'}"]) == 2
    assert "tinny.py" in (err := capsys.readouterr().err) and "tiny.py" in err


@pytest.mark.parametrize(
    ("override", "keys"),
    [
        ("pairs.max_gap=17", ("pairs.per_slot", "pairs.max_gap", "17")),
        ("pairs.min_gap=30", ("pairs.min_gap",)),
        ("schedule.k=0", ("schedule.k", "at least 1")),
        ("schedule.group=1", ("schedule.group", "at least 2")),
        ("schedule.mode=sft", ("schedule.mode", "warmup.updates")),
        ("schedule.mode=verifiable", ("schedule.verifier",)),
        ("update.pack_length=32", ("update.pack_length",)),
        ("sampler.max_new=8", ("sampler.max_new",)),
        ("run.tensorboard=true", ("run.tensorboard", "coevo-jax[tensorboard]")),
    ],
)
def test_values_that_cannot_work(override: str, keys: tuple[str, ...], refused, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)  # as where it is not installed
    refused(f"--config.{override}", names=keys)


def test_a_rubric_prompt_that_does_not_fit(refused, tmp_path: pathlib.Path) -> None:
    refused("--config.rubric.prompt=rubric_long", names=("sampler.max_prompt",))
    template = tmp_path / "again.txt"
    template.write_text("[user]\n" + "{{question|line}}\n" * 12, encoding="utf-8")
    refused(f"--config.rubric.prompt={template}", names=("sampler.max_prompt", "the prompt 'tiny"))


def test_a_missing_verifier(refused) -> None:
    verifiable = "--config.schedule.mode=verifiable"
    refused(verifiable, "--config.schedule.verifier=no_such_module:score", names=("no_such_module", "schedule.verifier"))
    refused(
        verifiable,
        "--config.schedule.verifier=coevo_jax.learn.verifiers:reasoning_gin",
        names=("schedule.verifier", "reasoning_gym"),
    )


def test_a_missing_loss(refused) -> None:
    refused("--config.loss.function=no_such_module:loss", names=("no_such_module", "loss.function"))
    refused("--config.loss.function=coevo_jax.learn.losses:policy_los", names=("loss.function", "policy_loss"))


# ------------------------------------------------------------------------------------------------------------ run folders


def test_a_run_folder_of_another_config(refused, tmp_path) -> None:
    folder = run(tmp_path / "run", stop_after=1).folder
    refused("--config.optimizer.lr=0.1", names=("optimizer.lr: 0.001 -> 0.1", str(folder)))


def test_a_folder_that_is_no_run_folder(refused, tmp_path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter1.tex").write_text("years of work")
    refused(names=(str(folder), "chapter1.tex"), workdir=folder)


def test_a_file_as_run_folder(call, tmp_path) -> None:
    path = tmp_path / "thesis.tex"
    path.write_text("years of work")
    done = call(workdir=path)
    assert done.code == 2 and str(path) in done.err and path.read_text() == "years of work"


def test_a_folder_in_use(refused, tmp_path) -> None:
    from coevo_jax.config.override import to_dict
    from coevo_jax.records.run_folder import open_run

    with open_run(tmp_path / "run", to_dict(tiny())):
        refused(names=("another process", str(tmp_path / "run")))


def test_only_corrupt_checkpoints(refused, tmp_path) -> None:
    folder = run(tmp_path / "run", stop_after=2).folder
    for path in (folder / "checkpoints").glob("step_*"):
        shutil.rmtree(path / "state")
    refused(names=("corrupt or partial", str(folder / "checkpoints")))


def test_a_config_that_was_wrong_leaves_no_folder_that_refuses_the_right_one(refused, call, tmp_path) -> None:
    refused("--config.policy.source=/no/such/model", names=("/no/such/model",))
    refused("--config.loss.function=no_such_module:loss", names=("no_such_module",))
    done = call("--config.schedule.cycles=1")
    assert done.code == 0 and (tmp_path / "run" / "config.json").exists()


# ---------------------------------------------------------------------------------------------------------- looking, running


def test_print_config_gives_the_same_config_again(call) -> None:
    done = call("--print_config", "--config.schedule.k=3", "--config.optimizer.lr=3e-5", "--config.rubric.retry_temperatures=0.5")
    assert done.code == 0
    lines = done.out.strip().splitlines()
    assert "schedule.k=3" in lines and "rubric.retry_temperatures=0.5" in lines
    wanted = tiny("schedule.k=3", "optimizer.lr=3e-5", "rubric.retry_temperatures=0.5")
    from coevo_jax.config import Experiment

    assert apply_overrides(Experiment(), lines) == wanted


def test_dry_run_shows_prompts_arithmetic_and_memory_and_writes_nothing(call, tmp_path) -> None:
    done = call("--dry_run")
    assert done.code == 0 and not (tmp_path / "run").exists()
    for title in ("answer prompt", "rubric prompt", "judge prompt"):
        assert f"== {title}, " in done.out
    assert "<|user|> write " in done.out and done.out.count("\nids [") == 3
    assert "4 prompts x 4 samples = 16 sequences an update" in done.out and "= 12 updates" in done.out
    for part in ("policy parameters", "policy optimizer state", "policy reference", "sampler keys and values", "sum"):
        assert part in done.out


def test_the_memory_table_counts_what_is_there() -> None:
    from train_support import system_of

    from coevo_jax.dry_run import memory

    system = system_of()
    parts, learner = memory(system), system.learners["policy"]
    count = sum(x.size for x in jax.tree.leaves(learner.state.params))
    assert parts["policy parameters"] == parts["policy reference"] == parts["policy gradients"] == 4 * count
    assert 8 * count <= parts["policy optimizer state"] <= 8 * count + 64
    spec = learner.spec
    assert parts["sampler keys and values"] == 2 * 4 * spec.layers * spec.kv_heads * spec.head_dim * (16 * 192 + 8 * 128)


def test_activations_grow_with_what_remat_keeps() -> None:
    from coevo_jax.dry_run import activation_bytes
    from coevo_jax.models.load import load_model

    spec = load_model("tiny").spec
    full, dots, none = (activation_bytes(spec, tiny(f"update.remat={kind}")) for kind in ("full", "dots", "none"))
    rows, length = 8, 128
    scores, feed_forward = rows * length * length * spec.heads, rows * length * spec.mlp_size
    assert full < dots and none - dots > (spec.layers - 2) * 4 * (scores + 4 * feed_forward)


def test_a_supervised_run_has_no_reference_and_no_sampler() -> None:
    from train_support import system_of

    from coevo_jax.dry_run import memory

    parts = memory(system_of("schedule.mode=sft", "warmup.updates=1"))
    assert not any("reference" in name or "sampler" in name for name in parts)


def test_help_exits_0(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        program.main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "--print_config" in out and program.DEFAULT in out


def test_a_run_prints_its_table_and_folder(call, tmp_path) -> None:
    done = call("--config.schedule.cycles=1")
    assert done.code == 0
    assert "cycle 1 policy" in done.out and "peak memory" in done.out and f"finished: {tmp_path / 'run'}" in done.out
    assert "ETA" in done.out and "prove no gain in quality" in done.out
    lines = done.out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("cycle 1 policy"))  # the table at the end of the phase
    assert lines[first - 2].split()[:3] == ["phase", "updates", "reward"] and lines[first + 1].startswith("-- cycle 1 rubric")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["schedule"]["cycles"] == 1


def test_the_alarm_of_the_judge_is_shown(call) -> None:
    done = call("--config.schedule.cycles=1", "--config.judge.oracle_failure_rate=0.9")
    assert done.code == 0 and "warning: judge/failure_share is 0." in done.out


def test_a_compat_switch_warns_and_marks_its_rows(call, tmp_path) -> None:
    done = call("--config.schedule.cycles=1", "--config.compat.policy_rubric_temperature=0.6")
    assert done.code == 0 and "warning: compat.policy_rubric_temperature=0.6" in done.out
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["compat"] == "compat.policy_rubric_temperature=0.6" for row in rows)


def test_the_default_config_exists() -> None:
    from train_support import REPO

    assert load_config(str(REPO / program.DEFAULT)).name == "smollm2_demo"
