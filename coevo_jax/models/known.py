"""Shapes of published models by name, for plans made without their weights. A run reads config.json.

From the config.json of each model (Qwen/Qwen3-*): head width 128, 8 kv heads, a vocabulary of 151,936, rope theta 1e6, epsilon
1e-6, 40,960 positions; the sizes up to 4B tie the head to the embedding.
"""

from __future__ import annotations

import pathlib

from coevo_jax.errors import UserError, nearest
from coevo_jax.models.spec import ModelSpec

STOP_IDS = (151_645, 151_643)  # <|im_end|>, <|endoftext|>


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, tied: bool) -> ModelSpec:
    return ModelSpec("qwen3", vocab_size=151_936, hidden_size=hidden, layers=layers, heads=heads, kv_heads=8, head_dim=128,
                     mlp_size=mlp, rope_theta=1e6, norm_eps=1e-6, tied=tied, qk_norm="head", max_position=40_960)  # fmt: skip


KNOWN = {
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, True),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32, False),
    "Qwen3-14B": _qwen3(5120, 17408, 40, 40, False),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64, False),
}


def known_spec(source: str, where: str) -> ModelSpec:
    """The spec of a source whose last part is a known name ('/models/Qwen3-8B'). UserError for another."""
    name = pathlib.PurePath(source).name
    if name not in KNOWN:
        raise UserError(f"the shapes of {source!r} are not known by name", where=where,
                        expected=f"a path that ends in one of {', '.join(KNOWN)}", nearest=nearest(name, KNOWN))  # fmt: skip
    return KNOWN[name]
