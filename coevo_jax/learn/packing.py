"""Samples packed into rows, on the host; the arrays that a loss sees.

Axes: M micro-batches, B rows of one, T tokens of a row, S segments of a row.
Segment ids of a row are 1..S in order, 0 is padding; positions restart at every segment. Position t carries what belongs to the
token it predicts, t + 1 of the same segment: `targets`, `mask`, `sampler_logp` and `advantage` are aligned with `logp`, not with
`tokens`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import struct

from coevo_jax.config import UpdateConfig
from coevo_jax.errors import UserError
from coevo_jax.models.prefix import SharedRow, shared_rows


@dataclasses.dataclass
class Sample:
    """One completion to train on, as sampled: ids with the stop id, log-probs of the distribution they were drawn from."""

    prompt: Sequence[int] | np.ndarray
    completion: np.ndarray
    sampler_logp: np.ndarray
    advantage: float
    group: int
    index: int
    truncated: bool = False
    heldout: bool = False  # supervised data that is only looked at

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt) + len(self.completion)


class TokenBatch(struct.PyTreeNode):
    """Packed rows [M,B,T] and their segments [M,B,S]; a loss sees one micro-batch of it, [B,T] and [B,S].

    mask: the target is a completion token that trains. owner: index of a segment's sample in the packed list, -1 for none.
    parent_ids [.,B,T]: the segment of a shared head that a token sees beside its own, 0 for none (models/prefix.py).
    old_logp, ref_logp: log-probs under the weights before this batch and under the reference, None where no pass computed them.
    """

    tokens: Any
    positions: Any
    segment_ids: Any
    targets: Any
    mask: Any
    advantage: Any
    sampler_logp: Any
    truncated: Any
    owner: Any
    parent_ids: Any = None
    old_logp: Any = None
    ref_logp: Any = None


def pack(samples: Sequence[Sample], cfg: UpdateConfig, *, devices: int = 1, rows: int = 0) -> TokenBatch:
    """Rows of whole samples; the same samples in the same order give the same rows.

    A micro-batch has cfg.rows_per_micro rows, rounded up to a multiple of `devices` (those that rows are spread over). So that
    few shapes are compiled, the number of micro-batches is what `rows` rows need, or the next power of two where samples need
    more; the update does not run empty ones. UserError for a sample longer than cfg.pack_length. No samples: `rows`
    of padding, for a process that takes part in the update of others.
    """
    if not samples and not rows:
        raise ValueError("no samples to pack")
    for i, sample in enumerate(samples):
        _check(sample, i, cfg)
    bins = plan_rows(samples, cfg)
    height = -(-cfg.rows_per_micro // devices) * devices
    micro = max(-(-rows // height), 1)
    needed = -(-len(bins) // height)
    if needed > micro:
        micro = 1 << (needed - 1).bit_length()
    batch = _empty(micro * height, cfg.pack_length, cfg.max_segments)
    for row, members in enumerate(bins):
        _fill_row(batch, row, members, samples)
    return TokenBatch(**{name: x.reshape(micro, height, *x.shape[1:]) for name, x in batch.items()})


def with_micro_batches(batch: TokenBatch, micro: int) -> TokenBatch:
    """The batch with empty micro-batches up to `micro` of them."""
    missing = micro - batch.tokens.shape[0]

    def widen(name: str, x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.full((missing, *x.shape[1:]), -1 if name == "owner" else 0, x.dtype)])

    if missing <= 0:
        return batch
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return batch.replace(**{name: widen(name, x) for name, x in fields.items() if x is not None})


def plan_rows(samples: Sequence[Sample], cfg: UpdateConfig) -> list[SharedRow]:
    """Rows for the samples: plain first-fit, or with shared heads where those need fewer rows (cfg.share_prefix)."""
    lengths = [s.length for s in samples]
    plain = [SharedRow(tuple(b), 0) for b in first_fit(lengths, cfg.pack_length, cfg.max_segments)]
    if not cfg.share_prefix or cfg.attention != "xla" or cfg.max_segments < 3:
        return plain
    prompts = [np.asarray(s.prompt, np.int32) for s in samples]
    shared = shared_rows(prompts, lengths, cfg.pack_length, cfg.max_segments - 1)  # the head takes a segment
    return shared if len(shared) < len(plain) else plain


def first_fit(lengths: Sequence[int], capacity: int, max_segments: int) -> list[list[int]]:
    """Indices per bin, first-fit-decreasing; equal lengths in their given order."""
    bins: list[list[int]] = []
    free: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = next((b for b, room in enumerate(free) if room >= lengths[i] and len(bins[b]) < max_segments), None)
        if at is None:
            bins.append([])
            free.append(capacity)
            at = len(bins) - 1
        bins[at].append(i)
        free[at] -= lengths[i]
    return bins


def unpack(values_MxBxT: Any, batch: TokenBatch) -> list[np.ndarray]:
    """Per-token values of the completions, one array a sample, in the order of the packed list."""
    values, owner = np.asarray(values_MxBxT), np.asarray(batch.owner)
    segments, mask = np.asarray(batch.segment_ids), np.asarray(batch.mask)
    out: list[np.ndarray] = [np.zeros(0)] * int(owner.max() + 1)
    for m, b, s in np.argwhere(owner >= 0):
        out[owner[m, b, s]] = values[m, b][(segments[m, b] == s + 1) & mask[m, b]]
    return out


def _check(sample: Sample, i: int, cfg: UpdateConfig) -> None:
    name = f"sample {i} (group {sample.group}, sample {sample.index} of it)"
    if sample.length > cfg.pack_length:
        raise UserError(
            f"a sample of {sample.length} tokens is longer than a packed row of {cfg.pack_length}",
            where=f"{name}, update.pack_length", expected=f"update.pack_length of at least {sample.length}",
        )  # fmt: skip
    if not len(sample.prompt) or not len(sample.completion):
        raise ValueError(f"{name} has an empty prompt or completion: {len(sample.prompt)} and {len(sample.completion)} tokens")
    if len(sample.sampler_logp) != len(sample.completion):
        raise ValueError(f"{name}: {len(sample.sampler_logp)} log-probs for {len(sample.completion)} completion tokens")


def _empty(rows: int, T: int, S: int) -> dict[str, np.ndarray]:
    names = ("tokens", "positions", "segment_ids", "targets", "parent_ids")
    ints = {name: np.zeros((rows, T), np.int32) for name in names}
    floats = {name: np.zeros((rows, T), np.float32) for name in ("advantage", "sampler_logp")}
    segments = {"truncated": np.zeros((rows, S), bool), "owner": np.full((rows, S), -1, np.int32)}
    return {**ints, **floats, **segments, "mask": np.zeros((rows, T), bool)}


def _fill_row(batch: dict[str, np.ndarray], row: int, shared: SharedRow, samples: Sequence[Sample]) -> None:
    start, first = 0, 1 if shared.head else 0
    if shared.head:
        batch["tokens"][row, : shared.head] = samples[shared.members[0]].prompt[: shared.head]
        batch["positions"][row, : shared.head] = np.arange(shared.head)
        batch["segment_ids"][row, : shared.head] = 1
        start = shared.head
    for s, i in enumerate(shared.members, start=first):
        sample = samples[i]
        ids = np.concatenate([np.asarray(sample.prompt, np.int32)[shared.head :], np.asarray(sample.completion, np.int32)])
        end = start + len(ids)
        trained = slice(end - len(sample.completion) - 1, end - 1)  # by length: the stop token is in, no value is looked at
        batch["tokens"][row, start:end] = ids
        batch["positions"][row, start:end] = shared.head + np.arange(len(ids))
        batch["segment_ids"][row, start:end] = s + 1
        batch["parent_ids"][row, start:end] = first
        batch["targets"][row, start : end - 1] = ids[1:]
        batch["mask"][row, trained] = True
        batch["advantage"][row, trained] = sample.advantage
        batch["sampler_logp"][row, trained] = sample.sampler_logp
        batch["truncated"][row, s] = sample.truncated
        batch["owner"][row, s] = i
        start = end
