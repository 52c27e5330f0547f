"""What a compiled program does, read from its HLO text: collectives, and copies as large as a cache, with the loops around them.

Understands what XLA for TPU prints after scheduling: asynchronous pairs, collectives cut into fusions (one a channel counts),
reduce-scatters printed as fused all-reduces, and transfers between slices (sends to the host).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute", "send")
MOVES = {
    "copy",
    "copy-start",
    "transpose",
    "slice",
    "dynamic-slice",
    "slice-start",
    "convert",
    "reshape",
    "concatenate",
    "gather",
}
PASSIVE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "pad", "broadcast", "iota"}
SHAPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,<=]*)\](\{[^}]*\})?")
HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
CALLS = re.compile(
    r"\b(body|condition|calls|to_apply|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    arguments: str  # the text between the parentheses
    attributes: str
    root: bool


@dataclasses.dataclass(frozen=True)
class Loops:
    """The while bodies around an instruction, outermost first, and how often it runs (a loop of unknown length counts once)."""

    bodies: tuple[str, ...] = ()
    runs: int = 1
    known: bool = True


@dataclasses.dataclass(frozen=True)
class Collective:
    kind: str  # all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute; slices-... between slices; send
    bytes: int  # a device's larger side: of an all-gather the result, of a reduce-scatter the operand
    groups: Groups  # positions in the mesh's flat order; pairs for a collective-permute; () between slices
    loops: Loops
    crosses_hosts: bool | None  # None when the hosts were not given

    @property
    def body(self) -> str:
        """The innermost while body, '' outside of loops."""
        return self.loops.bodies[-1] if self.loops.bodies else ""


@dataclasses.dataclass(frozen=True)
class Copy:
    name: str
    opcode: str
    shape: str
    bytes: int
    in_vmem: bool  # moved into fast memory: the array is read whole, but no copy of it takes HBM
    loops: Loops


@dataclasses.dataclass(frozen=True)
class Module:
    computations: dict[str, list[Instruction]]
    entry: str
    partitions: int


def parse(text: str) -> Module:
    """The computations of an HLO module's text. ValueError when there is no entry computation."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in _logical_lines(text):
        if header := HEADER.match(line):
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line == "}":
            current = None
        elif current is not None and (found := INSTRUCTION.match(line)):
            current.append(_instruction(found[2], found[3], bool(found[1])))
    if not entry:
        raise ValueError("no ENTRY computation: this is not the text of a compiled HLO module")
    counted = re.search(r"num_partitions=(\d+)", text)
    return Module(computations, entry, int(counted[1]) if counted else 1)


def _logical_lines(text: str) -> Iterator[str]:
    """Lines, with what a kernel's metadata broke into several put together again: these may begin with a brace themselves."""
    held: list[str] = []
    for line in text.splitlines():
        if held and (line == "}" or line.startswith(("  ", "%", "ENTRY ")) or not line):
            yield "".join(held)
            held = []
        held.append(line)
    yield "".join(held)


def collectives(text: str, hosts: Sequence[int] | None = None) -> list[Collective]:
    """Every collective of a program. hosts: the host of each device in the mesh's flat order."""
    module = parse(text)
    found: list[Collective] = []
    seen: set[tuple[str, str, tuple[str, ...]]] = set()
    for computation, loops in _reached(module):
        shapes = {i.name: i.shape for i in module.computations[computation]}
        for i in module.computations[computation]:
            kind = i.opcode.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            channel = re.search(r"channel_id=(\d+)", i.attributes)
            if channel and kind != "send":  # the pieces of one collective that overlaps with others share a channel
                key = (kind, channel[1], loops.bodies)
                if key in seen:
                    continue
                seen.add(key)
            found.append(collective(module, computation, i, shapes, loops, hosts))
    return found


