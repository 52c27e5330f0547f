"""Names and layouts of weights in Hugging Face and GGUF files, and assembly of our parameter tree from any tensor source.

Axes of parameters: L layers, D model, H heads, K kv heads, d head width, F feed-forward, V vocabulary. A file
holds one tensor a layer, ours are stacked on axis 0. A linear map lies [out, in] in files and [in, out...] here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from coevo_jax.errors import UserError, nearest
from coevo_jax.models.forward import ParamInfo, param_shapes
from coevo_jax.models.spec import ModelSpec

Layout = tuple[tuple[int, ...], ...]

# For each axis of the file's tensor, the axes of ours (without L) that are merged into it.
LAYOUTS: dict[str, Layout] = {
    "embed": ((0,), (1,)),  # [V,D]
    "unembed": ((1,), (0,)),  # [V,D] <- [D,V]
    "score": ((), (0,)),  # [1,D] <- [D]
    "q": ((1, 2), (0,)),  # [H*d,D] <- [D,H,d]
    "k": ((1, 2), (0,)),
    "v": ((1, 2), (0,)),
    "o": ((2,), (0, 1)),  # [D,H*d] <- [H,d,D]
    "gate": ((1,), (0,)),
    "up": ((1,), (0,)),
    "down": ((1,), (0,)),
    "q_bias": ((0, 1),),
    "k_bias": ((0, 1),),
    "v_bias": ((0, 1),),
}
HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "unembed": "lm_head.weight",
    "score": "score.weight",
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "post_attn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "post_mlp_norm": "model.layers.{}.post_feedforward_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "o": "model.layers.{}.self_attn.o_proj.weight",
    "q_bias": "model.layers.{}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{}.self_attn.v_proj.bias",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
}
GGUF_NAMES = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "unembed": "output.weight",
    "attn_norm": "blk.{}.attn_norm.weight",
    "mlp_norm": "blk.{}.ffn_norm.weight",
    "q": "blk.{}.attn_q.weight",
    "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight",
    "o": "blk.{}.attn_output.weight",
    "q_bias": "blk.{}.attn_q.bias",
    "k_bias": "blk.{}.attn_k.bias",
    "v_bias": "blk.{}.attn_v.bias",
    "q_norm": "blk.{}.attn_q_norm.weight",
    "k_norm": "blk.{}.attn_k_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
}


class TensorSource(Protocol):
    """Named tensors somewhere. `where` is for errors; `whole`: a read costs the whole tensor, however small the slice."""

    where: str
    whole: bool

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of the parameter tree and the tensors that it is made of: one a layer, or a single one (stacked = False)."""

    path: tuple[str, ...]
    info: ParamInfo
    stacked: bool
    names: tuple[str, ...]
    layout: Layout

    @property
    def inner_shape(self) -> tuple[int, ...]:
        return self.info.shape[1:] if self.stacked else self.info.shape

    @property
    def file_shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.inner_shape[a] for a in axes) for axes in self.layout)


def leaves(spec: ModelSpec, names: dict[str, str]) -> list[Leaf]:
    """Every array of an architecture, with its tensors under a name map (HF_NAMES or GGUF_NAMES)."""
    out = []
    flat, _ = jax.tree_util.tree_flatten_with_path(param_shapes(spec), is_leaf=lambda x: isinstance(x, ParamInfo))
    for keys, info in flat:
        path = tuple(k.key for k in keys)
        stacked = path[0] == "layers"
        template = names[path[-1]]
        tensors = tuple(template.format(i) for i in range(spec.layers)) if stacked else (template,)
        inner = len(info.shape) - stacked
        if path[-1] in ("q_norm", "k_norm") and inner == 2:
            layout: Layout = ((0, 1),)
        else:
            layout = LAYOUTS.get(path[-1], ((0,),))
        out.append(Leaf(path, info, stacked, tensors, layout))
    return out


def file_index(leaf: Leaf, index: Sequence[slice]) -> tuple[slice, ...]:
    """Slice of the file's tensor that holds a slice of ours (without L). Merged axes need the inner one whole."""
    out = []
    for axes in leaf.layout:
        if not axes:  # of size 1, and in the file alone
            out.append(slice(0, 1))
            continue
        start, stop = _bounds(index[axes[0]], leaf.inner_shape[axes[0]])
        for axis in axes[1:]:
            size = leaf.inner_shape[axis]
            if _bounds(index[axis], size) != (0, size):
                raise ValueError(f"{'/'.join(leaf.path)}: axis {axis} can't be cut")
            start, stop = start * size, stop * size
        out.append(slice(start, stop))
    return tuple(out)


