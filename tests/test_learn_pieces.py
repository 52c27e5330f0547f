"""The optimizer's step in pieces against the step on whole trees: numbers, what stays, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coevo_jax.config import OptimizerConfig
from coevo_jax.learn import pieces
from coevo_jax.learn.update import TrainState, apply_gradients, init_state, make_optimizer

SHAPES = {"embed": (12, 10), "layers": {"q": (3, 4, 10), "attn_norm": (3, 10), "q_bias": (3, 2)}, "final_norm": (10,)}
CONFIG = OptimizerConfig(lr=0.1, weight_decay=0.5, grad_clip=1.0, mu_dtype="bfloat16")


def draw(seed, scale=1.0, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    make = lambda shape: jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)  # noqa: E731
    return jax.tree.map(make, shapes, is_leaf=lambda x: isinstance(x, tuple))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 20)


def test_pieces_are_equal_parts_of_the_first_axis():
    assert [pieces.count_pieces(s) for s in ((12, 10), (3, 4, 10), (3, 2), (10,), ())] == [6, 3, 1, 1, 1]
    assert pieces.count_pieces((7, 10)) == 7  # 7 has no other divisor


@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_steps_equal_those_of_whole_trees(scale):
    """Below the clip and above it; norms and biases do not decay; first moments in bfloat16."""
    optimizer = make_optimizer(CONFIG)
    step = jax.jit(apply_gradients, static_argnums=(2, 3))
    whole = cut = init_state(draw(0), optimizer)
    for seed in (1, 2):
        whole, expected = step(whole, draw(seed, scale), optimizer, False)
        cut, found = step(cut, draw(seed, scale), optimizer, True)
        assert found.keys() == expected.keys()
        for name, x in found.items():
            np.testing.assert_allclose(x, expected[name], rtol=1e-5, err_msg=name)
    assert jax.tree.structure(cut) == jax.tree.structure(whole) and int(cut.step) == 2
    for a, b in zip(jax.tree.leaves(cut), jax.tree.leaves(whole)):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_not_finite_changes_nothing():
    optimizer = make_optimizer(CONFIG)
    step = jax.jit(apply_gradients, static_argnums=(2, 3))
    state, _ = step(init_state(draw(0), optimizer), draw(1), optimizer, True)
    grads = draw(2)
    grads["layers"]["q"] = grads["layers"]["q"].at[2, 1, 1].set(jnp.inf)
    after, metrics = step(state, grads, optimizer, True)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state)))
    assert float(metrics["nonfinite"]) == 1.0 and float(metrics["update_norm"]) == 0.0
    np.testing.assert_allclose(
        metrics["param_norm"], np.sqrt(sum(float((x**2).sum()) for x in jax.tree.leaves(state.params))), 1e-5
    )


def test_no_array_is_copied(monkeypatch):
    """The step's own memory is that of pieces: the donated arrays are written in place."""
    monkeypatch.setattr(pieces, "PIECE", 1 << 10)
    optimizer = make_optimizer(OptimizerConfig())
    state = init_state({"layers": {"q": jnp.ones((64, 32, 32))}}, optimizer)
    size = state.params["layers"]["q"].nbytes

    def step(state: TrainState, grads):
        return apply_gradients(state, grads, optimizer, True)[0]

    memory = jax.jit(step, donate_argnums=0).lower(state, state.params).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 3 * size and memory.temp_size_in_bytes < size // 4
