"""A program's cost: operations in the order of the schedule, loops as often as they run, transfers hidden where they overlap.

Each operation takes max(flops / 0.75 peak, bytes / 0.8 bandwidth). An asynchronous transfer (a collective, or a copy between HBM
and fast memory) is hidden by the operations between its start and its end as far as these leave its link, or HBM, free; the rest
is exposed. A collective that is cut into pieces inside fusions is hidden by those fusions. A synchronous one is all exposed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from coevo_jax import hlo
from coevo_jax.aot import Chip
from coevo_jax.cost.links import HOST_LINK, Network
from coevo_jax.cost.operations import FREE, FREE_TARGETS, Array, Kernels, Operations, arrays
from coevo_jax.hlo import Instruction

OF_PEAK, OF_BANDWIDTH = 0.75, 0.8
COPIES = hlo.MOVES | {"dynamic-update-slice", "pad", "scatter"}
RESOURCES = ("hbm", "ici", "dcn", "host")
HEAVIEST = 20


@dataclasses.dataclass(frozen=True)
class Loop:
    """A while whose length the text does not say. `op_name` is JAX's path to it, `depth` the number of such loops around it."""

    name: str
    op_name: str
    depth: int


Trips = Sequence[float] | Callable[[Loop], float | None] | None


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation, summed over its runs. `bound`: flops, bytes, or transfer for what a transfer leaves exposed."""

    name: str
    category: str
    op_name: str
    runs: float
    flops: float
    bytes: float
    seconds: float
    bound: str


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one run of a program on one device. FLOPs are those of products and kernels, bytes those of HBM."""

    flops: float
    bytes: float
    collective_bytes: dict[str, float]  # by kind, a device's larger side
    collective_seconds: float  # of all collectives, hidden ones too
    exposed_seconds: float  # of collectives that the schedule does not overlap
    compute_seconds: float  # the rest
    seconds: float
    by_category: dict[str, dict[str, float]]  # flops, bytes, seconds of each category of operations
    crossing_bytes: float  # of collectives that cross hosts
    unknown_loops: int  # loops whose length is not known, counted once
    unknown_kernels: tuple[str, ...]  # kernels whose FLOPs are not known
    heaviest: list[Op]


def program_cost(
    text: str,
    chip: Chip,
    hosts: Sequence[int] | None = None,
    *,
    network: Network | None = None,
    trips: Trips = None,
    kernels: Kernels | None = None,
) -> Cost:
    """Cost of a compiled program's text on one device.

    hosts: the host of each device in the mesh's flat order. network: where the devices sit (Network.of(mesh.devices.flat, chip));
    without it each group of a collective is taken for a line of neighbours. trips: lengths of loops that depend on data, by their
    nesting (trips[0] of the outermost) or by a function of Loop. kernels: FLOPs and bytes of custom calls.
    """
    module = hlo.parse(text)
    network = network or _line(module.partitions, chip)
    walk = _Walk(module, chip, hosts, network, trips, Operations(module, kernels))
    return walk.computation(module.entry, 0).cost()


@dataclasses.dataclass
class _Tally:
    """Sums over a computation, and how long HBM and the links were free in it."""

    ops: list[Op] = dataclasses.field(default_factory=list)
    collective_bytes: dict[str, float] = dataclasses.field(default_factory=dict)
    collective_seconds: float = 0.0
    crossing: float = 0.0
    unknown_loops: int = 0
    unknown_kernels: tuple[str, ...] = ()
    free: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(RESOURCES, 0.0))

    @property
    def seconds(self) -> float:
        return sum(op.seconds for op in self.ops)

    def add(self, other: _Tally, times: float = 1.0) -> None:
        for op in other.ops:
            scaled = {f: getattr(op, f) * times for f in ("runs", "flops", "bytes", "seconds")}
            self.ops.append(dataclasses.replace(op, **scaled))
        for kind, size in other.collective_bytes.items():
            self.collective_bytes[kind] = self.collective_bytes.get(kind, 0.0) + size * times
        self.collective_seconds += other.collective_seconds * times
        self.crossing += other.crossing * times
        self.unknown_loops += other.unknown_loops
        self.unknown_kernels = tuple(sorted({*self.unknown_kernels, *other.unknown_kernels}))

    def cost(self) -> Cost:
        by: dict[str, dict[str, float]] = {}
        for op in self.ops:
            row = by.setdefault(op.category, {"flops": 0.0, "bytes": 0.0, "seconds": 0.0})
            for field in row:
                row[field] += getattr(op, field)
        exposed = by.get("collective", {}).get("seconds", 0.0)
        return Cost(
            sum(op.flops for op in self.ops), sum(op.bytes for op in self.ops), self.collective_bytes, self.collective_seconds,
            exposed, self.seconds - exposed, self.seconds, by, self.crossing, self.unknown_loops, self.unknown_kernels,
            sorted(self.ops, key=lambda op: -op.seconds)[:HEAVIEST],
        )  # fmt: skip


@dataclasses.dataclass
class _Slot:
    """An instruction's place in the schedule: its seconds, and what of them leaves each resource free."""

    seconds: float = 0.0
    free: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(RESOURCES, 0.0))


