"""Checks of low-rank adapters: targets that exist, and no settings that would be ignored. Imports no JAX."""

from __future__ import annotations

from coevo_jax.config import Experiment
from coevo_jax.config.lora import TARGETS, LoraConfig
from coevo_jax.config.several import require
from coevo_jax.errors import nearest


def check_lora(cfg: Experiment) -> None:
    """UserError for the first thing that is wrong."""
    lora = cfg.lora
    require(lora.rank > 0 or lora == LoraConfig(), "lora settings would be ignored: lora.rank=0 trains all weights", "lora.rank",
            "lora.rank of at least 1, or no other lora setting")  # fmt: skip
    if lora.rank == 0:
        return
    for name in lora.targets:
        require(name in TARGETS, f"lora.targets names no matrix {name!r}", "lora.targets", ", ".join(TARGETS),
                nearest(name.removesuffix("_proj"), TARGETS))  # fmt: skip
    require(bool(lora.targets), "lora.targets is empty: nothing would train", "lora.targets", f"some of {', '.join(TARGETS)}")
    require(len(set(lora.targets)) == len(lora.targets), f"lora.targets={','.join(lora.targets)} names a matrix twice",
            "lora.targets", "each name once")  # fmt: skip
    require(lora.alpha > 0, f"lora.alpha={lora.alpha} is out of range", "lora.alpha", "above 0")
    require(cfg.update.reference == "device", "update.reference=host would be ignored: the reference is the frozen base, which "
            "the update needs, and an adapter", "update.reference, lora.rank", "update.reference=device")  # fmt: skip
