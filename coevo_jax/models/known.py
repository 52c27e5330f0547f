"""Shapes of published models by name, for plans made without their weights. A run reads config.json.

From the config.json of each model. Qwen/Qwen3-*: head width 128, 8 kv heads, a vocabulary of 151,936, rope theta 1e6, epsilon
1e-6, 40,960 positions; the sizes up to 4B tie the head to the embedding. The others are those that configs/ names.
"""

from __future__ import annotations

import pathlib

from coevo_jax.errors import UserError, nearest
from coevo_jax.models.spec import ModelSpec, RopeScaling

STOP_IDS = (151_645, 151_643)  # <|im_end|>, <|endoftext|>


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, tied: bool) -> ModelSpec:
    return ModelSpec("qwen3", vocab_size=151_936, hidden_size=hidden, layers=layers, heads=heads, kv_heads=8, head_dim=128,
                     mlp_size=mlp, rope_theta=1e6, norm_eps=1e-6, tied=tied, qk_norm="head", max_position=40_960)  # fmt: skip


def _llama3(hidden: int, mlp: int, layers: int, head_dim: int, scaled: float, tied: bool = False) -> ModelSpec:
    """Llama 3: 32 heads, 8 kv heads, a vocabulary of 128,256. scaled: factor of 3.1's and 3.2's rope, 0 = Llama 3.0's."""
    scaling = RopeScaling("llama3", scaled, 1.0, 4.0, 8192) if scaled else None
    return ModelSpec("llama", vocab_size=128_256, hidden_size=hidden, layers=layers, heads=32, kv_heads=8, head_dim=head_dim,
                     mlp_size=mlp, rope_theta=5e5, rope_scaling=scaling, norm_eps=1e-5, tied=tied,
                     max_position=131_072 if scaled else 8192)  # fmt: skip


LLAMA31 = _llama3(4096, 14336, 32, 128, 8.0)
KNOWN = {
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, True),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32, False),
    "Qwen3-14B": _qwen3(5120, 17408, 40, 40, False),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64, False),
    "Meta-Llama-3-8B-Instruct": _llama3(4096, 14336, 32, 128, 0.0),
    "Llama-3.1-8B-Instruct": LLAMA31,
    "Llama-3.2-1B-Instruct": _llama3(2048, 8192, 16, 64, 32.0, tied=True),
    "Skywork-Reward-V2-Llama-3.1-8B-40M": LLAMA31,
    "Mistral-7B-Instruct-v0.3": ModelSpec("mistral", vocab_size=32_768, hidden_size=4096, layers=32, heads=32, kv_heads=8,
                                          head_dim=128, mlp_size=14_336, rope_theta=1e6, norm_eps=1e-5, max_position=32_768),
    "Olmo-3-7B-Think": ModelSpec(
        "olmo3", vocab_size=100_278, hidden_size=4096, layers=32, heads=32, kv_heads=32, head_dim=128, mlp_size=11_008,
        rope_theta=5e5, rope_scaling=RopeScaling("yarn", 8.0, original_max_position=8192, attention_factor=1.2079441541679836),
        norm_eps=1e-6, qk_norm="full", norm_placement="post", windows=(4096, 4096, 4096, 0) * 8, unscaled_rope_in_windows=True,
        max_position=65_536,
    ),
}  # fmt: skip


def known_spec(source: str, where: str) -> ModelSpec:
    """The spec of a source whose last part is a known name ('/models/Qwen3-8B'). UserError for another."""
    if source.startswith("run:"):
        raise UserError(f"a plan reads no run, and {source!r} is one", where=where,
                        expected=f"the model that it trains, such as --config.{where}=/models/Qwen3-8B")  # fmt: skip
    name = pathlib.PurePath(source).name
    if name not in KNOWN:
        raise UserError(f"the shapes of {source!r} are not known by name", where=where,
                        expected=f"a path that ends in one of {', '.join(KNOWN)}", nearest=nearest(name, KNOWN))  # fmt: skip
    return KNOWN[name]
