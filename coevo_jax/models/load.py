"""Models from their sources: embedded, the small world's, Hugging Face, GGUF and Orbax ones (the last also in a bucket)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from coevo_jax.config import Experiment, ModelConfig
from coevo_jax.config.several import policy_names
from coevo_jax.errors import UserError, nearest
from coevo_jax.mesh import RULES, ShardingRules, param_shardings
from coevo_jax.models import orbax_folder, smollm2
from coevo_jax.models.files import (
    TOKENIZER_FILES,
    SafetensorsFolder,
    copy_tokenizer,
    new_folder,
    read_json,
    source_hash,
    user_cache,
)
from coevo_jax.models.forward import ParamInfo, param_shapes
from coevo_jax.models.gguf_file import GgufFile
from coevo_jax.models.hf_weights import GGUF_NAMES, HF_NAMES, build_params
from coevo_jax.models.orbax_folder import BUCKET, OrbaxFolder
from coevo_jax.models.scalar import HEAD, Body, check_head, fresh_head
from coevo_jax.models.spec import ModelSpec, spec_from_hf, spec_to_hf

TINY = pathlib.Path(__file__).parent.parent / "judges" / "tiny_world" / "model"
TINY_ARM = TINY.with_name("model_arm")  # writes numbered lists and judges pairs (benchmarks/train_tiny_arm.py)
TINY_DYNAMIC = TINY.with_name("dynamic")  # reads answers and writes weighted items (benchmarks/train_tiny_dynamic.py)
NAMED = ("smollm2", "tiny", "tiny_arm", "tiny_dynamic")
TOKENIZER_VERSION = 1  # of the files made from a GGUF; a change makes them again
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model. folder: config.json and tokenizer files; source: as given; hash: identity of the weights (files.source_hash)."""

    spec: ModelSpec
    params: Any
    folder: pathlib.Path
    source: str
    hash: str


def load_model(cfg: ModelConfig | str, mesh: Any = None, *, rules: ShardingRules = RULES) -> LoadedModel:
    """Load `cfg.source` in `cfg.param_dtype`, placed over `mesh` by `rules` when one is given (else on the default device).

    UserError: nothing there, unreadable, wrong sha256, an unsupported architecture, a missing or extra tensor (named).
    """
    cfg = ModelConfig(source=cfg) if isinstance(cfg, str) else cfg
    if cfg.param_dtype not in DTYPES:
        raise UserError(f"param_dtype {cfg.param_dtype!r} is not supported", where="policy.param_dtype",
                        expected=f"one of {', '.join(DTYPES)}", nearest=nearest(cfg.param_dtype, DTYPES))  # fmt: skip
    if cfg.source.startswith(BUCKET):
        return _load_bucket(cfg, mesh, rules)
    path = _resolve(cfg.source)
    if path.is_file():
        return _load_gguf(cfg, path, mesh, rules)
    if (path / orbax_folder.ITEM).is_dir():
        files = sorted(p for p in (path / orbax_folder.ITEM).rglob("*") if p.is_file())
        return load_orbax(cfg, OrbaxFolder(str(path)), path, _checked_hash(cfg, files), mesh, rules)
    source = SafetensorsFolder(path)
    digest = _checked_hash(cfg, source.files)
    spec = spec_from_hf(read_json(path / "config.json"), str(path / "config.json"))
    params = build_params(source, spec, HF_NAMES, cfg.param_dtype, _shardings(spec, mesh, rules))
    return LoadedModel(spec, params, path, cfg.source, digest)


def load_scalar(cfg: ModelConfig, mesh: Any = None, *, rules: ShardingRules = RULES) -> LoadedModel:
    """A reward model: a Hugging Face folder of a ...ForSequenceClassification with one label, whose head is `score.weight` [1,D].

    `params` has the head as "score" [D] and no unembedding. UserError as in load_model, or for a folder without such a head.
    """
    path = _resolve(cfg.source)
    if path.is_file() or (path / orbax_folder.ITEM).is_dir():
        raise UserError(f"{cfg.source!r} has no scalar head", where=str(path), expected="a Hugging Face folder with score.weight")
    source = SafetensorsFolder(path)
    digest = _checked_hash(cfg, source.files)
    spec = dataclasses.replace(spec_from_hf(read_json(path / "config.json"), str(path / "config.json")), scalar=True)
    check_head(source, spec)
    params = build_params(Body(source), spec, HF_NAMES, cfg.param_dtype, _shardings(spec, mesh, rules))
    return LoadedModel(spec, params, path, cfg.source, digest)


