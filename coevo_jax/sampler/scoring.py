"""Scoring without decoding, in packed prefill: next-token probabilities and log-probs of given continuations.

Sequences that begin alike share their beginning through the same prefix tree and head store as the slots' prompts.

Axes: P packed rows, T positions of a row, M sequences of a batch, U distinct token ids asked for, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from coevo_jax.models.forward import unembed
from coevo_jax.models.logprobs import greedy_logprobs, token_logprobs
from coevo_jax.models.spec import ModelSpec
from coevo_jax.sampler.prefill import Packed, Span, Variant, choose, pack, packed_forward
from coevo_jax.sampler.run import store_heads
from coevo_jax.sampler.tree import Heads, Tree

if TYPE_CHECKING:
    from coevo_jax.sampler.engine import Engine, Weights

IDS_STEP = 64  # the id list of a program is padded to a multiple of this


def next_token_program(
    params: dict[str, Any], last_M: jax.Array, ids_U: jax.Array, *batch: Any, spec: ModelSpec, variant: Variant, dtype: Any,
    mesh: Mesh | None = None,
) -> jax.Array:  # fmt: skip
    """Probability of each id after flat position last[m], [M,U] float32: the softmax is over the whole vocabulary."""
    hidden, _ = packed_forward(params, *batch, spec=spec, variant=variant, dtype=dtype, mesh=mesh)
    at_last = jnp.take(hidden.reshape(-1, hidden.shape[2]), last_M, axis=0)
    probs = jax.nn.softmax(unembed(params, spec, at_last), axis=1)
    return jnp.take(probs, ids_U, axis=1)


def score_program(
    params: dict[str, Any],
    targets_PxT: jax.Array,
    temperature: jax.Array,
    *batch: Any,
    spec: ModelSpec,
    variant: Variant,
    dtype: Any,
    mesh: Mesh | None = None,
    greedy: bool = False,
) -> jax.Array:
    """Log-prob of targets[p,t] after position (p,t), [P,T] float32; greedy: [2,P,T], the second part 1 where it is likeliest."""
    hidden, _ = packed_forward(params, *batch, spec=spec, variant=variant, dtype=dtype, mesh=mesh)
    if greedy:
        return jnp.stack(greedy_logprobs(params, spec, hidden, targets_PxT))
    return token_logprobs(params, spec, hidden, targets_PxT, temperature)[0]


def most_sequences(variant: Variant) -> int:
    """Most sequences of one program: bounds its logits."""
    return max(1, variant.shape[0] * variant.shape[1] // 16)


def walk(
    engine: Engine,
    weights: Weights,
    sequences: Sequence[np.ndarray],
    tree: Tree,
    shapes: Sequence[Variant],
    run: Callable[[Packed, list[int], Any], None],
) -> None:
    """Give every sequence's tail to `run(packed, which sequences, store)`, heads prefilled before those that need them."""
    heads = Heads(tree, engine.cfg.heads, [1] * len(sequences))
    store = engine.new_store() if tree.nodes else None
    order, at = list(tree.order), 0
    while at < len(order):
        nodes: set[int] = set()
        missing: list[int] = []
        end = at
        while end < len(order) and (room := heads.make_room(order[end], nodes)) is not None:
            missing += room
            nodes |= set(tree.path(tree.node_of[order[end]]))
            end += 1
        if missing:
            store = store_heads(engine, weights, sequences, heads, missing, store)
        spans = []
        for i in order[at:end]:
            start = tree.start(i)
            spans.append(Span(sequences[i][start:], start, heads.row.get(tree.node_of[i], 0)))
        while spans:
            count, variant = choose(spans, shapes, min(len(spans), most_sequences(shapes[-1])))
            while count > most_sequences(variant):
                count = most_sequences(variant)
            run(pack(spans[:count], variant), order[at : at + count], store)
            for i in order[at : at + count]:
                heads.done(i)
            spans, at = spans[count:], at + count


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


def shifted_targets(tokens_PxT: np.ndarray) -> np.ndarray:
    """Target of each position: the next token of its row (what crosses a span's end is not read)."""
    return np.concatenate([tokens_PxT[:, 1:], np.zeros_like(tokens_PxT[:, :1])], axis=1)
