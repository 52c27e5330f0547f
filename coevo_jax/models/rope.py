"""Rotary position embedding with the scalings of Llama 3 and YaRN.

Axes: B batch, T time, h half of a head's width. Formulas: RoFormer (arXiv 2104.09864) eq. 34; Llama 3.1 frequency
scaling as in its model card's code; YaRN (arXiv 2309.00071) section 3.2 with the ramp over rotations.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from coevo_jax.models.spec import ModelSpec, RopeScaling


def inverse_frequencies(spec: ModelSpec, scaled: bool = True) -> tuple[np.ndarray, float]:
    """Angular speed of each pair [h] in radians a position, and the factor on cos and sin."""
    h = spec.head_dim // 2
    inv = 1.0 / spec.rope_theta ** (np.arange(h, dtype=np.float64) / h)
    s = spec.rope_scaling
    if s is None or not scaled:
        return inv, 1.0
    if s.kind == "linear":
        return inv / s.factor, 1.0
    if s.kind == "llama3":
        return _llama3(inv, s), 1.0
    return _yarn(inv, s, spec), s.attention_factor


def _llama3(inv: np.ndarray, s: RopeScaling) -> np.ndarray:
    wavelength = 2 * math.pi / inv
    smooth = (s.original_max_position / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * inv / s.factor + smooth * inv


def _yarn(inv: np.ndarray, s: RopeScaling, spec: ModelSpec) -> np.ndarray:
    def pair_of(rotations: float) -> float:  # the pair that turns this often over the original context
        return spec.head_dim * math.log(s.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(spec.rope_theta))

    low = max(math.floor(pair_of(s.beta_fast)), 0)
    high = min(math.ceil(pair_of(s.beta_slow)), spec.head_dim - 1)
    ramp = np.clip((np.arange(len(inv)) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return inv / s.factor * ramp + inv * (1 - ramp)


def rope_tables(spec: ModelSpec, positions_BxT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin in float32, [R,B,T,h]: R = 2 where windowed layers use unscaled rope (index 1), else 1."""
    variants = [True, False] if spec.unscaled_rope_in_windows and spec.rope_scaling else [True]
    cos, sin = [], []
    for scaled in variants:
        inv, factor = inverse_frequencies(spec, scaled)
        angle = positions_BxT[..., None].astype(jnp.float32) * jnp.asarray(inv, jnp.float32)[None, None, :]
        cos.append(jnp.cos(angle) * factor)
        sin.append(jnp.sin(angle) * factor)
    return jnp.stack(cos), jnp.stack(sin)


def rotate(x_BxTxHxd: jax.Array, cos_BxTxh: jax.Array, sin_BxTxh: jax.Array) -> jax.Array:
    """Rotate the two halves of each head (Hugging Face order: first half real, second half imaginary)."""
    first, second = jnp.split(x_BxTxHxd.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_BxTxh[:, :, None, :], sin_BxTxh[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BxTxHxd.dtype)