def load_with_head(
    cfg: ModelConfig, mesh: Any = None, *, rules: ShardingRules = RULES, std: float, seed: int,
    load: Callable[..., LoadedModel] = load_model,
) -> LoadedModel:  # fmt: skip
    """A model with a scalar head to train: a reward model as it is, any other source, by `load`, with a head drawn anew."""
    if not cfg.source.startswith(BUCKET) and has_head(_resolve(cfg.source)):
        return load_scalar(cfg, mesh, rules=rules)
    model = load(cfg, mesh, rules=rules)
    spec = dataclasses.replace(model.spec, scalar=True)
    sharding = None if mesh is None else _shardings(spec, mesh, rules)["score"]
    params, spec = fresh_head(model.params, spec, std, seed, sharding)
    return dataclasses.replace(model, params=params, spec=spec)


def critic_source(cfg: Experiment, name: str = "policy") -> ModelConfig:
    """What the critic of the weights `name` begins as: critic.source, else the same as they."""
    own = dict(zip(policy_names(cfg), (cfg.policy, *cfg.policies))).get(name, cfg.policy)
    source = cfg.critic.source or (cfg.generator.source if name == "rubric" else "") or own.source
    return dataclasses.replace(own, source=source, sha256=own.sha256 if source == own.source else "")


def has_head(path: pathlib.Path) -> bool:
    """Is it the folder of a reward model?"""
    hf = path.is_dir() and any((path / name).exists() for name in ("model.safetensors", "model.safetensors.index.json"))
    return hf and HEAD in SafetensorsFolder(path).shapes()


def tokenizer_folder(source: str) -> pathlib.Path:
    """The tokenizer's files of a model source (as ModelConfig.source; a folder needs no weights). UserError as in load_model."""
    if source.startswith(BUCKET):
        return _bucket_folder(OrbaxFolder(source))
    given = pathlib.Path(source).expanduser()
    if source not in NAMED and given.is_dir():
        return given
    path = _resolve(source)
    if path.is_dir():
        return path
    return _gguf_folder(GgufFile(path), smollm2.SHA256 if source == "smollm2" else source_hash([path]))


def save_orbax(params: Any, spec: ModelSpec, tokenizer_folder: pathlib.Path, out: pathlib.Path) -> None:
    """Write an Orbax source: params/, config.json, tokenizer files. Atomic; UserError when `out` exists."""
    with new_folder(out) as folder:
        orbax_folder.save(params, folder)
        write_config(spec, tokenizer_folder, params["embed"].dtype, folder)


