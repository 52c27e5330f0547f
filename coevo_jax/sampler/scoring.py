"""Scoring without decoding, in packed prefill: next-token probabilities and log-probs of given continuations.

Axes: P packed rows, T positions of a row, M sequences of a batch, U distinct token ids asked for, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coevo_jax.models.forward import forward, unembed
from coevo_jax.models.logprobs import token_logprobs
from coevo_jax.models.prefix import SharedRow
from coevo_jax.models.spec import ModelSpec

IDS_STEP = 64  # the id list of a program is padded to a multiple of this


def next_token_program(
    params: dict[str, Any],
    tokens_PxT: jax.Array,
    positions_PxT: jax.Array,
    segments_PxT: jax.Array,
    parents_PxT: jax.Array,
    last_M: jax.Array,
    ids_U: jax.Array,
    *,
    spec: ModelSpec,
    dtype: Any,
) -> jax.Array:
    """Probability of each id after flat position last[m], [M,U] float32: the softmax is over the whole vocabulary."""
    hidden = forward(params, spec, tokens_PxT, positions_PxT, segments_PxT, dtype=dtype, parent_ids_BxT=parents_PxT)
    at_last = jnp.take(hidden.reshape(-1, hidden.shape[2]), last_M, axis=0)
    probs = jax.nn.softmax(unembed(params, spec, at_last), axis=1)
    return jnp.take(probs, ids_U, axis=1)


def score_program(
    params: dict[str, Any],
    tokens_PxT: jax.Array,
    positions_PxT: jax.Array,
    segments_PxT: jax.Array,
    targets_PxT: jax.Array,
    temperature: jax.Array,
    *,
    spec: ModelSpec,
    dtype: Any,
) -> jax.Array:
    """Log-prob of targets[p,t] after position (p,t), [P,T] float32."""
    hidden = forward(params, spec, tokens_PxT, positions_PxT, segments_PxT, dtype=dtype)
    return token_logprobs(params, spec, hidden, targets_PxT, temperature)[0]


@dataclasses.dataclass
class SharedBatch:
    """Arrays [P,T] of rows with shared heads; `last`: flat position of each sequence's last token, `members`: which they are."""

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    parents: np.ndarray
    members: list[int]
    last: list[int]


def pack_shared(rows: Sequence[SharedRow], sequences: Sequence[np.ndarray], bucket: tuple[int, int]) -> SharedBatch:
    """One row of the program a SharedRow: the head as segment 1, then the tails, each with the head as its parent."""
    tokens, positions, segments, parents = np.zeros((4, *bucket), np.int32)
    batch = SharedBatch(tokens, positions, segments, parents, [], [])
    for r, row in enumerate(rows):
        pieces = [(sequences[row.members[0]][: row.head], 0, 0)] + [(sequences[i][row.head :], row.head, 1) for i in row.members]
        at = 0
        for segment, (ids, start, parent) in enumerate(pieces, start=1):
            where = np.s_[r, at : at + len(ids)]
            batch.tokens[where], batch.positions[where] = ids, start + np.arange(len(ids))
            batch.segments[where], batch.parents[where] = segment, parent if row.head else 0
            at += len(ids)
            if segment > 1:
                batch.last.append(r * bucket[1] + at - 1)
        batch.members += row.members
    return batch


def id_table(forms: Sequence[Sequence[int]]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Distinct ids, padded with id 0, and for each form the columns of its (distinct) ids."""
    distinct = sorted({int(i) for form in forms for i in form})
    column = {token: c for c, token in enumerate(distinct)}
    padded = np.zeros(max(-(-len(distinct) // IDS_STEP), 1) * IDS_STEP, np.int32)
    padded[: len(distinct)] = distinct
    return padded, [np.asarray(sorted({column[int(i)] for i in form}), np.int64) for form in forms]


def distinct(sequences: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[int]]:
    """Distinct sequences in order of first appearance, and which of them each one is."""
    numbers: dict[bytes, int] = {}
    which = [numbers.setdefault(s.tobytes(), len(numbers)) for s in sequences]
    first = {n: s for s, n in reversed(list(zip(sequences, which)))}
    return [first[n] for n in range(len(numbers))], which


def shifted_targets(packed_tokens_PxT: np.ndarray) -> np.ndarray:
    """Target of each position: the next token of its row (what crosses a segment's end is not read)."""
    return np.concatenate([packed_tokens_PxT[:, 1:], np.zeros_like(packed_tokens_PxT[:, :1])], axis=1)
