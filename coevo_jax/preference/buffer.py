"""The replay buffer: answers that the policy gave some updates ago, in host memory, kept by prompt slot.

Age is counted in policy updates: an entry stored at update u has age now - u, and an answer of age 0 is no older answer.
The buffer holds what the largest gap needs or is refused; evictions and fallbacks are counted (design.md 4.9).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from coevo_jax.errors import UserError

# E entries, S slots. Counters are kept by slot, so that any number of processes can restore them.
COUNTERS = ("added", "evicted", "surplus", "drawn", "fallback", "dropped", "empty")
State = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """One stored answer. tokens: int32 ids as sampled; extra: whole numbers that a pair source wants to keep."""

    slot: int
    update: int
    record_id: str
    question: str
    tokens: np.ndarray
    finish: str = "stop"
    extra: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Draw:
    """entry None: nothing to draw. gap: policy updates between the entry and now. fallback: None, or why the gap was not met."""

    entry: Entry | None
    gap: int | None
    fallback: str | None


class ReplayBuffer:
    """Per-slot store of at most `per_slot` answers, at most `per_update` of them from one policy update.

    slots: the slots of this process (a count means range(count)). Gap [min_gap, max_gap] in policy updates, max_gap 0 = no upper
    bound. on_empty: 'nearest' or 'drop' when no entry fits the gap. fifo_entries > 0 (compat): one first-in-first-out store of
    that many entries over all slots, with the age, the draw and the fallbacks of the released EvoLM code.
    """

    def __init__(
        self,
        slots: int | Iterable[int],
        per_slot: int,
        min_gap: int,
        max_gap: int,
        *,
        on_empty: str = "nearest",
        per_update: int = 1,
        fifo_entries: int = 0,
    ):
        self.slots = tuple(range(slots) if isinstance(slots, int) else slots)
        self.per_slot, self.min_gap, self.max_gap = per_slot, min_gap, max_gap
        self.on_empty, self.per_update, self.fifo_entries = on_empty, per_update, fifo_entries
        self._check()
        self._entries: dict[int, list[Entry]] = {slot: [] for slot in self.slots}
        self._fifo: list[Entry] = []
        self._counters = {slot: dict.fromkeys(COUNTERS, 0) for slot in self.slots}

    def _check(self) -> None:
        if self.min_gap < 1 or (self.max_gap and self.max_gap < self.min_gap):
            raise UserError(
                f"the gap [{self.min_gap}, {self.max_gap}] is empty",
                where="pairs.min_gap, pairs.max_gap",
                expected="1 <= min_gap <= max_gap (or max_gap 0)",
            )
        if self.on_empty not in ("nearest", "drop"):
            raise UserError(f"unknown choice {self.on_empty!r}", where="pairs.on_empty", expected="nearest or drop")
        furthest = max(self.min_gap, self.max_gap)
        needed = self.per_update * furthest
        if not self.fifo_entries and self.per_slot < needed:
            raise UserError(
                f"the replay buffer holds {self.per_slot} answers a slot; a gap up to {furthest} needs {needed}",
                where="pairs.per_slot",
                expected=f"at least {needed}, or a smaller pairs.max_gap",
            )

    def __len__(self) -> int:
        return len(self._fifo) + sum(map(len, self._entries.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of the stored token ids."""
        return sum(entry.tokens.nbytes for entry in self._all())

    @property
    def counters(self) -> dict[str, int]:
        """Totals over this process's slots since the start of the run."""
        return {name: sum(counts[name] for counts in self._counters.values()) for name in COUNTERS}

    def add(
        self,
        slot: int,
        update: int,
        record_id: str,
        question: str,
        tokens: Sequence[int] | np.ndarray,
        finish: str = "stop",
        extra: Mapping[str, int] | None = None,
    ) -> bool:
        """Store an answer that the policy gave at `update`. False: the slot has its `per_update` answers of that update already
        (a resampled group), which would push out answers that the largest gap still needs; counted as surplus.
        """
        counts = self._counters[slot]
        held = self._fifo if self.fifo_entries else self._entries[slot]
        if held and update < held[-1].update:
            raise ValueError(f"slot {slot}: an answer of update {update} after one of {held[-1].update}")
        if not self.fifo_entries and sum(entry.update == update for entry in held[-self.per_update :]) >= self.per_update:
            counts["surplus"] += 1
            return False
        ids = np.array(tokens, dtype=np.int32)
        held.append(
            Entry(
                slot, int(update), str(record_id), question, ids, finish, {key: int(item) for key, item in (extra or {}).items()}
            )
        )
        counts["added"] += 1
        if len(held) > (self.fifo_entries or self.per_slot):
            self._counters[held.pop(0).slot]["evicted"] += 1
        return True

    def draw(self, slot: int, now: int, key: int | str | tuple[int | str, ...]) -> Draw:
        """One stored answer for `slot`, uniform among those whose age at policy update `now` lies in the gap.

        The choice depends on (key, slot, now) and on what the slot holds, and on nothing else.
        """
        drawn = self._draw_released(slot, now, key) if self.fifo_entries else self._draw_slot(slot, now, key)
        counts = self._counters[slot]
        counts["drawn"] += drawn.entry is not None
        counts["fallback"] += drawn.entry is not None and drawn.fallback is not None
        counts["dropped"] += drawn.fallback == "drop"
        counts["empty"] += drawn.fallback == "empty"
        return drawn

    def _draw_slot(self, slot: int, now: int, key: Any) -> Draw:
        older = [entry for entry in self._entries[slot] if entry.update < now]
        if not older:
            return Draw(None, None, "empty")
        fitting = [entry for entry in older if self._misfit(now - entry.update) == 0]
        if fitting:
            return self._pick(fitting, now, key, slot, now, None)
        if self.on_empty == "drop":
            return Draw(None, None, "drop")
        # Nearest to the interval; of two as near, the older.
        _, age = min((self._misfit(now - entry.update), -(now - entry.update)) for entry in older)
        return self._pick([entry for entry in older if now - entry.update == -age], now, key, slot, now, "nearest")

    def _misfit(self, age: int) -> int:
        """Policy updates between `age` and the gap's nearest end; 0 inside."""
        return max(self.min_gap - age, age - self.max_gap if self.max_gap else 0, 0)

    def _draw_released(self, slot: int, now: int, key: Any) -> Draw:
        """The released code's draw: age counts from the newest entry, any slot serves, fallbacks relax step by step."""
        if not self._fifo:
            return Draw(None, None, "empty")
        newest = self._fifo[-1].update
        aged = [(newest - entry.update, entry) for entry in self._fifo]
        relaxed = max(1, self.min_gap // 2)
        steps = (
            (None, [entry for age, entry in aged if self._misfit(age) == 0]),
            ("half_min_gap", [entry for age, entry in aged if age >= relaxed]),
            ("oldest_half", [entry for age, entry in aged[: max(1, len(aged) // 2)] if aged[0][0] > 0]),
            ("any", self._fifo),
        )
        fallback, entries = next((name, found) for name, found in steps if found)
        return self._pick(entries, newest, key, slot, now, fallback)

    @staticmethod
    def _pick(entries: list[Entry], now: int, key: Any, slot: int, salt: int, fallback: str | None) -> Draw:
        entry = entries[hashed(key, "replay", slot, salt) % len(entries)]
        return Draw(entry, now - entry.update, fallback)

    def _all(self, slots: Iterable[int] | None = None) -> list[Entry]:
        if self.fifo_entries:
            return list(self._fifo)
        return [entry for slot in (self.slots if slots is None else slots) for entry in self._entries[slot]]

    def state(self, slots: Iterable[int] | None = None) -> State:
        """Everything, exact and in order, as flat arrays: of this process's slots, or of some of them."""
        chosen = self.slots if slots is None else tuple(slots)
        entries = self._all(chosen)
        texts = [
            json.dumps([entry.record_id, entry.question, entry.finish, dict(entry.extra)], ensure_ascii=False).encode(
                "utf-8", "surrogatepass"
            )
            for entry in entries
        ]
        return {
            "slots": np.array(chosen, np.int32),
            "counters": np.array([[self._counters[slot][name] for name in COUNTERS] for slot in chosen], np.int64).reshape(
                -1, len(COUNTERS)
            ),
            "slot": np.array([entry.slot for entry in entries], np.int32),
            "update": np.array([entry.update for entry in entries], np.int64),
            "token_counts": np.array([entry.tokens.size for entry in entries], np.int64),
            "tokens": np.concatenate([np.zeros(0, np.int32), *(entry.tokens for entry in entries)]),
            "text_counts": np.array([len(text) for text in texts], np.int64),
            "texts": np.frombuffer(b"".join(texts), np.uint8).copy(),
        }

    def restore(self, state: State | Sequence[State]) -> None:
        """Take the content that any number of processes saved. UserError when a slot of this buffer is in none of them."""
        parts = [state] if isinstance(state, dict) else list(state)
        saved = {int(slot): counts for part in parts for slot, counts in zip(part["slots"], part["counters"])}
        missing = sorted(set(self.slots) - saved.keys())
        if missing:
            raise UserError(
                f"the saved replay buffer lacks prompt slots {missing[:5]}",
                where="checkpoint",
                expected=f"slots {self.slots[0]}..{self.slots[-1]}",
            )
        self._counters = {slot: dict(zip(COUNTERS, map(int, saved[slot]))) for slot in self.slots}
        self._entries = {slot: [] for slot in self.slots}
        self._fifo = []
        for part in parts:
            for entry in _unpack(part):
                if self.fifo_entries:
                    self._fifo.append(entry)
                elif entry.slot in self._entries:
                    self._entries[entry.slot].append(entry)


def _unpack(state: State) -> list[Entry]:
    tokens = np.split(state["tokens"], np.cumsum(state["token_counts"])[:-1]) if len(state["slot"]) else []
    ends = np.cumsum(state["text_counts"])
    blob = state["texts"].tobytes()
    entries = []
    for index, ids in enumerate(tokens):
        text = blob[int(ends[index] - state["text_counts"][index]) : int(ends[index])]
        record_id, question, finish, extra = json.loads(text.decode("utf-8", "surrogatepass"))
        entries.append(
            Entry(
                int(state["slot"][index]), int(state["update"][index]), record_id, question, ids.astype(np.int32), finish, extra
            )
        )
    return entries


def hashed(*parts: Any) -> int:
    """A 64-bit whole number from ints, strings and nested tuples of them; the same on every machine and Python."""
    digest = hashlib.blake2b(repr(_canonical(parts)).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _canonical(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_canonical(item) for item in value)
    if isinstance(value, str):
        return value
    return int(value)  # NumPy whole numbers print otherwise than Python's
