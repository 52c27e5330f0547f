"""Does the loop teach? SmolLM2-135M-Instruct, from the demo's warm-up, should write more valid rubrics after 16 rubric updates.

    python benchmarks/learning.py --what=rubrics --workdir=runs/learn
    python benchmarks/learning.py --what=rubrics --workdir=runs/learn_format --config.rubric.alpha=0     # what format alone does

The benchmark trains by run.py's own loop (`python run.py --config=configs/smollm2_learn.py` trains the same) and measures both
ends on the 64 questions of 'demo_heldout'.

Policy and generator are two models: in a first try with one set of weights the policy's updates, which carry little signal, broke
the rubrics that the generator had just learned to write (docs/results.md).

Hardware: 2 cores and 16 GB (14.3 GiB at its peak, for two models with their optimizers and references); up to an hour.
Expected (docs/results.md): the share of valid rubrics rises from 0.77 to 0.87 in 42 minutes of training. Margin and pair accuracy
of a 135M judge are shown beside it, did not move, and prove little.
"""

import dataclasses

from smollm2_demo import get_config as demo

from coevo_jax.config import (
    AdvantageConfig,
    Experiment,
    GeneratorConfig,
    LossConfig,
    OptimizerConfig,
    PairConfig,
    RunConfig,
    Sampling,
    ScheduleConfig,
)


def get_config() -> Experiment:
    return dataclasses.replace(
        demo(),
        name="smollm2_learn",
        generator=GeneratorConfig(mode="two", lr=8e-5),
        answer=Sampling(temperature=1.0, max_new_tokens=40),
        pairs=PairConfig(temporal=1.0, min_gap=1, max_gap=12, per_slot=12),
        schedule=ScheduleConfig(order="alternate", cycles=8, k=2, prompts=4, group=6),
        advantage=AdvantageConfig(kind="mean", max_resample=1),
        # The KL term keeps the weights after the warm-up in the run folder: the benchmark's starting point.
        loss=LossConfig(kl_weight=0.02),
        optimizer=OptimizerConfig(lr=2e-5),
        run=RunConfig(save_every=6, keep=1),
    )
