"""An optimizer's step on one array after the other, a piece of it at a time: what one CPU runs.

XLA on a CPU makes a kernel for each result of a step. On whole trees these walk the memory a dozen times, and since they write
donated arrays that others still read, both moments are copied first. Of a piece all of it happens in the cache. The numbers are
those of the whole trees, but for the order of sums.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

Tree = Any
PIECE = 1 << 20  # numbers of a piece, at most, where the first axis can be cut so


def count_pieces(shape: tuple[int, ...]) -> int:
    """Into how many equal parts of its first axis an array is cut."""
    size = math.prod(shape)
    if size <= PIECE:
        return 1
    return next(n for n in range(1, shape[0] + 1) if shape[0] % n == 0 and (size // n <= PIECE or n == shape[0]))


def square_sum(tree: Tree) -> jax.Array:
    """Sum of the squares of all numbers, float32."""

    def one(x: jax.Array) -> jax.Array:
        n = count_pieces(x.shape)
        parts = x.reshape(n, -1)
        return lax.fori_loop(
            0, n, lambda i, total: total + _squares(lax.dynamic_index_in_dim(parts, i, 0, False)), jnp.float32(0)
        )

    return sum(map(one, jax.tree.leaves(tree)), jnp.float32(0.0))


def step_in_pieces(
    rule: optax.GradientTransformation, params: Tree, opt_state: Tree, grads: Tree, scale: jax.Array, keep: jax.Array
) -> tuple[Tree, Tree, jax.Array, jax.Array]:
    """New parameters and state by a rule that looks at one number at a time, for gradients times `scale`; where `keep` is false
    both stay as they are. And the sums of squares of the change and of the new parameters."""
    cuts = jax.tree.map(lambda p: count_pieces(p.shape), params)
    marks = cuts, optax.tree.map_params(rule, lambda _, n: n, opt_state, cuts, transform_non_params=lambda _: 0), cuts
    numbers = jax.tree.leaves(marks)
    leaves, treedef = jax.tree.flatten((params, opt_state, grads))

    def advance(pieces: list[jax.Array]) -> tuple[list[jax.Array], Any, Any]:
        own_params, own_state, own_grads = jax.tree.unflatten(treedef, pieces)
        gradient = jax.tree.map(lambda g, p: (g * scale).astype(p.dtype), own_grads, own_params)
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
            change, next_state = rule.update(gradient, own_state, own_params)
        after = optax.apply_updates(own_params, change)
        return jax.tree.leaves((after, next_state, own_grads)), _squares(change), _squares(after)

    def stay(pieces: list[jax.Array]) -> tuple[list[jax.Array], Any, Any]:
        return pieces, jnp.float32(0.0), _squares(jax.tree.unflatten(treedef, pieces)[0])

    # A leaf that is cut otherwise is empty: the rule sees every name, and so which of them decay.
    empty = [jnp.zeros((0,), x.dtype) if n else x for x, n in zip(leaves, numbers)]
    done = lax.cond(keep, advance, stay, empty)[0]  # the scalars of the state
    changed, total = jnp.float32(0.0), jnp.float32(0.0)
    written = len(leaves) - len(jax.tree.leaves(grads))
    for n in sorted(set(numbers) - {0}):
        own = [i for i, number in enumerate(numbers) if number == n]
        fixed = [i for i in own if i >= written]

        def step(i: jax.Array, carry: Any, own: list[int] = own, fixed: list[int] = fixed) -> Any:
            arrays, changed, total = carry
            whole = arrays | {j: leaves[j].reshape(n, -1) for j in fixed}  # noqa: B023
            rows = {j: lax.dynamic_index_in_dim(whole[j], i, 0, False) for j in own}
            # A branch is a border for fusion: each row is read once, before any is written. Else XLA copies the arrays.
            new, more, size = lax.cond(keep, advance, stay, [rows.get(j, x) for j, x in enumerate(empty)])
            arrays = {j: lax.dynamic_update_index_in_dim(x, new[j], i, 0) for j, x in arrays.items()}
            return arrays, changed + more, total + size

        start = {j: leaves[j].reshape(n, -1) for j in own if j < written}
        arrays, changed, total = lax.fori_loop(0, n, step, (start, changed, total))
        done = [arrays[j].reshape(leaves[j].shape) if j in arrays else x for j, x in enumerate(done)]
    new_params, new_state, _ = jax.tree.unflatten(treedef, done)
    return new_params, new_state, changed, total


def _squares(tree: Tree) -> jax.Array:
    return sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)), jnp.float32(0.0))
