"""A scalar head beside an architecture: one number a sequence, read at its last token (Skywork-Reward-V2's shape).

The head is a vector [D] on the final normalised hidden state, as in transformers' ...ForSequenceClassification with one label and
no bias; there the last token is the last that isn't padding, here it is named by position, whatever its id.

Axes: B rows, T positions of a row, D model, M sequences of a batch.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from coevo_jax.errors import UserError
from coevo_jax.mesh import replicated
from coevo_jax.models.forward import Params, forward
from coevo_jax.models.hf_weights import TensorSource
from coevo_jax.models.spec import ModelSpec

HEAD = "score.weight"
UNEMBED = "lm_head.weight"


class Body:
    """The tensors of a source without its heads."""

    def __init__(self, source: TensorSource):
        self._source, self.where, self.whole = source, source.where, source.whole

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in self._source.shapes().items() if name not in (HEAD, UNEMBED)}

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return self._source.read(name, index)


def read_head(source: TensorSource, spec: ModelSpec, dtype: Any, mesh: Mesh | None = None) -> jax.Array:
    """The head [D] of a source. UserError: there is none, or it has several labels."""
    shapes = source.shapes()
    if HEAD not in shapes:
        close = UNEMBED if UNEMBED in shapes else ""
        raise UserError(f"tensor {HEAD!r} is missing: no reward model", where=source.where,
                        expected="the folder of a ...ForSequenceClassification with one label", nearest=close)  # fmt: skip
    if shapes[HEAD] != (1, spec.hidden_size):
        raise UserError(f"tensor {HEAD!r} has shape {list(shapes[HEAD])}", where=source.where,
                        expected=f"{[1, spec.hidden_size]}: one label")  # fmt: skip
    head = source.read(HEAD, (slice(None), slice(None)))[0].astype(jnp.dtype(dtype))
    return jnp.asarray(head) if mesh is None else jax.device_put(head, replicated(mesh))


def scalar_values(
    params: Params, spec: ModelSpec, tokens_BxT: jax.Array, positions_BxT: jax.Array, segments_BxT: jax.Array, last_M: jax.Array,
    *, dtype: Any = jnp.float32, attention: str = "xla", mesh: Mesh | None = None,
) -> jax.Array:  # fmt: skip
    """[M] float32: the head's value at flat position last[m] of packed rows (models.forward.forward has their meaning)."""
    hidden = forward(params, spec, tokens_BxT, positions_BxT, segments_BxT, dtype=dtype, attention=attention, mesh=mesh)
    at_last = jnp.take(hidden.reshape(-1, hidden.shape[2]), last_M, axis=0)
    return jnp.einsum("MD,D->M", at_last, params["score"].astype(dtype), preferred_element_type=jnp.float32)
