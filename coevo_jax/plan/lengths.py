"""Slots that fit into so much memory, by length class, against a pager that wastes nothing, on a stated distribution of lengths.

Axes: N rows, C length classes, B slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

Classes = tuple[tuple[int, int], ...]  # (slots, positions), shortest first
GRAIN = 256  # positions of classes are multiples of it
LEANINGS = (1.0, 1.1, 1.2, 1.3, 1.5)
FREE, RUNNING, ENDED, FULL = 0, 1, 2, 3


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Prompts and completions in tokens, [N] each; `text` says where they come from."""

    prompts: np.ndarray
    completions: np.ndarray
    text: str

    @property
    def filled(self) -> float:
        """Positions that a running row fills on average over its steps."""
        n = self.completions
        return float((self.prompts * n + n * (n - 1) / 2).sum() / n.sum())


@dataclasses.dataclass(frozen=True)
class Use:
    """What slots do under a queue that never empties: `rows` run on average, `full` wait for a larger slot."""

    rows: float
    full: float
    slots: int


def lognormal_lengths(
    rows: int, seed: int, max_prompt: int, max_new: int, mean_new: float = 3000, mean_prompt: float = 400
) -> Lengths:
    """Completions lognormal of mean `mean_new` and sigma 1, prompts `mean_prompt` and 0.5 (of the logarithm); both cut."""
    rng = np.random.default_rng(seed)

    def draw(mean: float, sigma: float, most: int) -> np.ndarray:
        x = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, rows)
        return np.clip(x.astype(np.int64), 1, most)

    completions, prompts = draw(mean_new, 1.0, max_new), draw(mean_prompt, 0.5, max_prompt)
    text = (
        f"completions lognormal, mean {mean_new:g} and sigma 1 before the cut at {max_new} (after it mean "
        f"{completions.mean():.0f}); "
        f"prompts lognormal, mean {mean_prompt:g} and sigma 0.5, cut at {max_prompt}; seed {seed}"
    )
    return Lengths(prompts, completions, text)


