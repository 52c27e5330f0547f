"""Which record each prompt slot sees next: one seeded walk over the set, dealt out to the slots.

Slot i of P takes the positions i, i + P, i + 2P, ... of one endless walk. The walk passes through a permutation of the N records,
then through another one, and so on; position g lies in epoch g // N. So every (epoch, record) belongs to exactly one
(slot, count), whatever P, N and the number of processes:

- Slots that consume equally walk each permutation exactly once, also when P does not divide N: an epoch then ends inside
  an update and the remaining slots of that update are in the next one.
- Slots that consume unequally (a dropped group draws again) only run ahead on their own positions. Nothing is drawn twice in an
  epoch; what a slower slot has left of an epoch comes when that slot gets there.

A mixture walks each component through its own permutations; chunks of the walk are shared among them by weight.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from coevo_jax.data.prompts import PromptSet
from coevo_jax.errors import UserError

# N records, P slots, C components. A chunk of the walk holds the components by weight, to one record, in a seeded order.
CHUNK = 256


class SlotStream:
    """Cursors of `slots` prompt slots over `prompts`. `name` sets apart streams of one seed. Holds a count for each slot."""

    def __init__(self, prompts: PromptSet, seed: int, slots: int, name: str = ""):
        if slots < 1:
            raise ValueError(f"a stream needs at least one slot, not {slots}")
        self.prompts, self.seed, self.slots, self.name = prompts, seed, slots, name
        self._counts = [0] * slots
        self._permutation = functools.lru_cache(maxsize=8 * len(prompts.parts))(self._make_permutation)
        self._chunk = functools.lru_cache(maxsize=None)(self._make_chunk)
        self._taken = [np.zeros(len(prompts.parts), np.int64)]  # records that each component gave before chunk b

    def next(self, slot: int) -> dict[str, Any]:
        """The next record of `slot`."""
        record = self.prompts.records[self.index(slot, self._counts[slot])]
        self._counts[slot] += 1
        return record

    def index(self, slot: int, count: int) -> int:
        """Index in `prompts.records` of the record that `slot` draws after `count` others."""
        part, position = self._locate(slot + count * self.slots)
        start, size, _ = self.prompts.parts[part]
        epoch, offset = divmod(position, size)
        return start + int(self._permutation(part, epoch)[offset])

    def _locate(self, position: int) -> tuple[int, int]:
        """(component, position in the component's own walk) of a position of the whole walk."""
        if len(self.prompts.parts) == 1:
            return 0, position
        chunk, offset = divmod(position, CHUNK)
        while len(self._taken) <= chunk:
            self._taken.append(
                self._taken[-1] + np.bincount(self._chunk(len(self._taken) - 1)[0], minlength=len(self._taken[-1]))
            )
        choices, ranks = self._chunk(chunk)
        part = int(choices[offset])
        return part, int(self._taken[chunk][part]) + int(ranks[offset])

    def _make_permutation(self, part: int, epoch: int) -> np.ndarray:
        return random_of(self.seed, self.name, "epoch", part, epoch).permutation(self.prompts.parts[part][1])

    def _make_chunk(self, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """(component, records of it before in this chunk) of each position of a chunk.

        Each place goes to the component that is furthest behind its share of the walk; then the chunk is shuffled.
        """
        weights = np.array([part[2] for part in self.prompts.parts], np.float64)
        taken = self._taken[chunk].astype(np.float64)
        choices = np.empty(CHUNK, np.int64)
        for offset in range(CHUNK):
            choices[offset] = np.argmax(weights * float(chunk * CHUNK + offset + 1) - taken)
            taken[choices[offset]] += 1
        choices = choices[random_of(self.seed, self.name, "mixture", chunk).permutation(CHUNK)]
        ranks = np.zeros(CHUNK, np.int64)
        for part in range(len(weights)):
            ranks[choices == part] = np.arange(np.sum(choices == part))
        return choices, ranks

    def epochs(self) -> float:
        """Passes over the set so far, mean over the slots."""
        return sum(self._counts) / len(self.prompts.records)

    def state(self, slots: Iterable[int] | None = None) -> dict[str, Any]:
        """JSON-able: the count of each slot (or of some), and what the counts mean: data hash, seed, name, number of slots."""
        chosen = range(self.slots) if slots is None else slots
        return {**self._identity(), "counts": {str(slot): self._counts[slot] for slot in chosen}}

    def _identity(self) -> dict[str, Any]:
        return {"data": self.prompts.hash, "seed": self.seed, "name": self.name, "slots": self.slots}

    def restore(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Take the counts that any number of processes saved. UserError when data, seed or slots differ or a slot is missing."""
        states = [state] if isinstance(state, dict) else list(state)
        counts: dict[int, int] = {}
        for part in states:
            for key, now in self._identity().items():
                self._check_same(key, part.get(key), now)
            counts.update({int(slot): int(count) for slot, count in part["counts"].items()})
        missing = sorted(set(range(self.slots)) - counts.keys())
        if missing:
            raise UserError(
                f"the saved data cursor lacks prompt slots {missing[:5]}", where="checkpoint", expected=f"0..{self.slots - 1}"
            )
        self._counts = [counts[slot] for slot in range(self.slots)]

    def _check_same(self, key: str, saved: Any, now: Any) -> None:
        if saved == now:
            return
        if key == "data":
            raise UserError(
                "the data changed since the checkpoint was written, so its cursor means nothing",
                where=f"data.prompts={self.prompts.source}",
                expected=f"the records with the hash {saved} (these have {now}), or a new --workdir",
            )
        names = {"seed": "seed", "slots": "schedule.prompts", "name": "stream name"}
        raise UserError(
            f"the data cursor was saved with {names[key]}={saved}, not {now}",
            where="checkpoint",
            expected=f"{names[key]}={saved}",
        )


def random_of(*parts: int | str) -> np.random.RandomState:
    """A generator keyed by `parts`. RandomState's streams are frozen by NumPy, so an order never changes with its version."""
    digest = hashlib.blake2b(repr(parts).encode("utf-8"), digest_size=32).digest()
    return np.random.RandomState(np.frombuffer(digest, "<u4"))
