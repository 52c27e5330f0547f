"""Training on preference pairs: both answers of a pair packed, a preference loss, one optimizer step; log-probs of the reference.

Axes: M micro-batches, B rows of one, T tokens of a row, S segments of a row.

Both answers of a pair lie in one micro-batch. Where rows may share heads, they share their prompt in one row, computed once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import Mesh

from coevo_jax.config import DpoConfig, Experiment, UpdateConfig
from coevo_jax.errors import UserError
from coevo_jax.learn.losses import segment_sums
from coevo_jax.learn.preference_losses import PairLogps, log_ratios, pair_losses, sft_losses
from coevo_jax.learn.update import (
    Metrics,
    Optimizer,
    TrainState,
    apply_gradients,
    batch_logprobs,
    compiler_options,
    in_shardings,
    one_micro,
    state_shardings,
    summed_gradients,
    used_micros,
)
from coevo_jax.mesh import one_cpu, replicated, train_rules
from coevo_jax.models.forward import Params
from coevo_jax.models.lora import whole
from coevo_jax.models.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class PreferenceSample:
    """Token ids of a prompt and of two answers to it, the first one preferred, each with its end token where it has one.

    reference: summed log-probs of both answers under the reference. heldout: only looked at."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray
    reference: tuple[float, float] = (0.0, 0.0)
    heldout: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the prompt and the longer answer."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


class PreferenceBatch(struct.PyTreeNode):
    """Packed rows [M,B,T] and their segments [M,B,S].

    mask: the target is a token of an answer. parent_ids: the segment of a shared prompt that a token sees beside its own.
    owner: 2 i of the chosen and 2 i + 1 of the rejected answer of pair i, -1 for none. reference: the segment's summed log-prob.
    chosen: is the segment the better answer of a pair; only there have `partner_rows` (rows from it to its partner) and `partner`
    (the partner's segment) a meaning.
    """

    tokens: Any
    positions: Any
    segment_ids: Any
    parent_ids: Any
    targets: Any
    mask: Any
    owner: Any
    reference: Any
    chosen: Any
    partner_rows: Any
    partner: Any


# --------------------------------------------------------------------------------------------------------------- packing


class _Place(NamedTuple):
    """Where a segment lies: row of its micro-batch, number in the row, first position."""

    row: int
    segment: int
    start: int


class _Placed(NamedTuple):
    """The places of a pair's answers, and of the prompt that they share, if they do."""

    chosen: _Place
    rejected: _Place
    head: _Place | None


