"""The update of the shared torch_train_step.py on rows of mixed lengths: padded in the order given, `rows` at a time.

    python torch_update.py '{"model": DIR, "lengths": [...], "rows": 8, "steps": 3}'

In the environment of `benchmarks/sampler.py --install hf`. Padding is masked in attention and in the loss, whose denominator is
the trained tokens of all rows; gradients of the padded batches add up before the one optimizer step. The last line is one object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from rows import REFERENCE, random_rows
from transformers import AutoModelForCausalLM

PAD = 0


def batches(lengths: list[int], rows: int, vocab: int) -> list[dict[str, Any]]:
    """Padded ids, attention mask, loss mask (of targets) and advantage of each `rows` rows."""
    ids, advantages = random_rows(lengths, vocab)
    out = []
    for first in range(0, len(ids), rows):
        part, longest = ids[first : first + rows], max(map(len, ids[first : first + rows]))
        padded = torch.full((len(part), longest), PAD, dtype=torch.long)
        mask = torch.zeros((len(part), longest), dtype=torch.long)
        for i, row in enumerate(part):
            padded[i, : len(row)], mask[i, : len(row)] = torch.from_numpy(row).long(), 1
        advantage = torch.from_numpy(advantages[first : first + rows])[:, None]
        out.append({"ids": padded, "mask": mask, "trained": mask[:, 1:].float(), "advantage": advantage})
    return out


def loss_of(model: Any, batch: dict[str, Any], count: float) -> torch.Tensor:
    ids = batch["ids"]
    logits = model(ids, attention_mask=batch["mask"], use_cache=False).logits[:, :-1]
    logp = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    ratio = torch.exp(logp - logp.detach())
    clipped = torch.clamp(ratio, 0.8, 1.2)
    gap = (REFERENCE - logp).clamp(-40, 40)
    token = -torch.minimum(ratio * batch["advantage"], clipped * batch["advantage"]) + 0.001 * (torch.exp(gap) - gap - 1)
    return (token * batch["trained"]).sum() / count


def run(asked: dict[str, Any]) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    micro = batches(asked["lengths"], asked["rows"], model.config.vocab_size)
    count = float(sum(b["trained"].sum() for b in micro))
    losses, rates = [], []
    for step in range(asked["steps"] + 1):
        start, total = time.perf_counter(), 0.0
        for batch in micro:
            loss = loss_of(model, batch, count)
            loss.backward()
            total += float(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - start
        losses.append(total)
        rates += [sum(asked["lengths"]) / seconds] if step else []
        print(f"{'step' if step else 'warm-up'} {seconds:.2f} s", flush=True)
    return {"rates": rates, "loss": losses[0]}


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
