"""A model that obeys every prompt of the package: a Markov chain written as a transformer, for runs of the size of a smoke test.

Its vocabulary is whole pieces of rubrics, verdicts and answers. Its chat template opens a turn with a token that says what the
prompt asks for; from there each token names its successors. Embeddings are one-hot, attention and feed-forward begin at zero, and
the head holds the log-probabilities: it samples as the chain does, and has gradients. A quarter of its rubrics is invalid.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import numpy as np
from safetensors.numpy import save_file

SPECIAL = ("<unk>", "<|pad|>", "<|end|>")
END = "<|end|>"
LEVELS = '"scoring_levels": {"1.0": "yes", "0.0": "no"}'
FIRST = [f'{{"criteria": [{{"criterion": "is {w}", "weight": 0.{n}, {LEVELS}}}, ' for w, n in (("short", 6), ("right", 6))]
SECOND = [f'{{"criterion": "has {w}", "weight": 0.4, {LEVELS}}}]}}' for w in ("a word", "a name", "an end")]
INVALID = ['{"criterion": "weighs nothing"}]}']
RAR_KINDS = ("Essential", "Essential", "Important", "Important", "Optional", "Pitfall")


def _rar(last: str) -> str:
    kinds = [(kind, f"has property {i}") for i, kind in enumerate(RAR_KINDS)] + [("Optional", last)]
    items = [{"title": f"Point {i}", "description": f"{k}: {what}", "weight": -1 if k == "Pitfall" else 1}
             for i, (k, what) in enumerate(kinds)]  # fmt: skip
    return json.dumps({"items": items})


def _points(first: int) -> str:
    points = (first, 3, -2, 1, 4)
    items = [{"category": "method", "criterion": f"Does thing {i}", "points": p} for i, p in enumerate(points)]
    return json.dumps({"rubrics": items})


# What a prompt asks for: the words that it is known by, the token that opens the turn, and what may follow.
ASKED: dict[str, tuple[str, list[str]]] = {
    "<|score|>": ('"score": a number', [json.dumps({"reasoning": "so", "score": n / 10}) for n in range(11)]),
    "<|rating|>": ('"rating": a whole number', [json.dumps({"rating": n}) for n in range(1, 11)]),
    "<|yes|>": ("Reply yes or no", ["yes", "no"]),
    "<|points|>": ('"judgement": [true or false',
                   [json.dumps({"judgement": [bool(n >> i & 1) for i in range(5)]}) for n in (1, 6, 11, 21, 28, 30)]),
    "<|pair|>": ('"winner": "A" or "B"', [json.dumps({"winner": w}) for w in ("A", "B", "tie")]),
    "<|question|>": ("Write the one question that", [f"write {n} words" for n in range(1, 9)]),
    "<|write_points|>": ('"rubrics": [{"category"', [_points(n) for n in (1, 2, 5)] + ["no rubric"]),
    "<|write_rar|>": ('"items": [{"title"', [_rar(w) for w in ("is short", "is right", "ends well")] + ["no rubric "]),
    "<|write|>": ("Write a rubric", FIRST),
    "<|answer|>": ("", [f" word{i}" for i in range(6)] + ["\\boxed{4}", "\\boxed{5}"]),
}  # fmt: skip


def successors() -> dict[str, list[str]]:
    """Token -> its equally likely successors."""
    out = {opening: list(texts) for opening, (_, texts) in ASKED.items()}
    for opening, (_, texts) in ASKED.items():
        out |= {text: [END] for text in texts if opening not in ("<|write|>", "<|answer|>")}
    out |= {text: [*SECOND, *INVALID] for text in FIRST} | {text: [END] for text in (*SECOND, *INVALID)}
    words = [text for text in ASKED["<|answer|>"][1] if text.startswith(" ")]
    out |= {word: [*words, "\\boxed{4}", "\\boxed{5}", END] for word in words} | {"\\boxed{4}": [END], "\\boxed{5}": [END]}
    return out


def make(folder: pathlib.Path) -> pathlib.Path:
    """The model's folder, as transformers writes one."""
    folder.mkdir(parents=True, exist_ok=True)
    after = successors()
    plain = sorted({text for texts in after.values() for text in texts} - {END})
    tokens = [*SPECIAL, *ASKED, *plain]
    V = -(-len(tokens) // 16) * 16
    D = V
    _tokenizer(folder, tokens)
    eye, log = np.eye(V, D, dtype=np.float32), np.full((V, D), -30.0, np.float32)
    for token, texts in after.items():
        for text in texts:
            log[tokens.index(text), tokens.index(token)] = -np.log(len(texts))
    rng = np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": eye, "model.norm.weight": np.ones(D, np.float32),
               "lm_head.weight": log / np.float32(np.sqrt(D))}  # fmt: skip
    shapes = {"self_attn.q_proj": (64, D), "self_attn.k_proj": (32, D), "self_attn.v_proj": (32, D), "mlp.gate_proj": (32, D),
              "mlp.up_proj": (32, D)}  # fmt: skip
    tensors |= {f"model.layers.0.{n}.weight": rng.normal(0, D**-0.5, s).astype(np.float32) for n, s in shapes.items()}
    tensors |= {
        f"model.layers.0.{n}.weight": np.zeros((D, d), np.float32) for n, d in (("self_attn.o_proj", 64), ("mlp.down_proj", 32))
    }
    tensors |= {f"model.layers.0.{n}.weight": np.ones(D, np.float32) for n in ("input_layernorm", "post_attention_layernorm")}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": V, "hidden_size": D, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 32, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 1000.0, "max_position_embeddings": 1024, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": tokens.index(END), "pad_token_id": tokens.index("<|pad|>"),
        "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _tokenizer(folder: pathlib.Path, tokens: list[str]) -> None:
    """Whole pieces; all other text is one unknown token every 30 characters."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    pieces = sorted((t for t in tokens if not t.startswith("<|")), key=len, reverse=True)
    pattern = "|".join([*map(re.escape, pieces), r"[\s\S]{1,30}"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    opened = [*SPECIAL, *ASKED]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in opened])
    tokenizer.save(str(folder / "tokenizer.json"))
    branches: list[Any] = [(opening, words) for opening, (words, _) in ASKED.items() if words]
    choose = "".join(
        f"{{%- {'if' if i == 0 else 'elif'} {words!r} in last -%}}{{{{ '{opening}' }}}}"
        for i, (opening, words) in enumerate(branches)
    )
    template = (
        "{%- set last = messages[-1]['content'] -%}"
        "{%- for m in messages -%}{%- if m['content'] -%}{{ m['content'] + '<|end|>' }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}" + choose + "{%- else -%}{{ '<|answer|>' }}{%- endif -%}{%- endif -%}"
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "pad_token": "<|pad|>", "eos_token": END,
        "model_max_length": 1024, "clean_up_tokenization_spaces": False, "add_bos_token": False, "chat_template": template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
