"""Packed prefill: tails of sequences, each going on from a shared head or from nothing, in one program.

Sequences lie in rows one behind the other; a block of BLOCK tokens holds tails of one head only, so attention goes block by
block: to the blocks just before it (as many as the longest tail reaches over) and to its head. A long row then costs no square of
its length, and short tails cost no padding.

Axes: L layers, P packed rows, T positions of a row, N blocks of a row, K kv heads, d head width, W positions of a head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from coevo_jax.models.attention import packed_attention
from coevo_jax.models.forward import attention_inputs, attention_output, embed, layer_constants, mlp_block, rms_norm
from coevo_jax.models.rope import rope_tables
from coevo_jax.models.spec import ModelSpec
from coevo_jax.sampler.block_attention import BLOCK, Context, block_attention
from coevo_jax.sampler.kv import KV, encode

Shape = tuple[int, int]  # (rows, positions a row) of a compiled program
BY_BLOCKS = ("xla", "blocks")


@dataclasses.dataclass(frozen=True)
class Span:
    """Tokens to prefill, their first position, and the row and length of the head before them (length 0 = none)."""

    tokens: np.ndarray
    start: int = 0
    head: int = 0


@dataclasses.dataclass(frozen=True)
class Variant:
    """What a program is compiled for: its shape, the longest span, and how wide heads may be (0 = there are none).

    attention: of models.attention, for spans without heads (splash on a TPU); xla is by blocks, all at once, and blocks is the
    same, one after the other (a CPU; one row).
    """

    shape: Shape
    longest: int
    context: int
    attention: str = "xla"


@dataclasses.dataclass
class Packed:
    """Arrays of one packed batch [P,T] and [P,N], and for each span its row and offset."""

    variant: Variant
    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    heads: np.ndarray  # [P,N] row of the store
    head_lengths: np.ndarray  # [P,N]
    places: list[tuple[int, int]]

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """What the program takes."""
        return self.tokens, self.positions, self.segments, self.heads, self.head_lengths

    @property
    def used(self) -> int:
        """Tokens that are not padding."""
        return int((self.segments > 0).sum())


def round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def variants(longest: int, budget: int, rows: int, heads: int, attention: str = "xla") -> list[Variant]:
    """Programs, smallest first; no span is longer than the row of the largest. budget: its tokens, over all rows;
    heads: positions of a row of the store, 0 = nothing is shared.

    The largest shape has cheaper programs for short spans, and two widths of heads. About two thirds of a judge's prompt are
    head: that length has a shape and a width of its own; and the third that is left has programs, where one compiles in a second.
    """
    step = BLOCK if attention in BY_BLOCKS else max(BLOCK, 128)  # splash runs rows of a multiple of 128
    most = round_up(max(longest, budget // rows), step)
    whole, part = round_up(longest, step), round_up(2 * longest // 3, step)
    sizes = sorted({min(whole, 2 * BLOCK), part, min(max(whole, round_up(most // 4, step)), most), most})
    by = attention if attention in BY_BLOCKS else "xla"
    short = {2 * BLOCK, round_up(longest // 3, BLOCK)} if by == "blocks" else {2 * BLOCK}
    out = []
    for T in sizes:
        for width in sorted({0, round_up(2 * heads // 3, BLOCK) if most == T else 0, heads}):
            if not width and attention not in BY_BLOCKS:
                out.append(Variant((rows, T), min(whole, T), 0, attention))
                continue
            spans = {whole, *(short if width else {2 * BLOCK})} if most == T else {T}
            out += [Variant((rows, T), n, width, by) for n in sorted({min(n, whole) for n in spans})]
    return out


def fill(spans: Sequence[Span], shape: Shape) -> list[tuple[int, int]]:
    """Places (row, offset) of as many leading spans as fit; a new head begins a new block."""
    P, T = shape
    row, at, places = 0, 0, []
    last: tuple[int, int] | None = None
    for span in spans:
        head = (span.head, span.start)
        if last is not None and head != last:
            at = round_up(at, BLOCK)
        if at + len(span.tokens) > T:
            row, at = row + 1, 0
        if row >= P or len(span.tokens) > T:
            break
        places.append((row, at))
        at, last = at + len(span.tokens), head
    return places


def choose(spans: Sequence[Span], shapes: Sequence[Variant], at_most: int) -> tuple[int, Variant]:
    """How many leading spans to pack and into which program: the smallest that holds all, else what the largest holds."""
    todo = spans[:at_most]
    longest, widest = max(len(s.tokens) for s in todo), max(s.start for s in todo)
    fitting = [v for v in shapes if v.longest >= longest and v.context >= widest]
    best = next((v for v in fitting if len(fill(todo, v.shape)) == len(todo)), fitting[-1])
    count = len(fill(todo, best.shape))
    longest, widest = max(len(s.tokens) for s in todo[:count]), max(s.start for s in todo[:count])
    return count, next(v for v in shapes if v.shape == best.shape and v.longest >= longest and v.context >= widest)


def pack(spans: Sequence[Span], variant: Variant) -> Packed:
    """Spans in order; segment ids count from 1 in each batch, positions go on from the head."""
    P, T = variant.shape
    places = fill(spans, variant.shape)
    if len(places) < len(spans):
        raise ValueError(f"spans of {[len(s.tokens) for s in spans]} tokens do not fit into {variant}")
    tokens, positions, segments = np.zeros((3, P, T), np.int32)
    heads, lengths = np.zeros((2, P, T // BLOCK), np.int32)
    for i, (span, (row, at)) in enumerate(zip(spans, places)):
        where = np.s_[row, at : at + len(span.tokens)]
        tokens[where], segments[where] = span.tokens, i + 1
        positions[where] = span.start + np.arange(len(span.tokens))
        blocks = np.s_[row, at // BLOCK : -(-(at + len(span.tokens)) // BLOCK)]
        heads[blocks], lengths[blocks] = span.head, span.start
    return Packed(variant, tokens, positions, segments, heads, lengths, places)


def packed_forward(
    params: dict[str, Any],
    tokens_PxT: jax.Array,
    positions_PxT: jax.Array,
    segments_PxT: jax.Array,
    heads_PxN: jax.Array,
    lengths_PxN: jax.Array,
    store: KV | None,
    *,
    spec: ModelSpec,
    variant: Variant,
    dtype: Any,
    kv_dtype: Any = None,
    mesh: Mesh | None = None,
    dealt: tuple[str, ...] = ("data", "fsdp"),
) -> tuple[jax.Array, KV | None]:
    """Final hidden states [P,T,D] and, where kv_dtype is given, the tokens' keys and values (stacked [L,P,...]).

    dealt: mesh axes over which rows are dealt out; () where the caller has made one device's rows of them already.
    """
    x = embed(params, tokens_PxT, dtype)
    cos, sin = rope_tables(spec, positions_PxT)

    def block(x: jax.Array, scanned: Any) -> tuple[jax.Array, KV | None]:
        layer, constants, index = scanned
        q, k, v = attention_inputs(layer, spec, x, cos[constants["rope"]], sin[constants["rope"]])
        context = None if store is None or not variant.context else Context(store, index, heads_PxN, lengths_PxN, variant.context)
        window = constants["window"] if spec.windows else None
        if variant.attention in BY_BLOCKS:
            loop = variant.attention == "blocks"
            attended = block_attention(q, k, v, positions_PxT, segments_PxT, variant.longest, context, window, loop)
        else:
            attended = packed_attention(
                q, k, v, positions_PxT, segments_PxT, window, variant.attention, windows=spec.windows, mesh=mesh, dealt=dealt
            )
        x = mlp_block(layer, spec, attention_output(layer, spec, x, attended))
        return x, None if kv_dtype is None else encode(k, v, kv_dtype)

    scanned = (params["layers"], layer_constants(spec), jnp.arange(spec.layers, dtype=jnp.int32))
    x, kv = lax.scan(block, x, scanned)
    return rms_norm(x, params["final_norm"], spec.norm_eps), kv


def prefill(*args: Any, spec: ModelSpec, variant: Variant, dtype: Any, kv_dtype: Any, mesh: Mesh | None = None) -> KV:
    """Keys and values of packed spans, stacked. No logits are made: a slot's first decode step feeds the prompt's last token.

    With a mesh each group of devices that holds the whole model computes all rows, so that the slots of any of them can take
    them: left to itself XLA deals the rows out and sums hidden states across hosts, twice a layer.
    """

    def run(*args: Any) -> KV:
        kv = packed_forward(*args, spec=spec, variant=variant, dtype=dtype, kv_dtype=kv_dtype, mesh=mesh, dealt=())[1]
        assert kv is not None
        return kv

    if mesh is None:
        return run(*args)
    whole, axes = PartitionSpec(), {a for a in ("data", "fsdp") if a in mesh.shape}
    return jax.shard_map(run, mesh=mesh, in_specs=whole, out_specs=whole, axis_names=axes, check_vma=False)(*args)
