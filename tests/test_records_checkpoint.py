"""Checkpoints: bytes equal, fallback to the last good one, keep N, full disk, kills, shardings, two processes, the reference."""

from __future__ import annotations

import os
import pathlib
import shutil
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coevo_jax.errors import UserError
from coevo_jax.preference.buffer import ReplayBuffer
from coevo_jax.records.checkpoint import Checkpoints
from coevo_jax.records.fingerprint import fingerprint

HERE = pathlib.Path(__file__).parent
P = jax.sharding.PartitionSpec


def placed(array, *spec, shape=(4, 2)):
    mesh = jax.make_mesh(shape, ("data", "tensor"))
    return jax.device_put(array, jax.sharding.NamedSharding(mesh, P(*spec)))


def make_state(seed: int = 0):
    keys = jax.random.split(jax.random.key(seed), 2)
    params = {
        "w": placed(jax.random.normal(keys[0], (8, 16)), "data", "tensor"),
        "b": placed(jax.random.normal(keys[1], (6,), jnp.bfloat16)),
    }
    optimizer = optax.adamw(1e-3).init(params)
    return {"params": params, "optimizer": optimizer, "key": jax.random.key(seed), "count": jnp.int32(seed)}


def bits(tree) -> list[bytes]:
    leaves = [
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf for leaf in jax.tree.leaves(tree)
    ]
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def names(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory):
    """A folder with checkpoints of steps 1 and 2, to be copied."""
    folder = tmp_path_factory.mktemp("saved")
    checkpoints = Checkpoints(folder, keep=2)
    for step in (1, 2):
        checkpoints.save(step, make_state(step), {"step": step}, {"a/b": np.arange(step)})
    checkpoints.close()
    return folder


@pytest.fixture
def copied(two_saved, tmp_path):
    shutil.copytree(two_saved, tmp_path / "copy")
    return tmp_path / "copy"


def payload_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Every file whose bytes matter, relative to a checkpoint's folder."""
    late = {"_CHECKPOINT_METADATA", "commit_success.txt"}
    found = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [path for path in found if str(path) not in late]


def test_everything_comes_back_bit_for_bit(tmp_path):
    state = make_state(3)
    arrays = {"buffer/tokens": np.arange(7, dtype=np.uint32), "file": np.zeros((0, 3), np.float64), "flag": np.array(True)}
    host = {"cursor": 12, "text": "é \u2028 \ud800", "nested": {"list": [1, 2.5, None]}}
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(7, state, host, arrays)
    arrays["buffer/tokens"][:] = 0  # later changes of host state do not reach the file
    host["cursor"] = 13
    checkpoints.close()
    restored = Checkpoints(tmp_path / "c").restore_latest(make_state(0))
    assert restored is not None and (restored.step, restored.skipped) == (7, [])
    assert restored.host == {**host, "cursor": 12}
    assert bits(restored.state) == bits(state) and jax.tree.structure(restored.state) == jax.tree.structure(state)
    assert jax.tree.map(lambda leaf: leaf.dtype, restored.state) == jax.tree.map(lambda leaf: leaf.dtype, state)
    assert {name: (array.dtype, array.shape) for name, array in restored.arrays.items()} == {
        "buffer/tokens": (np.dtype(np.uint32), (7,)), "file": (np.dtype(np.float64), (0, 3)), "flag": (np.dtype(bool), ()),
    }  # fmt: skip
    assert restored.arrays["buffer/tokens"].tolist() == list(range(7))


def test_nothing_to_restore(tmp_path):
    assert Checkpoints(tmp_path / "new").restore_latest(make_state()) is None
    (tmp_path / "new" / "step_00000001.orbax-checkpoint-tmp").mkdir()
    assert Checkpoints(tmp_path / "new").restore_latest(make_state()) is None


