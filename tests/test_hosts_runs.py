"""Several real processes with Gloo against one: same prompts, keys, pairs and rollouts; metrics and weights within 1e-5 after the
first update; a process that is killed, hangs or fails is named, and the run goes on with any number of processes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from sampler_support import border_distance
from train_support import REPO, tiny

from coevo_jax.methods.context import request_id
from coevo_jax.models.forward import forward, unembed
from coevo_jax.models.load import load_model
from coevo_jax.records.metrics import comparable, read_metrics
from coevo_jax.records.rollouts import read_rollouts
from coevo_jax.sampler.keys import row_key, token_uniforms

# Policy, rubric, policy, rubric: one update each, a checkpoint after each.
SHORT = ("schedule.cycles=2", "schedule.k=1", "run.save_every=1", "run.keep=9", "update.rows_per_micro=4")
SHORT = (*SHORT, "sampler.share_heads=false", "sampler.prefill_tokens=256")  # few programs
SHORT = (*SHORT, "optimizer.eps=1e-3")  # Adam's first steps are smooth in the gradient then, so that rounding stays rounding
UPDATES = 4
# What depends on how requests are dealt out and on how rows are packed, not on what they hold.
DEALT = ("sampler/dispatches", "sampler/occupancy", "tokens/prefilled")
LOST = 75


@dataclasses.dataclass
class Processes:
    """The processes of one run, their output in files."""

    folder: pathlib.Path
    children: list[subprocess.Popen[bytes]]
    logs: list[pathlib.Path]

    def until(self, index: int, text: str, seconds: float = 400) -> None:
        """Wait for a line in the output of a process."""
        end = time.monotonic() + seconds
        while text not in self.logs[index].read_text():
            assert time.monotonic() < end and self.children[index].poll() is None, self.said()
            time.sleep(0.02)

    def finish(self, seconds: float = 400) -> list[int]:
        """Exit codes."""
        end = time.monotonic() + seconds
        return [child.wait(timeout=max(end - time.monotonic(), 1)) for child in self.children]

    def said(self, index: int | None = None) -> str:
        return "\n".join(log.read_text() for i, log in enumerate(self.logs) if index in (None, i))


@contextlib.contextmanager
def started(
    folder: pathlib.Path, count: int, *overrides: str, last: tuple[str, ...] = (), program: pathlib.Path = REPO / "run.py"
) -> Iterator[Processes]:
    """`count` processes of one run; what is left of them is killed at the end. last: further overrides of the last one alone."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "COEVO_MARKS": "1", "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, str(program), f"--config={REPO / 'configs/tiny.py'}", f"--workdir={folder}"]
    command += [f"--config.{o}" for o in (*SHORT, "run.dead_after_s=5", *overrides)]
    group = [f"--processes={count}", f"--coordinator=localhost:{port}", "--verbose"]
    children, logs = [], []
    for index in range(count):
        logs.append(folder.with_name(f"{folder.name}.{len(list(folder.parent.glob('*.log')))}.log"))
        own = [*group, f"--process_id={index}"] if count > 1 else []
        own += [f"--config.{o}" for o in last if index == count - 1]
        with open(logs[-1], "wb") as log:
            children.append(subprocess.Popen([*command, *own], cwd=REPO, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        yield Processes(folder, children, logs)
    finally:
        for child in children:
            child.kill()
            child.wait()


def whole_run(folder: pathlib.Path, count: int, *overrides: str, program: pathlib.Path = REPO / "run.py") -> pathlib.Path:
    with started(folder, count, *overrides, program=program) as run:
        assert run.finish() == [0] * count, run.said()
    return folder


def rows_of(folder: pathlib.Path) -> list[dict[str, Any]]:
    rows = [comparable(row) for row in read_metrics(folder / "metrics.jsonl")]
    return [{name: value for name, value in row.items() if name not in DEALT} for row in rows]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return whole_run(tmp_path_factory.mktemp("one") / "run", 1)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, one: pathlib.Path) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("two") / "run"
    with started(folder, 2) as run:
        assert run.finish() == [0, 0], run.said()
        for index, slots in enumerate(("0..1", "2..3")):
            found = re.search(rf"\[process {index}\] {index + 1} of 2 on .*", run.said(index))
            assert found is not None and f"prompt slots {slots} of 4" in found[0], run.said(index)
            assert all(part in found[0] for part in ("mesh {'data': 2", "GiB", "small collective", "weights {'policy': '"))
    return folder


# --------------------------------------------------------------------------------------------------- equal to one process


def assert_like_one(many: pathlib.Path, one: pathlib.Path, updates: int = 2) -> None:
    """The first update of each role: rollouts equal but for near-ties; metrics and weights after the first one within 1e-5."""
    assert [row["step"] for row in rows_of(many)] == [row["step"] for row in rows_of(one)] == list(range(UPDATES))
    differing = assert_same_rollouts(read_rollouts(many / "rollouts", 0), read_rollouts(one / "rollouts", 0))
    if differing:
        return  # a near-tie, checked: another token changes what follows it
    ours, theirs = rows_of(many), rows_of(one)
    for update in range(updates):
        assert_close(ours[update], theirs[update], 1e-4 if update else 1e-5)
        names = [(r["group"], r["sample"], r["record"], r.get("pair")) for r in read_rollouts(many / "rollouts", update)]
        wanted = [(r["group"], r["sample"], r["record"], r.get("pair")) for r in read_rollouts(one / "rollouts", update)]
        assert names == wanted
    mine, its = (state_of(folder, 1) for folder in (many, one))
    assert jax.tree.structure(mine) == jax.tree.structure(its)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(its), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)


