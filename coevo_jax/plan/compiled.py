"""What the compiler says of each program: memory, donation, warnings, and the text from which costs are read.

Figures are kept in a JSON file and texts packed beside it, both keyed by coevo_jax.aot. A program whose layers are unrolled
(decode) takes minutes at full depth; it may be compiled at two small depths instead and taken on a line
through them: its arguments, buffers and operations are those of one layer times the layers, plus a rest.
"""

from __future__ import annotations

import dataclasses
import gzip
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax

from coevo_jax import aot
from coevo_jax.errors import UserError
from coevo_jax.plan.cast import Slice
from coevo_jax.plan.programs import Planned, programs

SHALLOW = (2, 4)  # depths from which a line is drawn
TRIES = 3  # a compile that fails inside libtpu is tried again
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One compile. `text`: a packed file; `donated`: bytes that had to be written in place."""

    name: str
    layers: int
    memory: aot.Memory
    text: pathlib.Path
    donated: int
    warnings: tuple[str, ...]
    seconds: float

    @property
    def in_place(self) -> bool:
        """Is what was donated written in place?"""
        return self.memory.alias >= self.donated

    def read(self) -> str:
        """The compiled program's text."""
        with gzip.open(self.text, "rt") as file:
            return file.read()


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of the plan: at full depth, or at two depths that stand for it."""

    name: str
    layers: int
    parts: tuple[Compiled, ...]

    @property
    def exact(self) -> bool:
        """Was it compiled at full depth?"""
        return len(self.parts) == 1

    @property
    def memory(self) -> aot.Memory:
        fields = [f.name for f in dataclasses.fields(aot.Memory)]
        return aot.Memory(*(round(self.line(lambda c, f=f: getattr(c.memory, f))) for f in fields))  # type: ignore[misc]

    @property
    def in_place(self) -> bool:
        return all(part.in_place for part in self.parts)

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(w for part in self.parts for w in part.warnings)

    def line(self, figure: Callable[[Compiled], float]) -> float:
        """A figure at full depth."""
        if self.exact:
            return figure(self.parts[0])
        (a, x), (b, y) = ((part.layers, figure(part)) for part in self.parts)
        return x + (y - x) * (self.layers - a) / (b - a)


def compile_all(
    s: Slice, cache: pathlib.Path, *, full: bool, only: tuple[str, ...] = (), say: Say = lambda _: None
) -> dict[str, Program]:
    """Every program of the run (or those whose name is in `only`). full: unrolled ones too at full depth."""
    wanted = [name for name in programs(s) if not only or name in only]
    return {name: compile_one(s, name, cache, full=full, say=say) for name in wanted}


def compile_one(s: Slice, name: str, cache: pathlib.Path, *, full: bool, say: Say = lambda _: None) -> Program:
    """One program. UserError when it can't be compiled, with what libtpu said."""
    depth = _depth(s, name)
    if full or not name.endswith("decode") or depth <= SHALLOW[-1]:
        return Program(name, depth, (_compile(s, name, cache, say),))
    parts = (dataclasses.replace(s, layers=n) for n in SHALLOW)
    return Program(name, depth, tuple(_compile(part, name, cache, say) for part in parts))


def _depth(s: Slice, name: str) -> int:
    return s.spec(name.split(" ")[0]).layers


def _compile(s: Slice, name: str, cache: pathlib.Path, say: Say) -> Compiled:
    start, planned = time.perf_counter(), programs(s)[name]()
    found = _figures(planned, s, cache)
    layers, m = _depth(s, name), found["memory"]
    took = time.perf_counter() - start
    say(f"  {name}, {layers} layers: {took:.0f} s, peak {m['peak'] / aot.GIB:.2f} GiB a device")
    return Compiled(name, layers, aot.Memory(**m), cache / found["text"], planned.donated, tuple(found["warnings"]), took)


def _figures(planned: Planned, s: Slice, cache: pathlib.Path) -> dict[str, Any]:
    errors: list[str] = []
    for _ in range(TRIES):
        try:
            return aot.figures(planned.function, planned.args, s.mesh, cache=cache / "figures.json", texts=cache,
                               donate=planned.donate, out_shardings=planned.out_shardings)  # fmt: skip
        except jax.errors.JaxRuntimeError as error:
            errors.append(str(error))
            if "RESOURCE_EXHAUSTED" in errors[-1]:
                break
    raise UserError(f"{planned.name} does not compile: {_first_lines(errors[-1])}", where=s.topology.name,
                    expected="a program that fits: fewer slots or rows, more chips, or update.remat=full")  # fmt: skip


def _first_lines(error: str) -> str:
    return " ".join(error.split())[:400]
