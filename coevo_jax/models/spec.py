"""The shape of a Llama-like decoder, read from a Hugging Face config.json.

One record covers SmolLM2 and Llama 3.x (rope scaling), Qwen2.5 (q, k, v biases), Qwen3 dense (q and k norms per head),
Mistral 7B (sliding window) and OLMo 3 (norms after the blocks, q and k norms over all heads, window pattern).
"""

from __future__ import annotations

import dataclasses
import math
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
class LoraSpec:
    """Adapters beside the matrices `targets`: W + scale A B of a rank (models/lora.py)."""

    rank: int
    scale: float
    targets: tuple[str, ...]


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
    scalar: bool = False  # a head of one number (models/scalar.py) in place of the vocabulary's
    lora: LoraSpec | None = None  # of programs that train: adapters alone change (models/lora.py)

    @property
    def window_of(self) -> tuple[int, ...]:
        return self.windows or (0,) * self.layers


FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
}
# What transformers assumes where a config.json is silent.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "olmo3": {"sliding_window": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
}
# Fields of config.json that are read below; everything else must be known to be harmless, or the config is refused.
READ = frozenset(
    (
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("intermediate_size", "rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps", "tie_word_embeddings"),
        *("attention_bias", "mlp_bias", "sliding_window", "layer_types", "max_position_embeddings", "hidden_act"),
        *("use_sliding_window", "max_window_layers", "partial_rotary_factor"),
    )
)
HARMLESS = frozenset(
    (
        *(
            "architectures",
            "model_type",
            "torch_dtype",
            "dtype",
            "transformers_version",
            "_name_or_path",
            "auto_map",
            "use_cache",
        ),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
        *("initializer_range", "attention_dropout", "pretraining_tp", "is_llama_config", "transformers.js_config"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params", "tokenizer_class"),
        *("output_attentions", "output_hidden_states", "output_scores", "return_dict", "return_dict_in_generate", "prefix"),
        *("chunk_size_feed_forward", "max_length", "min_length", "do_sample", "num_beams", "num_beam_groups", "temperature"),
        *("top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "num_return_sequences", "_attn_implementation"),
    )
)
ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
}


def spec_from_hf(config: dict[str, Any], where: str) -> ModelSpec:
    """Read a Hugging Face config. UserError names the field that is missing, unknown or not supported."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UserError(
            f"model_type {family!r} is not supported", where=where, expected=f"one of {', '.join(FAMILIES)}",
            nearest=nearest(str(family), FAMILIES),
        )  # fmt: skip
    _refuse_unsupported(config, family, where)
    config = DEFAULTS[family] | config
    heads, hidden = _need(config, "num_attention_heads", where), _need(config, "hidden_size", where)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise UserError(f"{heads} heads do not divide into {kv_heads} kv heads", where=where, expected="a multiple")
    layers = _need(config, "num_hidden_layers", where)
    theta, scaling, unscaled_in_windows = _rope(config, family, where)
    return ModelSpec(
        family=family,
        vocab_size=_need(config, "vocab_size", where),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=int(config.get("head_dim") or hidden // heads),
        mlp_size=_need(config, "intermediate_size", where),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm={"qwen3": "head", "olmo3": "full"}.get(family, "none"),
        norm_placement="post" if family == "olmo3" else "pre",
        windows=_windows(config, family, layers, where),
        unscaled_rope_in_windows=unscaled_in_windows,
        max_position=int(config.get("max_position_embeddings", 8192)),
    )


def spec_to_hf(spec: ModelSpec) -> dict[str, Any]:
    """config.json of a spec, as transformers 4 and 5 read it. spec_from_hf(spec_to_hf(spec)) == spec, but for `scalar`, which is
    said by the weights: models.load.load_scalar."""
    config: dict[str, Any] = {
        "architectures": [FAMILIES[spec.family].replace("CausalLM", "SequenceClassification" if spec.scalar else "CausalLM")],
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.mlp_size,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "max_position_embeddings": spec.max_position,
        "rope_theta": spec.rope_theta,
    }
    rope = {"rope_type": "default"} if spec.rope_scaling is None else _rope_to_hf(spec.rope_scaling)
    if spec.family == "olmo3":  # transformers 5 keeps one record a layer type
        rope = rope | {"rope_theta": spec.rope_theta}
        plain = {"rope_type": "default", "rope_theta": spec.rope_theta}
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": plain}
    elif spec.rope_scaling is not None:
        config["rope_scaling"] = rope
    if spec.scalar:  # the number of labels is that of their names
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if spec.family != "llama":
        config["sliding_window"] = max(spec.window_of) or None
    if spec.family in ("qwen2", "qwen3"):
        config["use_sliding_window"] = any(spec.windows)
    if spec.family in ("qwen2", "qwen3", "olmo3"):
        config["layer_types"] = ["sliding_attention" if w else "full_attention" for w in spec.window_of]
    return config


def _rope_to_hf(s: RopeScaling) -> dict[str, Any]:
    values = {
        "factor": s.factor, "low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor,
        "original_max_position_embeddings": s.original_max_position, "attention_factor": s.attention_factor,
        "beta_fast": s.beta_fast, "beta_slow": s.beta_slow,
    }  # fmt: skip
    return {"rope_type": s.kind} | {name: values[name] for name in ROPE_FIELDS[s.kind]}


def _refuse_unsupported(config: dict[str, Any], family: str, where: str) -> None:
    for name in sorted(set(config) - HARMLESS - READ):
        if config[name]:
            raise UserError(f"config field {name!r} = {config[name]!r} is not supported for {family}", where=where,
                            expected="a field this code knows", nearest=nearest(name, READ))  # fmt: skip
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"hidden_act {config['hidden_act']!r} is not supported", where=where, expected="silu")
    if config.get("mlp_bias"):
        raise UserError("mlp_bias = true is not supported", where=where, expected="no biases in the feed-forward block")
    if config.get("attention_bias") and family != "qwen2":  # it would put a bias on the output projection too
        raise UserError(f"attention_bias = true is not supported for {family}", where=where, expected="false")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"partial_rotary_factor = {config['partial_rotary_factor']} is not supported", where=where, expected="1")


def _need(config: dict[str, Any], name: str, where: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"config field {name!r} is missing or not a whole number", where=where, expected="a positive integer")
    return value


def _windows(config: dict[str, Any], family: str, layers: int, where: str) -> tuple[int, ...]:
    window, types = int(config.get("sliding_window") or 0), config.get("layer_types")
    if family == "llama" and window:
        raise UserError("sliding_window is not supported for llama", where=where, expected="null, or model_type mistral")
    if family in ("qwen2", "qwen3") and not config.get("use_sliding_window"):
        window = 0
    if types is not None and (len(types) != layers or set(types) - {"full_attention", "sliding_attention"}):
        raise UserError(f"config field 'layer_types' = {types!r} is not supported", where=where,
                        expected=f"{layers} of full_attention and sliding_attention")  # fmt: skip
    if types is not None and family in ("llama", "mistral") and len({*types, "sliding_attention" if window else types[0]}) > 1:
        raise UserError(f"layer_types is not supported for {family}", where=where, expected="the same attention in all layers")
    if not window:
        return ()
    if types is None and family == "olmo3":
        types = ["full_attention" if (i + 1) % 4 == 0 else "sliding_attention" for i in range(layers)]
    if types is None and family in ("qwen2", "qwen3"):
        types = ["sliding_attention" if i >= int(config["max_window_layers"]) else "full_attention" for i in range(layers)]
    if types is None:
        return (window,) * layers
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in types)
    return windows if any(windows) else ()


def _rope(config: dict[str, Any], family: str, where: str) -> tuple[float, RopeScaling | None, bool]:
    """Theta, scaling and whether windowed layers go without it.

    transformers 4 writes rope_theta and rope_scaling, transformers 5 one record rope_parameters (OLMo 3: one a layer type).
    """
    theta = float(config.get("rope_theta") or 10000.0)
    record = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "full_attention" not in record and "sliding_attention" not in record:
        return *_scaling(dict(record), theta, config, where), family == "olmo3"
    full = _scaling(dict(record.get("full_attention") or {}), theta, config, where)
    windowed = _scaling(dict(record.get("sliding_attention") or {}), theta, config, where)
    if full[0] != windowed[0] or windowed[1] is not None:
        raise UserError("rope_parameters of sliding_attention layers are not supported", where=where,
                        expected="unscaled rope with the theta of the full_attention layers")  # fmt: skip
    return *full, True


def _scaling(record: dict[str, Any], theta: float, config: dict[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    theta = float(record.pop("rope_theta", None) or theta)
    kinds = (record.pop("rope_type", None), record.pop("type", None))
    kind = kinds[0] or kinds[1] or "default"
    if kind not in ROPE_FIELDS:
        raise UserError(f"rope type {kind!r} is not supported", where=where, expected=", ".join(ROPE_FIELDS),
                        nearest=nearest(str(kind), ROPE_FIELDS))  # fmt: skip
    if kind == "default":
        return theta, None
    for name, value in record.items():
        harmless = value is None or (name, value) in (("truncate", True), ("partial_rotary_factor", 1.0))
        if name not in ("original_max_position_embeddings", *ROPE_FIELDS[kind]) and not harmless:
            raise UserError(f"rope field {name!r} = {value!r} is not supported for {kind}", where=where,
                            expected=", ".join(ROPE_FIELDS[kind]), nearest=nearest(name, ROPE_FIELDS[kind]))  # fmt: skip
    longest = int(config.get("max_position_embeddings", 8192))
    values = {"original_max_position_embeddings": longest} | {k: v for k, v in record.items() if v is not None}
    for name in ("factor",) if kind != "llama3" else ROPE_FIELDS["llama3"]:
        if not isinstance(values.get(name), int | float):
            raise UserError(f"rope field {name!r} of {kind} is missing", where=where, expected="a number")
    factor, original = float(values["factor"]), int(values["original_max_position_embeddings"])
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    if kind == "llama3":
        low, high = float(values["low_freq_factor"]), float(values["high_freq_factor"])
        return theta, RopeScaling("llama3", factor, low, high, original)
    attention = float(values.get("attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0))
    fast, slow = float(values.get("beta_fast") or 32), float(values.get("beta_slow") or 1)
    return theta, RopeScaling(
        "yarn", factor, original_max_position=original, attention_factor=attention, beta_fast=fast, beta_slow=slow
    )
