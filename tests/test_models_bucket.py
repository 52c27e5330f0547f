"""Orbax sources in a bucket (a stand-in for Cloud Storage on this machine) and how their arrays are cut."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_bucket import bucket

from coevo_jax.config import MeshConfig, ModelConfig
from coevo_jax.errors import UserError
from coevo_jax.mesh import make_mesh
from coevo_jax.models.export import export_orbax
from coevo_jax.models.forward import param_shapes
from coevo_jax.models.load import load_model, save_orbax, tokenizer_folder
from coevo_jax.models.orbax_folder import CHUNK_BYTES, OrbaxFolder
from coevo_jax.models.spec import spec_from_hf
from coevo_jax.records.fingerprint import fingerprint

HERE = pathlib.Path(__file__).parent
GOLDEN = HERE / "golden" / "qwen3"


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A folder that a bucket shows, with the model 'models/q' of 60 MiB, and its parameters."""
    wide = {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    more = {"vocab_size": 2048, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    spec = spec_from_hf(json.loads((GOLDEN / "config.json").read_text()) | wide | more, "test")
    rng = np.random.default_rng(0)
    flat, tree = jax.tree.flatten(param_shapes(spec), is_leaf=lambda x: hasattr(x, "axes"))
    params = jax.tree.unflatten(tree, [jnp.asarray(rng.standard_normal(info.shape).astype(np.float32)) for info in flat])
    root = tmp_path_factory.mktemp("bucket")
    (root / "tokenizer").mkdir()
    (root / "tokenizer" / "tokenizer.json").write_text('{"a": "tokenizer"}')
    save_orbax(params, spec, root / "tokenizer", root / "models" / "q")
    return root, params


@pytest.fixture
def reach(monkeypatch, tmp_path):
    """A function that points this process at a bucket."""
    monkeypatch.setenv("COEVO_CACHE", str(tmp_path / "cache"))

    def point(server):
        for key, value in server.environment.items():
            monkeypatch.setenv(key, value)

    return point


def size_of(folder: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_each_of_two_processes_reads_its_half(stored, tmp_path):
    """Real processes; every one has a bucket of its own that counts."""
    root, params = stored
    whole, port = size_of(root / "models" / "q"), str(free_port())
    with bucket(root) as first, bucket(root) as second:
        started = [
            subprocess.Popen(
                [sys.executable, str(HERE / "fake_bucket.py"), "gs://any/models/q", str(index), "2", port],
                env=os.environ | server.environment | {"COEVO_CACHE": str(tmp_path), "PYTHONPATH": str(HERE.parent)},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for index, server in enumerate((first, second))
        ]  # fmt: skip
        ended = [process.communicate(timeout=120) for process in started]
        assert [process.returncode for process in started] == [0, 0], ended
        served = [first.served, second.served]
    found = [json.loads(out.splitlines()[-1]) for out, _ in ended]
    assert found[0] == found[1] and found[0]["fingerprint"] == fingerprint(params)
    assert found[0]["files"] == ["config.json", "tokenizer.json"] and found[0]["hash"].startswith("part:")
    assert all(0.48 * whole < bytes_ < 0.55 * whole for bytes_ in served), (served, whole)


def test_eight_devices_of_one_process_read_everything_once(stored, reach):
    root, params = stored
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with bucket(root) as server:
        reach(server)
        m = load_model(ModelConfig(source="gs://any/models/q/", param_dtype="bfloat16"), mesh)
        assert server.served < 1.02 * size_of(root / "models" / "q")
    assert m.params["layers"]["gate"].sharding.shard_shape((2, 1024, 1024)) == (2, 512, 512)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b).astype(a.dtype)), m.params, params)


def test_arrays_are_cut_into_chunks_of_a_layer_at_most(stored):
    root, params = stored
    folder = OrbaxFolder(str(root / "models" / "q"))
    for path, _ in jax.tree.leaves_with_path(params):
        chunk = folder._open(".".join(key.key for key in path)).chunk_layout.read_chunk.shape
        assert np.prod(chunk) * 4 <= CHUNK_BYTES and (path[0].key != "layers" or chunk[0] == 1), (path, chunk)


def test_a_vocabulary_of_odd_size_is_not_cut_into_rows(tmp_path):
    m = load_model(str(GOLDEN))
    params = m.params | {"embed": jnp.zeros((1021, 1024))}
    save_orbax(params, m.spec, m.folder, tmp_path / "odd")
    assert OrbaxFolder(str(tmp_path / "odd"))._open("embed").chunk_layout.read_chunk.shape == (1021, 1024)


def test_the_tokenizers_files_are_kept_once(stored, reach):
    root, _ = stored
    with bucket(root) as server:
        reach(server)
        folder = tokenizer_folder("gs://any/models/q")
        assert (folder / "tokenizer.json").read_text() == '{"a": "tokenizer"}'
        assert tokenizer_folder("gs://any/models/q") == folder
        assert not any("/d/" in name for name in server.asked)  # no weights


def test_what_is_wrong_in_a_bucket_is_named(stored, reach, tmp_path):
    root, _ = stored
    (tmp_path / "hf").mkdir()
    shutil.copytree(GOLDEN, tmp_path / "served" / "hf")
    shutil.copytree(root / "models" / "q", tmp_path / "served" / "q")
    (tmp_path / "served" / "q" / "config.json").unlink()
    with bucket(tmp_path / "served") as server:
        reach(server)
        for source, match in (("gs://any/hf", "no Orbax folder is there"), ("gs://any/absent", "no Orbax folder is there"),
                              ("gs://any/q", r"no config\.json")):  # fmt: skip
            with pytest.raises(UserError, match=match) as error:
                load_model(source)
            assert source in str(error.value)
        with pytest.raises(UserError, match="sha256 can't be compared"):
            load_model(ModelConfig(source="gs://any/q", sha256="0" * 64))
    with bucket(root) as server:
        reach(server)
        server.refuse = "/d/"
        with pytest.raises(UserError, match="can't be read") as error:
            load_model("gs://any/models/q")
        assert "no access to this object" in str(error.value)


def test_damage_is_named(stored, tmp_path):
    root, _ = stored
    shutil.copytree(root / "models" / "q", tmp_path / "q")
    for file in (tmp_path / "q" / "params").rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match="the Orbax folder can't be read"):
        load_model(str(tmp_path / "q"))
    (tmp_path / "q" / "params" / "_METADATA").write_text("{}")
    with pytest.raises(UserError, match="the Orbax folder can't be read"):
        load_model(str(tmp_path / "q"))


def test_the_export_compares_every_array(tmp_path, monkeypatch):
    m = load_model(ModelConfig(source=str(GOLDEN), param_dtype="bfloat16"))
    export_orbax(m.params, m.spec, m.folder, tmp_path / "out")
    again = load_model(ModelConfig(source=str(tmp_path / "out"), param_dtype="bfloat16"))
    jax.tree.map(np.testing.assert_array_equal, again.params, m.params)
    monkeypatch.setattr(OrbaxFolder, "_read", lambda self, store, dtype, sharding: jnp.zeros(store.shape, dtype))
    with pytest.raises(RuntimeError, match=r"other values for \['embed'\]"):
        export_orbax(m.params, m.spec, m.folder, tmp_path / "second")
