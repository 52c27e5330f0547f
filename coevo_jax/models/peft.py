"""Adapters in the layout of the PEFT library: adapter_config.json and adapter_model.safetensors.

There A lies as lora_A.weight [r, in] and B as lora_B.weight [out, r], a layer each, with merged axes as in a Hugging Face folder;
a scalar head, which trains whole, as the saved module `score`.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from coevo_jax.config.lora import TARGETS, LoraConfig
from coevo_jax.errors import UserError, nearest
from coevo_jax.models.files import file_sha256, new_folder, read_json
from coevo_jax.models.forward import ParamInfo, Params
from coevo_jax.models.hf_weights import HF_NAMES
from coevo_jax.models.lora import placed, trained_shapes
from coevo_jax.models.spec import ModelSpec

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
HEAD = PREFIX + "score.weight"
# Settings of PEFT under which an adapter is something else than W + scale A B of one rank, and what they must be.
PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False), "bias": (None, "none"), "rank_pattern": (None, {}), "alpha_pattern": (None, {}),
    "fan_in_fan_out": (None, False), "layer_replication": (None,), "lora_bias": (None, False), "use_qalora": (None, False),
    "target_parameters": (None, []), "trainable_token_indices": (None, []), "exclude_modules": (None, []),
    "megatron_config": (None,), "alora_invocation_tokens": (None,), "arrow_config": (None,),
}  # fmt: skip


def tensor_name(target: str, part: str, layer: int) -> str:
    """'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight' of ('q', 'a', 0)."""
    return f"{PREFIX}{HF_NAMES[target].format(layer).removesuffix('.weight')}.lora_{part.upper()}.weight"


def export_adapter(trained: Params, spec: ModelSpec, cfg: LoraConfig, base: str, out: pathlib.Path) -> None:
    """Write the new folder `out`, tensors in float32. base: the name of the model under it. UserError when `out` exists."""
    tensors = {}
    for target, pair in trained["layers"].items():
        for part, array in pair.items():
            for layer in range(spec.layers):
                tensors[tensor_name(target, part, layer)] = _to_file(part, np.asarray(array[layer], np.float32))
    if spec.scalar:
        tensors[HEAD] = np.asarray(trained["score"], np.float32)[None]
    with new_folder(out) as folder:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / WEIGHTS).chmod(0o644)  # safetensors makes its files private
        (folder / CONFIG).write_text(json.dumps(_config(cfg, base, spec.scalar), indent=2) + "\n", encoding="utf-8")


def _config(cfg: LoraConfig, base: str, scalar: bool) -> dict[str, Any]:
    modules = [HF_NAMES[target].rsplit(".", 2)[1] for target in cfg.targets]
    return {
        "peft_type": "LORA", "task_type": "SEQ_CLS" if scalar else "CAUSAL_LM", "base_model_name_or_path": base,
        "r": cfg.rank, "lora_alpha": cfg.alpha, "use_rslora": cfg.rslora, "target_modules": sorted(modules),
        "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "use_dora": False, "init_lora_weights": True,
        "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": ["score"] if scalar else None, "inference_mode": True,
    }  # fmt: skip


def _to_file(part: str, array: np.ndarray) -> np.ndarray:
    """One layer: A [inputs, r] as [r, in], B [r, outputs] as [out, r]."""
    flat = array.reshape(-1, array.shape[-1]) if part == "a" else array.reshape(array.shape[0], -1)
    return np.ascontiguousarray(flat.T)


def adapter_hash(folder: pathlib.Path) -> str:
    """Identity of an adapter's weights."""
    return file_sha256(folder / WEIGHTS)


