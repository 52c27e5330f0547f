"""GGUF files: architecture from the metadata, dequantised tensors, tokenizer rebuilt as Hugging Face files.

llama.cpp stores q and k of Llama-shaped models with each head's rotary pairs interleaved; here they are put back as halves.
Its tokenizer is a table of tokens and merges plus the name of a pre-tokenizer, whose regular expression is llama.cpp's
(src/llama-vocab.cpp); `smollm` splits digits singly, which transformers' own conversion of GGUF leaves out.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import gguf
import numpy as np

from coevo_jax.errors import UserError, nearest
from coevo_jax.models.spec import ModelSpec

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
INTERLEAVED = ("llama",)  # architectures whose q and k are permuted in the file
CONTROL, USER_DEFINED = 3, 4  # gguf token types

_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


class _Reader(gguf.GGUFReader):
    """The package's reader over a plain view of the mapped file: slicing a memmap costs five times as much, 200,000 times."""

    @property  # type: ignore[override]
    def data(self) -> np.ndarray:
        return self._plain

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._plain = mapped.view(np.ndarray)


class GgufFile:
    """Metadata and tensors of one file. Reading a slice dequantises the whole tensor."""

    whole = True

    def __init__(self, path: pathlib.Path):
        self.path, self.where = path, str(path)
        try:
            self.reader = _Reader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise UserError(f"the GGUF file can't be read: {error}", where=self.where, expected="a complete GGUF file") from error
        self._tensors = {t.name: t for t in self.reader.tensors}
        self.architecture = str(self.field("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise UserError(f"GGUF architecture {self.architecture!r} is not supported", where=self.where,
                            expected=f"one of {', '.join(ARCHITECTURES)}",
                            nearest=nearest(self.architecture, ARCHITECTURES))  # fmt: skip

    def field(self, name: str, default: Any = None) -> Any:
        """A metadata value, or the default."""
        found = self.reader.fields.get(name)
        return default if found is None else found.contents()

    def _size(self, name: str, default: Any = None) -> Any:
        value = self.field(f"{self.architecture}.{name}", default)
        if value is None:
            raise UserError(f"GGUF metadata {self.architecture}.{name} is missing", where=self.where, expected="a complete file")
        return value

    def config(self) -> dict[str, Any]:
        """The metadata as a Hugging Face config.json. UserError for rope scaling other than none or linear."""
        scaling = self.field(f"{self.architecture}.rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise UserError(f"GGUF rope scaling {scaling!r} is not supported", where=self.where, expected="none or linear")
        heads = int(self._size("attention.head_count"))
        hidden = int(self._size("embedding_length"))
        rotary = int(self._size("attention.key_length", hidden // heads))
        if int(self._size("rope.dimension_count", rotary)) != rotary:
            raise UserError("rotary embedding of a part of each head is not supported", where=self.where,
                            expected=f"{self.architecture}.rope.dimension_count = {rotary}")  # fmt: skip
        config = {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "hidden_act": "silu",
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.field("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.field("tokenizer.ggml.padding_token_id"),
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in self._tensors else 0,
            "hidden_size": hidden,
            "num_hidden_layers": int(self._size("block_count")),
            "intermediate_size": int(self._size("feed_forward_length")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self._size("attention.head_count_kv", heads)),
            "head_dim": rotary,
            "rope_theta": float(self._size("rope.freq_base", 10000.0)),
            "rms_norm_eps": float(self._size("attention.layer_norm_rms_epsilon")),
            "max_position_embeddings": int(self._size("context_length")),
            "tie_word_embeddings": "output.weight" not in self._tensors,
        }
        if scaling == "linear":
            config["rope_scaling"] = {"rope_type": "linear", "factor": float(self._size("rope.scaling.factor"))}
        return config

    def tensors(self, spec: ModelSpec) -> GgufTensors:
        """The file as a tensor source for an architecture."""
        return GgufTensors(self, spec)

    def write_tokenizer(self, folder: pathlib.Path) -> None:
        """tokenizer.json, tokenizer_config.json and config.json in `folder`, as transformers reads them."""
        tokenizer = self._tokenizer()
        tokenizer.save(str(folder / "tokenizer.json"))
        tokens = self.field("tokenizer.ggml.tokens")
        ids = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id",
               "unk_token": "unknown_token_id"}  # fmt: skip
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        for name, key in ids.items():
            value = self.field(f"tokenizer.ggml.{key}")
            if value is not None:
                config[name] = tokens[int(value)]
        config |= {"clean_up_tokenization_spaces": False, "model_max_length": int(self._size("context_length"))}
        if self.field("tokenizer.chat_template") is not None:
            config["chat_template"] = self.field("tokenizer.chat_template")
        _write_json(folder / "tokenizer_config.json", config)
        _write_json(folder / "config.json", self.config())

    def _tokenizer(self) -> Any:
        from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

        kind, pre = self.field("tokenizer.ggml.model"), str(self.field("tokenizer.ggml.pre", "default"))
        if kind != "gpt2":
            raise UserError(f"GGUF tokenizer {kind!r} is not supported", where=self.where,
                            expected="a byte-level BPE ('gpt2'), or a tokenizer.json beside the file")  # fmt: skip
        tokens, merges = self.field("tokenizer.ggml.tokens"), self.field("tokenizer.ggml.merges")
        types = self.field("tokenizer.ggml.token_type") or [1] * len(tokens)
        model = models.BPE(
            vocab={t: i for i, t in enumerate(tokens)},
            merges=[tuple(m.split(" ", 1)) for m in merges],
            ignore_merges=pre == "llama-bpe",
        )
        tokenizer = Tokenizer(model)
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = self._pre_tokenizer(pre)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(
            [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types) if k == CONTROL]
        )
        tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in zip(tokens, types) if k == USER_DEFINED])
        return tokenizer

    def _pre_tokenizer(self, pre: str) -> Any:
        from tokenizers import Regex
        from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

        plain = ByteLevel(add_prefix_space=False)
        if pre == "smollm":
            return Sequence([Digits(individual_digits=True), plain])
        if pre == "gpt-2":
            return plain
        patterns = {"llama-bpe": _LLAMA3, "qwen2": _QWEN2}
        if pre not in patterns:
            raise UserError(f"GGUF pre-tokenizer {pre!r} is not supported", where=self.where,
                            expected="smollm, gpt-2, llama-bpe or qwen2, or a tokenizer.json beside the file",
                            nearest=nearest(pre, ["smollm", "gpt-2", *patterns]))  # fmt: skip
        split = Split(Regex(patterns[pre]), behavior="isolated")
        return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])


class GgufTensors:
    """Tensors of a GGUF file in float32, q and k as Hugging Face has them."""

    whole = True

    def __init__(self, file: GgufFile, spec: ModelSpec):
        self.where, self._tensors = file.where, file._tensors
        self._heads: dict[str, int] = {}
        if file.architecture in INTERLEAVED:
            self._heads = {"attn_q": spec.heads, "attn_k": spec.kv_heads}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        tensor = self._tensors[name]
        try:
            array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UserError(f"tensor {name!r} has quantisation {tensor.tensor_type.name}", where=self.where,
                            expected="one that the gguf package dequantises") from error  # fmt: skip
        heads = self._heads.get(name.split(".")[-2])
        return (array if heads is None else halves(array, heads))[index]


def halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k [heads * d, ...]: from rotary pairs side by side (llama.cpp) to first half, second half (Hugging Face)."""
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