def large_copies(text: str, at_least_bytes: int) -> list[Copy]:
    """Copies, transposes, slices and conversions inside while bodies whose result has at least so many bytes; fusions that do
    nothing else count too. Updates in place and fusions that compute do not."""
    module = parse(text)
    fused = {name for body in module.computations.values() for i in body if i.opcode == "fusion" for _, name in calls(i)}
    out = []
    for computation, loops in _reached(module):
        if not loops.bodies or computation in fused:
            continue
        for i in module.computations[computation]:
            if i.opcode not in MOVES and not (i.opcode == "fusion" and _only_moves(module, i)):
                continue
            result = next(SHAPE.finditer(result_shape(i.shape)), None)
            if result and (size := _bytes(result[0])) >= at_least_bytes:
                out.append(Copy(i.name, i.opcode, result[0], size, "S(1)" in (result[3] or ""), loops))
    return out


def _instruction(name: str, rest: str, root: bool) -> Instruction:
    cut = _balanced(rest, 0) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:cut], rest[cut:].lstrip()
    opened = rest.index("(")
    closed = _balanced(rest, opened)
    arguments = rest[opened + 1 : closed - 1]
    return Instruction(name, rest[:opened], shape, tuple(re.findall(r"%([\w.\-]+)", arguments)), arguments, rest[closed:], root)


def _balanced(text: str, start: int) -> int:
    """Index after the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")


def _bytes(shape: str) -> int:
    """Bytes of an array or of all arrays of a tuple, without padding; contexts (u32[] of asynchronous pairs) don't count."""
    total = 0
    for found in SHAPE.finditer(shape):
        if found[1] == "u32" and not found[2]:
            continue
        count = math.prod(int(n.removeprefix("<=")) for n in found[2].split(",") if n)
        total += (count * bits(found[1]) + 7) // 8
    return total


