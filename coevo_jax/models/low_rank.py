"""A frozen matrix with a low-rank adapter beside it: y = x W + scale (x A) B (LoRA, arXiv 2106.09685).

Axes: L layers, r rank; A is [L, inputs of W, r] and B is [L, r, outputs of W].
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

ADAPTED = "adapted"  # the sum x W + scale (x A) B: what remat=dots keeps of it, and not both products


@functools.partial(jax.tree_util.register_dataclass, data_fields=["base", "a", "b"], meta_fields=["scale"])
@dataclasses.dataclass(frozen=True)
class LoraWeight:
    """Stands where the matrix stood (models/quantize.py, `product`); a scan over layers cuts all three arrays."""

    base: Any
    a: Any
    b: Any
    scale: float


def low_rank(equation: str, x: jax.Array, w: LoraWeight) -> jax.Array:
    """scale (x A) B in float32, for the equation of x W, such as 'BTHd,HdD->BTD'. The products are in x's dtype, their sums in
    float32; the scale is applied to [...,r], the smallest array."""
    return _delta(equation, w.scale, x, w.a, w.b)


def _letters(equation: str) -> tuple[str, str, str, str, str]:
    """Axes of x, of W's inputs and outputs, of x A and of the result."""
    (left, right), out = equation.split("->")[0].split(","), equation.split("->")[1]
    inputs, outputs = ("".join(c for c in right if (c in out) == kept) for kept in (False, True))
    return left, inputs, outputs, "".join(c for c in left if c not in inputs) + "r", out


def _dot(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _delta(equation: str, scale: float, x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return _forward(equation, scale, x, a, b)[0]


def _forward(equation: str, scale: float, x: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, Any]:
    left, inputs, outputs, middle, out = _letters(equation)
    low = (_dot(f"{left},{inputs}r->{middle}", x, a.astype(x.dtype)) * scale).astype(x.dtype)
    return _dot(f"{middle},r{outputs}->{out}", low, b.astype(x.dtype)), (x, a, b, low)


def _backward(equation: str, scale: float, saved: Any, d_out: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Written out, since the products that transposition gives contract their operands' outer axes, which XLA's loops for one
    CPU do several times as slowly as the library does these."""
    x, a, b, low = saved
    left, inputs, outputs, middle, out = _letters(equation)
    d_out = d_out.astype(x.dtype)
    d_low = (_dot(f"{out},r{outputs}->{middle}", d_out, b.astype(x.dtype)) * scale).astype(x.dtype)
    d_x = _dot(f"{middle},{inputs}r->{left}", d_low, a.astype(x.dtype))
    d_a, d_b = _dot(f"{left},{middle}->{inputs}r", x, d_low), _dot(f"{middle},{out}->r{outputs}", low, d_out)
    return d_x.astype(x.dtype), d_a.astype(a.dtype), d_b.astype(b.dtype)


_delta.defvjp(_forward, _backward)
