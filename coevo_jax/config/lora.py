"""Record: low-rank adapters in place of full weights, for every trainer. Imports no JAX."""

from __future__ import annotations

import dataclasses

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")  # matrices of a layer that may have an adapter


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """LoRA (arXiv 2106.09685): W + scale A B, of which A and B train and W is frozen (docs/lora.md).

    There is no dropout: it would draw from another policy than the one trained, and no ratio would be 1.
    """

    rank: int = 0  # 0 = off: all weights train
    alpha: float = 32.0  # scale = alpha / rank
    rslora: bool = False  # scale = alpha / sqrt(rank) (arXiv 2312.03732)
    targets: tuple[str, ...] = TARGETS
    init: str = "kaiming"  # of A: kaiming (uniform within 1/sqrt(inputs)) | normal (std 1/rank); B begins at zero
    source: str = ""  # a PEFT folder with the adapter to begin with, for every model that begins as policy.source

    @property
    def scale(self) -> float:
        """What A B is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
