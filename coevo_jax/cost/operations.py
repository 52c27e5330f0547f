"""FLOPs and HBM traffic of single operations of an HLO module.

FLOPs are those of products (dot and convolution) and kernels: a vector unit's work is bounded by its traffic in this model.
Traffic is operands and results that lie in HBM, without padding to tiles: a fusion's inside costs nothing, what it slices is read
as far as it is sliced, what it updates in place is written as far as it is updated, and arrays in fast memory (VMEM) are free.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

from coevo_jax import hlo
from coevo_jax.hlo import Instruction, Module

UNARY = {"convert", "bitcast", "copy", "transpose", "reshape", "negate", "bitcast-convert", "reverse"}
FREE = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id", "replica-id", "opt-barrier",
    "add-dependency", "domain", "get-dimension-size",
}  # fmt: skip
FREE_TARGETS = {
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "GatherScatterIndicesBitpacked",
    "Sharding",
    "SPMDFullToShardShape",
}


@dataclasses.dataclass(frozen=True)
class Array:
    dtype: str
    dims: tuple[int, ...]
    space: int  # 0 HBM, 1 VMEM, 2 semaphores, 5 the host's memory, 6 scalar memory

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        return self.elements * hlo.bits(self.dtype) / 8

    @property
    def hbm(self) -> float:
        """Bytes in HBM."""
        return self.bytes if self.space == 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A custom call of Pallas, for a caller that knows what it does."""

    name: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]


Kernels = Callable[[Kernel], tuple[float, float] | None]  # (flops, HBM bytes), None for a kernel that it doesn't know