def read_adapter(
    folder: pathlib.Path, cfg: LoraConfig, spec: ModelSpec, start: Params, place: Callable[[ParamInfo], Any] | None = None
) -> Params:
    """The trained tree `start` (lora.fresh) with what the folder holds in its place; targets that it lacks stay as they are.

    UserError: no adapter there, another rank or scale than cfg's, a kind of adapter that is more than A B, a tensor that is
    unknown, missing, or of another shape.
    """
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        close = "coevo_jax.export --adapter makes one of a run" if (folder / "checkpoints").is_dir() else ""
        raise UserError("no adapter is there", where=f"lora.source={folder}", expected=f"a folder with {CONFIG} and {WEIGHTS}",
                        nearest=close)  # fmt: skip
    _check_config(read_json(folder / CONFIG), cfg, folder)
    tensors, where = _read(folder / WEIGHTS), str(folder / WEIGHTS)
    shapes, layers = trained_shapes(spec), {}
    for target, pair in shapes["layers"].items():
        if not any(name in tensors for name, _ in _names(target, spec)):
            layers[target] = start["layers"][target]
            continue
        layers[target] = {part: _leaf(tensors, target, part, info, where, place) for part, info in pair.items()}
    out: Params = {"layers": layers}
    if spec.scalar:
        head = tensors.pop(HEAD, None)
        out["score"] = start["score"]
        if head is not None:
            info = shapes["score"]
            out["score"] = placed(_shaped(head, (1, *info.shape), HEAD, where)[0], place and place(info))
    for name in tensors:
        raise UserError(f"tensor {name!r} has no place in what trains", where=where,
                        expected=f"adapters of lora.targets={','.join(cfg.targets)}",
                        nearest=nearest(name, [n for t in TARGETS for n, _ in _names(t, spec)]))  # fmt: skip
    return out


def _check_config(found: dict[str, Any], cfg: LoraConfig, folder: pathlib.Path) -> None:
    where = str(folder / CONFIG)
    if found.get("peft_type") != "LORA":
        raise UserError(f"peft_type={found.get('peft_type')!r}", where=where, expected="LORA")
    for key, allowed in PLAIN.items():
        if found.get(key) not in allowed:
            raise UserError(f"{key}={found[key]!r} is not supported", where=where, expected=f"{key}={allowed[-1]!r}")
    rank, rslora = found.get("r"), bool(found.get("use_rslora"))
    for key, own, theirs in (
        ("rank", cfg.rank, rank),
        ("alpha", cfg.alpha, found.get("lora_alpha")),
        ("rslora", cfg.rslora, rslora),
    ):
        if own != theirs:
            raise UserError(f"lora.{key}={own}, and the adapter to begin with has {theirs}", where=f"lora.{key}, {where}",
                            expected=f"lora.{key}={theirs}")  # fmt: skip


def _read(path: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        with safe_open(path, "numpy") as file:
            return {name: np.asarray(file.get_tensor(name)).astype(np.float32) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"the file can't be read: {error}", where=str(path), expected="a complete safetensors file") from error


def _names(target: str, spec: ModelSpec) -> Iterator[tuple[str, int]]:
    for layer in range(spec.layers):
        for part in "ab":
            yield tensor_name(target, part, layer), layer


def _leaf(
    tensors: dict[str, np.ndarray], target: str, part: str, info: ParamInfo, where: str, place: Callable[[ParamInfo], Any] | None
) -> jax.Array:
    """A stacked leaf; its tensors leave `tensors`."""
    inner = info.shape[1:]
    shape = (inner[-1], math.prod(inner[:-1])) if part == "a" else (math.prod(inner[1:]), inner[0])
    rows = []
    for layer in range(info.shape[0]):
        name = tensor_name(target, part, layer)
        if name not in tensors:
            raise UserError(f"tensor {name!r} is missing", where=where, expected=f"shape {list(shape)}",
                            nearest=nearest(name, tensors))  # fmt: skip
        rows.append(_shaped(tensors.pop(name), shape, name, where).T.reshape(inner))
    return placed(np.stack(rows), place and place(info))


def _shaped(tensor: np.ndarray, shape: tuple[int, ...], name: str, where: str) -> np.ndarray:
    if tensor.shape != shape:
        raise UserError(f"tensor {name!r} has shape {list(tensor.shape)}", where=where, expected=f"{list(shape)}")
    return tensor
