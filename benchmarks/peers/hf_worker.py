"""Worker around transformers' `generate` (torch, CPU, float32), in the environment of `benchmarks/sampler.py --install hf`."""

from __future__ import annotations

import os
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from protocol import lengths_to_end, serve

PAD = 0  # hidden by the attention mask in prompts, and behind the end token in completions
HELD: dict[str, Any] = {}


def load(asked: dict[str, Any]) -> dict[str, Any]:
    import torch
    import transformers

    start = time.perf_counter()
    HELD.update({k: asked[k] for k in ("prompts", "samples", "max_new", "end")})
    HELD["model"] = transformers.AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32).eval()
    longest = max(map(len, HELD["prompts"]))
    HELD["ids"] = torch.tensor([[PAD] * (longest - len(ids)) + ids for ids in HELD["prompts"]])
    HELD["mask"] = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in HELD["prompts"]])
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads()}
    return {"versions": versions, "seconds": time.perf_counter() - start}


def run(asked: dict[str, Any]) -> dict[str, Any]:
    import torch

    torch.manual_seed(asked["seed"])
    start = time.perf_counter()
    with torch.inference_mode():
        out = HELD["model"].generate(
            input_ids=HELD["ids"], attention_mask=HELD["mask"], max_new_tokens=HELD["max_new"], do_sample=True, temperature=1.0,
            top_k=0, top_p=1.0, num_return_sequences=HELD["samples"], eos_token_id=HELD["end"], pad_token_id=PAD,
        )  # fmt: skip
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "lengths": lengths_to_end(out[:, HELD["ids"].shape[1] :].tolist(), HELD["end"])}


if __name__ == "__main__":
    serve({"load": load, "run": run})