def bits(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8  # pred


def result_shape(shape: str) -> str:
    """From the result on: asynchronous operations print (target, source, context) for a copy, else ((operands), result, ...)."""
    return shape[_balanced(shape, 1) :] if shape.startswith("((") else shape


def calls(i: Instruction) -> Iterator[tuple[str, str]]:
    for role, names in CALLS.findall(i.attributes):
        for name in re.findall(r"[\w.\-]+", names):
            yield role, name


def _reached(module: Module) -> Iterator[tuple[str, Loops]]:
    """Computations reached from the entry, each with its loops. Reducers (to_apply of anything but a call) are left out."""
    stack, seen = [(module.entry, Loops())], set()
    while stack:
        at = stack.pop()
        if at in seen or at[0] not in module.computations:
            continue
        seen.add(at)
        computation, loops = at
        yield at
        for i in module.computations[computation]:
            for role, name in calls(i):
                if role == "to_apply" and i.opcode != "call":
                    continue
                if i.opcode == "while":
                    trips = trip_count(module, computation, i)
                    inside = (*loops.bodies, name) if role == "body" else loops.bodies
                    stack.append((name, Loops(inside, loops.runs * (trips or 1), loops.known and trips is not None)))
                else:
                    stack.append((name, loops))


def trip_count(module: Module, computation: str, loop: Instruction) -> int | None:
    """Trips of a while: as XLA notes it, else limit - start of a counter that is compared with a constant; None if neither."""
    if noted := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(noted[1])
    condition = next((name for role, name in calls(loop) if role == "condition"), "")
    inside = {i.name: i for i in module.computations.get(condition, [])}
    root = next((i for i in inside.values() if i.root), None)
    if root is None or root.opcode != "compare" or "direction=LT" not in root.attributes:
        return None
    counter, limit = (inside.get(name) for name in root.operands)
    index = re.search(r"index=(\d+)", counter.attributes) if counter and counter.opcode == "get-tuple-element" else None
    if index is None or limit is None or limit.opcode != "constant":
        return None
    outside = {i.name: i for i in module.computations[computation]}
    start = outside.get(loop.operands[0])
    start = outside.get(start.operands[int(index[1])]) if start and start.opcode == "tuple" else None
    while start and start.opcode in ("copy", "bitcast", "reshape") and start.operands:
        start = outside.get(start.operands[0])
    first = int(start.arguments) if start and start.opcode == "constant" else 0
    return -(-(int(limit.arguments) - first) // _step(module, loop, int(index[1])))


def _step(module: Module, loop: Instruction, index: int) -> int:
    """What a loop adds to its counter: XLA unrolls some by two. 1 where the body doesn't say."""
    body = next((name for role, name in calls(loop) if role == "body"), "")
    inside = {i.name: i for i in module.computations.get(body, [])}
    root = next((i for i in inside.values() if i.root and i.opcode == "tuple"), None)
    added = inside.get(root.operands[index]) if root else None
    while added and added.opcode in ("copy", "bitcast") and added.operands:
        added = inside.get(added.operands[0])
    if added is None or added.opcode != "add":
        return 1
    constants = [inside[name].arguments for name in added.operands if name in inside and inside[name].opcode == "constant"]
    return int(constants[0]) if len(constants) == 1 and int(constants[0]) > 0 else 1


def _only_moves(module: Module, fusion: Instruction) -> bool:
    opcodes = {i.opcode for _, name in calls(fusion) for i in module.computations.get(name, [])}
    return bool(opcodes & MOVES) and opcodes <= MOVES | PASSIVE


def collective(
    module: Module, computation: str, i: Instruction, shapes: dict[str, str], loops: Loops, hosts: Sequence[int] | None
) -> Collective:
    kind = i.opcode.removesuffix("-start")
    into = sum(_bytes(shapes.get(name, "")) for name in i.operands)
    if kind == "send":
        between = re.search(r'_xla_megascale_transfer_type="(\w+)"', i.attributes)
        kind = "slices-" + between[1].lower().replace("_", "-") if between else "send"
        return Collective(kind, into, (), loops, True if between else None)
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
    result = _bytes(i.shape)
    if i.opcode.endswith("-start") and kind in ("all-gather", "collective-permute"):
        result -= into  # their result holds the operands too
    groups = replica_groups(i.attributes, module.partitions)
    crosses = None if hosts is None else any(len({hosts[d] for d in group}) > 1 for group in groups)
    return Collective(kind, max(into, result), groups, loops, crosses)


def replica_groups(attributes: str, partitions: int) -> Groups:
    """Groups of device positions in any notation: listed, [groups,size]<=[dims]T(order), or axes of a mesh."""
    if pairs := re.search(r"source_target_pairs=\{((?:\{[\d,]*\},?)*)\}", attributes):
        return _listed(pairs[1])
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        shape, dims, order = (tuple(int(n) for n in part.split(",")) if part else () for part in iota.groups())
        ids = np.arange(math.prod(dims)).reshape(dims).transpose(order or range(len(dims)))
        return _tuples(ids.reshape(shape))
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*(?:,\s*device_ids=\S+\s*)?\{([^}]*)\}", attributes):
        return _mesh_groups(mesh[1], mesh[2])
    listed = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes)
    if listed is None:
        raise ValueError(f"replica groups in a notation that is not known: {attributes[:200]!r}")
    return _listed(listed[1]) or (tuple(range(partitions)),)


def _mesh_groups(sizes: str, over: str) -> Groups:
    axes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", sizes)}
    names = re.findall(r"'([^']+)'", over)
    if ":" in over or not set(names) <= set(axes):
        raise ValueError(f"replica groups over parts of mesh axes are not known: {over!r}")
    ids = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
    order = [n for n in axes if n not in names] + names
    ids = ids.transpose([list(axes).index(n) for n in order])
    return _tuples(ids.reshape(-1, math.prod(axes[n] for n in names)))


def _listed(text: str) -> Groups:
    return tuple(tuple(int(n) for n in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", text))


def _tuples(ids: np.ndarray) -> Groups:
    return tuple(tuple(int(n) for n in row) for row in ids)
