"""Which source each slot's preference pair comes from, and the record of a pair. Pure host code; answers are made elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from coevo_jax.config import PairConfig
from coevo_jax.errors import UserError
from coevo_jax.preference.buffer import hashed
from coevo_jax.records.facts import Facts

SOURCES = ("temporal", "inferred", "conditioned", "frozen", "dataset")
OWN = ("temporal", "inferred", "conditioned")  # sources that ask the policy for an answer to the pair's question


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """One preference pair: the judge should score `accepted` above `rejected`.

    ids: int32 tokens as sampled (none of a data set's), texts: the same decoded. gap: policy updates between the two (temporal
    only). fallback: why the source's rule was not met, else None. writers: the frozen policies that gave the two (frozen only).
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
    writers: tuple[str, str] | None = None


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


def gap_bins(config: PairConfig) -> list[tuple[int, int]]:
    """(lowest, highest) gap of each bin of the histogram, doubling from 1 to what the buffer holds."""
    lows = [1 << i for i in range(max(config.per_slot, 1).bit_length())]
    return [(low, 2 * low - 1) for low in lows]


def add_pairs(facts: Facts, pairs: Iterable[Pair], asked: int, config: PairConfig = PairConfig()) -> None:
    """Shares by source and fallback, the gaps' least, mean, most and histogram, and the share of `asked` pairs that could not be
    made. A gap beyond the last bin counts in it."""
    made = list(pairs)
    gaps = [pair.gap for pair in made if pair.gap is not None]
    for name in SOURCES:
        facts.mean(f"pairs/share_{name}", [pair.source == name for pair in made])
    facts.mean("pairs/fallback_share", [pair.fallback is not None for pair in made])
    facts.add("ratio_if", "pairs/missing_share", [asked - len(made), asked])
    facts.mean("pairs/gap_mean", gaps)
    facts.add("least", "pairs/gap_min", gaps)
    facts.add("most", "pairs/gap_max", gaps)
    bins = gap_bins(config)
    for low, high in bins if gaps else ():
        last = (low, high) == bins[-1]
        facts.mean(f"pairs/gap_share_{low}_{'up' if last else high}", [low <= gap and (last or gap <= high) for gap in gaps])
    for first, second in sorted({pair.writers for pair in made if pair.writers is not None}):
        facts.total(f"pairs/{first}_over_{second}", sum(pair.writers == (first, second) for pair in made))