def assert_close(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    """Two metrics rows: the same names, numbers within a tolerance."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, float):
            assert value == pytest.approx(theirs[name], abs=tolerance, rel=tolerance), name
        else:
            assert value == theirs[name], name


def assert_same_rollouts(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> int:
    """Same slots, records, prompts; completions that differ do so at a near-tie first. How many differ."""
    for name in ("slot", "group", "sample", "record", "prompt_ids"):
        assert [row[name] for row in ours] == [row[name] for row in theirs], name
    differing = 0
    for a, b in zip(ours, theirs, strict=True):
        if a["completion_ids"] != b["completion_ids"]:
            differing += 1
            n = next(i for i, (x, y) in enumerate(zip(a["completion_ids"], b["completion_ids"])) if x != y)
            cfg = tiny()
            request = request_id("answer", a["slot"], a["group"] // cfg.schedule.prompts)
            key = row_key(cfg.seed, "policy", 0, request, a["sample"])
            uniforms = np.asarray(token_uniforms(jnp.asarray(key)[None], jnp.asarray([n], jnp.int32)))[0]
            gap = border_distance(next_logits([*a["prompt_ids"], *a["completion_ids"][:n]]), cfg.answer.temperature, uniforms)
            assert gap < 1e-4, f"slot {a['slot']} sample {a['sample']} token {n}: not a near-tie ({gap})"
    return differing


def next_logits(ids: list[int]) -> np.ndarray:
    """Of the small world's model, after `ids`."""
    model = _model()
    hidden = forward(model.params, model.spec, jnp.asarray([ids]), jnp.arange(len(ids))[None], jnp.ones((1, len(ids)), jnp.int32))
    return np.asarray(unembed(model.params, model.spec, hidden)[0, -1])


@functools.cache
def _model() -> Any:
    return load_model(tiny().policy)


def state_of(folder: pathlib.Path, update: int) -> Any:
    """Parameters and moments after an update, on the host."""
    path = next((folder / "checkpoints").glob(f"step_{update:08d}*")) / "state"
    with ocp.PyTreeCheckpointer() as reader:
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), reader.metadata(path).item_metadata.tree)
        return reader.restore(path, restore_args=as_numpy)  # whatever devices it was saved from