def time_at(lengths: Lengths, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Edges of bins of GRAIN positions up to `positions`, and the share of all row-steps spent at or below each edge."""
    edges = np.arange(0, positions + GRAIN, GRAIN)
    first, last = lengths.prompts, lengths.prompts + lengths.completions
    below = np.asarray([(np.minimum(last, e) - np.minimum(first, e)).sum() for e in edges], float)
    return edges, below / below[-1]


def best_positions(lengths: Lengths, positions: int, count: int) -> tuple[int, ...]:
    """Positions of `count` classes that need the least memory a running row when every row lies in the smallest that holds it."""
    edges, below = time_at(lengths, positions)
    cost, chosen = below * edges, [np.zeros(len(edges), int)]
    for _ in range(count - 1):
        options = cost[None] + (below[:, None] - below[None]) * edges[:, None]  # [to, from]
        options[np.triu_indices(len(edges))] = np.inf
        options[0, 0] = 0
        chosen.append(options.argmin(axis=1))
        cost = options.min(axis=1)
    at, out = len(edges) - 1, []
    for frm in reversed(chosen):
        out.append(int(edges[at]))
        at = frm[at]
    return tuple(sorted(x for x in out if x))


def fit_classes(lengths: Lengths, kinds: tuple[int, ...], positions: int, lean: float) -> Classes:
    """Slots of each kind for `positions` in all: as many of a class as rows spend time in it, and `lean` times more from class to
    class; at least one of each. () where that does not fit."""
    if sum(kinds) > positions:
        return ()
    edges, below = time_at(lengths, kinds[-1])
    share = np.diff(np.interp(kinds, edges, below), prepend=0) * lean ** np.arange(len(kinds))
    wanted = share * positions / (share * np.asarray(kinds)).sum()
    slots = np.maximum(wanted.astype(int), 1)
    for c in range(len(kinds)):  # a rare class that took more than its share takes it from the short ones
        over = int((slots * kinds).sum()) - positions
        slots[c] -= min(slots[c] - 1, max(-(-over // kinds[c]), 0))
    while True:  # what is left, to the class that lacks most
        room = positions - int((slots * kinds).sum())
        lacking = np.where(np.asarray(kinds) <= room, (wanted - slots) * kinds, -np.inf)
        if not np.isfinite(lacking).any():
            return tuple((int(n), s) for n, s in zip(slots, kinds))
        slots[int(np.argmax(lacking))] += 1


def best_classes(lengths: Lengths, longest: int, positions: int, count: int, steps: int, lag: int) -> tuple[Classes, Use] | None:
    """`count` classes under which most rows run, of several leanings towards long ones; None where they don't fit."""
    kinds = best_positions(lengths, longest, count)
    fitting = [fit_classes(lengths, kinds, positions, lean) for lean in LEANINGS]
    tried = [(c, use_of(c, lengths, steps, lag)) for c in dict.fromkeys(fitting) if c]
    return max(tried, key=lambda x: x[1].rows, default=None)


@dataclasses.dataclass(frozen=True)
class Drain:
    """A finite batch from its first dispatch to its last. rows: that run on average; read: positions they fill a slot, idle ones
    counted as empty; over the whole batch."""

    dispatches: int
    rows: float
    read: float


def use_of(classes: Classes, lengths: Lengths, steps: int, lag: int) -> Use:
    """Rows that run on average, by playing the scheduler's rules: a row takes a free slot of the smallest class that holds its
    prompt; one that fills its class goes on in a larger one as soon as one is free, the longest first; `steps` a dispatch, of
    which the host learns `lag` dispatches late. The first and the last rows, when slots fill and drain, are not counted."""
    B = sum(n for n, _ in classes)
    N = min(len(lengths.completions), 60 * B)
    active = full = dispatches = 0
    for d in _play(classes, lengths, N, steps, lag):
        if d.started >= N:
            break
        if d.started > 3 * B:
            active, full, dispatches = active + int(d.forward.sum()), full + int((d.state == FULL).sum()), dispatches + 1
    return Use(active / (steps * max(dispatches, 1)), full / max(dispatches, 1), B)


def drain_of(classes: Classes, lengths: Lengths, count: int, steps: int, lag: int) -> Drain:
    """How `count` rows, the first of `lengths`, run through the slots by the same rules, from nothing to nothing."""
    B = sum(n for n, _ in classes)
    played = [(int(d.forward.sum()), float(d.own[d.forward > 0].sum())) for d in _play(classes, lengths, count, steps, lag)]
    n = max(len(played), 1)
    return Drain(len(played), sum(f for f, _ in played) / (steps * n), sum(own for _, own in played) / (n * B))


@dataclasses.dataclass
class _Dispatch:
    """After a dispatch: rows begun so far; by slot the steps it took, its positions and its state."""

    started: int
    forward: np.ndarray
    own: np.ndarray
    state: np.ndarray


def _play(classes: Classes, lengths: Lengths, N: int, steps: int, lag: int) -> Iterator[_Dispatch]:
    """The scheduler's rules over the first N rows, dispatch by dispatch, until all have ended."""
    cap = np.repeat([s for _, s in classes], [n for n, _ in classes])
    B = len(cap)
    state, own, left, known = np.full(B, FREE), np.zeros(B, np.int64), np.zeros(B, np.int64), np.zeros(B, np.int64)
    at = now = 0
    while at < N or (state != FREE).any():
        seen = known <= now
        state[(state == ENDED) & seen] = FREE
        for slot in np.flatnonzero((state == FULL) & seen)[::-1]:  # the longest first
            larger = np.flatnonzero((state == FREE) & (cap > cap[slot]))
            if larger.size:
                to = larger[0]
                state[to], own[to], left[to], state[slot] = RUNNING, own[slot], left[slot], FREE
        for slot in np.flatnonzero(state == FREE):  # shortest first
            if at < N and cap[slot] > lengths.prompts[at]:
                state[slot], own[slot], left[slot] = RUNNING, lengths.prompts[at], lengths.completions[at]
                at += 1
        running = state == RUNNING
        if not running.any() and at >= N and not (state == FULL).any():
            return
        forward = np.where(running, np.minimum(np.minimum(left, cap - own), steps), 0)
        own, left, now = own + forward, left - forward, now + 1
        ends = running & ((left == 0) | (own == cap))
        state[ends] = np.where(left[ends] == 0, ENDED, FULL)
        known[ends] = now + lag
        yield _Dispatch(at, forward, own, state.copy())
