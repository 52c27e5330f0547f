"""Our side of benchmarks/update.py: the project's own update on rows of given lengths. The last line printed is one object.

python ours_update.py '{"model": DIR, "lengths": [...], "rows": 8, "steps": 3, "overrides": [...], "products": false, "rank": 0}'

rank: that of adapters in place of full weights (lora.rank).
"""

from __future__ import annotations

import json
import os
import pathlib
import resource
import sys
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent), str(pathlib.Path(__file__).resolve().parent.parent.parent)]

import _sampler  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
from rows import REFERENCE, random_rows  # noqa: E402

from coevo_jax.adapters import tune  # noqa: E402
from coevo_jax.config import Experiment, LoraConfig, LossConfig, ModelConfig, OptimizerConfig, UpdateConfig  # noqa: E402
from coevo_jax.config.override import apply_overrides  # noqa: E402
from coevo_jax.learn.losses import policy_loss  # noqa: E402
from coevo_jax.learn.packing import Sample, TokenBatch, first_fit, pack  # noqa: E402
from coevo_jax.learn.update import init_state, make_optimizer, make_update  # noqa: E402
from coevo_jax.models.load import load_model  # noqa: E402

PRODUCT_ROWS, PRODUCT_SECONDS = 512, 3.0


def update_config(lengths: list[int], rows: int, overrides: list[str]) -> UpdateConfig:
    """Rows as long as the longest sequence; at most `rows` of them a micro-batch, and no more than packing fills."""
    most = 1 if len(set(lengths)) == 1 else 8
    packed = min(rows, len(first_fit(lengths, max(lengths), most)))
    base = UpdateConfig(pack_length=max(lengths), max_segments=most, rows_per_micro=packed, remat="dots", share_prefix=False)
    return apply_overrides(base, overrides)


def batch_of(lengths: list[int], vocab: int, cfg: UpdateConfig) -> TokenBatch:
    """Each row's first token is its prompt: all others are predicted and trained, as in the peer."""
    ids, advantages = random_rows(lengths, vocab)
    samples = [
        Sample(row[:1], row[1:], np.full(len(row) - 1, REFERENCE, np.float32), float(a), group=i, index=0)
        for i, (row, a) in enumerate(zip(ids, advantages))
    ]
    batch = pack(samples, cfg)
    return batch.replace(ref_logp=np.full(batch.tokens.shape, REFERENCE, np.float32))


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Rates of the timed steps, useful tokens/s; the loss before the first update; peak memory in GiB."""
    _sampler.keep_programs()
    model = load_model(ModelConfig(source=asked["model"]))
    cfg = Experiment(
        update=update_config(asked["lengths"], asked["rows"], asked["overrides"]),
        loss=LossConfig(aggregation="token", kl_weight=0.001, kl_estimator="k3", tis_cap=0.0),
        optimizer=OptimizerConfig(lr=1e-6, weight_decay=0.0, grad_clip=1.0),
        lora=LoraConfig(rank=asked.get("rank", 0)),
    )
    optimizer, (tuning, params) = make_optimizer(cfg.optimizer), tune(cfg, "policy", model)
    update = make_update(tuning.spec, optimizer, policy_loss, cfg)
    batch = batch_of(asked["lengths"], model.spec.vocab_size, cfg.update)
    state, losses, rates = init_state(params, optimizer), [], []
    for step in range(asked["steps"] + 1):
        start = time.perf_counter()
        state, metrics = update(state, batch, 1.0, *tuning.args)
        losses.append(float(jax.block_until_ready(metrics["loss"])))
        seconds = time.perf_counter() - start
        rates += [sum(asked["lengths"]) / seconds] if step else []
        print(f"{'step' if step else 'warm-up'} {seconds:.2f} s", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    out = {"rates": rates, "loss": losses[0], "peak_gib": peak, "update": repr(cfg.update)}
    if asked.get("products"):
        del state
        chain = _sampler.ProductChain(model.spec, PRODUCT_ROWS)
        out |= {"product_rate": chain.measure(PRODUCT_SECONDS), "parameters": chain.parameters}
    return out


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
