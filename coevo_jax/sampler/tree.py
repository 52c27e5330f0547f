"""Which beginnings of which sequences are shared: a prefix tree, and the rows of a store that hold its heads.

A causal model gives a beginning the same values whatever follows it, so a shared head is computed once and kept once for all that
begin with it. Host code, of counts and ids only.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from coevo_jax.models.prefix import common_length


@dataclasses.dataclass(frozen=True)
class Node:
    """A shared head: tokens [0, stop) of sequence `owner`, of which [0, start) belong to `parent` (another node, -1 = none)."""

    parent: int
    start: int
    stop: int
    owner: int


@dataclasses.dataclass(frozen=True)
class Tree:
    """`nodes`, parents before children; `node_of[i]`: the node whose head sequence i goes on from (-1 = none)."""

    nodes: tuple[Node, ...]
    node_of: tuple[int, ...]
    order: tuple[int, ...]  # sequences, those of a node side by side

    def path(self, node: int) -> list[int]:
        """From the root down to the node."""
        out = []
        while node >= 0:
            out.append(node)
            node = self.nodes[node].parent
        return out[::-1]

    def start(self, sequence: int) -> int:
        """Tokens of a sequence that its node holds."""
        node = self.node_of[sequence]
        return self.nodes[node].stop if node >= 0 else 0


def flat(count: int) -> Tree:
    """No sharing."""
    return Tree((), (-1,) * count, tuple(range(count)))


def plan(
    sequences: Sequence[np.ndarray], limits: Sequence[int], least: int, deepest: int, uses: Sequence[int] | None = None
) -> Tree:
    """The tree of all heads that save at least `least` tokens, at most `deepest` nodes on a path.

    limits: how many of its first tokens a sequence may share (the ones after it must be its own). uses: samples of each sequence;
    one with several of them makes a head of its own (None: no sequence does).
    """
    order = sorted(range(len(sequences)), key=lambda i: (sequences[i].tolist(), i))
    together = [
        min(common_length(sequences[i], sequences[j]), limits[i], limits[j]) for i, j in itertools.pairwise(order)
    ]  # of neighbours
    nodes: list[Node] = []
    node_of = [-1] * len(sequences)
    todo = [(0, len(order), -1, 0)] if order else []
    while todo:
        low, high, parent, depth = todo.pop()
        start = nodes[parent].stop if parent >= 0 else 0
        one = high - low == 1
        sharers = uses[order[low]] if one and uses is not None else high - low
        common = limits[order[low]] if one else min(together[low : high - 1])
        if sharers > 1 and (common - start) * (sharers - 1) >= least and depth < deepest:
            nodes.append(Node(parent, start, common, order[low]))
            parent, depth = len(nodes) - 1, depth + 1
        if one:
            node_of[order[low]] = parent
            continue
        cuts = [low, *(i + 1 for i in range(low, high - 1) if together[i] <= common), high]
        todo += [(a, b, parent, depth) for a, b in reversed(list(itertools.pairwise(cuts)))]
    return Tree(tuple(nodes), tuple(node_of), tuple(order))


class Heads:
    """Which row of the store holds which node. A node's row is free again when all that begin with it are done; while nothing
    runs on it, it may also be given away and made again later."""

    def __init__(self, tree: Tree, rows: int, uses: Sequence[int]):
        self.tree = tree
        self.row: dict[int, int] = {}
        self.free = list(range(rows))
        self.uses = [0] * len(tree.nodes)  # samples yet to be done below each node
        self.held = [0] * len(tree.nodes)  # running slots that refer to the node's row
        for sequence, count in enumerate(uses):
            for node in tree.path(tree.node_of[sequence]):
                self.uses[node] += count

    def make_room(self, sequence: int, keep: set[int]) -> list[int] | None:
        """Nodes that must be prefilled before the sequence (parents first), each given a row; None when there is no room now.

        keep: nodes whose rows are about to be used.
        """
        path = self.tree.path(self.tree.node_of[sequence])
        missing = [n for n in path if n not in self.row]
        needed = len(missing) - len(self.free)
        idle = [n for n in self.row if not self.held[n] and n not in keep and n not in path]
        if needed > len(idle):
            return None
        for node in idle[: max(needed, 0)]:
            self.free.append(self.row.pop(node))
        for node in missing:
            self.row[node] = self.free.pop(0)
        return missing

    def done(self, sequence: int) -> None:
        """One sample of the sequence needs its heads no longer."""
        for node in self.tree.path(self.tree.node_of[sequence]):
            self.uses[node] -= 1
            if not self.uses[node] and node in self.row and not self.held[node]:
                self.free.append(self.row.pop(node))

    def hold(self, sequence: int) -> None:
        """A running slot refers to the sequence's head."""
        if (node := self.tree.node_of[sequence]) >= 0:
            self.held[node] += 1

    def release(self, sequence: int) -> None:
        """It no longer does."""
        if (node := self.tree.node_of[sequence]) >= 0:
            self.held[node] -= 1
