"""Attention over packed rows: an XLA einsum everywhere, splash attention on TPU; one switch.

Axes: B batch, T query time, S key time, H heads, K kv heads, G query heads a kv head, d head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

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


def packed_mask(
    positions_BxT: jax.Array, segments_BxT: jax.Array, window: jax.Array | None, parents_BxT: jax.Array | None = None
) -> jax.Array:
    """May query t see key s? Same segment (or the query's parent segment, 0 = none), not later, and within the window where
    one is set (0 = none). [B,T,S] bool."""
    T = positions_BxT.shape[1]
    causal = jnp.tril(jnp.ones((T, T), bool))[None]
    related = segments_BxT[:, :, None] == segments_BxT[:, None, :]
    if parents_BxT is not None:
        related |= (parents_BxT[:, :, None] == segments_BxT[:, None, :]) & (parents_BxT[:, :, None] > 0)
    mask = causal & related
    if window is None:
        return mask
    age = positions_BxT[:, :, None] - positions_BxT[:, None, :]
    return mask & ((window == 0) | (age < window))


def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    window: Any = None,
    choice: str = "xla",
    *,
    windows: tuple[int, ...] = (),
    mesh: Mesh | None = None,
    parents: jax.Array | None = None,
) -> jax.Array:
    """Causal attention [B,T,H,d] inside segments; `window` is this layer's (an array, 0 = full) or None.

    parents [B,T]: the segment that a token sees beside its own, 0 = none (models/prefix.py); for 'xla' alone.

    choice: 'xla', 'splash' (TPU kernel) or 'splash_interpret' (the same kernel in Python, for tests). Splash needs all `windows`
    that a layer may have, since it compiles one kernel each, and with several devices the `mesh` of the arrays.
    """
    if choice == "xla":
        mask = packed_mask(positions, segments, window, parents)[:, None, None]
        return grouped_values(jax.nn.softmax(jnp.where(mask, grouped_scores(q, k), NEGATIVE), axis=-1), v)
    if choice not in ("splash", "splash_interpret"):
        raise UserError(f"attention {choice!r} is not known", where="update.attention", expected="xla or splash")
    if parents is not None:
        raise UserError("splash attention has no shared heads", where="update.attention", expected="xla, or share_prefix=false")
    kinds = sorted(set(windows)) if window is not None else [0]
    kernels = [_splash(q.shape[1], q.shape[2], k.shape[2], kind, choice == "splash_interpret", mesh) for kind in kinds]
    operands = q * q.shape[3] ** -0.5, k, v, segments
    if len(kernels) == 1:
        return kernels[0](*operands)
    return jax.lax.switch(jnp.searchsorted(jnp.asarray(kinds), window), kernels, *operands)


def _splash(T: int, H: int, K: int, window: int, interpret: bool, mesh: Mesh | None) -> Callable[..., jax.Array]:
    """Pallas splash attention of (scaled q, k, v, segments) for one window; a mesh cuts rows (data, fsdp) and heads (tensor)."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    if T % 128:
        raise UserError(f"splash attention can't run rows of {T} tokens", where="update.pack_length",
                        expected="a multiple of 128, or update.attention=xla")  # fmt: skip
    tensor = mesh.shape["tensor"] if mesh is not None and K % mesh.shape["tensor"] == 0 else 1
    one = splash.CausalMask((T, T)) if window == 0 else splash.LocalMask((T, T), (window - 1, 0), 0)
    block = next(b for b in (512, 384, 256, 128) if T % b == 0)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
        block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([one] * (H // tensor)), block_sizes=sizes, interpret=interpret
    )

    def run(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        ids = splash.SegmentIds(segments, segments)
        out = jax.vmap(kernel)(*(x.transpose(0, 2, 1, 3) for x in (q, k, v)), segment_ids=ids)
        return out.transpose(0, 2, 1, 3)

    if mesh is None:
        return run
    heads = P(("data", "fsdp"), None, "tensor" if tensor > 1 else None, None)
    # the kernel is opaque to the partitioner and has no rule for which axes its outputs vary over
    return jax.shard_map(run, mesh=mesh, in_specs=(heads, heads, heads, P(("data", "fsdp"))), out_specs=heads, check_vma=False)
