"""A scalar reward model from preference pairs: packed conversations, the Bradley-Terry loss, one optimizer step.

Axes: M micro-batches, B rows of one, T tokens of a row, S segments (conversations) of a row.

Both conversations of a pair lie in one micro-batch, in whatever rows of it. A segment is read at its last token, by position.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import Mesh

from coevo_jax.config import Experiment, RewardConfig, UpdateConfig
from coevo_jax.errors import UserError
from coevo_jax.learn.update import (
    Metrics,
    Optimizer,
    TrainState,
    apply_gradients,
    compiler_options,
    in_shardings,
    in_time_order,
    one_micro,
    state_shardings,
    summed_gradients,
    used_micros,
)
from coevo_jax.mesh import replicated, train_rules
from coevo_jax.models.forward import Params, forward
from coevo_jax.models.lora import whole
from coevo_jax.models.scalar import head_values
from coevo_jax.models.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class PairSample:
    """Token ids of two conversations, the first one preferred; margin: by how much at least, in logits.
    heldout: only looked at."""

    chosen: np.ndarray
    rejected: np.ndarray
    margin: float = 0.0
    heldout: bool = False


class PairBatch(struct.PyTreeNode):
    """Packed rows [M,B,T] and their segments [M,B,S].

    last: position of a segment's last token in its row. chosen: is the segment the better one of a pair; only there have
    `partner_rows` (rows from it to its partner), `partner` (the partner's segment) and `margin` a meaning.
    """

    tokens: Any
    positions: Any
    segment_ids: Any
    last: Any
    chosen: Any
    partner_rows: Any
    partner: Any
    margin: Any


# --------------------------------------------------------------------------------------------------------------- packing


def pack_pairs(pairs: Sequence[PairSample], cfg: UpdateConfig, *, devices: int = 1, most: int = 0) -> PairBatch:
    """Rows of whole conversations, longest pairs first; the same pairs give the same rows.

    A micro-batch has cfg.rows_per_micro rows, rounded up to a multiple of `devices`, two at least. As many micro-batches as
    `most` pairs of the longest conversations need: one shape, and the update does not run empty ones.
    """
    height = -(-cfg.rows_per_micro // devices) * devices
    if height < 2:
        raise UserError("a pair of conversations has two rows of one micro-batch", where="update.rows_per_micro",
                        expected="at least 2 (a process of several)")  # fmt: skip
    for i, pair in enumerate(pairs):
        _check(pair, i, cfg)
    micros = _plan(pairs, height, cfg)
    M = max(-(-max(most, len(pairs)) // (height // 2)), 1)
    batch = _empty((M, height), cfg.pack_length, cfg.max_segments)
    for m, members in enumerate(micros):
        _fill(batch, m, members, pairs)
    return PairBatch(**batch)


Place = tuple[int, int, int]  # row, segment and first position of a conversation


def _plan(pairs: Sequence[PairSample], height: int, cfg: UpdateConfig) -> list[dict[int, tuple[Place, Place]]]:
    """For each micro-batch, where the conversations of its pairs lie: first fit, pairs of more tokens first."""
    micros: list[tuple[list[int], list[int], dict[int, tuple[Place, Place]]]] = []
    for i in sorted(range(len(pairs)), key=lambda i: -(len(pairs[i].chosen) + len(pairs[i].rejected))):
        lengths = len(pairs[i].chosen), len(pairs[i].rejected)
        for ends, counts, members in micros:
            if _place(i, lengths, ends, counts, members, cfg):
                break
        else:
            micros.append(([0] * height, [0] * height, {}))
            _place(i, lengths, *micros[-1], cfg)
    return [members for _, _, members in micros]


def _place(
    i: int, lengths: tuple[int, int], ends: list[int], counts: list[int], members: dict[int, tuple[Place, Place]],
    cfg: UpdateConfig,
) -> bool:  # fmt: skip
    """Put both conversations of pair i into the first rows with room, or neither."""
    ends_then, counts_then = list(ends), list(counts)
    found: list[Place] = []
    for n in lengths:
        room = (r for r in range(len(ends)) if cfg.pack_length - ends[r] >= n and counts[r] < cfg.max_segments)
        if (row := next(room, None)) is None:
            ends[:], counts[:] = ends_then, counts_then
            return False
        found.append((row, counts[row], ends[row]))
        ends[row] += n
        counts[row] += 1
    members[i] = found[0], found[1]
    return True


def _check(pair: PairSample, i: int, cfg: UpdateConfig) -> None:
    longest = max(len(pair.chosen), len(pair.rejected))
    if longest > cfg.pack_length:
        raise UserError(f"a conversation of {longest} tokens is longer than a packed row of {cfg.pack_length}",
                        where=f"pair {i}, update.pack_length", expected=f"update.pack_length of at least {longest}")  # fmt: skip
    if not len(pair.chosen) or not len(pair.rejected):
        raise ValueError(f"pair {i} has an empty conversation")


def _empty(rows: tuple[int, int], T: int, S: int) -> dict[str, np.ndarray]:
    tokens = {name: np.zeros((*rows, T), np.int32) for name in ("tokens", "positions", "segment_ids")}
    segments = {name: np.zeros((*rows, S), np.int32) for name in ("last", "partner_rows", "partner")}
    return tokens | segments | {"chosen": np.zeros((*rows, S), bool), "margin": np.zeros((*rows, S), np.float32)}


def _fill(batch: dict[str, np.ndarray], m: int, members: Mapping[int, tuple[Place, Place]], pairs: Sequence[PairSample]) -> None:
    for i, (better, worse) in members.items():
        for (row, s, start), ids in ((better, pairs[i].chosen), (worse, pairs[i].rejected)):
            inside = np.s_[m, row, start : start + len(ids)]
            batch["tokens"][inside] = ids
            batch["positions"][inside] = np.arange(len(ids))
            batch["segment_ids"][inside] = s + 1
            batch["last"][m, row, s] = start + len(ids) - 1
        at = np.s_[m, better[0], better[1]]
        batch["chosen"][at], batch["margin"][at] = True, pairs[i].margin
        batch["partner_rows"][at], batch["partner"][at] = worse[0] - better[0], worse[1]


# ------------------------------------------------------------------------------------------------------------------ loss


def preference_loss(values: jax.Array, batch: PairBatch, count: jax.Array, cfg: RewardConfig) -> tuple[jax.Array, Metrics]:
    """-log sigmoid(chosen - rejected - margin), Bradley-Terry as in arXiv 2203.02155 (margin: 2307.09288), mean over `count`
    pairs of the whole batch, plus cfg.center (chosen + rejected)^2 (2312.09244). values [B,S] of one micro-batch."""
    B, S = values.shape
    rows = jnp.arange(B, dtype=jnp.int32)[:, None] + batch.partner_rows
    rejected = jnp.take(values.reshape(-1), rows * S + batch.partner)
    gap = values - rejected

    def mean(x: jax.Array) -> jax.Array:
        return jnp.where(batch.chosen, x, jnp.zeros_like(x)).sum() / count

    loss = mean(jax.nn.softplus(-(gap - batch.margin)))
    metrics = {"loss/preference": loss, "reward_model/accuracy": mean((gap > 0).astype(jnp.float32))}
    metrics |= {"reward_model/margin": mean(gap), "reward_model/chosen": mean(values), "reward_model/rejected": mean(rejected)}
    lengths = _lengths(batch).astype(jnp.float32)
    others = jnp.take(lengths.reshape(-1), rows * S + batch.partner)
    sums = {"r": (values, rejected), "rr": (values**2, rejected**2), "n": (lengths, others), "nn": (lengths**2, others**2)}
    sums |= {"rn": (values * lengths, rejected * others)}
    metrics |= {f"moment/{name}": mean(0.5 * (a + b)) for name, (a, b) in sums.items()}
    if cfg.center > 0:
        centre = cfg.center * mean((values + rejected) ** 2)
        loss, metrics["loss/center"] = loss + centre, centre
    return loss, metrics


def _lengths(batch: PairBatch) -> jax.Array:
    """Tokens of each segment [B,S]."""
    S = batch.last.shape[-1]
    return jnp.stack([(batch.segment_ids == s + 1).sum(-1) for s in range(S)], axis=-1)


def described(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of an update with the moments as what they are for: spread of the rewards, and their correlation with length (of
    whole conversations), left out where either doesn't vary."""
    out = {name: x for name, x in metrics.items() if not name.startswith("moment/")}
    m = {name.removeprefix("moment/"): x for name, x in metrics.items() if name.startswith("moment/")}
    r, n = max(m["rr"] - m["r"] ** 2, 0.0), max(m["nn"] - m["n"] ** 2, 0.0)
    out["reward_model/std"] = math.sqrt(r)
    if r > 1e-12 and n > 1e-6:
        out["reward_model/length_correlation"] = (m["rn"] - m["r"] * m["n"]) / math.sqrt(r * n)
    return out


# ---------------------------------------------------------------------------------------------------------------- update


def segment_values(params: Params, spec: ModelSpec, batch: PairBatch, cfg: Experiment, mesh: Mesh | None = None) -> jax.Array:
    """The head's value at the last token of each segment, [B,S] float32, of one micro-batch."""
    u, dtype, rules = cfg.update, jnp.dtype(cfg.policy.dtype), train_rules(cfg.mesh)
    seen, back = in_time_order(batch, u.attention, mesh, rules)
    hidden = forward(
        params, spec, seen.tokens, seen.positions, seen.segment_ids,
        remat=u.remat, attention=u.attention, dtype=dtype, mesh=mesh, rules=rules,
    )  # fmt: skip
    last = batch.last if back is None else jnp.asarray(back, jnp.int32)[batch.last]
    return head_values(params, jnp.take_along_axis(hidden, last[..., None], axis=1), dtype)


def make_reward_update(spec: ModelSpec, optimizer: Optimizer, cfg: Experiment, mesh: Mesh | None = None) -> Any:
    """jitted `update(state, batch [M,B,T]) -> (state, metrics)`; the state passed in is donated. As learn.update.make_update."""
    rules = train_rules(cfg.mesh)

    def update(state: TrainState, batch: PairBatch, base: Any = None) -> tuple[TrainState, Metrics]:
        count = jnp.maximum(batch.chosen.sum(), 1).astype(jnp.float32)

        def micro_loss(params: Params, micro: Any) -> tuple[jax.Array, Metrics]:
            values = segment_values(whole(spec, base, params), spec, micro, cfg, mesh)
            loss, metrics = preference_loss(values, micro, count, cfg.reward)
            return loss, {"loss": loss, **metrics}

        grads, metrics = summed_gradients(micro_loss, state.params, cast(Any, batch), spec, mesh, rules)
        state, applied = apply_gradients(state, grads, optimizer)
        return state, {**metrics, **applied, "tokens/trained": (batch.segment_ids > 0).sum().astype(jnp.float32)}

    out = None if mesh is None else (state_shardings(spec, optimizer, mesh, rules), replicated(mesh))
    places = in_shardings(mesh, rules, temperature=False, base=spec.lora is not None)
    return jax.jit(update, donate_argnums=0, in_shardings=places, out_shardings=out, compiler_options=compiler_options(mesh))


def make_reward_scores(spec: ModelSpec, cfg: Experiment, mesh: Mesh | None = None) -> Any:
    """jitted `scores(params, batch [M,B,T]) -> metrics`: those of the loss on pairs that are not trained on."""
    rules = train_rules(cfg.mesh)

    def scores(params: Params, batch: PairBatch) -> Metrics:
        count = jnp.maximum(batch.chosen.sum(), 1).astype(jnp.float32)

        def step(i: jax.Array, sums: Metrics) -> Metrics:
            micro = one_micro(cast(Any, batch), i, mesh, rules)
            found = preference_loss(
                segment_values(params, spec, cast(Any, micro), cfg, mesh), cast(Any, micro), count, cfg.reward
            )[1]
            return {name: sums[name] + x for name, x in found.items()}

        shapes = jax.eval_shape(lambda p, b: preference_loss(segment_values(p, spec, b, cfg), b, count, cfg.reward)[1],
                                params, jax.tree.map(lambda x: x[0], batch))  # fmt: skip
        start = {name: jnp.zeros((), jnp.float32) for name in shapes}
        return lax.fori_loop(0, used_micros(cast(Any, batch)), step, start)

    places, out = in_shardings(mesh, rules, temperature=False), None if mesh is None else replicated(mesh)
    return jax.jit(scores, in_shardings=places, out_shardings=out, compiler_options=compiler_options(mesh))
