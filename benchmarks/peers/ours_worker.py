"""Worker around our engine; also measures the rate of matrix products, with the same library and threads."""

from __future__ import annotations

import os
import pathlib
import sys
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent), str(pathlib.Path(__file__).resolve().parent.parent.parent)]
from protocol import serve  # noqa: E402

HELD: dict[str, Any] = {}


def load(asked: dict[str, Any]) -> dict[str, Any]:
    import _sampler
    import jax

    from coevo_jax.config import Sampling

    start = time.perf_counter()
    HELD.update({k: asked[k] for k in ("prompts", "samples", "slots")})
    longest = max(map(len, HELD["prompts"]))
    cfg = _sampler.sampler_config(asked["slots"], longest, asked["max_new"], asked["overrides"])
    HELD["model"], HELD["engine"] = _sampler.model_and_engine(asked["model"], cfg, (asked["end"],))
    HELD["sampling"] = Sampling(temperature=1.0, max_new_tokens=asked["max_new"])
    HELD["engine"].warmup(HELD["model"].params, next_token=False)
    return {"versions": {"jax": jax.__version__}, "seconds": time.perf_counter() - start, "config": repr(cfg)}


def run(asked: dict[str, Any]) -> dict[str, Any]:
    import _sampler

    engine = HELD["engine"]
    engine.stats.reset()
    requests = _sampler.requests_of(HELD["prompts"], HELD["samples"], HELD["sampling"], update=asked["seed"])
    start = time.perf_counter()
    rows = engine.generate(HELD["model"].params, requests)
    seconds = time.perf_counter() - start
    stats = {name: getattr(engine.stats, name) for name in ("occupancy", "prefill_seconds", "decode_seconds", "dispatches")}
    return {"seconds": seconds, "lengths": [len(c.tokens) for row in rows for c in row], "stats": stats}


def products(asked: dict[str, Any]) -> dict[str, Any]:
    import _sampler

    if "chain" not in HELD:
        HELD["chain"] = _sampler.ProductChain(HELD["model"].spec, HELD["slots"])
    return {"rate": HELD["chain"].measure(asked["seconds"]), "parameters": HELD["chain"].parameters}


if __name__ == "__main__":
    serve({"load": load, "run": run, "products": products})
