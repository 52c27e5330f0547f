"""Attention over packed rows: an XLA einsum everywhere, pairs of blocks on one CPU, splash attention on TPU; one switch.

Axes: B batch, T query time, C time of a block of queries, S key time, H heads, K kv heads, G query heads a kv head, d head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from coevo_jax.errors import UserError
from coevo_jax.mesh import one_cpu
from coevo_jax.models.pair_attention import pair_attention

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
    along: tuple[str, ...] = (),
) -> jax.Array:
    """Causal attention [B,T,H,d] inside segments; `window` is this layer's (an array, 0 = full) or None.

    parents [B,T]: the segment that a token sees beside its own, 0 = none (models/prefix.py); for 'xla' alone.

    choice: 'xla', 'splash' (TPU kernel) or 'splash_interpret' (the same kernel in Python, for tests). Splash needs all `windows`
    that a layer may have, since it compiles one kernel each, and with several devices the `mesh` of the arrays; its axes `dealt`
    cut the rows (none inside a shard_map over them), and `along` their time, which then lies in `time_order`.
    """
    if choice == "xla" and one_cpu(mesh):
        return pair_attention(q, k, v, positions, segments, window, parents)
    if choice == "xla":
        return _xla_attention(q, k, v, positions, segments, window, parents)
    if choice not in ("splash", "splash_interpret"):
        raise UserError(f"attention {choice!r} is not known", where="update.attention", expected="xla or splash")
    if parents is not None:
        raise UserError("splash attention has no shared heads", where="update.attention", expected="xla, or share_prefix=false")
    kinds = sorted(set(windows)) if window is not None else [0]
    interpret = choice == "splash_interpret"
    if mesh is not None and math.prod(mesh.shape[axis] for axis in along) > 1:
        kernels = [_splash_along(q.shape[1], q.shape[2], kind, interpret, mesh, dealt, along) for kind in kinds]
    else:
        kernels = [_splash(q.shape[1], q.shape[2], k.shape[2], kind, interpret, mesh, dealt) for kind in kinds]
    operands = q * q.shape[3] ** -0.5, k, v, segments
    if len(kernels) == 1:
        return kernels[0](*operands)
    return jax.lax.switch(jnp.searchsorted(jnp.asarray(kinds), window), kernels, *operands)


def _splash(
    T: int, H: int, K: int, window: int, interpret: bool, mesh: Mesh | None, dealt: tuple[str, ...]
) -> Callable[..., jax.Array]:
    """Pallas splash attention of (scaled q, k, v, segments) for one window; a mesh cuts rows (dealt) and heads (tensor)."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    tensor = mesh.shape["tensor"] if mesh is not None and "tensor" not in dealt and K % mesh.shape["tensor"] == 0 else 1
    block = _block_that_runs(T)
    kernel = _kernel((T, T), H // tensor, window, block, interpret)

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


def _block_that_runs(T: int, chips: int = 1) -> int:
    """splash_block of a row's share. UserError for lengths that the kernel can't run."""
    if T % (128 * chips):
        raise UserError(f"splash attention can't run rows of {T} tokens" + (f" over {chips} chips" if chips > 1 else ""),
                        where="update.pack_length", expected=f"a multiple of {128 * chips}, or update.attention=xla")  # fmt: skip
    return splash_block(T // chips)


def _kernel(shape: tuple[int, int], heads: int, window: int, block: int, interpret: bool) -> Any:
    """Splash of `shape` queries and keys by square blocks."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    one = splash.CausalMask(shape) if window == 0 else splash.LocalMask(shape, (window - 1, 0), 0)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
        block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    return splash.make_splash_mha_single_device(
        splash.MultiHeadMask([one] * heads), block_sizes=sizes, interpret=interpret, residual_checkpoint_name=KEPT
    )


def time_order(T: int, chips: int) -> np.ndarray:
    """Positions of a row [T] in the order in which chips that share its time hold them: blocks of the kernel are dealt in turn,
    so that all chips have about as many blocks to visit wherever a packed row's segments lie."""
    return np.arange(T).reshape(-1, chips, _block_that_runs(T, chips)).transpose(1, 0, 2).ravel()


def _splash_along(
    T: int, H: int, window: int, interpret: bool, mesh: Mesh, dealt: tuple[str, ...], along: tuple[str, ...]
) -> Callable[..., jax.Array]:
    """As _splash where the chips of `along` share a row's time, which lies in `time_order`: each has its part of the queries, and
    gathers all keys and values (of few heads, so little to move)."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    chips = math.prod(mesh.shape[axis] for axis in along)
    own, block = T // chips, _block_that_runs(T, chips)
    kernel = _kernel((own, T), H, window, block, interpret)
    order = time_order(T, chips).astype(np.int32).reshape(chips, own)

    def row(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        index = jnp.asarray(order)[lax.axis_index(along)]
        ids = splash.SegmentIds(segments[index], segments)
        return _part_of_row(kernel, segments, index, block, window)(q, k, v, segment_ids=ids)

    def whole(x: jax.Array) -> jax.Array:
        """[B,own,K,d] of each chip -> [B,K,T,d] in the row's own order. Gathered by a new first axis: along an inner one XLA sums
        the gradient over chips whole before it cuts it."""
        B, _, K, d = x.shape
        blocks = lax.all_gather(x, along, axis=0).reshape(chips, B, own // block, block, K, d)
        return blocks.transpose(1, 4, 2, 0, 3, 5).reshape(B, K, T, d)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        return jax.vmap(row)(q.transpose(0, 2, 1, 3), whole(k), whole(v), segments[:, np.argsort(order.ravel())]).transpose(
            0, 2, 1, 3
        )

    parts = P(dealt or None, along)
    return jax.shard_map(run, mesh=mesh, in_specs=(parts, parts, parts, P(dealt or None)), out_specs=parts, check_vma=False)


def _part_of_row(kernel: Any, segments_T: jax.Array, index: jax.Array, block: int, window: int) -> Any:
    """The kernel for the queries at `index` (whole blocks of them) of a row of T keys: its tables of blocks are made here, since
    which blocks are seen depends on the chip."""
    N = segments_T.shape[0] // block
    at = index[::block] // block  # the row's block that each of the chip's is
    q, k = at[:, None], jnp.arange(N)[None]
    seen = related_blocks(segments_T, block)[at] & (k <= q)
    if window:
        seen &= (k + 1) * block - 1 >= q * block - (window - 1)
    kind = jnp.where(seen, jnp.where((k < q) & (window == 0), 2, 1), 0).astype(jnp.int32)[None]  # 2: nothing to mask
    # A block index that repeats fetches nothing: before the first and after the last block that is seen.
    n = len(at)
    first, last = jnp.argmax(seen, axis=1), N - 1 - jnp.argmax(seen[:, ::-1], axis=1)
    keys = jnp.clip(k, first[:, None], last[:, None])
    first, last = jnp.argmax(seen, axis=0), n - 1 - jnp.argmax(seen[::-1], axis=0)
    queries = jnp.clip(jnp.arange(n)[:, None], first[None], jnp.maximum(last, first)[None])
    info = kernel.fwd_mask_info._replace(mask_next=None, partial_mask_blocks=None, block_mask=kind, q_sequence=index)
    by_query, by_key = (info._replace(data_next=x.astype(jnp.int32)[None]) for x in (keys, queries))
    return type(kernel)(by_query, by_query, by_key, **kernel.kwargs)


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