def pack_preferences(
    pairs: Sequence[PreferenceSample], cfg: UpdateConfig, *, devices: int = 1, most: int = 0, first: int = 0
) -> PreferenceBatch:
    """Rows of whole answers, longest pairs first; the same pairs give the same rows. first: number of the first pair in `owner`.

    A micro-batch has cfg.rows_per_micro rows, rounded up to a multiple of `devices`, two at least. As many micro-batches as
    `most` pairs of the longest answers need: one shape, and the update does not run empty ones.
    """
    height = -(-cfg.rows_per_micro // devices) * devices
    if height < 2:
        raise UserError("a pair of answers may need two rows of one micro-batch", where="update.rows_per_micro",
                        expected="at least 2 (a process of several)")  # fmt: skip
    for i, pair in enumerate(pairs):
        _check(pair, i, cfg)
    micros = _plan(pairs, height, cfg)
    M = max(-(-max(most, len(pairs)) // (height // 2)), 1)
    batch = _empty((M, height), cfg.pack_length, cfg.max_segments)
    for m, members in enumerate(micros):
        for i, placed in members.items():
            _fill(batch, m, placed, pairs[i], first + i)
    return PreferenceBatch(**batch)


def shares(cfg: UpdateConfig) -> bool:
    """May the answers of a pair share their prompt?"""
    return cfg.share_prefix and cfg.attention == "xla" and cfg.max_segments >= 3


def _check(pair: PreferenceSample, i: int, cfg: UpdateConfig) -> None:
    if pair.longest > cfg.pack_length:
        raise UserError(
            f"a prompt and its answer of {pair.longest} tokens are longer than a packed row of {cfg.pack_length}",
            where=f"pair {i}, update.pack_length", expected=f"update.pack_length of at least {pair.longest}",
        )  # fmt: skip
    if not len(pair.prompt) or not len(pair.chosen) or not len(pair.rejected):
        raise ValueError(f"pair {i} has an empty prompt or answer")


def _plan(pairs: Sequence[PreferenceSample], height: int, cfg: UpdateConfig) -> list[dict[int, _Placed]]:
    """For each micro-batch, where its pairs lie: first fit, pairs of more tokens first."""
    micros: list[tuple[list[int], list[int], dict[int, _Placed]]] = []
    sizes = [2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected) for pair in pairs]
    for i in sorted(range(len(pairs)), key=lambda i: -sizes[i]):
        for ends, counts, members in micros:
            if (placed := _place(pairs[i], ends, counts, cfg)) is not None:
                members[i] = placed
                break
        else:
            ends, counts = [0] * height, [0] * height
            placed = _place(pairs[i], ends, counts, cfg)
            assert placed is not None  # an empty micro-batch has two rows
            micros.append((ends, counts, {i: placed}))
    return [members for _, _, members in micros]


def _place(pair: PreferenceSample, ends: list[int], counts: list[int], cfg: UpdateConfig) -> _Placed | None:
    """Into the first row with room for both behind a shared prompt, else into the first rows with room for each, or nowhere."""
    head = len(pair.prompt) - 1  # its last token predicts an answer's first one, so each answer has its own
    lengths = len(pair.chosen), len(pair.rejected)
    if shares(cfg) and head > 0 and head + sum(n + 1 for n in lengths) <= cfg.pack_length:
        room = _put([head, lengths[0] + 1, lengths[1] + 1], ends, counts, cfg)
        return _Placed(room[1], room[2], room[0]) if room else None
    before = list(ends), list(counts)
    places = [_put([len(pair.prompt) + n], ends, counts, cfg) for n in lengths]
    if not all(places):
        ends[:], counts[:] = before
        return None
    return _Placed(places[0][0], places[1][0], None)


def _put(sizes: list[int], ends: list[int], counts: list[int], cfg: UpdateConfig) -> list[_Place]:
    """Segments of these sizes one behind the other in the first row that has room; none where no row has."""
    for row, end in enumerate(ends):
        if cfg.pack_length - end >= sum(sizes) and counts[row] + len(sizes) <= cfg.max_segments:
            out = []
            for size in sizes:
                out.append(_Place(row, counts[row], ends[row]))
                ends[row] += size
                counts[row] += 1
            return out
    return []


def _empty(rows: tuple[int, int], T: int, S: int) -> dict[str, np.ndarray]:
    names = ("tokens", "positions", "segment_ids", "parent_ids", "targets")
    tokens = {name: np.zeros((*rows, T), np.int32) for name in names}
    segments = {name: np.zeros((*rows, S), np.int32) for name in ("partner_rows", "partner")}
    segments |= {"owner": np.full((*rows, S), -1, np.int32), "chosen": np.zeros((*rows, S), bool)}
    return tokens | segments | {"mask": np.zeros((*rows, T), bool), "reference": np.zeros((*rows, S), np.float32)}


def _fill(batch: dict[str, np.ndarray], m: int, placed: _Placed, pair: PreferenceSample, number: int) -> None:
    prompt = np.asarray(pair.prompt, np.int32)
    shared = 0 if placed.head is None else len(prompt) - 1
    if placed.head is not None:
        inside = np.s_[m, placed.head.row, placed.head.start : placed.head.start + shared]
        batch["tokens"][inside], batch["positions"][inside] = prompt[:shared], np.arange(shared)
        batch["segment_ids"][inside] = placed.head.segment + 1
    for side, (place, answer) in enumerate(((placed.chosen, pair.chosen), (placed.rejected, pair.rejected))):
        ids = np.concatenate([prompt[shared:], np.asarray(answer, np.int32)])
        row, end = (m, place.row), place.start + len(ids)
        inside = np.s_[*row, place.start : end]
        batch["tokens"][inside], batch["positions"][inside] = ids, shared + np.arange(len(ids))
        batch["segment_ids"][inside] = place.segment + 1
        batch["parent_ids"][inside] = 0 if placed.head is None else placed.head.segment + 1
        batch["targets"][np.s_[*row, place.start : end - 1]] = ids[1:]
        batch["mask"][np.s_[*row, end - len(answer) - 1 : end - 1]] = True  # by length: the end token is in
        batch["owner"][*row, place.segment] = 2 * number + side
        batch["reference"][*row, place.segment] = pair.reference[side]
    at = np.s_[m, placed.chosen.row, placed.chosen.segment]
    batch["chosen"][at] = True
    batch["partner_rows"][at], batch["partner"][at] = placed.rejected.row - placed.chosen.row, placed.rejected.segment


# ------------------------------------------------------------------------------------------------------------------ loss


class Counts(NamedTuple):
    """Of the whole batch, at least 1: pairs, and tokens of answers."""

    pairs: jax.Array
    tokens: jax.Array


def count_pairs(batch: PreferenceBatch) -> Counts:
    """Denominators of a whole batch."""
    return Counts(*(jnp.maximum(x.sum(), 1).astype(jnp.float32) for x in (batch.chosen, batch.mask)))


def pair_logps(logp: jax.Array, batch: PreferenceBatch) -> PairLogps:
    """Per-token log-probs [B,T] as those of pairs, [B,S] at the chosen answers' segments."""
    B, S = batch.chosen.shape
    at = (jnp.arange(B, dtype=jnp.int32)[:, None] + batch.partner_rows) * S + batch.partner
    sums = segment_sums(logp, cast(Any, batch))
    tokens = segment_sums(jnp.ones_like(logp), cast(Any, batch))
    other = lambda x: jnp.take(x.reshape(-1), at)  # noqa: E731
    return PairLogps(sums, other(sums), batch.reference, other(batch.reference), tokens, other(tokens))


def preference_loss(
    logp: jax.Array, entropy: jax.Array, batch: PreferenceBatch, counts: Counts, cfg: DpoConfig
) -> tuple[jax.Array, Metrics]:
    """This micro-batch's part of the mean loss over all pairs, and metrics. logp, entropy [B,T] of one micro-batch.

    rewards: beta times the log-ratios of the loss; accuracies: share of pairs whose chosen answer has the larger one, a tie
    counting one half (at the reference all are ties).
    """
    logps = pair_logps(logp, batch)
    c, r = log_ratios(logps, cfg.loss)

    def mean(x: jax.Array) -> jax.Array:
        return jnp.where(batch.chosen, x, jnp.zeros_like(x)).sum() / counts.pairs

    preference = mean(pair_losses(c, r, cfg))
    loss, metrics = preference, {"loss/preference": preference}
    if cfg.sft_weight > 0:
        metrics["loss/sft"] = cfg.sft_weight * mean(sft_losses(logps))
        loss = loss + metrics["loss/sft"]
    metrics |= {"rewards/chosen": cfg.beta * mean(c), "rewards/rejected": cfg.beta * mean(r)}
    metrics |= {"rewards/margins": cfg.beta * mean(c - r), "rewards/accuracies": mean(0.5 + 0.5 * jnp.sign(c - r))}
    metrics |= {"logps/chosen": mean(logps.chosen), "logps/rejected": mean(logps.rejected)}
    metrics["entropy"] = jnp.where(batch.mask, entropy, jnp.zeros_like(entropy)).sum() / counts.tokens
    return loss, metrics


# ---------------------------------------------------------------------------------------------------------------- update


def make_preference_update(spec: ModelSpec, optimizer: Optimizer, cfg: Experiment, mesh: Mesh | None = None) -> Any:
    """jitted `update(state, batch [M,B,T]) -> (state, metrics)`; the state passed in is donated. As learn.update.make_update."""
    rules, pieces = train_rules(cfg.mesh), one_cpu(mesh)

    def update(state: TrainState, batch: PreferenceBatch, base: Any = None) -> tuple[TrainState, Metrics]:
        counts = count_pairs(batch)

        def micro_loss(params: Params, micro: Any) -> tuple[jax.Array, Metrics]:
            logp, entropy = batch_logprobs(whole(spec, base, params), spec, micro, 1.0, cfg, mesh)
            loss, metrics = preference_loss(logp, entropy, micro, counts, cfg.dpo)
            return loss, {"loss": loss, **metrics}

        grads, metrics = summed_gradients(micro_loss, state.params, cast(Any, batch), spec, mesh, rules)
        state, applied = apply_gradients(state, grads, optimizer, pieces)
        return state, {**metrics, **applied, "tokens/trained": batch.mask.sum().astype(jnp.float32)}

    out = None if mesh is None else (state_shardings(spec, optimizer, mesh, rules), replicated(mesh))
    places = in_shardings(mesh, rules, temperature=False, base=spec.lora is not None)
    return jax.jit(update, donate_argnums=0, in_shardings=places, out_shardings=out, compiler_options=compiler_options(mesh))


def make_preference_scores(spec: ModelSpec, cfg: Experiment, mesh: Mesh | None = None) -> Any:
    """jitted `scores(params, batch [M,B,T]) -> metrics`: loss and metrics of pairs that are not trained on."""

    def scores(params: Params, batch: PreferenceBatch) -> Metrics:
        counts = count_pairs(batch)

        def found(params: Params, micro: Any, mesh: Mesh | None) -> Metrics:
            loss, metrics = preference_loss(*batch_logprobs(params, spec, micro, 1.0, cfg, mesh), micro, counts, cfg.dpo)
            return {"loss": loss, **metrics}

        def step(i: jax.Array, sums: Metrics) -> Metrics:
            micro = one_micro(cast(Any, batch), i, mesh, train_rules(cfg.mesh))
            return {name: sums[name] + x for name, x in found(params, micro, mesh).items()}

        shapes = jax.eval_shape(lambda p, b: found(p, b, None), params, jax.tree.map(lambda x: x[0], batch))
        start = {name: jnp.zeros((), jnp.float32) for name in shapes}
        return lax.fori_loop(0, used_micros(cast(Any, batch)), step, start)

    return _look(scores, cfg, mesh)


def make_reference_logps(spec: ModelSpec, cfg: Experiment, mesh: Mesh | None = None) -> Any:
    """jitted `logps(params, batch [M,B,T]) -> (sums [M,B,S] float32, owner [M,B,S])`: the summed log-prob of every answer, by the
    functions that the update differentiates."""

    def logps(params: Params, batch: PreferenceBatch) -> tuple[jax.Array, jax.Array]:
        def step(i: jax.Array, out: jax.Array) -> jax.Array:
            micro = one_micro(cast(Any, batch), i, mesh, train_rules(cfg.mesh))
            logp, _ = batch_logprobs(params, spec, micro, 1.0, cfg, mesh)
            return lax.dynamic_update_index_in_dim(out, segment_sums(logp, micro), i, 0)

        sums = jnp.zeros(batch.owner.shape, jnp.float32)
        return lax.fori_loop(0, used_micros(cast(Any, batch)), step, sums), batch.owner

    return _look(logps, cfg, mesh)


def _look(function: Any, cfg: Experiment, mesh: Mesh | None) -> Any:
    """A pass without gradients whose results every process reads whole."""
    places = in_shardings(mesh, train_rules(cfg.mesh), temperature=False)
    out = None if mesh is None else replicated(mesh)
    return jax.jit(function, in_shardings=places, out_shardings=out, compiler_options=compiler_options(mesh))
