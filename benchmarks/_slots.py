"""Slots in length classes against an ideal pager, on lengths drawn from a stated distribution.

A row holds its prompt and one position more each step. In a slot of a class it takes the whole of the class's positions, and goes
to a larger class when it fills them; an ideal pager takes what is held and nothing else, and never runs out.
"""

from __future__ import annotations

import dataclasses

import numpy as np

GRID = 512  # positions; tiles of the decode kernel


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Lognormal prompts and completions (mean before the cut, standard deviation of the logarithm), cut at the limits."""

    mean: float = 3000
    sigma: float = 1.0
    most: int = 16384
    prompt_mean: float = 400
    prompt_sigma: float = 0.8
    prompt_most: int = 2048
    seed: int = 0

    def draw(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Prompt and completion lengths."""
        rng = np.random.default_rng(self.seed)

        def some(mean: float, sigma: float, most: int) -> np.ndarray:
            x = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
            return np.clip(np.ceil(x), 1, most).astype(np.int64)

        return some(self.prompt_mean, self.prompt_sigma, self.prompt_most), some(self.mean, self.sigma, self.most)

    @property
    def longest(self) -> int:
        return self.prompt_most + self.most


def mean_held(prompts: np.ndarray, completions: np.ndarray) -> float:
    """Positions that a running row holds, averaged over time."""
    return float((completions * (prompts + (completions + 1) / 2)).sum() / completions.sum())


def sizes(prompts: np.ndarray, completions: np.ndarray, longest: int, classes: int) -> tuple[list[int], list[float]]:
    """Positions of each class that cost a row least on average, and the share of its time in each (dynamic programming)."""
    grid = [*range(GRID, longest, GRID), longest]
    steps = np.asarray([0.0, *(np.clip(np.minimum(prompts + completions, s) - prompts, 0, None).mean() for s in grid)])
    share = steps / completions.mean()
    N = len(grid)
    best = np.full((classes + 1, N + 1), np.inf)
    back = np.zeros((classes + 1, N + 1), np.int64)
    best[0, 0] = 0
    for c in range(1, classes + 1):
        for j in range(1, N + 1):
            cost = best[c - 1, :j] + grid[j - 1] * (share[j] - share[:j])
            back[c, j], best[c, j] = int(np.argmin(cost)), cost.min()
    ends, j = [], N
    for c in range(classes, 0, -1):
        ends.append(j)
        j = back[c, j]
    ends = ends[::-1]
    return [grid[j - 1] for j in ends], np.diff(share[[0, *ends]]).tolist()


def simulate(classes: list[tuple[int, int]], prompts: np.ndarray, completions: np.ndarray, steps: int) -> float:
    """Mean rows that draw a token in a step, the queue never empty (its drain is left out); dispatches of `steps` steps."""
    kind = np.repeat(np.arange(len(classes)), [n for n, _ in classes])
    capacity = np.asarray([s for _, s in classes])[kind]
    held, left = np.zeros(len(kind), np.int64), np.zeros(len(kind), np.int64)
    queue, drawn, dispatches = 0, 0, 0
    while True:
        for slot in np.flatnonzero((left > 0) & (held >= capacity)):  # full rows first, as the engine does
            free = np.flatnonzero((left == 0) & (kind > kind[slot]))
            if free.size:
                held[free[0]], left[free[0]], left[slot] = held[slot], left[slot], 0
        for slot in np.flatnonzero(left == 0):
            if queue == len(prompts):
                return drawn / (dispatches * steps)
            if capacity[slot] > prompts[queue]:
                held[slot], left[slot] = prompts[queue], completions[queue]
                queue += 1
        done = np.clip(np.minimum(left, capacity - held), 0, steps)
        held, left = held + done, left - done
        drawn, dispatches = drawn + int(done.sum()), dispatches + 1


def fit(
    positions: int, lengths: tuple[np.ndarray, np.ndarray], longest: int, classes: int, steps: int
) -> tuple[list[tuple[int, int]], float]:
    """(slots, positions) of each class within `positions` in all, and the rows that run on average; counts by simulation."""
    size, share = sizes(*lengths, longest, classes)
    best: tuple[list[tuple[int, int]], float] = ([], 0.0)
    for total in np.linspace(0.7, 1.3, 13) * positions / float(np.dot(size, share)):
        counts = [max(1, round(total * s)) for s in share[1:]]
        rest = positions - int(np.dot(counts, size[1:]))
        if rest < size[0]:
            continue
        found = [(rest // size[0], size[0]), *zip(counts, size[1:])]
        rows = simulate(found, *lengths, steps)
        if rows > best[1]:
            best = (found, rows)
    return best
