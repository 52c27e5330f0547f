"""What a method keeps from one update to later ones, by prompt slot: a rubric cache, labelled pairs, candidate sets.

A record is plain JSON data (token ids as lists of integers). It belongs to a slot, and so to the process that owns the slot:
checkpoints store slots, and any number of processes restores what others wrote (design.md section 3).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coevo_jax.distributed import own


class SlotStore:
    """Lists of records by slot, in the order they came. `slots`: of all processes."""

    def __init__(self, slots: int):
        self.slots = slots
        self._records: dict[int, list[Any]] = {}

    def add(self, slot: int, record: Any) -> None:
        """Append a record to a slot's. ValueError for a slot that isn't there."""
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} of {self.slots}")
        self._records.setdefault(slot, []).append(record)

    def of(self, slot: int) -> list[Any]:
        """A slot's records, oldest first."""
        return self._records.get(slot, [])

    def clear(self) -> None:
        """Forget everything."""
        self._records = {}

    def __len__(self) -> int:
        return sum(map(len, self._records.values()))

    def state(self) -> dict[str, list[Any]]:
        """The records of this process's slots, as JSON holds them."""
        return {str(slot): self._records[slot] for slot in own(self.slots) if slot in self._records}

    def restore(self, parts: Iterable[dict[str, list[Any]]]) -> None:
        """Take what every process saved; those of other processes' slots are left out."""
        mine = set(own(self.slots))
        self._records = {int(slot): list(records) for part in parts for slot, records in part.items() if int(slot) in mine}
