"""One call of `generate`: admit, dispatch, read back, until the queue is empty and no slot runs.

The host reads a dispatch's report `lag` dispatches late, so that the device never waits for it; what a slot has drawn is copied
out on the device before the slot is given away. Decisions follow from counts and ids alone.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from coevo_jax.sampler.guided import GuidedRows
from coevo_jax.sampler.prefill import Packed, Span, choose, fill, pack
from coevo_jax.sampler.queue import Queue, Sample, Stored
from coevo_jax.sampler.requests import Completion, Request
from coevo_jax.sampler.state import FINISH, FULL, Report
from coevo_jax.sampler.tree import Heads

if TYPE_CHECKING:
    from coevo_jax.sampler.engine import Engine, Weights

Progress = Callable[[int, int], None]


@dataclasses.dataclass
class Running:
    """A slot's sample; `length`: own positions filled as of the last report, `born`: the first dispatch it takes part in."""

    sample: Sample
    length: int
    born: int
    full: bool = False


@dataclasses.dataclass
class Finished:
    """Samples whose drawings are on their way to the host."""

    samples: list[tuple[Sample, int, int]]  # sample, tokens drawn, finish
    drawings: Any


def prefill_spans(
    engine: Engine, weights: Weights, spans: Sequence[Span], store: Any, further: Iterable[Span] = ()
) -> list[tuple[Packed, Any, int]]:
    """Prefill spans in order: (packed, keys and values, spans) of each program; `further` ones fill the last one's padding."""
    out, done = [], 0
    while done < len(spans):
        count, variant = choose(spans[done:], engine.variants, len(spans) - done)
        batch = list(spans[done : done + count])
        done += count
        for span in further if done == len(spans) else ():
            fits = len(span.tokens) <= variant.longest and span.start <= variant.context
            if not fits or len(fill([*batch, span], variant.shape)) <= len(batch):
                break
            batch.append(span)
        packed = pack(batch, variant)
        out.append((packed, engine.run_prefill(weights, packed, store), len(batch)))
    return out


def store_heads(
    engine: Engine, weights: Weights, sequences: Sequence[np.ndarray], heads: Heads, nodes: Sequence[int], store: Any
) -> Any:
    """Prefill nodes (parents first) and keep them in their rows of the store, level by level."""
    tree, todo = heads.tree, list(dict.fromkeys(nodes))
    while todo:
        level = [n for n in todo if tree.nodes[n].parent not in todo]
        todo = [n for n in todo if n not in level]
        level.sort(key=lambda n: heads.row.get(tree.nodes[n].parent, -1))
        spans = []
        for n in level:
            node = tree.nodes[n]
            spans.append(Span(sequences[node.owner][node.start : node.stop], node.start, heads.row.get(node.parent, 0)))
        at = 0
        for packed, kv, count in prefill_spans(engine, weights, spans, store):
            for n, (row, offset) in zip(level[at : at + count], packed.places):
                node = tree.nodes[n]
                store = engine.run_keep(store, kv, heads.row[n], heads.row.get(node.parent, 0), node.start, row, offset)
            at += count
    return store


