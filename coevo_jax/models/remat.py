"""What a layer keeps of its forward pass for the gradient (update.remat), and what that costs in bytes and products made again.

Axes: D model, F feed-forward, d head width.
"""

from __future__ import annotations

from typing import Any

import jax

from coevo_jax.config.learn import REMAT_NAMES
from coevo_jax.models.attention import KEPT
from coevo_jax.models.low_rank import ADAPTED
from coevo_jax.models.pair_attention import PAIRS
from coevo_jax.models.spec import ModelSpec


def remat_policy(remat: str) -> Any:
    """The policy of jax.checkpoint for a choice other than 'none'. models/forward.py gives the names of REMAT_NAMES."""
    policies, names = jax.checkpoint_policies, () if remat == "full" else remat.split("+")
    if remat == "dots":
        named = policies.save_only_these_names(PAIRS, ADAPTED)
        return policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, named)
    return policies.save_only_these_names(*names, *([PAIRS] if KEPT in names else []))


def kept_parts(remat: str) -> frozenset[str]:
    """Of config.REMAT_NAMES those that a layer keeps."""
    if remat == "none":
        return frozenset(REMAT_NAMES)
    return frozenset(() if remat == "full" else {"qkv", "gate", "up"} if remat == "dots" else remat.split("+"))


def kept_bytes(spec: ModelSpec, remat: str) -> float:
    """What a layer keeps of a token for the gradient, in bfloat16 (splash's statistics in float32)."""
    D, F, wide = spec.hidden_size, spec.mlp_size, spec.heads * spec.head_dim
    of = {"attention": 2.0 * wide + 4 * spec.heads, "qkv": 2.0 * (wide + 2 * spec.kv_heads * spec.head_dim), "residual": 2.0 * D,
          "gate": 2.0 * F, "up": 2.0 * F}  # fmt: skip
    own = 2.0 * D + sum(of[name] for name in kept_parts(remat))
    return own * {"none": 1.5, "dots": 1.2}.get(remat, 1.0)  # these two also keep what no name is for


def made_again(spec: ModelSpec, remat: str) -> float:
    """Share of a layer's products that the gradient makes again; `down` never is."""
    kept, D, F, d = kept_parts(remat), spec.hidden_size, spec.mlp_size, spec.head_dim
    of = {"qkv": D * d * (spec.heads + 2 * spec.kv_heads), "residual": D * d * spec.heads, "gate": D * F, "up": D * F}
    again = sum(n for name, n in of.items() if name not in kept)
    return 0.0 if remat in ("none", "dots") else again / (sum(of.values()) + D * F)
