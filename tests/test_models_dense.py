"""Flattened products against the plain einsum: values, gradients, dtypes, int8 weights; the policy 'dots' keeps them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coevo_jax.models.dense import flat_product
from coevo_jax.models.forward import forward, init_params
from coevo_jax.models.quantize import product, quantize_array
from coevo_jax.models.spec import ModelSpec

EQUATIONS = {
    "BTD,DHd->BTHd": ((2, 3, 4), (4, 5, 6)),
    "BTHd,HdD->BTD": ((2, 3, 5, 6), (5, 6, 4)),
    "BTD,DF->BTF": ((2, 3, 4), (4, 7)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equals_the_einsum_with_its_gradients(equation, dtype):
    """Inputs in the compute dtype, weights and their gradient in float32."""
    shapes = EQUATIONS[equation]
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))
    x = x.astype(dtype)

    def total(compute):
        return lambda x, w: (compute(equation, x, w).astype(jnp.float32) ** 2).sum()

    found, expected = flat_product(equation, x, w), product(equation, x, w)
    assert found.dtype == expected.dtype == dtype
    tolerance = 1e-5 if dtype == jnp.float32 else 5e-2
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=tolerance, atol=tolerance)
    grads, wanted = (jax.grad(total(f), argnums=(0, 1))(x, w) for f in (flat_product, product))
    for a, b in zip(grads, wanted):
        assert a.dtype == b.dtype and a.shape == b.shape
        scale = float(np.abs(np.asarray(b, np.float32)).max())
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=tolerance * scale)


def test_int8_weights_take_the_plain_product():
    x, w = jax.random.normal(jax.random.key(0), (2, 3, 4)), quantize_array(jax.random.normal(jax.random.key(1), (4, 7)), (0,))
    np.testing.assert_array_equal(flat_product("BTD,DF->BTF", x, w), product("BTD,DF->BTF", x, w))


def test_remat_dots_makes_no_product_again():
    spec = ModelSpec("llama", vocab_size=50, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp_size=24, tied=True)
    params, tokens = init_params(jax.random.key(0), spec), jnp.ones((2, 8), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), (2, 8))

    def products(remat):
        loss = lambda p: forward(p, spec, tokens, positions, tokens, remat=remat).sum()  # noqa: E731
        return str(jax.make_jaxpr(jax.grad(loss))(params)).count("dot_general")

    assert (
        products("none") <= products("dots") < products("full") - 5
    )  # six of seven; the last one of a layer is never needed again
