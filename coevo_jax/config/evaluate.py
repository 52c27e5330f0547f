"""The record of evaluation while a run trains (docs/evaluation.md). Imports no JAX."""

from __future__ import annotations

import dataclasses

from coevo_jax.config.model import Sampling


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """What is measured every so many updates, and changes nothing in the training. Its numbers are the row's eval/..."""

    every: int = 0  # updates between two evaluations, the run's last update is one too; 0 = none
    prompts: int = 16  # of those that data.heldout sets aside: answers, scored by the judge or schedule.verifier; 0 = none
    answer: Sampling = Sampling(temperature=0.0, max_new_tokens=64)  # how they are drawn, whatever training does
    rubric: Sampling = Sampling(temperature=0.0, max_new_tokens=128)  # rubrics of held-out prompts and of the probe
    pairs: str = ""  # a preference probe for generator and judge: a benchmark's file ('FILE?prompt=question'); '' = none
    benchmark: str = "pairs"  # how it is read: pairs, llmbar, pandalm, ... (coevo_jax/evaluate/benchmarks.py)
    probe: int = 32  # of its pairs
    best: str = ""  # a metric of the rows, such as eval/probe/accuracy: its best checkpoint is kept beside run.keep; '' = none
    best_is: str = "max"  # max | min