@pytest.mark.slow
def test_two_processes_do_what_one_does(one: pathlib.Path, two: pathlib.Path) -> None:
    assert_like_one(two, one)
    files = sorted(path.name for path in (two / "rollouts").iterdir())
    assert files[:2] == ["update_000000_policy.jsonl", "update_000000_policy.p001.jsonl"] and len(files) == 2 * UPDATES
    slots = {row["slot"] for row in read_rollouts(one / "rollouts")}
    assert slots == {0, 1, 2, 3}
    hosts = sorted(path.name for path in next((two / "checkpoints").glob("step_00000004*")).glob("host/*.json"))
    assert hosts == ["process_00000.json", "process_00001.json"]  # each wrote its own slots


@pytest.mark.slow
def test_four_processes_do_what_one_does(one: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert_like_one(whole_run(tmp_path / "run", 4), one)


@pytest.mark.slow
def test_a_judge_of_weights_and_a_warm_up_on_two_processes(tmp_path: pathlib.Path) -> None:
    """The judge's weights on every process; supervised rows and cut-off rubrics; slots that do not divide evenly."""
    program = tmp_path / "run_world.py"  # the small world's vocabulary lacks yes and no
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(REPO)!r})\nfrom coevo_jax.judges import criterion_logits\nimport run\n"
        "criterion_logits.yes_no_forms = lambda tokenizer: ([2], [57, 58, 14, 12])\nsys.exit(run.main(sys.argv[1:]))\n"
    )
    own = ("judge.source=tiny", "judge.protocol=criterion_logits", "judge.min_yes_no_mass=0", "warmup.updates=1")
    own = (*own, "sampler.max_prompt=256", "update.pack_length=256")
    own = (*own, "warmup.batch=5", "schedule.prompts=3", "schedule.cycles=1", "warmup.lr=1e-4")
    alone, both = (whole_run(tmp_path / f"run{count}", count, *own, program=program) for count in (1, 2))
    ours, theirs = rows_of(both), rows_of(alone)
    assert [row["stage"] for row in ours] == ["warmup", "policy", "rubric"]
    assert_close(ours[0], theirs[0], 1e-5)
    drawn, wanted = ([r["completion_ids"] for r in read_rollouts(folder / "rollouts", 1)] for folder in (both, alone))
    assert drawn == wanted and ours[1]["judge/score/std"] > 0 and ours[1]["groups/kept"] > 0
    assert_close(ours[1], theirs[1], 1e-4)


@pytest.mark.slow
def test_several_policies_judges_and_sources_of_pairs_on_two_processes(tmp_path: pathlib.Path) -> None:
    own = (
        "seed=5",
        "policies.0.source=tiny",
        "schedule.cycles=1",
        "optimizer.lr=1e-5",
        "pairs.frozen=1",
        "pairs.dataset=1",
        "pairs.data=tiny",
    )
    own = (*own, *(f"pairs.frozen_models.{i}.source=tiny" for i in range(2)), "panel.judges.0.source=oracle")
    own = (*own, "panel.judges.0.protocol=oracle", "panel.judges.0.oracle_noise=0.5", "panel.aggregate=margin_kappa_format")
    alone, both = (whole_run(tmp_path / f"run{count}", count, *own) for count in (1, 2))
    ours, theirs = rows_of(both), rows_of(alone)
    assert [row["stage"] for row in ours] == ["policy", "policy_1", "rubric"]
    for update, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert_close(a, b, 1e-4 if update else 1e-5)
        names = [[(r["record"], r["completion"], r.get("pair"), r.get("margins")) for r in read_rollouts(f / "rollouts", update)]
                 for f in (both, alone)]  # fmt: skip
        assert names[0] == names[1]
    assert all(ours[2][f"pairs/share_{name}"] > 0 for name in ("temporal", "frozen", "dataset")) and "panel/kappa" in ours[2]


