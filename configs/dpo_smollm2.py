"""DPO on given pairs: SmolLM2-135M-Instruct on the 200 bundled pairs of the small world, whose better answer rules know.

    python run.py --config=configs/dpo_smollm2.py --workdir=runs/dpo
    python run.py --config=configs/dpo_smollm2.py --workdir=runs/mine --config.dpo.data=pairs.jsonl  # {prompt, chosen, rejected}

Hardware: 2 cores and 8 GB. Expected: heldout/rewards/accuracies rises from about one half as the model learns what the pairs
prefer; the loss begins at ln 2 = 0.693. docs/trainers.md says what the reference is.
"""

from coevo_jax.config import (
    DpoConfig,
    Experiment,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    UpdateConfig,
)


def get_config() -> Experiment:
    return Experiment(
        name="dpo_smollm2",
        policy=ModelConfig(source="smollm2"),
        dpo=DpoConfig(data="tiny", beta=0.1, pairs=16, heldout=40, eval_every=5),
        schedule=ScheduleConfig(mode="dpo", cycles=1, k=20),
        optimizer=OptimizerConfig(lr=5e-6, warmup_steps=2),
        update=UpdateConfig(pack_length=256, max_segments=12, rows_per_micro=2, remat="dots"),
        run=RunConfig(save_every=10, keep=1),
    )
