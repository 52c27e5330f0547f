"""Our side of benchmarks/step.py: `train` as run.py calls it, on the config of _g1.py, with the reference pass timed apart.

    python ours_step.py '{"prompts": FILE, "workdir": DIR, "updates": 2, "model": "smollm2", "overrides": [...]}'

The last line printed is one object: seconds by part and completion tokens of each update, and the process's peak memory.
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

import jax  # noqa: E402
from _g1 import get_config  # noqa: E402

from coevo_jax import learner as learner_module  # noqa: E402
from coevo_jax.config import Experiment  # noqa: E402
from coevo_jax.config.override import apply_overrides  # noqa: E402
from coevo_jax.config.validate import validate  # noqa: E402
from coevo_jax.records.metrics import read_metrics  # noqa: E402
from coevo_jax.train import train  # noqa: E402


def experiment(asked: dict[str, Any]) -> Experiment:
    own = [f"data.prompts={asked['prompts']}", f"schedule.k={asked['updates']}", f"policy.source={asked['model']}"]
    cfg = apply_overrides(get_config(), [*own, *asked["overrides"]])
    validate(cfg)
    return cfg


def time_reference(seconds: list[float]) -> None:
    """Let each reference pass add its seconds: the loop counts it into 'update'."""
    make = learner_module.make_logprobs

    def made(*args: Any) -> Any:
        logprobs = make(*args)

        def timed(*inputs: Any) -> Any:
            start = time.perf_counter()
            out = jax.block_until_ready(logprobs(*inputs))
            seconds.append(time.perf_counter() - start)
            return out

        return timed

    learner_module.make_logprobs = made  # type: ignore[assignment]


def run(asked: dict[str, Any]) -> dict[str, Any]:
    reference: list[float] = []
    time_reference(reference)
    train(experiment(asked), asked["workdir"])
    rows = list(read_metrics(pathlib.Path(asked["workdir"]) / "metrics.jsonl"))
    names = {"seconds": "time/total", "rollout": "time/sample", "update": "time/update", "publish": "time/publish"}
    names |= {"check": "time/check", "tokens": "tokens/completion", "trained": "tokens/trained", "skipped": "update/skipped"}
    steps = [{name: row[key] for name, key in names.items()} for row in rows]
    for step, passed in zip(steps, reference, strict=True):
        step["reference"], step["update"] = passed, step["update"] - passed
    return {"steps": steps, "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
