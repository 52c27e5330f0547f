"""Attention over packed rows: an XLA einsum everywhere, splash attention on TPU; one switch.

Axes: B batch, T query time, S key time, H heads, K kv heads, G query heads a kv head, d head width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from coevo_jax.errors import UserError

NEGATIVE = -1e30  # finite, so that a fully masked (padding) row gives zeros' mean and not NaN


def grouped_scores(q_BxTxHxd: jax.Array, k_BxSxKxd: jax.Array) -> jax.Array:
    """Scaled scores [B,K,G,T,S] in float32."""
    B, T, H, d = q_BxTxHxd.shape
    K = k_BxSxKxd.shape[2]
    q = q_BxTxHxd.reshape(B, T, K, H // K, d)
    return jnp.einsum("BTKGd,BSKd->BKGTS", q, k_BxSxKxd, preferred_element_type=jnp.float32) * d**-0.5


def grouped_values(weights_BxKxGxTxS: jax.Array, v_BxSxKxd: jax.Array) -> jax.Array:
    """Weighted values [B,T,H,d]."""
    B, K, G, T, _ = weights_BxKxGxTxS.shape
    out = jnp.einsum("BKGTS,BSKd->BTKGd", weights_BxKxGxTxS.astype(v_BxSxKxd.dtype), v_BxSxKxd)
    return out.reshape(B, T, K * G, v_BxSxKxd.shape[3])


def packed_mask(positions_BxT: jax.Array, segments_BxT: jax.Array, window: jax.Array | None) -> jax.Array:
    """May query t see key s? Same segment, not later, and within the window where one is set (0 = none). [B,T,S] bool."""
    T = positions_BxT.shape[1]
    causal = jnp.tril(jnp.ones((T, T), bool))[None]
    mask = causal & (segments_BxT[:, :, None] == segments_BxT[:, None, :])
    if window is None:
        return mask
    age = positions_BxT[:, :, None] - positions_BxT[:, None, :]
    return mask & ((window == 0) | (age < window))


def packed_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, segments: jax.Array, window: Any = None, choice: str = "xla"
) -> jax.Array:
    """Causal attention [B,T,H,d] inside segments. choice: 'xla' or 'splash' (TPU; full attention only)."""
    if choice == "splash":
        if window is not None:
            raise UserError(
                "splash attention is not available for models with sliding windows", where="update.attention", expected="xla"
            )
        return _splash(q, k, v, segments)
    scores = grouped_scores(q, k)
    mask = packed_mask(positions, segments, window)[:, None, None]
    return grouped_values(jax.nn.softmax(jnp.where(mask, scores, NEGATIVE), axis=-1), v)


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
    """Pallas splash attention with segment ids; lengths must be a multiple of 128."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    T, H, d = q.shape[1], q.shape[2], q.shape[3]
    mask = splash.MultiHeadMask([splash.CausalMask((T, T))] * H)
    block = min(512, T)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
        block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    kernel = splash.make_splash_mqa_single_device if k.shape[2] == 1 else splash.make_splash_mha_single_device
    run = kernel(mask, block_sizes=sizes)
    ids = splash.SegmentIds(segments, segments)
    groups = H // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2).transpose(0, 2, 1, 3) for x in (k, v))
    out = jax.vmap(run)(q.transpose(0, 2, 1, 3) * d**-0.5, k, v, segment_ids=ids)
    return out.transpose(0, 2, 1, 3)
