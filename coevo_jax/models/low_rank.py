"""A frozen matrix with a low-rank adapter beside it: y = x W + scale (x A) B (LoRA, arXiv 2106.09685).

Axes: L layers, r rank; A is [L, inputs of W, r] and B is [L, r, outputs of W].
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp


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
    (left, right), out = equation.split("->")[0].split(","), equation.split("->")[1]
    inputs, outputs = ("".join(c for c in right if (c in out) == kept) for kept in (False, True))
    middle = "".join(c for c in left if c not in inputs) + "r"
    low = jnp.einsum(f"{left},{inputs}r->{middle}", x, w.a.astype(x.dtype), preferred_element_type=jnp.float32) * w.scale
    return jnp.einsum(f"{middle},r{outputs}->{out}", low.astype(x.dtype), w.b.astype(x.dtype), preferred_element_type=jnp.float32)
