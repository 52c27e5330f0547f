"""Sums over micro-batches: which ones run, and how gradients and metrics are combined."""

import jax
import jax.numpy as jnp
import numpy as np
from learn_support import some_samples

from coevo_jax.config import UpdateConfig
from coevo_jax.learn.packing import pack
from coevo_jax.learn.update import summed_gradients


def test_only_filled_micro_batches_run_and_metrics_are_summed_or_maxima():
    batch = pack(some_samples(), UpdateConfig(pack_length=32, max_segments=3, rows_per_micro=2), rows=32)
    used = int((batch.segment_ids.max((1, 2)) > 0).sum())
    assert 1 < used < batch.tokens.shape[0]

    def micro_loss(params, micro):
        total = jnp.where(micro.mask, micro.advantage, 0.0).sum()
        return params["w"] * total, {"runs": jnp.float32(1.0), "advantage/max": micro.advantage.max()}

    params = {"w": jnp.float32(2.0)}
    grads, metrics = jax.jit(lambda p, b: summed_gradients(micro_loss, p, b, None, None))(params, batch)
    assert float(metrics["runs"]) == used
    assert float(metrics["advantage/max"]) == batch.advantage.max()
    np.testing.assert_allclose(float(grads["w"]), batch.advantage.sum(dtype=np.float64), rtol=1e-4, atol=1e-5)