class Run:
    """The state of one call, on the host and on the device."""

    def __init__(self, engine: Engine, params: Any, requests: Sequence[Request], progress: Progress | None):
        cfg = engine.cfg
        self.engine, self.cfg, self.progress = engine, cfg, progress
        self.shared = cfg.share_decode
        self.queue = Queue(requests, engine.seed, engine.least, engine.deepest, own_heads=self.shared)
        self.heads = Heads(self.queue.tree, cfg.heads, self.queue.uses)
        self.store = engine.new_store() if self.queue.tree.nodes or self.shared else None
        self.weights, self.state, self.width = engine.prepare(params), engine.new_state(), cfg.slots
        self.requests = requests
        self.results: list[list[Completion | None]] = [[None] * r.n for r in requests]
        self.running: dict[int, Running] = {}
        self.reports: collections.deque[tuple[int, Report]] = collections.deque()
        self.finished: collections.deque[Finished] = collections.deque()
        self.dispatched = self.done = 0
        self.truncated = any(r.sampling.top_p < 1 or r.sampling.top_k > 0 for r in requests)
        self.forced = any(r.forced is not None for r in requests)
        self.guided = GuidedRows(cfg.slots, engine.spec.vocab_size) if any(r.grammar is not None for r in requests) else None
        self.lag = 0 if self.guided else cfg.read_lag

    def __call__(self) -> list[list[Completion]]:
        """Run to the end."""
        total = sum(r.n for r in self.requests)
        while self.queue or self.running:
            self._move_full()
            self._refill()
            self._dispatch()
            while len(self.reports) > self.lag:
                self._observe(*self.reports.popleft())
            while len(self.finished) > self.lag:
                self._harvest(self.finished.popleft())
            if self.progress is not None:
                self.progress(self.done, total)
        while self.finished:
            self._harvest(self.finished.popleft())
        if self.progress is not None:
            self.progress(self.done, total)
        return self.results  # type: ignore[return-value]

    # ---- admitting -----------------------------------------------------------------------------------------------------

    def _free(self) -> list[list[int]]:
        """Free slots of each class."""
        free = [s for s in range(self.cfg.slots) if s not in self.running]
        return [[s for s in free if self.engine.kinds[s] == c] for c in range(len(self.engine.classes))]

    def _place(self, free: list[list[int]], own_length: int) -> int | None:
        """Take a free slot of the smallest class that holds the prompt."""
        for slots, (_, positions) in zip(free, self.engine.classes):
            if slots and positions > own_length:
                return slots.pop(0)
        return None

    def _refill(self) -> None:
        """Give free slots to the leading samples."""
        if not self.queue:
            return
        queue, free = self.queue, self._free()
        placed: list[tuple[int, Sample]] = []
        missing: list[int] = []
        nodes: set[int] = set()
        for sample in queue.waiting:
            slot = self._place(free, queue.own_length(sample.prompt, self.shared))
            room = None if slot is None else self.heads.make_room(sample.prompt, nodes)
            if slot is None or room is None:  # asked in this order: a row of the store that is given is filled below
                break
            missing += room
            nodes |= set(queue.tree.path(queue.tree.node_of[sample.prompt]))
            placed.append((slot, sample))
        if not placed:
            return
        if missing:
            self.store = store_heads(self.engine, self.weights, queue.prompts, self.heads, missing, self.store)
        for part in self._parts(placed):
            self._prefill_tails(list(dict.fromkeys(s.prompt for _, s in part)))
            self._admit(part)

    def _parts(self, placed: list[tuple[int, Sample]]) -> Iterator[list[tuple[int, Sample]]]:
        """Samples in order, in parts whose prompts fill one prefill program: what it leaves goes to the slots before the next
        one's comes, or as many results as there are programs would wait in memory."""
        most = math.prod(self.engine.variants[-1].shape)
        part: list[tuple[int, Sample]] = []
        seen: set[int] = set()
        tokens = 0
        for slot, sample in placed:
            if sample.prompt not in seen and sample.prompt not in self.queue.stored:
                length = self.queue.tail_length(sample.prompt)
                if part and tokens + length > most:
                    yield part
                    part, tokens = [], 0
                seen.add(sample.prompt)
                tokens += length
            part.append((slot, sample))
        yield part

    def _head_row(self, prompt: int) -> int:
        return self.heads.row.get(self.queue.tree.node_of[prompt], 0)

    def _prefill_tails(self, prompts: list[int]) -> None:
        """Tails of `prompts`, and of the next ones in the queue whose heads are there, as far as they fit beside them."""
        queue = self.queue
        wanted = [p for p in prompts if p not in queue.stored]
        for p in wanted:  # a prompt that is all head has no tail
            if not queue.tail_length(p):
                queue.stored[p] = Stored(None, 0, 0)
        wanted = sorted((p for p in wanted if p not in queue.stored), key=lambda p: (queue.tree.node_of[p], p))
        if not wanted:
            return
        waiting = dict.fromkeys(s.prompt for s in itertools.islice(queue.waiting, 2 * self.cfg.slots))
        later = [p for p in waiting if p not in queue.stored and p not in wanted and queue.tail_length(p)]
        later = [p for p in later if queue.tree.node_of[p] < 0 or queue.tree.node_of[p] in self.heads.row]
        spans = [queue.tail(p, self._head_row(p)) for p in wanted]
        further = (queue.tail(p, self._head_row(p)) for p in later)
        order, at = [*wanted, *later], 0
        for packed, kv, count in prefill_spans(self.engine, self.weights, spans, self.store, further):
            for p, (row, offset) in zip(order[at : at + count], packed.places):
                queue.stored[p] = Stored(kv, row, offset)
            at += count

    def _admit(self, placed: list[tuple[int, Sample]]) -> None:
        queue, groups = self.queue, collections.defaultdict(list)
        for slot, sample in placed:
            place = queue.stored[sample.prompt]
            groups[id(place.buffer), self.engine.kind_of(slot)].append((slot, sample, place, self._head_row(sample.prompt)))
        for (_, kind), group in groups.items():
            admission = queue.admission(group, self.cfg.slots, self.cfg.forced_tokens, self.shared)
            buffer = group[0][2].buffer
            self.state = self.engine.run_admit(self.state, buffer, None if self.shared else self.store, admission, kind)
        for slot, sample in placed:
            self.running[slot] = Running(sample, queue.own_length(sample.prompt, self.shared), self.dispatched)
            grammar = self.requests[sample.index].grammar
            if self.guided is not None and grammar is not None:
                self.guided.start(slot, grammar, f"request {sample.index}")
            if self.shared:
                self.heads.hold(sample.prompt)
            else:
                self.heads.done(sample.prompt)
        queue.given([sample for _, sample in placed])

    def _move_full(self) -> None:
        """Rows that filled their class go on in a larger one, as far as there is room: those of the longest class first, or short
        rows take up the long slots while the rows that need them hold the short ones."""
        full = sorted((s for s, r in self.running.items() if r.full), key=lambda s: (-self.engine.kind_of(s), s))
        free = self._free() if full else []
        for slot in full:
            kind = self.engine.kind_of(slot)
            target = next((c for c in range(kind + 1, len(free)) if free[c]), None)
            if target is None:
                continue
            to = free[target].pop(0)
            self.state = self.engine.run_move(self.state, slot, to, (kind, target))
            self.running[to] = dataclasses.replace(self.running.pop(slot), born=self.dispatched, full=False)
            if self.guided is not None:
                self.guided.move(slot, to)
            self.engine.stats.moves += 1

    def _narrow(self, rows: int) -> None:
        """Go on with a state of fewer slots when few rows are left and no sample waits for a slot.

        Rows of a report that is still out can't change their slots. One width after the other: each step is a compiled program.
        """
        if self.queue or self.reports:
            return
        for width in sorted(self.cfg.narrow, reverse=True):
            if rows <= width < self.width:
                self._narrow_to(width)

    def _narrow_to(self, width: int) -> None:
        source = {slot: slot for slot in self.running if slot < width}
        free = (slot for slot in range(width) if slot not in source)
        for slot in sorted(s for s in self.running if s >= width):
            to = next(free)
            source[to] = slot
            self.running[to] = dataclasses.replace(self.running.pop(slot), born=self.dispatched)
            if self.guided is not None:
                self.guided.move(slot, to)
        resting = next(s for s in range(self.width) if s not in source.values())
        self.state = self.engine.run_narrow(self.state, width, [source.get(slot, resting) for slot in range(width)])
        self.width = width

    # ---- decoding ------------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Decode some steps with the shortest reach that holds them."""
        going = [r for r in self.running.values() if not r.full]
        if not going:
            if not self.reports:
                raise RuntimeError("no slot can go on: a class of slots is missing for rows that outgrew theirs")
            return
        guided = self.guided is not None and any(self.requests[r.sample.index].grammar is not None for r in going)
        steps = 1 if guided else self.cfg.steps_per_dispatch
        ahead = len(self.reports) + 1  # dispatches whose steps are not yet counted in `length`, this one included
        reach = self.engine.reach_for(max(r.length for r in going) + ahead * steps)
        if self.cfg.narrow:
            self._narrow(len(going))
        narrow = self.width if self.width < self.cfg.slots else 0
        if narrow:
            reach = self.engine.narrow_reach(narrow)
        plan = self.engine.plan(reach, self.shared, self.truncated, self.forced, guided, narrow)
        mask = self.guided.masks()[: self.width] if guided and self.guided is not None else None
        # slots that are free or full now cannot be refilled, or they would have been: only further ones are worth leaving for
        leave_at = max(len(going) - self.engine.refill_at, 0) if self.queue else 0
        store = self.store if self.shared else None
        start = time.perf_counter()
        self.state, report = self.engine.run_decode(self.weights, self.state, store, mask, plan, steps, leave_at)
        self.engine.stats.dispatches += 1
        self.engine.stats.decode_seconds += time.perf_counter() - start
        self.reports.append((self.dispatched, report))
        self.dispatched += 1

    def _observe(self, number: int, report: Report) -> None:
        """Take a report to heart: lengths, finished and full rows."""
        start, stats = time.perf_counter(), self.engine.stats
        r = jax.device_get(report)
        stats.decode_seconds += time.perf_counter() - start
        stats.row_steps += int(r.row_steps.sum())
        stats.slot_steps += int(r.steps.sum()) * len(r.active) // r.steps.size
        ended = []
        active, finish, length = r.active.tolist(), r.finish.tolist(), r.length.tolist()
        for slot, running in self.running.items():
            if running.born > number:  # it came to the slot after this dispatch
                continue
            running.length, running.full = length[slot], finish[slot] == FULL
            if not active[slot] and not running.full:
                ended.append(slot)
            elif self.guided is not None and self.requests[running.sample.index].grammar is not None:
                self.guided.accept(slot, int(r.last[slot]), int(r.drawn[slot]))
        if ended:
            self._take_out(ended, r)

    def _take_out(self, slots: list[int], report: Report) -> None:
        """Copy what finished slots have drawn, on the device, and free them."""
        size = self.engine.collect_size
        for at in range(0, len(slots), size):
            some = slots[at : at + size]
            padded = np.asarray([*some, *[some[0]] * (size - len(some))], np.int32)
            samples = []
            for slot in some:
                sample = self.running.pop(slot).sample
                samples.append((sample, int(report.drawn[slot]), int(report.finish[slot])))
                if self.shared:
                    self.heads.release(sample.prompt)
                    self.heads.done(sample.prompt)
                if self.guided is not None:
                    self.guided.stop(slot)
            self.finished.append(Finished(samples, self.engine.run_collect(self.state, padded)))

    def _harvest(self, finished: Finished) -> None:
        out = jax.device_get(finished.drawings)
        for i, (sample, n, finish) in enumerate(finished.samples):
            row = Completion(out.tokens[i, :n].copy(), out.logprobs[i, :n].copy(), out.entropy[i, :n].copy(), FINISH[finish])
            if not np.isfinite(row.logprobs).all():
                raise RuntimeError(
                    f"sampled log-probs of request {sample.index} are not finite: the weights hold NaN or infinities"
                )
            self.results[sample.index][sample.number] = row
            self.done += 1
            self.engine.stats.tokens += n
            self.engine.stats.sequences += 1
