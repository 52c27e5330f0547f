"""Products of tokens with a weight on one device, with the weight's gradient in the order that XLA's CPU backend does fastest.

Axes: N tokens, I inputs, O outputs of a weight. JAX derives (dy' x)' for w's gradient in y = x w; XLA then lays dy out by
columns, a copy of a layer's widest array, and Eigen reads it across. x' dy, as here, needs no copy. Over several devices the
product of models/quantize.py stays: its axes are what the partitioner knows.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from coevo_jax.models.quantize import Int8Weight, Weight, product

NAME = "product"  # of the results, for remat policies: a custom derivative hides the product itself from them


def flat_product(equation: str, x: jax.Array, w: Weight) -> jax.Array:
    """models.quantize.product for x [...,inputs] and w [inputs,outputs]: einsum(equation, x, w) in x's dtype."""
    if isinstance(w, Int8Weight):
        return product(equation, x, w)
    inputs, weight = equation.partition("->")[0].split(",")
    summed = sum(axis in inputs for axis in weight)  # x's last axes, w's first
    x_NxI = x.reshape(-1, math.prod(w.shape[:summed]))
    y_NxO = checkpoint_name(_matmul(x_NxI, w.reshape(x_NxI.shape[1], -1)), NAME)
    return y_NxO.reshape(*x.shape[: x.ndim - summed], *w.shape[summed:])


@jax.custom_vjp
def _matmul(x_NxI: jax.Array, w_IxO: jax.Array) -> jax.Array:
    return jnp.dot(x_NxI, w_IxO.astype(x_NxI.dtype))


def _saved(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _matmul(x, w), (x, w)


def _backward(saved: tuple[jax.Array, jax.Array], dy_NxO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    dx = lax.dot_general(dy_NxO, w.astype(dy_NxO.dtype), (((1,), (1,)), ((), ())))
    return dx, lax.dot_general(x, dy_NxO, (((0,), (0,)), ((), ()))).astype(w.dtype)


_matmul.defvjp(_saved, _backward)
