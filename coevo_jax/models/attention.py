"""Attention over packed rows: an XLA einsum everywhere, splash attention on TPU; one switch.

Axes: B batch, T query time, C time of a block of queries, S key time, H heads, K kv heads, G query heads a kv head, d head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from coevo_jax.errors import UserError

NEGATIVE = -1e30  # finite, so that a fully masked (padding) row gives zeros' mean and not NaN
KEPT = "attention"  # the name under which a remat policy keeps what the kernel's gradient needs
BLOCK, MOST_BLOCKS = 256, 8  # queries of a block; blocks of a row, each of which is compiled


def packed_mask(
    positions_BxT: jax.Array, segments_BxT: jax.Array, window: jax.Array | None, parents_BxT: jax.Array | None = None,
    first: int = 0, end: int | None = None,
) -> jax.Array:  # fmt: skip
    """May query t of first..end see key s? Same segment (or the query's parent segment, 0 = none), not later, and within the
    window where one is set (0 = none). [B,end - first,end] bool: keys after the last query are left out."""
    end = positions_BxT.shape[1] if end is None else end
    causal = (jnp.arange(first, end)[:, None] >= jnp.arange(end)[None])[None]
    keys = segments_BxT[:, None, :end]
    related = segments_BxT[:, first:end, None] == keys
    if parents_BxT is not None:
        parents = parents_BxT[:, first:end, None]
        related |= (parents == keys) & (parents > 0)
    mask = causal & related
    if window is None:
        return mask
    age = positions_BxT[:, first:end, None] - positions_BxT[:, None, :end]
    return mask & ((window == 0) | (age < window))


def _xla_attention(
    q_BxTxHxd: jax.Array, k_BxSxKxd: jax.Array, v_BxSxKxd: jax.Array,
    positions: jax.Array, segments: jax.Array, window: jax.Array | None, parents: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """Attention [B,T,H,d] in blocks of queries, each over the keys up to its end: what no query may see is not computed.

    Of a row of 768 tokens a third is left out.
    """
    B, T, H, d = q_BxTxHxd.shape
    K = k_BxSxKxd.shape[2]
    G, C = H // K, max(BLOCK, -(-T // MOST_BLOCKS))
    q = q_BxTxHxd.reshape(B, T, K, G, d).transpose(0, 2, 3, 1, 4)
    k, v = (x.transpose(0, 2, 1, 3) for x in (k_BxSxKxd, v_BxSxKxd))
    out = []
    for first in range(0, T, C):
        end = min(first + C, T)
        rows = q[:, :, :, first:end].reshape(B, K, G * (end - first), d)
        scores = jnp.einsum("BKRd,BKSd->BKRS", rows, k[:, :, :end], preferred_element_type=jnp.float32) * d**-0.5
        mask = packed_mask(positions, segments, window, parents, first, end)[:, None, None]
        scores = jnp.where(mask, scores.reshape(B, K, G, end - first, end), NEGATIVE)
        weights = jnp.exp(scores - lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
        total = weights.sum(axis=-1)[..., None]
        values = jnp.einsum("BKRS,BKSd->BKRd", weights.reshape(B, K, -1, end).astype(v.dtype), v[:, :, :end],
                            preferred_element_type=jnp.float32)  # fmt: skip
        out.append((values.reshape(B, K, G, end - first, d) / total).astype(v.dtype))
    whole = jnp.concatenate(out, axis=3) if len(out) > 1 else out[0]
    return whole.transpose(0, 3, 1, 2, 4).reshape(B, T, H, d)


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
    dealt: tuple[str, ...] = ("data", "fsdp"),
) -> jax.Array:
    """Causal attention [B,T,H,d] inside segments; `window` is this layer's (an array, 0 = full) or None.

    parents [B,T]: the segment that a token sees beside its own, 0 = none (models/prefix.py); for 'xla' alone.

    choice: 'xla', 'splash' (TPU kernel) or 'splash_interpret' (the same kernel in Python, for tests). Splash needs all `windows`
    that a layer may have, since it compiles one kernel each, and with several devices the `mesh` of the arrays; its axes `dealt`
    cut the rows (none inside a shard_map over them).
    """
    if choice == "xla":
        return _xla_attention(q, k, v, positions, segments, window, parents)
    if choice not in ("splash", "splash_interpret"):
        raise UserError(f"attention {choice!r} is not known", where="update.attention", expected="xla or splash")
    if parents is not None:
        raise UserError("splash attention has no shared heads", where="update.attention", expected="xla, or share_prefix=false")
    kinds = sorted(set(windows)) if window is not None else [0]
    kernels = [_splash(q.shape[1], q.shape[2], k.shape[2], kind, choice == "splash_interpret", mesh, dealt) for kind in kinds]
    operands = q * q.shape[3] ** -0.5, k, v, segments
    if len(kernels) == 1:
        return kernels[0](*operands)
    return jax.lax.switch(jnp.searchsorted(jnp.asarray(kinds), window), kernels, *operands)


def _splash(
    T: int, H: int, K: int, window: int, interpret: bool, mesh: Mesh | None, dealt: tuple[str, ...]
) -> Callable[..., jax.Array]:
    """Pallas splash attention of (scaled q, k, v, segments) for one window; a mesh cuts rows (dealt) and heads (tensor)."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    if T % 128:
        raise UserError(f"splash attention can't run rows of {T} tokens", where="update.pack_length",
                        expected="a multiple of 128, or update.attention=xla")  # fmt: skip
    tensor = mesh.shape["tensor"] if mesh is not None and "tensor" not in dealt and K % mesh.shape["tensor"] == 0 else 1
    one = splash.CausalMask((T, T)) if window == 0 else splash.LocalMask((T, T), (window - 1, 0), 0)
    block = splash_block(T)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
        block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([one] * (H // tensor)), block_sizes=sizes, interpret=interpret, residual_checkpoint_name=KEPT
    )

    def row(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        return _among_segments(kernel, segments, block)(q, k, v, segment_ids=splash.SegmentIds(segments, segments))

    def run(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        out = jax.vmap(row)(q, k, v, segments)
        return out.transpose(0, 2, 1, 3)

    if mesh is None:
        return run
    heads = P(dealt or None, None, "tensor" if tensor > 1 else None, None)
    specs: dict[str, Any] = {"in_specs": (heads, heads, heads, P(dealt or None)), "out_specs": heads}
    # the kernel is opaque to the partitioner and has no rule for which axes its outputs vary over
    if not dealt:  # the rows are those of one device already, in a shard_map that knows the mesh
        return jax.shard_map(run, **specs, axis_names={"tensor"}, check_vma=False)
    return jax.shard_map(run, mesh=mesh, **specs, check_vma=False)


def splash_block(T: int) -> int:
    """Queries, and keys, of a block of the kernel."""
    return next(b for b in (512, 384, 256, 128) if T % b == 0)


def related_blocks(segments_T: Any, block: int) -> Any:
    """May a token of query block i and one of key block j be of one segment? [N,N] bool (causality not looked at). Blocks of
    padding alone see themselves, so that their sums are not empty. For arrays of NumPy and of JAX alike."""
    xp = np if isinstance(segments_T, np.ndarray) else jnp
    blocks = segments_T.reshape(-1, block)
    first, last = xp.where(blocks == 0, xp.iinfo(xp.int32).max, blocks).min(1), blocks.max(1)
    return (first[:, None] <= last[None]) & (first[None] <= last[:, None]) | xp.eye(len(blocks), dtype=bool)


def _among_segments(kernel: Any, segments_T: jax.Array, block: int) -> Any:
    """The kernel of one row, with blocks that hold no pair of one segment left out: a packed row costs what its segments cost.

    The kernel walks a table of blocks; an entry of 0 computes nothing, and a block index that repeats fetches nothing.
    """
    related = related_blocks(segments_T, block)
    N = related.shape[0]
    earliest, latest = jnp.argmax(related, axis=1), N - 1 - jnp.argmax(related[::-1], axis=0)

    def cut(info: Any, by_keys: bool) -> Any:
        at = info.data_next[0].astype(jnp.int32)  # key block of cell (query block, n); in dkv query block of (n, key block)
        own = jnp.arange(at.shape[by_keys])
        keep = related[at, own[None]] if by_keys else related[own[:, None], at]
        near = jnp.minimum(at, latest[None]) if by_keys else jnp.maximum(at, earliest[:, None])
        mask = jnp.where(keep, info.block_mask[0], 0).astype(info.block_mask.dtype)
        return info._replace(data_next=near.astype(info.data_next.dtype)[None], block_mask=mask[None])

    infos = cut(kernel.fwd_mask_info, False), cut(kernel.dq_mask_info, False), cut(kernel.dkv_mask_info, True)
    return type(kernel)(*infos, **kernel.kwargs)