def test_restores_to_the_shardings_of_the_template(tmp_path):
    state = make_state(1)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {}, block=True)
    template = {**state, "params": {"w": placed(jnp.zeros((8, 16)), "tensor", shape=(2, 4)), "b": state["params"]["b"]}}
    restored = checkpoints.restore_latest(template)
    assert restored.state["params"]["w"].sharding == template["params"]["w"].sharding
    assert bits(restored.state) == bits(state)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), template)
    assert bits(checkpoints.restore_latest(abstract).state) == bits(state)
    # Scalars that no one placed stay free to join arrays on any devices.
    assert not restored.state["count"].committed
    jax.jit(lambda tree: tree["params"]["w"] * tree["count"].astype(jnp.float32))(restored.state).block_until_ready()


def test_state_may_be_donated_while_it_is_saved(tmp_path):
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 1.5, tree), donate_argnums=0)
    state = {"w": jax.random.normal(jax.random.key(0), (512, 1024))}
    before = np.array(state["w"])
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {})
    for _ in range(3):
        state = step(state)
    jax.block_until_ready(state)
    np.testing.assert_array_equal(np.asarray(checkpoints.restore_latest(state).state["w"]), before)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_any_damaged_file_is_found_and_the_last_good_one_serves(copied, damage):
    newest = copied / "step_00000002"
    checkpoints = Checkpoints(copied)
    files = payload_files(newest)
    assert len(files) > 8
    for name in files:
        path, data = newest / name, (newest / name).read_bytes()
        if damage == "flip":
            path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
        elif damage == "truncate":
            path.write_bytes(data[:-1])
        else:
            path.unlink()
        restored = checkpoints.restore_latest(make_state())
        assert restored.step == 1 and restored.host == {"step": 1} and bits(restored.state) == bits(make_state(1)), name
        assert len(restored.skipped) == 1 and restored.skipped[0].startswith("step_00000002: "), restored.skipped
        assert name.name in restored.skipped[0] or name.name == "manifest.json"
        path.write_bytes(data)
    assert checkpoints.restore_latest(make_state()).step == 2


def test_missing_commit_metadata_and_lost_folders_are_found(copied):
    (copied / "step_00000002" / "_CHECKPOINT_METADATA").unlink()
    (copied / "step_00000003.orbax-checkpoint-tmp").mkdir()
    (copied / "step_00000004").mkdir()
    restored = Checkpoints(copied).restore_latest(make_state())
    assert restored.step == 1
    assert restored.skipped == [
        "step_00000004: manifest.json is missing",
        "step_00000002: _CHECKPOINT_METADATA is missing",
        "step_00000003.orbax-checkpoint-tmp: not committed (the save was cut off)",
    ]
    assert len(names(copied)) == 4  # looking changes nothing


def test_all_bad_is_a_user_error_and_deletes_nothing(copied):
    for step in (1, 2):
        (copied / f"step_0000000{step}" / "host" / "process_00000.npz").write_bytes(b"")
    with pytest.raises(
        UserError, match=r"(?s)every checkpoint is corrupt or partial: step_00000002: .*; step_00000001: .*process_00000"
    ):
        Checkpoints(copied).restore_latest(make_state())
    assert names(copied) == ["step_00000001", "step_00000002"]


def test_work_done_again_after_a_fallback_replaces_the_bad_one_only_when_it_is_safe(copied):
    (copied / "step_00000002" / "state" / "manifest.ocdbt").unlink()
    checkpoints = Checkpoints(copied, keep=2)
    assert checkpoints.restore_latest(make_state()).step == 1
    checkpoints.save(2, make_state(22), {"step": 22})
    assert "step_00000002" in names(copied)
    checkpoints.wait()
    assert names(copied) == ["step_00000001", "step_00000002.1"]
    assert bits(Checkpoints(copied).restore_latest(make_state()).state) == bits(make_state(22))


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_keep_counts_good_checkpoints(tmp_path, keep):
    checkpoints = Checkpoints(tmp_path, keep=keep)
    for step in range(1, 6):
        checkpoints.save(step, make_state(step), {})
        committed = [name for name in names(tmp_path) if "tmp" not in name]
        assert len(committed) >= min(step - 1, keep)  # the older ones stay until the new one is whole
    checkpoints.close()
    assert names(tmp_path) == [f"step_0000000{step}" for step in range(6 - keep, 6)]


