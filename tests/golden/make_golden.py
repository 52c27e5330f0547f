"""Make the golden files of this folder with torch and transformers (neither is needed to run the tests).

    python -m venv .venv-torch && .venv-torch/bin/pip install torch==2.13.0 transformers safetensors gguf accelerate
    .venv-torch/bin/python tests/golden/make_golden.py                      # every family, about a minute
    .venv-torch/bin/python tests/golden/make_golden.py --smollm2=PATH.gguf  # and the embedded model's
    .venv-torch/bin/python tests/golden/make_golden.py --check=FOLDER --family=qwen3  # an exported folder

A family's folder holds config.json and model.safetensors of a tiny random model in float32 and golden.npz with tokens [B,T] and
logits [B,T,V]; a reward model's has, in place of logits, the length of each row and its score [B]. Weights are wide enough,
windows and original contexts short enough, that every field of the config moves them.
"""

from __future__ import annotations

import argparse
import copy
import pathlib
import shutil

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
SMALL = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 0.25}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
FAMILIES = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": True, "rope_theta": 10000.0}),
    "llama3": (transformers.LlamaConfig, {"rope_theta": 500.0, "rope_scaling": LLAMA3, "head_dim": 16}),
    "qwen2": (transformers.Qwen2Config, {"rope_theta": 1000.0, "tie_word_embeddings": True}),
    "qwen2_yarn": (transformers.Qwen2Config, {"rope_theta": 1000.0, "rope_scaling": YARN}),
    "qwen3": (transformers.Qwen3Config, {"rope_theta": 1000.0, "head_dim": 16}),
    "mistral": (transformers.MistralConfig, {"rope_theta": 1000.0, "sliding_window": 5}),
    "olmo3": (transformers.Olmo3Config, {"rope_theta": 500000.0, "rope_scaling": YARN, "sliding_window": 5}),
}
REWARDS = {
    "llama_reward": (transformers.LlamaConfig, {"rope_theta": 500.0, "rope_scaling": LLAMA3, "head_dim": 16}),
    "qwen3_reward": (transformers.Qwen3Config, {"rope_theta": 1000.0, "head_dim": 16, "tie_word_embeddings": True}),
}
TOKENS = (2, 40)
LENGTHS = (40, 17, 1, 33)
TEXTS = (
    "The quick brown fox jumps over the lazy dog because",
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nName the largest planet.<|im_end|>\n<|im_start|>assistant\n",
)


def make_family(name: str) -> None:
    """A tiny random model of one family, its logits on random tokens."""
    kind, extra = FAMILIES[name]
    config = kind(**copy.deepcopy(SMALL | extra))  # transformers writes into the dicts it is given
    torch.manual_seed(sorted(FAMILIES).index(name))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    widen(model)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, TOKENS)
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(folder / "golden.npz", tokens=tokens.astype(np.int32), logits=logits_of(model, tokens))
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name}: {size / 1024:.0f} KiB, logits std {logits_of(model, tokens).std():.2f}")


def make_reward(name: str) -> None:
    """A tiny random reward model of one label, its scores of random rows padded on the right."""
    kind, extra = REWARDS[name]
    config = kind(num_labels=1, **copy.deepcopy(SMALL | extra))
    torch.manual_seed(100 + sorted(REWARDS).index(name))
    kinds = transformers.AutoModelForSequenceClassification
    model = kinds.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    widen(model)
    tokens = np.random.default_rng(1).integers(1, config.vocab_size, (len(LENGTHS), max(LENGTHS)))  # no padding id inside
    mask = np.arange(max(LENGTHS)) < np.asarray(LENGTHS)[:, None]
    tokens = np.where(mask, tokens, config.pad_token_id)
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    with torch.no_grad():
        ids, mask = torch.asarray(tokens, dtype=torch.long), torch.asarray(mask, dtype=torch.long)
        scores = model(ids, attention_mask=mask).logits.numpy()[:, 0]
    np.savez_compressed(
        folder / "golden.npz", tokens=tokens.astype(np.int32), lengths=np.asarray(LENGTHS, np.int32), scores=scores
    )
    print(f"{name}: scores {scores}")


def widen(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith("norm.weight"):
                value.normal_(1.0, 0.3)
            elif key.endswith("bias"):
                value.normal_(0.0, 0.5)
            else:
                value.normal_(0.0, 1.0 if "embed" in key else 1.5 * value.shape[1] ** -0.5)


def logits_of(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.asarray(tokens, dtype=torch.long)).logits.numpy()


def make_smollm2(path: pathlib.Path) -> None:
    """The embedded model as transformers reads the GGUF: the eight largest logits at each place and the log-sum."""
    load = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**load)
    model = transformers.AutoModelForCausalLM.from_pretrained(**load, dtype=torch.float32).eval()
    out: dict[str, np.ndarray] = {}
    for i, text in enumerate(TEXTS):
        tokens = np.asarray([tokenizer(text, add_special_tokens=False)["input_ids"]])
        logits = torch.asarray(logits_of(model, tokens))[0]
        top = logits.topk(8)
        out |= {f"tokens{i}": tokens[0].astype(np.int32), f"top_ids{i}": top.indices.numpy().astype(np.int32),
                f"top_logits{i}": top.values.numpy(), f"log_total{i}": logits.logsumexp(-1).numpy()}  # fmt: skip
        print(repr(text), "->", tokenizer.decode(logits[-1].argmax()))
    np.savez_compressed(HERE / "smollm2.npz", texts=np.asarray(TEXTS), **out)


def check(folder: pathlib.Path, family: str) -> None:
    """A folder that the project exported gives the family's golden logits in transformers."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    golden = np.load(HERE / family / "golden.npz")
    gap = np.abs(logits_of(model.eval(), golden["tokens"]) - golden["logits"]).max()
    print(f"{folder}: largest difference {gap:.2e}; {info}")
    if gap > 1e-4 or any(info.values()):
        raise SystemExit("differs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=pathlib.Path)
    parser.add_argument("--check", type=pathlib.Path)
    parser.add_argument("--family", default="")
    args = parser.parse_args()
    if args.check:
        check(args.check, args.family)
    else:
        for family in [args.family] if args.family else [*FAMILIES, *REWARDS]:
            make_family(family) if family in FAMILIES else make_reward(family)
        if args.smollm2:
            make_smollm2(args.smollm2)