def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a shape or a tuple of shapes."""
    out = []
    for found in hlo.SHAPE.finditer(shape):
        space = re.search(r"S\((\d+)\)", found[3] or "")
        dims = tuple(int(n.removeprefix("<=")) for n in found[2].split(",") if n)
        out.append(Array(found[1], dims, int(space[1]) if space else 0))
    return tuple(out)


class Operations:
    """Costs of the operations of one module; fused computations are looked at once."""

    def __init__(self, module: Module, kernels: Kernels | None = None) -> None:
        self.module = module
        self.kernels = kernels
        self._tables: dict[str, dict[str, Instruction]] = {}
        self._flops: dict[str, float] = {}
        self._users: dict[str, dict[str, list[tuple[Instruction, int]]]] = {}

    def table(self, computation: str) -> dict[str, Instruction]:
        """Instructions by name."""
        if computation not in self._tables:
            self._tables[computation] = {i.name: i for i in self.module.computations[computation]}
        return self._tables[computation]

    # ---------------------------------------------------------------------------------------------------------------- FLOPs

    def flops(self, computation: str, i: Instruction) -> float:
        """Of a product, or of all products in a fusion."""
        if i.opcode == "dot":
            return _dot_flops(i, self._operand(computation, i, 0))
        if i.opcode == "convolution":
            return _convolution_flops(i, self._operand(computation, i, 0), self._operand(computation, i, 1))
        if i.opcode in ("fusion", "call"):
            return sum(self._inside(name) for role, name in hlo.calls(i) if role in ("calls", "to_apply"))
        return 0.0

    def _inside(self, computation: str) -> float:
        if computation not in self._flops:
            body = self.module.computations.get(computation, [])
            self._flops[computation] = sum(self.flops(computation, i) for i in body)
        return self._flops[computation]

    def _operand(self, computation: str, i: Instruction, k: int) -> Array:
        return arrays(self.table(computation)[i.operands[k]].shape)[0]

    # -------------------------------------------------------------------------------------------------------------- traffic

    def traffic(self, computation: str, i: Instruction) -> float:
        """Bytes of HBM that an operation reads and writes."""
        table, results = self.table(computation), arrays(i.shape)
        if i.opcode == "fusion":
            inner = next(name for role, name in hlo.calls(i) if role == "calls")
            read = sum(self._read(inner, k, _whole(table, name)) for k, name in enumerate(i.operands) if _first(i.operands, k))
            return read + self._written(inner, results)
        sizes = [_whole(table, name) for k, name in enumerate(i.operands) if _first(i.operands, k)]
        result = sum(a.hbm for a in results)
        if i.opcode in ("slice", "dynamic-slice", "gather"):
            return result + (results[0].bytes if sizes and sizes[0] else 0.0)
        if i.opcode == "dynamic-update-slice":
            update = arrays(table[i.operands[1]].shape)[0]
            return update.hbm + (update.bytes if result else 0.0)
        if i.opcode == "scatter":
            updates = arrays(table[i.operands[-1]].shape)[0]
            return updates.hbm + (2 * updates.bytes if result else 0.0)
        return result + sum(sizes)

    def _read(self, computation: str, k: int, whole: float) -> float:
        """Of the whole operand k of a fused computation, what is read."""
        parameter = next(
            (i for i in self.module.computations[computation] if i.opcode == "parameter" and i.arguments == str(k)), None
        )
        if not whole or parameter is None:
            return 0.0
        array = arrays(parameter.shape)
        share = self._touched(computation, parameter.name, sum(a.elements for a in array)) / max(
            1, sum(a.elements for a in array)
        )
        return whole * min(1.0, share)

    def _touched(self, computation: str, name: str, whole: int) -> int:
        """Elements of an array that its users in a fused computation look at."""
        total = 0
        for user, k in self._uses(computation).get(name, []):
            result = arrays(user.shape)
            if user.opcode in ("slice", "dynamic-slice", "gather") and k == 0:
                total += result[0].elements
            elif user.opcode in ("dynamic-update-slice", "scatter") and k == 0:
                continue  # in place: what stays is not read
            elif user.opcode in hlo.COLLECTIVES or (user.opcode == "tuple" and user.root):
                continue  # a collective's piece counts with the collective; what is handed on is not touched
            elif user.opcode in UNARY and not user.root:
                total += self._touched(computation, user.name, whole)
            elif user.opcode == "fusion":
                inner = next(name for role, name in hlo.calls(user) if role == "calls")
                total += self._touched(inner, self._parameter(inner, k), whole)
            elif user.opcode in ("dynamic-slice", "dynamic-update-slice") and whole == 1:
                total += 1
            else:
                return whole
            if total >= whole:
                return whole
        return total

    def _parameter(self, computation: str, k: int) -> str:
        return next(i.name for i in self.module.computations[computation] if i.opcode == "parameter" and i.arguments == str(k))

    def _uses(self, computation: str) -> dict[str, list[tuple[Instruction, int]]]:
        if computation not in self._users:
            uses: dict[str, list[tuple[Instruction, int]]] = {}
            for i in self.module.computations[computation]:
                for k, name in enumerate(i.operands):
                    uses.setdefault(name, []).append((i, k))
            self._users[computation] = uses
        return self._users[computation]

    def _written(self, computation: str, results: tuple[Array, ...]) -> float:
        table = self.table(computation)
        root = next(i for i in self.module.computations[computation] if i.root)
        roots = [table[name] for name in root.operands] if root.opcode == "tuple" else [root]
        if len(roots) != len(results):
            return sum(a.hbm for a in results)
        return sum(a.hbm * self._share(computation, r, a) for r, a in zip(roots, results))

    def _share(self, computation: str, i: Instruction, result: Array) -> float:
        """Of a fusion's result, the part that is written: an update in place writes the update."""
        table = self.table(computation)
        if i.opcode == "parameter" or i.opcode in hlo.COLLECTIVES:
            return 0.0  # handed on, or counted with the collective
        while i.opcode in UNARY:
            i = table[i.operands[0]]
        if i.opcode in ("dynamic-update-slice", "scatter"):
            updates = arrays(table[i.operands[1 if i.opcode == "dynamic-update-slice" else -1]].shape)[0]
            return min(1.0, updates.elements * (1 if i.opcode == "dynamic-update-slice" else 2) / max(1, result.elements))
        if i.opcode == "fusion" and len(arrays(i.shape)) == 1:
            inner = next(name for role, name in hlo.calls(i) if role == "calls")
            return self._share(inner, next(x for x in self.module.computations[inner] if x.root), result)
        return 1.0

    # -------------------------------------------------------------------------------------------------------------- kernels

    def kernel(self, computation: str, i: Instruction) -> tuple[float, float, bool]:
        """FLOPs and traffic of a Pallas kernel, and whether they are known: by the caller, by name, by its own estimate."""
        table = self.table(computation)
        operands = tuple(a for name in i.operands for a in arrays(table[name].shape))
        path = re.search(r'op_name="([^"]*)"', i.attributes)  # inside a loop over rows the call's own name says nothing
        name = i.name if path is None or not i.name.startswith("closed_call") else f"{i.name} {path[1]}"
        kernel = Kernel(name, operands, arrays(i.shape))
        found = (self.kernels and self.kernels(kernel)) or splash(kernel)
        if found:
            return *found, True
        if noted := re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)[^}]*"bytes_accessed":"?(\d+)', i.attributes):
            return float(noted[1]), float(noted[2]), True
        aliased = {(int(k) if k else 0, int(n)) for k, n in re.findall(r"\{(\d*)\}: \((\d+), \{", i.attributes)}
        read = sum(a.hbm for n, a in enumerate(operands) if n not in {n for _, n in aliased})
        written = sum(a.hbm for k, a in enumerate(kernel.results) if k not in {k for k, _ in aliased})
        return 0.0, read + (written if written or not aliased else read), False