def test_keep_never_deletes_the_last_good_one(copied):
    (copied / "step_00000002" / "manifest.json").unlink()
    checkpoints = Checkpoints(copied, keep=1)
    checkpoints.restore_latest(make_state())
    checkpoints.wait()
    assert "step_00000001" in names(copied)  # keep = 1 and a newer, bad one beside it
    checkpoints.save(3, make_state(3), {}, block=True)
    assert names(copied) == ["step_00000003"]
    with pytest.raises(UserError, match=r"(?s)cannot keep 0.*run\.keep"):
        Checkpoints(copied, keep=0)


def test_another_model_is_a_user_error_that_names_the_leaf(copied):
    template = make_state()
    template["params"]["w"] = placed(jnp.zeros((8, 32)), "data", "tensor")
    with pytest.raises(UserError, match=r"(?s)\['params'\]\['w'\] is float32\[8,16\].*float32\[8,32\]"):
        Checkpoints(copied).restore_latest(template)
    template = {**make_state(), "extra": jnp.zeros(3)}
    with pytest.raises(UserError, match=r"\['extra'\] is absent"):
        Checkpoints(copied).restore_latest(template)
    template = {**make_state(), "count": jnp.float32(0)}
    with pytest.raises(UserError, match=r"(?s)\['count'\] is int32\[\].*float32\[\]"):
        Checkpoints(copied).restore_latest(template)


@pytest.mark.parametrize("when", ["wait", "next save", "block"])
def test_full_disk_while_saving_keeps_older_ones(copied, when, caplog, file_size_limit):
    """A limit on file size refuses the write in the kernel, as a full disk does."""
    checkpoints = Checkpoints(copied)
    checkpoints.restore_latest(make_state())
    big = {"w": jax.random.normal(jax.random.key(0), (200, 200))}
    with (
        file_size_limit(50_000),
        pytest.raises(UserError, match=r"(?s)could not save a checkpoint: .*step_00000003 \([0-9.]+ MiB free\)"),
    ):
        checkpoints.save(3, big, {}, block=when == "block")
        checkpoints.wait() if when == "wait" else checkpoints.save(4, big, {})
    assert names(copied) == ["step_00000001", "step_00000002"]  # nothing half written is left
    assert "Traceback" not in caplog.text
    assert checkpoints.restore_latest(make_state()).step == 2
    checkpoints.save(5, make_state(5), {}, block=True)  # with space again, saving goes on
    assert names(copied) == ["step_00000002", "step_00000005"]


def test_a_save_that_cannot_fit_is_refused_before_it_begins(copied, monkeypatch):
    checkpoints = Checkpoints(copied)
    usage = shutil.disk_usage(copied)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match=r"(?s)No space left: it needs 0.0 MiB.*step_00000003 \(0.0 MiB free\)"):
        checkpoints.save(3, make_state(), {})
    assert names(copied) == ["step_00000001", "step_00000002"]


