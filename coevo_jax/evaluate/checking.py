"""Systems without a model, which check the harness: oracle knows the labels, always_a names the slot A, random knows nothing."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from coevo_jax.evaluate.benchmarks import Benchmark
from coevo_jax.evaluate.records import Example, Judged, Scores


class System(Protocol):
    """What a benchmark asks. identity: all that its verdicts depend on, as JSON values."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> Mapping[str, Any]: ...

    def judge(self, examples: Sequence[Example], benchmark: Benchmark) -> list[Judged]:
        """One record an example, in their order, which changes nothing in them."""
        ...


def units(example: Example, benchmark: Benchmark) -> int:
    """How many scores a game of the example has."""
    return len(example.criteria) if benchmark.kind == "criteria" else len(example.answers)


def uniform(*parts: object) -> float:
    """A number in [0, 1) that belongs to `parts`."""
    digest = hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def shown_order(example: Example) -> list[int]:
    """In which order a list's answers are shown: one that belongs to the id, for files that begin with the right answer."""
    return sorted(range(len(example.answers)), key=lambda i: (uniform("shown", example.id, i), i))


def oracle(example: Example, benchmark: Benchmark, game: int, seed: int) -> Scores:
    """The reference's own scores."""
    if benchmark.kind == "criteria":
        return tuple(map(float, example.met))
    if benchmark.kind == "list":
        return example.scores
    return {"A": (1.0, 0.0), "B": (0.0, 1.0), "tie": (0.5, 0.5)}[example.label]


def always_a(example: Example, benchmark: Benchmark, game: int, seed: int) -> Scores:
    """The answer in slot A of each game, the first one shown of a list, and yes to each criterion."""
    if benchmark.kind == "criteria":
        return (1.0,) * len(example.criteria)
    if benchmark.kind == "list":
        first = shown_order(example)[0]
        return tuple(float(i == first) for i in range(len(example.answers)))
    return (1.0, 0.0) if game == 0 else (0.0, 1.0)


def guess(example: Example, benchmark: Benchmark, game: int, seed: int) -> Scores:
    """A uniform draw for each unit."""
    return tuple(uniform(seed, example.id, game, i) for i in range(units(example, benchmark)))


CHECKS: dict[str, Callable[[Example, Benchmark, int, int], Scores]] = {"oracle": oracle, "always_a": always_a, "random": guess}


@dataclasses.dataclass(frozen=True)
class Checking:
    """One of CHECKS as a system; it reads no rubric."""

    name: str
    seed: int = 0

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"check": self.name, "seed": self.seed}

    def judge(self, examples: Sequence[Example], benchmark: Benchmark) -> list[Judged]:
        """One record an example."""
        games = range(benchmark.games)
        return [Judged(e.id, tuple(CHECKS[self.name](e, benchmark, g, self.seed) for g in games)) for e in examples]
