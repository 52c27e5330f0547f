"""FLOPs that an update must do whatever the program, and the share of the peak that they are.

Recomputation is never useful work. Source of the counts: 6 FLOPs a parameter and token (arXiv 2001.08361), attention as its two
products, forward once and backward twice.
"""

from __future__ import annotations

from collections.abc import Iterable

from coevo_jax.models.spec import ModelSpec


def product_parameters(spec: ModelSpec) -> int:
    """Parameters that take part in products with a token, the vocabulary head included (a reward model has none), embedding rows
    and norms left out."""
    attention = spec.hidden_size * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    return spec.layers * (attention + 3 * spec.hidden_size * spec.mlp_size) + head_parameters(spec)


def head_parameters(spec: ModelSpec) -> int:
    """Of the vocabulary's head."""
    return 0 if spec.scalar else spec.vocab_size * spec.hidden_size


def useful_update_flops(spec: ModelSpec, lengths: Iterable[int], frozen: bool = False) -> float:
    """6N + causal attention over sequences of these lengths (tokens): forward and backward, nothing twice.

    Attention: 3 passes x 2 products x 2 FLOPs x length^2 / 2 x heads x head_dim x layers. A window shortens rows. frozen: the
    matrices have adapters and no gradient of their own: 4N (the adapters' own products are left out).
    """
    lengths = list(lengths)
    pairs = sum(seen_pairs(n, window) for window in spec.window_of for n in lengths)
    return (4.0 if frozen else 6.0) * product_parameters(spec) * sum(lengths) + 3 * 2 * 2 * pairs * spec.heads * spec.head_dim


def seen_pairs(length: int, window: int) -> float:
    """Query-key pairs of one causal sequence, length^2 / 2, or less where a window (0 = none) cuts them."""
    return length**2 / 2 if window == 0 or window >= length else window**2 / 2 + (length - window) * window


def mfu(useful_flops: float, seconds: float, chips: int, peak: float) -> float:
    """Useful FLOPs of all chips over what they could have done in `seconds` (peak: FLOP/s of one chip)."""
    return useful_flops / (seconds * chips * peak)