def test_unwritable_folder_is_a_user_error(copied, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="could not create the checkpoint folder"):
        Checkpoints(tmp_path / "file" / "checkpoints")
    checkpoints = Checkpoints(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone")
    (tmp_path / "gone").write_text("")
    with pytest.raises(UserError, match="could not"):
        checkpoints.save(1, make_state(), {}, block=True)


def test_reference_is_stored_once_and_bound_to_the_checkpoints(tmp_path):
    params, other = make_state(1)["params"], make_state(2)["params"]
    checkpoints = Checkpoints(tmp_path)
    print_ = checkpoints.save_reference(params)
    written = (tmp_path / "reference" / "manifest.json").stat().st_mtime_ns
    assert checkpoints.save_reference(params) == print_ == fingerprint(params)
    assert (tmp_path / "reference" / "manifest.json").stat().st_mtime_ns == written
    with pytest.raises(UserError, match="reference parameters differ"):
        checkpoints.save_reference(other)
    checkpoints.save(1, make_state(1), {}, block=True)
    again = Checkpoints(tmp_path)
    assert again.restore_latest(make_state()).reference == {"reference": print_}
    assert bits(again.load_reference(other)) == bits(params)

    shutil.rmtree(tmp_path / "reference")
    Checkpoints(tmp_path).save_reference(other)  # a whole reference, but of another run
    with pytest.raises(UserError, match=r"(?s)has fingerprint .*that of the checkpoint"):
        again.load_reference(other)
    (tmp_path / "reference" / "state" / "manifest.ocdbt").unlink()
    with pytest.raises(UserError, match=r"cannot be used: state/manifest\.ocdbt is missing"):
        again.load_reference(other)
    with pytest.raises(UserError, match="reference parameters differ"):
        again.save_reference(other)
    assert again.save_reference(params) == print_  # a corrupt one is made again, with the same bits
    assert bits(again.load_reference(other)) == bits(params)
    assert "reference" in names(tmp_path)


def test_fingerprint_follows_bits_positions_names_and_dtypes_but_not_sharding():
    base = {"a": jax.random.normal(jax.random.key(0), (8, 16)), "b": jnp.arange(8, dtype=jnp.bfloat16)}
    same = {"a": placed(base["a"], "data", "tensor"), "b": placed(base["b"])}
    assert fingerprint(base) == fingerprint(same) == fingerprint(jax.tree.map(np.array, base))
    swapped = base["a"].at[0, 0].set(base["a"][5, 3]).at[5, 3].set(base["a"][0, 0])
    one_bit = jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(base["a"], jnp.uint32).at[7, 15].add(jnp.uint32(1)), jnp.float32
    )
    variants = [
        {**base, "a": swapped},
        {**base, "a": one_bit},
        {**base, "a": base["a"].T},
        {**base, "a": base["a"].reshape(16, 8)},
        {"c": base["a"], "b": base["b"]},
        {**base, "b": base["b"].astype(jnp.float32)},
        {**base, "b": -base["b"]},  # differs in the sign of zero, too
        {**base, "n": jnp.zeros((0,))},
    ]
    prints = [fingerprint(base), *map(fingerprint, variants)]
    assert len(set(prints)) == len(prints)
    others = {"i8": jnp.arange(3, dtype=jnp.int8), "u": jnp.uint32(1), "flag": jnp.array([True, False]), "key": jax.random.key(3)}
    assert len(fingerprint(others)) == 16 and fingerprint(others) != fingerprint({**others, "key": jax.random.key(4)})


def run_helper(name: str, *args: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    return subprocess.run(
        [sys.executable, str(HERE / name), *map(str, args)], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("rounds", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_leaves_the_last_checkpoint(tmp_path, rounds):
    done = run_helper("records_save_forever.py", tmp_path / "c", rounds, rounds)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("round") == rounds


def test_two_processes_save_and_one_restores(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    commands = [
        [sys.executable, str(HERE / "records_two_processes.py"), str(tmp_path / "c"), str(index), str(port)] for index in (0, 1)
    ]
    children = [
        subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for line in commands
    ]
    outputs = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    values = placed(jnp.arange(32, dtype=jnp.float32).reshape(8, 4) + 3.0, ("data", "tensor"))
    restored = Checkpoints(tmp_path / "c").restore_latest({"w": values})
    assert restored.step == 3 and [host["process"] for host in restored.host_parts] == [0, 1]
    assert bits(restored.state) == bits({"w": values})
    assert {stdout.split()[-1] for stdout, _ in outputs} == {fingerprint({"w": values})}
    buffer = ReplayBuffer(4, 4, 1, 4)
    buffer.restore(restored.array_parts)
    assert [entry.tokens.tolist() for entry in buffer._all()] == [[slot, step] for slot in range(4) for step in (1, 2, 3)]
    assert names(tmp_path / "c") == ["reference", "step_00000003"]
