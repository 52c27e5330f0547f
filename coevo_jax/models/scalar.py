"""A scalar head beside an architecture: one number a sequence, read at its last token (Skywork-Reward-V2's shape).

The head is a vector [D] on the final normalised hidden state, as in transformers' ...ForSequenceClassification with one label and
no bias; there the last token is the last that isn't padding, here it is named by position, whatever its id.

Axes: B rows, T positions of a row, D model, M sequences of a batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from coevo_jax.errors import UserError
from coevo_jax.models.forward import Params, forward
from coevo_jax.models.hf_weights import TensorSource
from coevo_jax.models.spec import ModelSpec

HEAD = "score.weight"
UNEMBED = "lm_head.weight"


class Body:
    """The tensors of a reward model's source without a vocabulary's head, which some files keep."""

    def __init__(self, source: TensorSource):
        self._source, self.where, self.whole = source, source.where, source.whole

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in self._source.shapes().items() if name != UNEMBED}

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return self._source.read(name, index)


def check_head(source: TensorSource, spec: ModelSpec) -> None:
    """UserError: the source has no head, or one of several labels."""
    shapes = source.shapes()
    if HEAD not in shapes:
        close = UNEMBED if UNEMBED in shapes else ""
        raise UserError(f"tensor {HEAD!r} is missing: no reward model", where=source.where,
                        expected="the folder of a ...ForSequenceClassification with one label", nearest=close)  # fmt: skip
    if shapes[HEAD] != (1, spec.hidden_size):
        raise UserError(f"tensor {HEAD!r} has shape {list(shapes[HEAD])}", where=source.where,
                        expected=f"{[1, spec.hidden_size]}: one label")  # fmt: skip


def fresh_head(params: Params, spec: ModelSpec, std: float, seed: int, sharding: Any = None) -> tuple[Params, ModelSpec]:
    """A language model's parameters with a head of normal numbers (std, keyed by the seed) in place of the vocabulary's."""
    spec = dataclasses.replace(spec, scalar=True)
    drawn = np.random.RandomState(seed % 2**32).normal(0.0, std, spec.hidden_size).astype(params["embed"].dtype)
    head = jnp.asarray(drawn) if sharding is None else jax.make_array_from_callback(drawn.shape, sharding, lambda i: drawn[i])
    return {name: p for name, p in params.items() if name != "unembed"} | {"score": head}, spec


def head_values(params: Params, hidden_XxD: jax.Array, dtype: Any) -> jax.Array:
    """[X] float32: the head's value of final normalised hidden states."""
    return jnp.einsum("...D,D->...", hidden_XxD, params["score"].astype(dtype), preferred_element_type=jnp.float32)


def scalar_values(
    params: Params, spec: ModelSpec, tokens_BxT: jax.Array, positions_BxT: jax.Array, segments_BxT: jax.Array, last_M: jax.Array,
    *, dtype: Any = jnp.float32, attention: str = "xla", mesh: Mesh | None = None,
) -> jax.Array:  # fmt: skip
    """[M] float32: the head's value at flat position last[m] of packed rows (models.forward.forward has their meaning)."""
    hidden = forward(params, spec, tokens_BxT, positions_BxT, segments_BxT, dtype=dtype, attention=attention, mesh=mesh)
    return head_values(params, jnp.take(hidden.reshape(-1, hidden.shape[2]), last_M, axis=0), dtype)
