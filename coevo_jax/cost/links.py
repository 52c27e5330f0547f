"""How long a collective takes on the torus of a slice, by ring formulas, and on the network between slices.

A group whose chips fill a box of the torus uses all of the box's dimensions at once, as XLA's collectives do: bandwidth is the
sum of the links a chip has along them (two on a ring that wraps around, one on a line, whose end chips have no more). Source of
the formulas and of the hop's latency: jax-ml.github.io/scaling-book/sharding.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from coevo_jax.hlo import Groups

HOP = 1e-6  # seconds a hop adds to a collective (scaling book: "about 1 microsecond per hop")
HOST_LINK = 16e9  # bytes/s between a chip's HBM and its host (scaling book, PCIe of v5e)
# Bytes/s of a chip between slices, egress (scaling book, 'Networking'; Cloud's v5p page: 50 Gbit/s). v4 is not given: v5p's.
DCN = {"v4": 6.25e9, "v5e": 3.125e9, "v5p": 6.25e9, "v6e": 12.5e9}
POD_SIDE = 16  # of v5e and v6e, whose rings close only over a whole side
Position = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Network:
    """Where the devices of a mesh sit. `coords` in the slice and `slices`, in the mesh's flat order; `link`: bytes/s one way."""

    coords: tuple[Position, ...]
    slices: tuple[int, ...]
    dims: tuple[int, ...]
    wraps: tuple[bool, ...]
    link: float
    dcn: float

    @classmethod
    def of(cls, devices: Sequence[Any], chip: Any) -> Network:
        """The network of a mesh's devices (`mesh.devices.flat`) of a topology of coevo_jax.aot."""
        coords = tuple(tuple(int(c) for c in d.coords) for d in devices)
        slices = tuple(int(getattr(d, "slice_index", None) or 0) for d in devices)
        low, high = (tuple(f(c[i] for c in coords) for i in range(len(coords[0]))) for f in (min, max))
        dims = tuple(h - l + 1 for l, h in zip(low, high))
        moved = tuple(tuple(c - l for c, l in zip(position, low)) for position in coords)
        return cls(moved, slices, dims, wraparound(chip.name, dims), chip.ici_link, DCN[chip.name])

    def seconds(self, kind: str, size: int, groups: Groups) -> float:
        """Of one collective; `size` as hlo.Collective.bytes (a device's larger side)."""
        if kind.startswith("slices-") or kind == "send":
            return HOP + size / self.dcn
        if kind == "collective-permute":
            return self._permute(size, groups)
        return max((self._group(kind, size, group) for group in groups if len(group) > 1), default=0.0)

    def _group(self, kind: str, size: int, group: tuple[int, ...]) -> float:
        n = len(group)
        if len({self.slices[d] for d in group}) > 1:
            passes = 2 if kind == "all-reduce" else 1
            return HOP + passes * size * (n - 1) / n / self.dcn
        rings = self.rings(group)
        hops = sum(r.hops for r in rings)
        if kind in ("all-to-all", "ragged-all-to-all"):  # half of a dimension's data crosses its middle
            return HOP * hops + max(size * r.size / (4 * r.ways) / self.link for r in rings)
        passes = 2 if kind == "all-reduce" else 1
        return passes * (HOP * hops + size * (n - 1) / n / (self.link * sum(r.ways for r in rings)))

    def rings(self, group: tuple[int, ...]) -> list[Ring]:
        """The box that a group fills, a ring or line a dimension; one line in the group's order where it fills none."""
        values = [sorted({self.coords[d][i] for d in group}) for i in range(len(self.dims))]
        if math.prod(len(v) for v in values) != len(group):
            return [Ring(len(group), 1.0, len(group) - 1)]
        out = []
        for v, size, wraps in zip(values, self.dims, self.wraps):
            if len(v) > 1:
                stride = (v[-1] - v[0]) / (len(v) - 1)  # groups that lie interleaved share the links
                closed = wraps and len(v) * stride == size
                hops = stride * (len(v) // 2 if closed else len(v) - 1)
                out.append(Ring(len(v), (2 if closed else 1) / stride, hops))
        return out

    def _permute(self, size: int, pairs: Groups) -> float:
        """The most loaded link decides; each pair goes along one dimension after the other, the shorter way round."""
        load: Counter[tuple[Position, int, int]] = Counter()
        hops, crosses = 0, False
        for source, target in pairs:
            if self.slices[source] != self.slices[target]:
                crosses = True
                continue
            path = self._path(self.coords[source], self.coords[target])
            load.update(path)
            hops = max(hops, len(path))
        inside = HOP * hops + size * max(load.values(), default=0) / self.link
        return max(inside, HOP + size / self.dcn) if crosses else inside

    def _path(self, at: Position, to: Position) -> list[tuple[Position, int, int]]:
        path, here = [], list(at)
        for i, (size, wraps) in enumerate(zip(self.dims, self.wraps)):
            ahead = (to[i] - here[i]) % size if wraps else to[i] - here[i]
            step = 1 if 0 < ahead <= size / 2 or (ahead > 0 and not wraps) else -1
            while here[i] != to[i]:
                path.append((tuple(here), i, step))
                here[i] = (here[i] + step) % size
        return path


@dataclasses.dataclass(frozen=True)
class Ring:
    """One dimension of a group: chips along it, links a chip can receive over at once, hops to the farthest."""

    size: int
    ways: float
    hops: float


def wraparound(chip: str, dims: Sequence[int]) -> tuple[bool, ...]:
    """Which dimensions close to rings: v5e and v6e over a whole side of 16, v4 and v5p in slices of whole 4x4x4 cubes
    (docs.cloud.google.com/tpu/docs/v5p: "All 4x4x4 and larger slices (one cube) have full 3D torus")."""
    if chip in ("v5e", "v6e"):
        return tuple(n == POD_SIDE for n in dims)
    return (all(n % 4 == 0 for n in dims),) * len(dims)
