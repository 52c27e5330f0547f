"""The scheduler's queue: which samples wait, where their prompts' keys and values lie. Counts and ids only; no clock.

Order: longest allowed completion first, then the order of the requests, then the samples of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from coevo_jax.sampler.keys import row_key
from coevo_jax.sampler.prefill import Bucket, Packed, pack, take
from coevo_jax.sampler.requests import Request
from coevo_jax.sampler.state import Admission, new_rows


@dataclasses.dataclass
class Sample:
    """One completion to make: sample `number` of request `index`; `prompt` is the number of its distinct prompt."""

    index: int
    number: int
    prompt: int


@dataclasses.dataclass
class Stored:
    """A prompt's place in a prefilled buffer."""

    buffer: Any  # PromptKV
    row: int
    offset: int


class Queue:
    """Waiting samples, and the prefilled prompts that they still need."""

    def __init__(self, requests: Sequence[Request], seed: int, most_prompts: int):
        self.requests, self.seed, self.most_prompts = requests, seed, most_prompts
        numbers: dict[bytes, int] = {}
        of = [numbers.setdefault(r.prompt.tobytes(), len(numbers)) for r in requests]  # equal prompts are prefilled once
        self.prompts = {of[i]: r.prompt for i, r in enumerate(requests)}
        order = sorted(range(len(requests)), key=lambda i: (-requests[i].sampling.max_new_tokens, i))
        self.waiting = [Sample(i, s, of[i]) for i in order for s in range(requests[i].n)]
        self.uses = dict.fromkeys(self.prompts, 0)
        for sample in self.waiting:
            self.uses[sample.prompt] += 1
        self.stored: dict[int, Stored] = {}

    def __len__(self) -> int:
        return len(self.waiting)

    def next_prefill(self, free: int, shapes: Sequence[Bucket]) -> tuple[Packed, list[int]] | None:
        """Prompts to prefill so that the next `free` samples can start, with what else fits into the same program; None if all
        are there. A prompt's last token is left out: the slot's first decode step feeds it."""
        missing = list(dict.fromkeys(s.prompt for s in self.waiting if s.prompt not in self.stored))
        needed = len({s.prompt for s in self.waiting[:free]} - set(self.stored))
        if not needed:
            return None
        heads = [self.prompts[p][:-1] for p in missing]
        count, bucket = take([len(h) for h in heads], shapes, needed, self.most_prompts)
        return pack(heads[:count], bucket), missing[:count]

    def store(self, packed: Packed, prompts: Sequence[int], buffer: Any) -> None:
        """Note where prefilled prompts lie."""
        for prompt, (row, offset) in zip(prompts, packed.places):
            self.stored[prompt] = Stored(buffer, row, offset)

    def admit(self, free: Sequence[int], slots: int) -> tuple[dict[int, Sample], list[tuple[Any, Admission]]]:
        """Give free slots to the leading samples: what each slot now holds, and an admission for each buffer concerned."""
        given = dict(zip(free, self.waiting))
        self.waiting = self.waiting[len(given) :]
        groups: dict[int, list[tuple[int, Sample]]] = {}
        for slot, sample in given.items():
            groups.setdefault(id(self.stored[sample.prompt].buffer), []).append((slot, sample))
        out = [(self.stored[group[0][1].prompt].buffer, self._admission(group, slots)) for group in groups.values()]
        for sample in given.values():
            self.uses[sample.prompt] -= 1
            if not self.uses[sample.prompt]:
                del self.stored[sample.prompt]  # a buffer goes when its last prompt does
        return given, out

    def _admission(self, group: list[tuple[int, Sample]], slots: int) -> Admission:
        slot, row, offset = (np.zeros(slots, np.int32) for _ in range(3))
        rows = new_rows(slots)
        for i, (where, sample) in enumerate(group):
            place, request = self.stored[sample.prompt], self.requests[sample.index]
            slot[i], row[i], offset[i] = where, place.row, place.offset
            rows.active[i] = True
            rows.last[i], rows.length[i] = request.prompt[-1], len(request.prompt) - 1
            rows.key[i] = row_key(self.seed, request.role, request.update, request.request, sample.number)
            s = request.sampling
            rows.temperature[i], rows.top_p[i], rows.top_k[i] = s.temperature, s.top_p, s.top_k
            rows.max_new[i], rows.min_new[i] = s.max_new_tokens, s.min_new_tokens
        return Admission(count=np.int32(len(group)), slot=slot, packed_row=row, offset=offset, rows=rows)