def from_file(leaf: Leaf, block: np.ndarray) -> np.ndarray:
    """A block of the file's tensor in our layout."""
    order = [a for axes in leaf.layout for a in axes]
    sizes = []
    for size, axes in zip(block.shape, leaf.layout):
        if not axes:
            continue
        inner = [leaf.inner_shape[a] for a in axes[1:]]
        sizes += [size // math.prod(inner), *inner]
    return block.reshape(sizes).transpose(np.argsort(order))


def to_file(leaf: Leaf, array: np.ndarray) -> np.ndarray:
    """Our array of one layer as the file's tensor (contiguous)."""
    order = [a for axes in leaf.layout for a in axes]
    return np.ascontiguousarray(array.transpose(order).reshape(leaf.file_shape))


def file_tensors(params: Any, spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    """(Hugging Face name, shape, function that fetches the array) of every tensor, one layer on the host at a time."""
    for leaf in leaves(spec, HF_NAMES):
        array = params
        for key in leaf.path:
            array = array[key]
        for i, name in enumerate(leaf.names):
            yield name, leaf.file_shape, _Fetch(leaf, array, i)


@dataclasses.dataclass(frozen=True)
class _Fetch:
    leaf: Leaf
    array: Any
    layer: int

    def __call__(self) -> np.ndarray:
        one = self.array[self.layer] if self.leaf.stacked else self.array
        return to_file(self.leaf, np.asarray(one))


def check_tensors(source: TensorSource, spec: ModelSpec, names: dict[str, str]) -> None:
    """UserError naming the first tensor that is missing, extra or of another shape."""
    found = source.shapes()
    expected = {name: leaf.file_shape for leaf in leaves(spec, names) for name in leaf.names}
    for name, shape in expected.items():
        if name not in found:
            raise UserError(f"tensor {name!r} is missing", where=source.where, expected=f"shape {list(shape)}",
                            nearest=nearest(name, set(found) - set(expected)))  # fmt: skip
    for name in found:
        # Files of tied models often repeat the embedding as a head; old ones hold rope frequencies, which the config gives.
        if name not in expected and not (spec.tied and name == names["unembed"]) and not name.endswith("rotary_emb.inv_freq"):
            raise UserError(f"tensor {name!r} is not part of this architecture ({spec.family})", where=source.where,
                            expected=f"the {len(expected)} tensors that config.json describes",
                            nearest=nearest(name, set(expected)))  # fmt: skip
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise UserError(f"tensor {name!r} has shape {list(found[name])}", where=source.where, expected=f"{list(shape)}")


def build_params(source: TensorSource, spec: ModelSpec, names: dict[str, str], dtype: Any, shardings: Any = None) -> Any:
    """The parameter tree from a source. With shardings, a process reads only the slices that its devices hold."""
    check_tensors(source, spec, names)
    tree: dict[str, Any] = {}
    for leaf in leaves(spec, names):
        at, placed = tree, shardings
        for key in leaf.path[:-1]:
            at = at.setdefault(key, {})
        for key in leaf.path if shardings is not None else ():
            placed = placed[key]
        at[leaf.path[-1]] = _build_leaf(source, leaf, jnp.dtype(dtype), placed)
    return tree


def _build_leaf(source: TensorSource, leaf: Leaf, dtype: np.dtype, sharding: Any) -> jax.Array:
    everything = (slice(None),) * len(leaf.info.shape)
    if sharding is None:
        return jnp.asarray(_read_block(source, leaf, everything, dtype))
    whole = _read_block(source, leaf, everything, dtype) if source.whole else None
    blocks: dict[Any, np.ndarray] = {}

    def block(index: Any) -> np.ndarray:
        if whole is not None:
            return whole[index]
        key = tuple(_bounds(s, n) for s, n in zip(index, leaf.info.shape))
        if key not in blocks:  # devices that hold the same slice share one read
            blocks[key] = _read_block(source, leaf, index, dtype)
        return blocks[key]

    return jax.make_array_from_callback(leaf.info.shape, sharding, block)


def _read_block(source: TensorSource, leaf: Leaf, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
    if not leaf.stacked:
        return np.ascontiguousarray(from_file(leaf, source.read(leaf.names[0], file_index(leaf, index))).astype(dtype))
    inside = index[1:]
    sizes = [stop - start for start, stop in (_bounds(s, n) for s, n in zip(index, leaf.info.shape))]
    out = np.empty(sizes, dtype)
    for row, name in enumerate(leaf.names[index[0]]):
        out[row] = from_file(leaf, source.read(name, file_index(leaf, inside))).astype(dtype)
    return out


def _bounds(index: slice, size: int) -> tuple[int, int]:
    start, stop, _ = index.indices(size)
    return start, stop
