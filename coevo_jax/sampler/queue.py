"""The scheduler's queue: which samples wait, which prompts they need, which heads those share. Counts and ids only; no clock.

Order: longest allowed completion first, then the order of the requests, then the samples of each.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from coevo_jax.sampler.keys import row_key
from coevo_jax.sampler.prefill import Span
from coevo_jax.sampler.requests import Request
from coevo_jax.sampler.state import FREE, Admission, new_rows
from coevo_jax.sampler.tree import Tree, flat, plan


@dataclasses.dataclass
class Sample:
    """One completion to make: sample `number` of request `index`; `prompt` is the number of its distinct prompt."""

    index: int
    number: int
    prompt: int


@dataclasses.dataclass
class Stored:
    """Where a prompt's tail lies, prefilled."""

    buffer: Any  # stacked KV
    row: int
    offset: int


class Queue:
    """Waiting samples, and their prompts' tails as far as they are prefilled. A prompt's last token is left out: the slot's first
    decode step feeds it.

    least: tokens that a shared head must save (0 = no sharing); own_heads: a prompt of several samples is itself a head.
    """

    def __init__(self, requests: Sequence[Request], seed: int, least: int, deepest: int, own_heads: bool):
        self.requests, self.seed = requests, seed
        numbers: dict[bytes, int] = {}
        of = [numbers.setdefault(r.prompt.tobytes(), len(numbers)) for r in requests]  # equal prompts are prefilled once
        by_number = {of[i]: r.prompt for i, r in enumerate(requests)}
        self.prompts = [by_number[n] for n in range(len(numbers))]
        order = sorted(range(len(requests)), key=lambda i: (-requests[i].sampling.max_new_tokens, i))
        self.waiting = collections.deque(Sample(i, s, of[i]) for i in order for s in range(requests[i].n))
        self.uses = [0] * len(self.prompts)
        for sample in self.waiting:
            self.uses[sample.prompt] += 1
        limits = [len(p) - 1 for p in self.prompts]
        uses = self.uses if own_heads else None
        self.tree: Tree = plan(self.prompts, limits, least, deepest, uses) if least else flat(len(self.prompts))
        self.stored: dict[int, Stored] = {}

    def __len__(self) -> int:
        return len(self.waiting)

    def tail(self, prompt: int, head_row: int) -> Span:
        """What of a prompt must be prefilled after its head."""
        start = self.tree.start(prompt)
        return Span(self.prompts[prompt][start:-1], start, head_row)

    def tail_length(self, prompt: int) -> int:
        """Tokens of that tail."""
        return len(self.prompts[prompt]) - 1 - self.tree.start(prompt)

    def own_length(self, prompt: int, shared: bool) -> int:
        """Own positions that a sample starts with."""
        return self.tail_length(prompt) if shared else len(self.prompts[prompt]) - 1

    def given(self, samples: Sequence[Sample]) -> None:
        """The leading samples have left the queue; tails that none of the others needs are forgotten."""
        for sample in samples:
            self.waiting.popleft()
            self.uses[sample.prompt] -= 1
            if not self.uses[sample.prompt]:
                self.stored.pop(sample.prompt, None)

    def admission(self, group: Sequence[tuple[int, Sample, Stored, int]], slots: int, forced: int, shared: bool) -> Admission:
        """An admission of (slot, sample, place, row of its head) that one buffer serves."""
        slot, row, offset, head, length = (np.zeros(slots, np.int32) for _ in range(5))
        tokens, rows = np.full((slots, forced), FREE, np.int32), new_rows(slots)
        for i, (where, sample, place, head_row) in enumerate(group):
            request, start = self.requests[sample.index], self.tree.start(sample.prompt)
            slot[i], row[i], offset[i], head[i], length[i] = where, place.row, place.offset, head_row, start
            rows.active[i] = True
            rows.last[i], rows.length[i] = request.prompt[-1], self.own_length(sample.prompt, shared)
            rows.base[i], rows.head[i] = (start, head_row) if shared else (0, 0)
            rows.key[i] = row_key(self.seed, request.role, request.update, request.request, sample.number)
            s = request.sampling
            rows.temperature[i], rows.top_p[i], rows.top_k[i] = s.temperature, s.top_p, s.top_k
            rows.max_new[i], rows.min_new[i] = s.max_new_tokens, s.min_new_tokens
            if request.forced is not None:
                tokens[i, : len(request.forced)] = request.forced
        return Admission(np.int32(len(group)), slot, row, offset, head, length, tokens, rows)
