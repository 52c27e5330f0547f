"""scalar: a reward model with a scalar head scores (question, answer), without a rubric and without writing anything.

The conversation is rendered by the model's own template, without a system prompt of ours and without the head of a further turn;
its last token is where the head is read. Pairs are packed into rows of a few compiled lengths, each pair seeing itself alone; one
that is longer than `judge.max_prompt` (0: `sampler.max_prompt`) is refused, never cut. The verdict is the raw logit, or its
sigmoid (judge.scalar).

Axes: B rows, T positions of a row, M sequences of a batch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from coevo_jax.config import JudgeConfig, SamplerConfig
from coevo_jax.judges.base import JudgeItem, check_items
from coevo_jax.mesh import batch_sharding, replicated
from coevo_jax.models.scalar import scalar_values
from coevo_jax.models.spec import ModelSpec
from coevo_jax.records.verdicts import Verdict, failed
from coevo_jax.text.chat import ChatTokenizer

SHORTEST = 128  # positions of the shortest compiled row; splash runs multiples of 128
LEAST = 8  # positions a sequence takes of the bound on a batch's sequences


def conversation(tokenizer: ChatTokenizer, question: str, answer: str) -> list[int]:
    """Token ids of a conversation that a reward model reads, in training as in judging. The template decides about the first
    token, and nothing adds it again."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return tokenizer.render(messages, thinking=False, system=None, add_generation_prompt=False)


class RewardModel:
    """A reward model and its compiled programs, one for each length of rows. params: of models.load.load_scalar; attention: of
    models.attention (xla holds the square of a row's length)."""

    def __init__(
        self, spec: ModelSpec, params: Any, tokenizer: ChatTokenizer, cfg: SamplerConfig, dtype: Any = jnp.float32,
        attention: str = "xla", mesh: Mesh | None = None,
    ):  # fmt: skip
        self.spec, self.params, self.tokenizer, self.mesh = spec, params, tokenizer, mesh
        self.limit = cfg.max_prompt
        self.lengths = row_lengths(cfg.max_prompt)
        self._budget = cfg.prefill_tokens
        self._shards = 1 if mesh is None else math.prod(mesh.shape.get(axis, 1) for axis in ("data", "fsdp"))
        program = functools.partial(scalar_values, spec=spec, dtype=jnp.dtype(dtype), attention=attention, mesh=mesh)
        self._program = jax.jit(program)

    def warm_up(self) -> None:
        """Compile the program of every length of rows."""
        for T in self.lengths:
            self._run([np.zeros(1, np.int32)], T)

    def ids(self, question: str, answer: str) -> list[int]:
        """Token ids of the conversation."""
        return conversation(self.tokenizer, question, answer)

    def logits(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
        """The head's value at the end of each sequence, float32, in their order."""
        arrays = [np.asarray(ids, np.int32) for ids in sequences]
        out = np.zeros(len(arrays), np.float32)
        if not arrays:
            return out
        T = next(n for n in self.lengths if n >= max(map(len, arrays)))
        # By content: the same pairs meet in the same rows whatever order they came in.
        pending = sorted(range(len(arrays)), key=lambda i: (-len(arrays[i]), arrays[i].tobytes(), i))
        while pending:
            taken = _fitting([len(arrays[i]) for i in pending], self._rows(T), T, self._most(T))
            chosen = [pending[i] for i in taken]
            out[chosen] = self._run([arrays[i] for i in chosen], T)
            pending = [i for i in pending if i not in set(chosen)]
        return out

    def _rows(self, T: int) -> int:
        return -(-max(self._budget // T, 1) // self._shards) * self._shards

    def _most(self, T: int) -> int:
        return self._rows(T) * (T // LEAST)

    def _run(self, arrays: list[np.ndarray], T: int) -> np.ndarray:
        """Values of sequences that fit into one batch of rows of T positions."""
        batch = _pack(arrays, self._rows(T), T)
        last = np.zeros(self._most(T), np.int32)
        last[: len(arrays)] = batch.last
        values = self._program(self.params, **self._placed(batch, last))
        return np.asarray(values)[: len(arrays)]

    def _placed(self, batch: _Rows, last: np.ndarray) -> dict[str, Any]:
        rows = {"tokens_BxT": batch.tokens, "positions_BxT": batch.positions, "segments_BxT": batch.segments}
        if self.mesh is None:
            return rows | {"last_M": last}
        placed = {name: jax.device_put(x, batch_sharding(self.mesh)) for name, x in rows.items()}
        return placed | {"last_M": jax.device_put(last, replicated(self.mesh))}


@dataclasses.dataclass
class _Rows:
    tokens: np.ndarray  # [B,T]
    positions: np.ndarray
    segments: np.ndarray
    last: np.ndarray  # flat position of each sequence's last token


def row_lengths(longest: int) -> list[int]:
    """Lengths of rows to compile: from SHORTEST, doubling, to the first that holds `longest` (a multiple of 128)."""
    last = -(-longest // SHORTEST) * SHORTEST
    out = [SHORTEST]
    while out[-1] < last:
        out.append(min(2 * out[-1], last))
    return out


def _fitting(lengths: Sequence[int], rows: int, T: int, most: int) -> list[int]:
    """Which sequences, given longest first, fit into the rows, first fit."""
    room = [T] * rows
    taken: list[int] = []
    for i, n in enumerate(lengths):
        row = next((r for r, free in enumerate(room) if free >= n), None)
        if row is not None and len(taken) < most:
            room[row] -= n
            taken.append(i)
    return taken


def _pack(arrays: Sequence[np.ndarray], rows: int, T: int) -> _Rows:
    """Rows of the sequences, first fit, segments from 1 in each row."""
    tokens, positions, segments = np.zeros((3, rows, T), np.int32)
    out = _Rows(tokens, positions, segments, np.zeros(len(arrays), np.int32))
    ends, counts = [0] * rows, [0] * rows
    for i, ids in enumerate(arrays):
        row = next(r for r in range(rows) if T - ends[r] >= len(ids))
        at = np.s_[row, ends[row] : ends[row] + len(ids)]
        counts[row] += 1
        out.tokens[at], out.positions[at], out.segments[at] = ids, np.arange(len(ids)), counts[row]
        ends[row] += len(ids)
        out.last[i] = row * T + ends[row] - 1
    return out


@dataclasses.dataclass(frozen=True)
class ScalarJudge:
    """The judge of this protocol."""

    cfg: JudgeConfig
    instrument: RewardModel
    name: str = "scalar"

    def judge(self, items: list[JudgeItem], update: int) -> list[Verdict]:
        """One verdict an item, in their order. There is no noise, so no retry."""
        check_items(items)
        ids = [self.instrument.ids(item.question, item.answer) for item in items]
        fits = [len(own) <= self.instrument.limit for own in ids]
        values = iter(self.instrument.logits([own for own, ok in zip(ids, fits) if ok]))
        return [self._verdict(float(next(values))) if ok else self._refused(own) for own, ok in zip(ids, fits)]

    def _verdict(self, logit: float) -> Verdict:
        if not math.isfinite(logit):
            return failed("parse_fail", f"the reward model's logit is {logit}")
        if self.cfg.scalar == "sigmoid":
            return Verdict("ok", 1.0 / (1.0 + math.exp(-logit)) if logit > -700 else 0.0, f"{logit:.9g}")
        return Verdict("ok", logit, f"{logit:.9g}", bounded=False)

    def _refused(self, ids: Sequence[int]) -> Verdict:
        limit = self.instrument.limit
        return failed("refused", f"a conversation of {len(ids)} tokens, more than {limit} (judge. or sampler.max_prompt)")