# --------------------------------------------------------------------------------------------- lost, hung and failed processes


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_others_and_the_run_goes_on(
    victim: int, one: pathlib.Path, two: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with started(tmp_path / "run", 2) as run:
        run.until(victim, "mark batch 2")
        run.children[victim].send_signal(signal.SIGKILL)
        begin = time.monotonic()
        codes = run.finish(60)
        seconds = time.monotonic() - begin
    print(f"\nprocess {victim} of 2 killed, run.dead_after_s=5: the other one ended {seconds:.1f} s later")
    assert codes[1 - victim] == LOST and seconds < 30, (codes, seconds, run.said())
    told = run.said(1 - victim).splitlines()[-1]
    assert told.startswith(f"[process {1 - victim}] ends: ") and f"process {victim}" in told, told
    assert re.search(r"last heard at '[a-z ]+' of update [0-3], for \d+ s", told), told
    assert "goes on from the last checkpoint" in told
    assert len(rows_of(tmp_path / "run")) in (2, 3)

    for count in (1, 2, 3):  # with another number of processes, and with the same
        folder = tmp_path / f"run{count}"
        shutil.copytree(tmp_path / "run", folder)
        with started(folder, count) as again:
            assert again.finish() == [0] * count, again.said()
            assert "resumed after update " in again.said(0)
        if count == 2:  # the same shapes: the same bits
            assert rows_of(folder) == rows_of(two)
            assert read_rollouts(folder / "rollouts") == read_rollouts(two / "rollouts")
        assert_like_one(folder, one)
        pairs = [row["pair"] for row in read_rollouts(folder / "rollouts", 3)]
        assert len(rows_of(folder)) == UPDATES and pairs and all(pair["source"] == "temporal" for pair in pairs)


@pytest.mark.slow
def test_a_process_that_hangs_is_named_with_its_stage(tmp_path: pathlib.Path) -> None:
    """Stopped by a signal it gives no sign of life; a main thread that stands still while others wait is found by its marks."""
    with started(tmp_path / "run", 2) as run:
        run.until(1, "mark batch 1")
        run.children[1].send_signal(signal.SIGSTOP)
        assert run.children[0].wait(timeout=60) == LOST
        assert re.search(r"no sign of life from process 1 for [56] s: ", run.said(0).splitlines()[-1]), run.said(0)
    verifier = tmp_path / "slow_verifier.py"
    verifier.write_text(
        "import os, time\n\ndef score(record, text):\n"
        "    time.sleep(600 if '--process_id=1' in open('/proc/self/cmdline').read() else 0)\n    return float(len(text) % 2)\n"
    )
    own = ("schedule.mode=verifiable", "schedule.verifier=slow_verifier:score", "run.hang_after_s=40", "loss.kl_weight=0")
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{path}"
    try:
        with started(tmp_path / "hung", 2, *own) as run:
            assert run.finish() == [LOST, LOST], run.said()
    finally:
        os.environ["PYTHONPATH"] = path
    for index in (0, 1):
        assert re.search(r"ends: process 1 hangs at 'batch' of update 0, for \d+ s; waiting at 'update'", run.said(index))
    assert "slow_verifier.py" in run.said(1) and "slow_verifier.py" not in run.said(0)  # where its threads stand


@pytest.mark.slow
def test_one_signal_stops_all_and_an_error_of_one_ends_all(two: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with started(tmp_path / "run", 2) as run:
        run.until(1, "mark batch 1")
        run.children[1].send_signal(signal.SIGTERM)
        assert run.finish() == [130, 130], run.said()
    done = len(rows_of(tmp_path / "run"))
    assert 2 <= done < UPDATES
    assert rows_of(whole_run(tmp_path / "run", 2)) == rows_of(two)

    with started(tmp_path / "full", 2) as run:
        run.until(0, "mark batch 1")
        (tmp_path / "full" / "rollouts").rename(tmp_path / "full" / "moved")
        (tmp_path / "full" / "rollouts").write_text("in the way")
        codes = run.finish()
    assert 2 in codes and set(codes) <= {2, LOST}, (codes, run.said())
    assert "error: could not write the rollouts" in run.said()


@pytest.mark.slow
def test_processes_of_other_configs_are_refused(tmp_path: pathlib.Path) -> None:
    with started(tmp_path / "run", 2, last=("optimizer.lr=0.5",)) as run:
        codes = run.finish()
    assert 2 in codes and set(codes) <= {2, LOST}, (codes, run.said())
    assert "process 1 differs from process 0 in the config" in run.said()