@dataclasses.dataclass
class _Transfer:
    """Seconds on a resource that the slots first .. last (exclusive) may hide."""

    name: str
    category: str
    op_name: str
    resource: str
    seconds: float
    bytes: float
    first: int
    last: int


class _Walk:
    def __init__(self, module: Any, chip: Chip, hosts: Any, network: Network, trips: Trips, operations: Operations) -> None:
        self.module, self.chip, self.hosts, self.network, self.trips, self.of = module, chip, hosts, network, trips, operations
        self.rate = chip.hbm_bandwidth * OF_BANDWIDTH

    def computation(self, name: str, depth: int) -> _Tally:
        tally, slots = _Tally(), []
        started: dict[str, _Transfer] = {}
        transfers: list[_Transfer] = []
        pieces: dict[str, _Transfer] = {}
        for at, i in enumerate(self.module.computations[name]):
            slot = _Slot()
            slots.append(slot)
            if i.opcode in FREE:
                continue
            if i.opcode.endswith("-done"):
                if (begun := started.pop(_start_of(self.of.table(name), i), None)) is not None:
                    transfers.append(dataclasses.replace(begun, last=at))
            elif i.opcode.endswith("-start") or i.opcode in ("send", "recv"):
                started[i.name] = self.transfer(tally, name, i, at)
            elif i.opcode in hlo.COLLECTIVES:
                transfers.append(dataclasses.replace(self.transfer(tally, name, i, at), first=at, last=at))
            elif i.opcode in ("while", "conditional", "call"):
                self.block(tally, slot, name, i, depth)
            else:
                self.operation(tally, slot, name, i)
                if i.opcode == "fusion":
                    self.fused(tally, name, i, at, pieces)
        transfers += [*pieces.values(), *started.values()]
        _expose(tally, slots, transfers)
        for slot in slots:
            for resource in RESOURCES:
                tally.free[resource] += slot.free[resource]
        return tally

    # ------------------------------------------------------------------------------------------------------------ operations

    def operation(self, tally: _Tally, slot: _Slot, computation: str, i: Instruction) -> None:
        """A fusion, a product, a kernel or anything else that runs by itself."""
        target = re.search(r'custom_call_target="([^"]*)"', i.attributes)
        if target and target[1] in FREE_TARGETS:
            return
        if target and target[1] == "tpu_custom_call":
            flops, size, known = self.of.kernel(computation, i)
            category = "attention" if re.search("attention|splash", i.name + _op_name(i)) else "kernel"
            if not known:
                tally.unknown_kernels = tuple(sorted({*tally.unknown_kernels, re.sub(r"\.\d+$", "", i.name)}))
        else:
            flops, size = self.of.flops(computation, i), self.of.traffic(computation, i)
            category = "matmul" if flops else "copy" if self._moves(i) else "elementwise"
        by_flops, by_bytes = flops / (self.chip.bf16_flops * OF_PEAK), size / self.rate
        seconds = max(by_flops, by_bytes)
        bound = "flops" if by_flops >= by_bytes else "bytes"
        tally.ops.append(Op(i.name, category, _op_name(i), 1.0, flops, size, seconds, bound))
        slot.seconds += seconds
        for resource in RESOURCES:
            slot.free[resource] += seconds - (by_bytes if resource == "hbm" else 0.0)

    def _moves(self, i: Instruction) -> bool:
        if i.opcode != "fusion":
            return i.opcode in COPIES
        inside = {x.opcode for _, name in hlo.calls(i) for x in self.module.computations.get(name, [])}
        return bool(inside & COPIES) and inside <= COPIES | hlo.PASSIVE

    def block(self, tally: _Tally, slot: _Slot, computation: str, i: Instruction, depth: int) -> None:
        """A loop, a call, or the branch of a conditional that takes longest."""
        times: float = 1.0
        if i.opcode == "while":
            length, inside = self.length(computation, i, depth)
            times = 1.0 if length is None else length
            body = next(name for role, name in hlo.calls(i) if role == "body")
            inner = self.computation(body, inside)
            tally.unknown_loops += length is None
        else:
            branches = [self.computation(name, depth) for _, name in hlo.calls(i)]
            inner = max(branches, key=lambda branch: branch.seconds)
        tally.add(inner, times)
        slot.seconds += inner.seconds * times
        for resource in RESOURCES:
            slot.free[resource] += inner.free[resource] * times

    def length(self, computation: str, i: Instruction, depth: int) -> tuple[float | None, int]:
        """Trips of a loop, and the number of loops of unknown length around its body."""
        known = hlo.trip_count(self.module, computation, i)
        if known is not None:
            return float(known), depth
        if callable(self.trips):
            return self.trips(Loop(i.name, _op_name(i), depth)), depth + 1
        if self.trips is not None and depth < len(self.trips):
            return float(self.trips[depth]), depth + 1
        return None, depth + 1

    # ------------------------------------------------------------------------------------------------------------- transfers

    def transfer(self, tally: _Tally, computation: str, i: Instruction, at: int) -> _Transfer:
        """What a start (or a synchronous collective) sets going."""
        kind = i.opcode.removesuffix("-start")
        if kind in hlo.COLLECTIVES:
            return self.collective(tally, computation, i, at, _op_name(i))
        inside = [(name, x) for _, name in hlo.calls(i) for x in self.module.computations.get(name, [])]
        wrapped = next(((name, x) for name, x in inside if x.opcode in hlo.COLLECTIVES), None)
        if wrapped:
            return self.collective(tally, *wrapped, at, _op_name(i))
        source, target = self._ends(computation, i, kind)
        size = min(source.bytes, target.bytes)
        resource = "host" if 5 in (source.space, target.space) else "hbm"
        moved = size * ((source.space == 0) + (target.space == 0))
        seconds = size / HOST_LINK if resource == "host" else moved / self.rate
        return _Transfer(i.name, "host" if resource == "host" else "copy", _op_name(i), resource, seconds, moved, at, at)

    def _ends(self, computation: str, i: Instruction, kind: str) -> tuple[Array, Array]:
        """Source and target of an asynchronous copy: (target, source, context) or ((operands), results, context)."""
        found = [a for a in arrays(i.shape) if a.space != 2 or a.dims]
        if kind == "copy":
            return found[1], found[0]
        operands = len(i.operands)
        given = arrays(self.of.table(computation)[i.operands[0]].shape) if operands else ()
        results = arrays(hlo.result_shape(i.shape))
        return (given or found)[0], (results or found)[0]

    def collective(self, tally: _Tally, computation: str, i: Instruction, at: int, op_name: str) -> _Transfer:
        shapes = {name: x.shape for name, x in self.of.table(computation).items()}
        found = hlo.collective(self.module, computation, i, shapes, hlo.Loops(), self.hosts)
        seconds = self.network.seconds(found.kind, found.bytes, found.groups)
        tally.collective_bytes[found.kind] = tally.collective_bytes.get(found.kind, 0.0) + found.bytes
        tally.collective_seconds += seconds
        tally.crossing += found.bytes if found.crosses_hosts else 0
        resource = "dcn" if found.kind.startswith("slices-") or found.kind == "send" else "ici"
        moved = sum(a.hbm for a in arrays(hlo.result_shape(i.shape)))
        moved += sum(a.hbm for name in i.operands for a in arrays(shapes.get(name, "")))
        return _Transfer(i.name, "collective", op_name, resource, seconds, moved, at, at)

    def fused(self, tally: _Tally, computation: str, i: Instruction, at: int, pieces: dict[str, _Transfer]) -> None:
        """Collectives inside a fusion. Several fusions that hold pieces of one (a channel) hide it together."""
        for inner, x in self._collectives_in(i):
            channel = re.search(r"channel_id=(\d+)", x.attributes)
            key = f"{x.opcode} {channel[1]}" if channel else f"{computation} {i.name}"
            if key in pieces:
                pieces[key].last = at + 1
            else:
                pieces[key] = dataclasses.replace(self.collective(tally, inner, x, at, _op_name(i)), first=at - 1, last=at + 1)

    def _collectives_in(self, i: Instruction) -> list[tuple[str, Instruction]]:
        out = []
        for _, name in hlo.calls(i):
            for x in self.module.computations.get(name, []):
                if x.opcode.removesuffix("-start") in hlo.COLLECTIVES:
                    out.append((name, x))
                elif x.opcode == "fusion":
                    out += self._collectives_in(x)
        return out


