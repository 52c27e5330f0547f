"""Rows whose sequences share their beginning: the common head is computed once and every tail attends to it.

A causal model gives a head the same values whatever follows it, so sharing changes results by rounding only. A row is one head
and the tails of its members: tail tokens keep the positions they have in their own sequence and see the head and their own tail.
Host code; `forward(parent_ids=...)` is the device side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class SharedRow:
    """`members`: indices of sequences; `head`: tokens that all of them begin with and that are stored once (0 = none)."""

    members: tuple[int, ...]
    head: int

    def size(self, lengths: Sequence[int]) -> int:
        """Tokens of the row."""
        return self.head + sum(lengths[i] - self.head for i in self.members)


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens that two sequences have in common at their beginning."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if differs.size else n


def shared_rows(heads: Sequence[np.ndarray], lengths: Sequence[int], capacity: int, most: int, keep: int = 1) -> list[SharedRow]:
    """Sequences dealt to rows of `capacity` tokens, at most `most` a row, so that those with a long common beginning share it.

    heads: the part of each sequence that may be shared; its last `keep` tokens never are (they predict what is read off).
    lengths: tokens of each whole sequence, none over `capacity`. Rows fill in lexicographic order of heads; the same input gives
    the same rows.
    """
    order = sorted(range(len(heads)), key=lambda i: (heads[i].tolist(), i))
    rows: list[SharedRow] = []
    row: SharedRow | None = None
    for i in order:
        own = max(len(heads[i]) - keep, 0)
        if row is not None:
            wider = SharedRow((*row.members, i), min(row.head, own, common_length(heads[row.members[-1]], heads[i])))
            if len(wider.members) <= most and wider.size(lengths) <= capacity:
                row = wider
                continue
            rows.append(_closed(row))
        row = SharedRow((i,), own)
    return [*rows, _closed(row)] if row is not None else rows


def _closed(row: SharedRow) -> SharedRow:
    """A head of one member saves nothing."""
    return row if len(row.members) > 1 else SharedRow(row.members, 0)
