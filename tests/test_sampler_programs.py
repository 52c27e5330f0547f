"""Programs: asked for ahead they compile in threads and run nothing; afterwards none compiles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coevo_jax.sampler.programs import Programs, cpu_options


def double(x: jax.Array) -> dict[str, jax.Array]:
    return {"y": x * 2}


def total(y: jax.Array) -> jax.Array:
    return y.sum()


def ask(programs: Programs, x: Any) -> Any:
    """Two programs, the second over the first one's result; the first gives its argument's memory away."""
    y = programs.get("double", double, (x,), donate_argnums=0)(x)["y"]
    return programs.get("total", total, (y,))(y)


def test_ahead_gives_shapes_and_runs_nothing():
    programs, seen, x = Programs(), [], jnp.ones((3, 2))
    with programs.ahead(lambda done, whole: seen.append((done, whole))):
        out = ask(programs, x)
        assert isinstance(out, jax.ShapeDtypeStruct) and out.shape == () and out.dtype == np.float32
    assert not x.is_deleted(), "the donated argument was not taken: nothing ran"
    assert seen == [(1, 2), (2, 2)] and len(programs) == 2
    programs.sealed = True
    assert float(ask(programs, x)) == 12 and x.is_deleted()
    with pytest.raises(RuntimeError, match="other was not compiled by warm-up"):
        programs.get("other", total, (jnp.ones(2),))


def test_a_second_time_ahead_adds_what_is_missing():
    programs = Programs()
    first = programs.get("double", double, (jnp.ones(4),))
    with programs.ahead():
        assert ask(programs, jnp.ones(4)).shape == ()
    assert programs.get("double", double, (jnp.ones(4),)) is first and len(programs) == 2


def test_a_program_that_does_not_compile_is_told_at_the_end_of_the_block():
    programs = Programs()
    broken = lambda x: jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct((2,), jnp.float32), x) @ jnp.ones(3)  # noqa: E731
    with pytest.raises(TypeError), programs.ahead():
        programs.get("broken", broken, (jnp.ones(2),))
    assert programs.get("total", total, (jnp.ones(2),))(jnp.ones(2)) == 2, "and later programs compile as ever"


def test_an_option_that_this_compiler_does_not_know_is_left_out(monkeypatch):
    cpu_options.cache_clear()
    assert cpu_options(), "the installed XLA knows it"
    real = jax.stages.Lowered.compile

    def older(self, options=None):
        if options:
            raise RuntimeError("INVALID_ARGUMENT: No such compile option")
        return real(self, options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", older)
    cpu_options.cache_clear()
    assert cpu_options() == {} and float(ask(Programs(), jnp.ones(2))) == 4
    cpu_options.cache_clear()


def test_shapes_carry_the_shardings_that_were_asked_for():
    mesh = jax.make_mesh((2,), ("data",))
    rows, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("data",), ()))
    programs = Programs()
    with programs.ahead():
        both = programs.get("both", lambda x: (x, {"n": x.sum()}), (jnp.ones(4),), out_shardings=(rows, whole))(None)
    assert both[0].sharding == rows and both[1]["n"].sharding == whole