def write_config(spec: ModelSpec, tokenizer_folder: pathlib.Path, dtype: Any, folder: pathlib.Path) -> None:
    """config.json of an architecture and the tokenizer's files; token ids are those of the folder they come from."""
    config = spec_to_hf(spec) | {"torch_dtype": str(jnp.dtype(dtype))}
    if (tokenizer_folder / "config.json").exists():
        given = read_json(tokenizer_folder / "config.json")
        config |= {k: given[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in given}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    copy_tokenizer(tokenizer_folder, folder)


def _resolve(source: str) -> pathlib.Path:
    if source == "smollm2":
        return smollm2.fetch()
    named = {"tiny": TINY, "tiny_arm": TINY_ARM, "tiny_dynamic": TINY_DYNAMIC}
    path = named.get(source) or pathlib.Path(source).expanduser()
    if not path.exists():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        close = nearest(path.name, siblings)
        raise UserError(f"model source {source!r} does not exist", where=str(path.absolute()),
                        expected="smollm2, tiny, tiny_arm, a Hugging Face folder, a .gguf file, an Orbax folder or gs://...",
                        nearest=str(path.parent / close) if close else nearest(source, NAMED))  # fmt: skip
    if path.is_file() and path.suffix != ".gguf":
        raise UserError(f"model source {source!r} is a file but not a .gguf", where=str(path.absolute()),
                        expected="a .gguf file, or the folder that holds config.json and the weights")  # fmt: skip
    if path.is_dir() and not (path / "config.json").exists():
        raise UserError("the model folder has no config.json", where=str(path.absolute()),
                        expected="config.json beside the weights")  # fmt: skip
    return path


def _load_gguf(cfg: ModelConfig, path: pathlib.Path, mesh: Any, rules: ShardingRules) -> LoadedModel:
    digest = smollm2.SHA256 if cfg.source == "smollm2" and not cfg.sha256 else _checked_hash(cfg, [path])
    file = GgufFile(path)
    spec = spec_from_hf(file.config(), str(path))
    folder = _gguf_folder(file, digest)
    params = build_params(file.tensors(spec), spec, GGUF_NAMES, cfg.param_dtype, _shardings(spec, mesh, rules))
    return LoadedModel(spec, params, folder, cfg.source, digest)


def _gguf_folder(file: GgufFile, digest: str) -> pathlib.Path:
    """Tokenizer files of a GGUF: those beside it, or made from its tables once and kept in the user cache."""
    if (file.path.parent / "tokenizer.json").exists():
        return file.path.parent
    folder = user_cache() / "tokenizers" / f"{digest[-16:]}-v{TOKENIZER_VERSION}"
    if not folder.exists():
        try:
            with new_folder(folder) as temporary:
                file.write_tokenizer(temporary)
        except UserError:
            if not folder.exists():  # else another process made it meanwhile
                raise
    return folder


def _load_bucket(cfg: ModelConfig, mesh: Any, rules: ShardingRules) -> LoadedModel:
    if cfg.sha256:
        raise UserError("a source in a bucket is not read whole, so its sha256 can't be compared", where=cfg.source,
                        expected="an empty sha256, or a local folder")  # fmt: skip
    source = OrbaxFolder(cfg.source)
    return load_orbax(cfg, source, _bucket_folder(source), source.hash(), mesh, rules)


def _bucket_folder(source: OrbaxFolder) -> pathlib.Path:
    """config.json and the tokenizer's files of a source in a bucket, kept in the user cache under their own hash."""
    found = {name: source.read_file(name) for name in ("config.json", *TOKENIZER_FILES)}
    files = {name: data for name, data in found.items() if data is not None}
    if "config.json" not in files:
        raise UserError("the model folder has no config.json", where=source.where, expected="config.json beside the weights")
    digest = hashlib.sha256(b"".join(f"{name} {len(data)} ".encode() + data for name, data in files.items())).hexdigest()
    folder = user_cache() / "buckets" / digest[:16]
    if not folder.exists():
        try:
            with new_folder(folder) as temporary:
                for name, data in files.items():
                    (temporary / name).write_bytes(data)
        except UserError:
            if not folder.exists():  # else another process made it meanwhile
                raise
    return folder


def load_orbax(
    cfg: ModelConfig,
    source: OrbaxFolder,
    folder: pathlib.Path,
    digest: str,
    mesh: Any,
    rules: ShardingRules,
    scalar: bool = False,
) -> LoadedModel:
    """Parameters from an open Orbax source; folder: config.json and the tokenizer's files; digest: their identity. scalar: they
    have a scalar head in place of the vocabulary's."""
    spec = spec_from_hf(read_json(folder / "config.json"), f"{source.where}/config.json")
    spec = dataclasses.replace(spec, scalar=scalar)
    placed = _shardings(spec, mesh, rules)
    if placed is None:
        one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        placed = jax.tree.map(lambda _: one, param_shapes(spec), is_leaf=_is_info)
    return LoadedModel(spec, source.params(spec, cfg.param_dtype, placed), folder, cfg.source, digest)


def _checked_hash(cfg: ModelConfig, files: list[pathlib.Path]) -> str:
    digest = source_hash(files, whole=bool(cfg.sha256))
    if cfg.sha256 and digest != cfg.sha256.lower():
        raise UserError(f"the weights of {cfg.source!r} have sha256 {digest}", where=", ".join(map(str, files[:3])),
                        expected=cfg.sha256)  # fmt: skip
    return digest


def _shardings(spec: ModelSpec, mesh: Any, rules: ShardingRules) -> Any:
    return None if mesh is None else param_shardings(param_shapes(spec), mesh, rules)


def _is_info(x: Any) -> bool:
    return isinstance(x, ParamInfo)