def _expose(tally: _Tally, slots: list[_Slot], transfers: list[_Transfer]) -> None:
    """Hide transfers under the slots between their ends, in the order in which they end; what is left becomes an operation."""
    for t in sorted(transfers, key=lambda t: t.last):
        left = t.seconds
        for slot in slots[t.first + 1 : t.last]:
            hidden = min(left, slot.free[t.resource])
            slot.free[t.resource] -= hidden
            left -= hidden
        tally.ops.append(Op(t.name, t.category, t.op_name, 1.0, 0.0, t.bytes, left, "transfer"))
        end = slots[min(t.last, len(slots) - 1)]
        end.seconds += left
        for resource in RESOURCES:
            end.free[resource] += left if resource != t.resource else 0.0


def _start_of(table: dict[str, Instruction], done: Instruction) -> str:
    """The start whose end this is, through tuples' elements and bitcasts."""
    i = table.get(done.operands[0]) if done.operands else None
    while i is not None and i.opcode in ("get-tuple-element", "bitcast", "tuple") and i.operands:
        i = table.get(i.operands[0])
    return i.name if i else ""


def _op_name(i: Instruction) -> str:
    found = re.search(r'op_name="([^"]*)"', i.attributes)
    return found[1] if found else ""


def _line(partitions: int, chip: Chip) -> Network:
    """Devices side by side, where nobody says where they are."""
    from coevo_jax.cost.links import DCN

    coords = tuple((n,) for n in range(partitions))
    return Network(coords, (0,) * partitions, (partitions,), (False,), chip.ici_link, DCN.get(chip.name, 6.25e9))
