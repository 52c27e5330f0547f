"""Rows that both sides of benchmarks/update.py train on. numpy only."""

from __future__ import annotations

import numpy as np

REFERENCE = -10.0  # log-prob of every token under the reference, as in the shared script


def random_rows(lengths: list[int], vocab: int, seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    """Ids [length] of each row, of 3..vocab, and an advantage a row."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(3, vocab, n).astype(np.int32) for n in lengths]
    return ids, rng.standard_normal(len(lengths)).astype(np.float32)
