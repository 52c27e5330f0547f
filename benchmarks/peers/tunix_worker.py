"""Worker around Tunix's own JAX sampler. Runs in the environment of `python benchmarks/sampler.py --install tunix`.

Prompts come as token ids and go to Tunix through a tokenizer that only carries ids, so that both sides see the same tokens.
Tunix takes every id equal to the pad id as padding and hides it from attention, so the pad id must not occur in a prompt.
SmolLM2's own pad is its end token, hence id 0 (end of a document). Tunix cuts a completion before its end token: added here.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
from protocol import serve

PAD = 0
HELD: dict[str, Any] = {}


class Ids:
    """A 'tokenizer' for texts that are already ids, with blanks between them."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return ""

    def bos_id(self) -> int:
        return 0  # none is put in front

    def eos_id(self) -> int:
        return int(HELD["end"])

    def pad_id(self) -> int:
        return PAD


def load(asked: dict[str, Any]) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    from tunix.generate.sampler import CacheConfig, Sampler
    from tunix.models.llama3 import model, params

    start, hf = time.perf_counter(), json.loads((pathlib.Path(asked["model"]) / "config.json").read_text())
    HELD.update({k: asked[k] for k in ("prompts", "samples", "max_new", "end")})
    if any(PAD in ids for ids in HELD["prompts"]):
        raise ValueError(f"a prompt holds id {PAD}, which Tunix would take as padding")
    head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    config = model.ModelConfig(
        num_layers=hf["num_hidden_layers"], vocab_size=hf["vocab_size"], embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"], num_heads=hf["num_attention_heads"], num_kv_heads=hf["num_key_value_heads"],
        head_dim=head_dim, norm_eps=hf["rms_norm_eps"], rope_theta=int(rope_theta(hf)), weight_tying=hf["tie_word_embeddings"],
    )  # fmt: skip
    HELD["longest"] = max(map(len, HELD["prompts"]))
    HELD["mesh"] = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    cache = CacheConfig(
        cache_size=HELD["longest"] + HELD["max_new"] + 8, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads,
        head_dim=head_dim,
    )  # fmt: skip
    with HELD["mesh"]:
        weights = params.create_model_from_safe_tensors(asked["model"], config, HELD["mesh"], dtype=jnp.float32)
        HELD["sampler"] = Sampler(weights, Ids(), cache)
    versions = {name: importlib.metadata.version(name) for name in ("google-tunix", "jax", "flax")}
    return {"versions": versions, "seconds": time.perf_counter() - start}


def rope_theta(hf: dict[str, Any]) -> float:
    return float(hf["rope_theta"] if "rope_theta" in hf else hf["rope_parameters"]["rope_theta"])


def run(asked: dict[str, Any]) -> dict[str, Any]:
    texts = [" ".join(map(str, ids)) for ids in HELD["prompts"] for _ in range(HELD["samples"])]
    start = time.perf_counter()
    with HELD["mesh"]:
        out = HELD["sampler"](
            texts, max_generation_steps=HELD["max_new"], max_prompt_length=HELD["longest"], temperature=1.0, top_p=1.0,
            seed=asked["seed"], eos_tokens=[HELD["end"]],
        )  # fmt: skip
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "lengths": [min(len(row) + 1, HELD["max_new"]) for row in out.tokens]}


if __name__ == "__main__":
    serve({"load": load, "run": run})
