"""Export any source to a Hugging Face folder, read it back and compare logits; or to an Orbax folder, whose arrays are compared.

python -m coevo_jax.models.export --source=smollm2 --out=exported
python -m coevo_jax.models.export --source=DIR_OR_GGUF --out=exported --dtype=bfloat16 --format=orbax
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from safetensors.numpy import save_file

from coevo_jax.config import ModelConfig
from coevo_jax.errors import UserError, parse_flags
from coevo_jax.models.files import SafetensorsFolder, new_folder, read_json
from coevo_jax.models.forward import forward, unembed
from coevo_jax.models.hf_weights import HF_NAMES, build_params, file_tensors
from coevo_jax.models.load import DTYPES, load_model, save_orbax, write_config
from coevo_jax.models.scalar import head_values
from coevo_jax.models.spec import ModelSpec, spec_from_hf
from coevo_jax.text.chat import ChatTokenizer

SHARD_BYTES = 5_000_000_000
CHECK_TOKENS = 32


def export_hf(
    params: Any, spec: ModelSpec, tokenizer_folder: pathlib.Path, out: pathlib.Path, shard_bytes: int = SHARD_BYTES
) -> float:
    """Write config.json, tokenizer files and safetensors (shards and index over `shard_bytes`); read all back, compare logits.

    Returns the largest difference of a logit. The folder takes its name only after the check. UserError when `out` exists.
    """
    with new_folder(out) as folder:
        write_config(spec, tokenizer_folder, params["embed"].dtype, folder)
        if spec.scalar:
            write_padding(folder)
        _write_tensors(params, spec, folder, shard_bytes)
        gap = _check(params, spec, folder)
    return gap


def write_padding(folder: pathlib.Path) -> None:
    """Give a reward model a padding token that stands in no conversation: transformers reads the head at the last token that is
    no padding, and SmolLM2, for one, pads with the token that ends a turn."""
    found = ChatTokenizer.load(folder).padding_token()
    if found is None:
        return  # transformers then takes one conversation at a time
    path = folder / "config.json"
    path.write_text(json.dumps(read_json(path) | {"pad_token_id": found[0]}, indent=2) + "\n", encoding="utf-8")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (path := folder / name).exists():
            text = json.dumps(read_json(path) | {"pad_token": found[1]}, indent=2, ensure_ascii=False)
            path.write_text(text + "\n", encoding="utf-8")


def _write_tensors(params: Any, spec: ModelSpec, folder: pathlib.Path, shard_bytes: int) -> None:
    itemsize = jnp.dtype(params["embed"].dtype).itemsize
    shards = list(_shards(params, spec, shard_bytes, itemsize))
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file({tensor: fetch() for tensor, fetch in shard.items()}, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # safetensors makes its files private
        weight_map |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        total = sum(leaf.size * itemsize for leaf in jax.tree.leaves(params))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(params: Any, spec: ModelSpec, shard_bytes: int, itemsize: int) -> Iterator[dict[str, Any]]:
    """Tensors in groups of at most `shard_bytes` (one tensor at least), each as a function that fetches it."""
    shard: dict[str, Any] = {}
    size = 0
    for name, shape, fetch in file_tensors(params, spec):
        needed = int(np.prod(shape)) * itemsize
        if shard and size + needed > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = fetch
        size += needed
    yield shard


def _check(params: Any, spec: ModelSpec, folder: pathlib.Path) -> float:
    """Read the folder back and compare spec and logits; an error here is a bug, not bad input."""
    again = spec_from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")), str(folder / "config.json"))
    again = dataclasses.replace(again, scalar=spec.scalar)  # which the weights say
    if again != spec:
        raise RuntimeError(f"the exported config.json reads as another architecture:\n{again}\n{spec}")
    shardings = jax.tree.map(lambda p: p.sharding, params) if len(params["embed"].sharding.device_set) > 1 else None
    source = SafetensorsFolder(folder)
    reread = build_params(source, spec, HF_NAMES, params["embed"].dtype, shardings)
    gap = float(jnp.max(jnp.abs(_logits(params, spec) - _logits(reread, spec))))
    if not gap <= 1e-4:
        raise RuntimeError(f"logits of the exported folder differ by {gap} from those of its source")
    return gap


def export_orbax(params: Any, spec: ModelSpec, tokenizer_folder: pathlib.Path, out: pathlib.Path) -> None:
    """Write an Orbax folder, of which each process of a run reads its own slices (also from a bucket); read back, same bits.

    UserError when `out` exists.
    """
    save_orbax(params, spec, tokenizer_folder, out)
    again = load_model(ModelConfig(source=str(out), param_dtype=str(params["embed"].dtype))).params
    for path, array in jax.tree.leaves_with_path(params):
        other = again
        for key in path:
            other = other[key.key]
        if not bool(jnp.array_equal(array, other, equal_nan=True)):
            raise RuntimeError(f"the Orbax folder {out} gives other values for {jax.tree_util.keystr(path)}")


def _logits(params: Any, spec: ModelSpec) -> jax.Array:
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, (1, CHECK_TOKENS)).astype(np.int32)
    positions = np.arange(CHECK_TOKENS, dtype=np.int32)[None]
    return _forward(params, spec, tokens, positions, np.ones_like(tokens))


def _forward_logits(params: Any, spec: ModelSpec, tokens: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
    """Logits at every position, or the values of a scalar head."""
    dtype = params["embed"].dtype
    hidden = forward(params, spec, tokens, positions, segments, dtype=dtype)
    return head_values(params, hidden, dtype) if spec.scalar else unembed(params, spec, hidden)


_forward = jax.jit(_forward_logits, static_argnames="spec")


def main(argv: list[str]) -> int:
    """Command line. Exit code 2 for bad input."""
    try:
        if len(argv) > 1:
            raise UserError(f"unknown argument {argv[1]!r}", where="command line", expected="--source=... --out=...")
        return _export(FLAGS.source, pathlib.Path(FLAGS.out).expanduser().absolute(), FLAGS.dtype, FLAGS.format)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _export(source: str, out: pathlib.Path, dtype: str, layout: str) -> int:
    if out.exists():  # before minutes are spent on loading
        raise UserError("the folder exists already", where=str(out), expected="a new folder; nothing is written over")
    print(f"loading {source}", flush=True)
    model = load_model(ModelConfig(source=source, param_dtype=dtype))
    count = sum(p.size for p in jax.tree.leaves(model.params))
    print(f"writing {count / 1e6:.1f} M parameters in {dtype} to {out}", flush=True)
    if layout == "orbax":
        export_orbax(model.params, model.spec, model.folder, out)
        print("read back: every array has the same bits")
        return 0
    gap = export_hf(model.params, model.spec, model.folder, out)
    print(f"read back: largest difference of a logit {gap:.1e} over {CHECK_TOKENS} tokens")
    return 0


FLAGS = flags.FLAGS

if __name__ == "__main__":
    flags.DEFINE_string("source", None, "smollm2, tiny, a Hugging Face folder, a .gguf file or an Orbax folder", required=True)
    flags.DEFINE_string("out", None, "folder to make", required=True)
    flags.DEFINE_enum("dtype", "float32", list(DTYPES), "dtype of the weights in the files")
    flags.DEFINE_enum("format", "hf", ["hf", "orbax"], "a Hugging Face folder, or an Orbax one for several hosts")
    app.run(main, flags_parser=parse_flags)
