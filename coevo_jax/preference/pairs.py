"""Which source each slot's preference pair comes from, and the record of a pair. Pure host code; answers are made elsewhere."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from coevo_jax.config import PairConfig
from coevo_jax.errors import UserError
from coevo_jax.preference.buffer import hashed

SOURCES = ("temporal", "inferred", "conditioned")


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """One preference pair: the judge should score `accepted` above `rejected`.

    ids: int32 tokens as sampled, texts: the same decoded. gap: policy updates between the two (temporal only).
    fallback: why the source's rule was not met, else None.
    """

    slot: int
    question: str
    record_id: str
    accepted_ids: np.ndarray
    accepted_text: str
    rejected_ids: np.ndarray
    rejected_text: str
    source: str
    gap: int | None = None
    fallback: str | None = None


@dataclasses.dataclass(frozen=True)
class PairPlan:
    """Mixture weights over pair sources; each slot's source is drawn from (seed, update, slot, attempt) and nothing else."""

    weights: tuple[float, ...]

    @staticmethod
    def from_config(config: PairConfig) -> PairPlan:
        return PairPlan.from_weights({name: getattr(config, name) for name in SOURCES})

    @staticmethod
    def from_weights(weights: Mapping[str, float]) -> PairPlan:
        """Weights >= 0 with a positive sum, in any scale. UserError otherwise."""
        values = tuple(float(weights.get(name, 0.0)) for name in SOURCES)
        unknown = set(weights) - set(SOURCES)
        if unknown or not all(np.isfinite(value) and value >= 0 for value in values) or sum(values) <= 0:
            raise UserError(
                f"the mixture of pair sources {dict(weights)} is not valid",
                where="pairs",
                expected=f"weights >= 0 of {', '.join(SOURCES)}, at least one above 0",
            )
        return PairPlan(values)

    def source(self, seed: int, update: int, slot: int, attempt: int = 0) -> str:
        """The source of one slot's pair; attempt counts the resamples of a dropped pair or group."""
        point = hashed("pair source", seed, update, slot, attempt) / 2**64 * sum(self.weights)
        for name, weight in zip(SOURCES, self.weights):
            if point < weight:
                return name
            point -= weight
        return [name for name, weight in zip(SOURCES, self.weights) if weight > 0][-1]  # rounding at the far end

    def sources(self, seed: int, update: int, slots: Iterable[int], attempt: int = 0) -> dict[int, str]:
        """The source of each slot."""
        return {slot: self.source(seed, update, slot, attempt) for slot in slots}

    def draw_key(self, seed: int, update: int, slot: int, attempt: int = 0) -> tuple[int | str, ...]:
        """The key to give ReplayBuffer.draw for the same identity."""
        return ("pair draw", seed, update, slot, attempt)


def pair_metrics(pairs: Iterable[Pair], asked: int) -> dict[str, float | int | None]:
    """Shares by source and fallback, gap statistics, and the share of `asked` pairs that could not be made."""
    made = list(pairs)
    sources = collections.Counter(pair.source for pair in made)
    gaps = [pair.gap for pair in made if pair.gap is not None]
    row: dict[str, float | int | None] = {f"pairs/share_{name}": sources[name] / len(made) if made else None for name in SOURCES}
    row["pairs/fallback_share"] = sum(pair.fallback is not None for pair in made) / len(made) if made else None
    row["pairs/missing_share"] = (asked - len(made)) / asked if asked else None
    row.update(
        {"pairs/gap_mean": float(np.mean(gaps)), "pairs/gap_min": min(gaps), "pairs/gap_max": max(gaps)}
        if gaps
        else dict.fromkeys(("pairs/gap_mean", "pairs/gap_min", "pairs/gap_max"))
    )
    return row
