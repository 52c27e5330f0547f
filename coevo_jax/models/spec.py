"""The shape of a Llama-like decoder, read from a Hugging Face config.json.

One record covers SmolLM2 and Llama 3.x (rope scaling), Qwen2.5 (q, k, v biases), Qwen3 dense (q and k norms per head),
Mistral 7B (sliding window) and OLMo 3 (norms after the blocks, q and k norms over all heads, window pattern).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from coevo_jax.errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """kind: 'linear' | 'llama3' | 'yarn'. Fields a kind doesn't use stay at their defaults."""

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 8192  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cos and sin


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Architecture of one model. Sizes in units, `windows` per layer (0 = full attention)."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: str = "none"  # none | head (Qwen3) | full (OLMo)
    norm_placement: str = "pre"  # pre | post (OLMo: the block's output is normalised, then added)
    windows: tuple[int, ...] = ()  # () = all full
    unscaled_rope_in_windows: bool = False  # OLMo 3: rope scaling only in full-attention layers
    max_position: int = 8192

    @property
    def window_of(self) -> tuple[int, ...]:
        return self.windows or (0,) * self.layers


# Fields of config.json that are read below; everything else must be known to be harmless, or the config is refused.
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "olmo3")
HARMLESS = frozenset(
    """architectures model_type torch_dtype dtype transformers_version use_cache bos_token_id eos_token_id pad_token_id unk_token_id
    initializer_range attention_dropout pretraining_tp _name_or_path auto_map max_window_layers use_sliding_window id2label label2id
    is_llama_config rope_interleaved transformers.js_config num_labels output_attentions output_hidden_states return_dict
    chunk_size_feed_forward is_encoder_decoder problem_type tokenizer_class decoder_start_token_id quantization_config_removed
    tie_encoder_decoder finetuning_task task_specific_params""".split()
)
READ = frozenset(
    """vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size rope_theta
    rope_scaling rope_parameters rms_norm_eps tie_word_embeddings attention_bias mlp_bias sliding_window layer_types
    max_position_embeddings hidden_act""".split()
)


def spec_from_hf(config: dict[str, Any], where: str) -> ModelSpec:
    """Read a Hugging Face config. UserError names the field that is missing, unknown or not supported."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UserError(
            f"model_type {family!r} is not supported", where=where, expected=f"one of {', '.join(FAMILIES)}",
            nearest=nearest(str(family), FAMILIES),
        )  # fmt: skip
    for name in sorted(set(config) - HARMLESS - READ):
        if config[name] not in (None, False, 0):
            raise UserError(f"config field {name!r} = {config[name]!r} is not supported for {family}", where=where,
                            expected="a field this code knows", nearest=nearest(name, READ))  # fmt: skip
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"hidden_act {config['hidden_act']!r} is not supported", where=where, expected="silu")
    if config.get("mlp_bias"):
        raise UserError("mlp_bias = true is not supported", where=where, expected="no biases in the feed-forward block")
    heads = _need(config, "num_attention_heads", where)
    layers = _need(config, "num_hidden_layers", where)
    hidden = _need(config, "hidden_size", where)
    theta, scaling = _rope(config, where)
    return ModelSpec(
        family=family,
        vocab_size=_need(config, "vocab_size", where),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        mlp_size=_need(config, "intermediate_size", where),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=_qkv_bias(config, family, where),
        qk_norm={"qwen3": "head", "olmo3": "full"}.get(family, "none"),
        norm_placement="post" if family == "olmo3" else "pre",
        windows=_windows(config, family, layers),
        unscaled_rope_in_windows=family == "olmo3",
        max_position=int(config.get("max_position_embeddings", 8192)),
    )


def _need(config: dict[str, Any], name: str, where: str) -> int:
    if not isinstance(config.get(name), int):
        raise UserError(f"config field {name!r} is missing or not a whole number", where=where, expected="a positive integer")
    return int(config[name])


def _qkv_bias(config: dict[str, Any], family: str, where: str) -> bool:
    if family == "qwen2":
        return True
    if config.get("attention_bias"):  # Llama's attention_bias also puts one on the output projection
        raise UserError(f"attention_bias = true is not supported for {family}", where=where, expected="false")
    return False


def _windows(config: dict[str, Any], family: str, layers: int) -> tuple[int, ...]:
    window = int(config.get("sliding_window") or 0)
    if not window or (family in ("qwen2", "qwen3") and not config.get("use_sliding_window")):
        return ()
    types = config.get("layer_types")
    if types is None and family == "olmo3":
        types = ["full_attention" if (i + 1) % 4 == 0 else "sliding_attention" for i in range(layers)]
    if types is None and family in ("qwen2", "qwen3"):
        first = int(config.get("max_window_layers", layers))
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if types is None:
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _rope(config: dict[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """transformers 4 writes rope_theta and rope_scaling, transformers 5 one record rope_parameters."""
    record = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(record.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    kind = record.pop("rope_type", record.pop("type", "default"))
    record.pop("type", None)
    if kind in ("default", None):
        return theta, None
    original = int(record.get("original_max_position_embeddings") or config.get("max_position_embeddings", 8192))
    factor = float(record.get("factor", 1.0))
    if kind == "linear":
        return theta, RopeScaling("linear", factor=factor)
    if kind == "llama3":
        return theta, RopeScaling("llama3", factor, float(record["low_freq_factor"]), float(record["high_freq_factor"]), original)
    if kind == "yarn":
        from math import log

        unknown = {"mscale", "mscale_all_dim", "truncate"} & set(record)
        if unknown:
            raise UserError(f"rope field {sorted(unknown)[0]!r} is not supported", where=where, expected="plain YaRN")
        attention = record.get("attention_factor")
        attention = 0.1 * log(factor) + 1.0 if attention is None and factor > 1 else float(attention or 1.0)
        return theta, RopeScaling("yarn", factor, original_max_position=original, attention_factor=attention,
                                  beta_fast=float(record.get("beta_fast") or 32), beta_slow=float(record.get("beta_slow") or 1))  # fmt: skip
    raise UserError(f"rope type {kind!r} is not supported", where=where, expected="default, linear, llama3 or yarn",
                    nearest=nearest(str(kind), ["default", "linear", "llama3", "yarn"]))  # fmt: skip