def splash(kernel: Kernel) -> tuple[float, float] | None:
    """Splash attention by its operands' shapes: products of the blocks that the mask leaves, and their keys and values.

    Forward 2 products a block, dq 3, dkv 4 (Pallas' splash_attention_kernel.py). The mask's table [., q blocks, kv blocks] says
    how many blocks a row of them may visit; a causal row visits those up to its own. Segments skip nothing.
    """
    products = next(
        (n for name, n in (("_fwd", 2), ("_dq", 3), ("_dkv", 4)) if "splash" in kernel.name and name in kernel.name), 0
    )
    wide = [a for a in kernel.operands if a.dtype in ("bf16", "f32") and len(a.dims) >= 3]
    tables = [a for a in kernel.operands if a.dtype in ("s8", "s32") and len(a.dims) >= 3]
    if not products or len(wide) < 2 or not tables:
        return None
    q, k = wide[:2]
    heads, T, d = math.prod(q.dims[:-2]), q.dims[-2], q.dims[-1]
    rows, width = tables[0].dims[-2:]
    if products == 4:  # dkv walks the transposed table
        rows, width = max(rows, width), min(rows, width)
    visited: float = sum(min(r + 1, width) for r in range(rows))
    if k.dims[-2] > T:  # a chip's part of a row's queries against all of its keys: the mean over the chips of the row
        rows, width = tables[0].dims[-2:]
        visited = rows * (width + 1) / 2
    block_q = block_kv = T / rows
    flops = 2.0 * products * block_q * block_kv * d * heads * visited
    tiles = 2 * visited * block_kv * d * heads * hlo.bits(k.dtype) / 8
    return flops, tiles + sum(a.hbm for a in (q, *kernel.results) if len(a.dims) >= 3)


def decode_kernels(filled: float) -> Kernels:
    """Costs of coevo_jax/sampler/kernel.py when rows have `filled` positions of the cache on average (tiles' ends not counted).

    Keys and values of what is filled are read once, q, results and statistics whole. FLOPs: 2 products of each query head.
    """

    def cost(kernel: Kernel) -> tuple[float, float] | None:
        if "decode_attention" not in kernel.name:
            return None
        cache = [a for a in kernel.operands if len(a.dims) == 4]
        q, keys, values = cache[:3]
        size = max(keys.dims[-2:], key=lambda n: n != q.dims[-1])
        share = min(1.0, filled / size)
        flops = 4.0 * q.elements * filled
        return flops, share * (keys.hbm + values.hbm) + sum(a.hbm for a in (q, *kernel.results))

    return cost


def _whole(table: dict[str, Instruction], name: str) -> float:
    return sum(a.hbm for a in arrays(table[name].shape)) if name in table else 0.0


def _first(operands: tuple[str, ...], k: int) -> bool:
    return operands.index(operands[k]) == k


def _dot_flops(i: Instruction, left: Array) -> float:
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.attributes)
    over = [int(n) for n in contracted[1].split(",") if n] if contracted else []
    return 2.0 * arrays(i.shape)[0].elements * math.prod(left.dims[n] for n in over)


def _convolution_flops(i: Instruction, left: Array, kernel: Array) -> float:
    """2 x batch x output features x input features of a group x the pairs of window and input that are not padding."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes)
    if labels is None:
        raise ValueError(f"a convolution without dim_labels: {i.attributes[:200]!r}")
    out = arrays(i.shape)[0]
    batch, features = (out.dims[labels[3].index(c)] for c in "bf")
    inputs = kernel.dims[labels[2].index("i")]
    pairs = 1
    for n, window in enumerate(_windows(i.attributes)):
        pairs *= _valid(left.dims[labels[1].index(str(n))], out.dims[labels[3].index(str(n))], *window)
    return 2.0 * batch * features * inputs * pairs


def _windows(attributes: str) -> list[tuple[int, int, int, int, int]]:
    """(size, stride, low padding, input dilation, window dilation) of each spatial dimension."""
    found = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(part.split("=") for part in found[1].split()) if found else {}
    sizes = [int(n) for n in fields.get("size", "").split("x") if n]

    def field(name: str) -> list[int]:
        return [int(n.split("_")[0]) for n in fields[name].split("x")] if name in fields else []

    def at(name: str, n: int, default: int) -> int:
        values = field(name)
        return values[n] if n < len(values) else default

    return [
        (size, at("stride", n, 1), at("pad", n, 0), at("lhs_dilate", n, 1), at("rhs_dilate", n, 1))
        for n, size in enumerate(sizes)
    ]


def _valid(size_in: int, size_out: int, size: int, stride: int, low: int, dilate_in: int, dilate: int) -> int:
    """Pairs (output position, window position) of one dimension that meet an input element and not padding."""
    if size == 1 and stride == 1 and low == 0 and dilate_in == 1:
        return min(size_in, size_out)
    count = 0
    span = (size_in - 1) * dilate_in
    for at in range(size_out):
        start = at * stride - low
        count += sum(1 for w in range(size) if 0 <= start + w * dilate <= span and (start + w * dilate) % dilate_in == 0)
    return count
