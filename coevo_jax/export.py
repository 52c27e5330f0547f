"""Export the trained weights of a run to a Hugging Face folder; it is read back and its logits are compared.

    python -m coevo_jax.export --run=runs/smollm2_demo --out=exported [--weights=policy|rubric] [--dtype=float32]

The newest good checkpoint is taken. `coevo_jax.models.export` does the same for a model that is no run.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from coevo_jax.assemble import optimizer_steps
from coevo_jax.config import Experiment, api_model
from coevo_jax.config.override import from_dict
from coevo_jax.errors import UserError, nearest, parse_flags
from coevo_jax.learn.update import init_state, make_optimizer
from coevo_jax.models.export import export_hf
from coevo_jax.models.load import DTYPES, LoadedModel, critic_source, load_with_head, trained_loader
from coevo_jax.records.checkpoint import Checkpoints
from coevo_jax.records.run_folder import read_config


def load_trained(run: pathlib.Path, weights: str = "policy") -> tuple[LoadedModel, int]:
    """The weights of a run's newest good checkpoint as a model, and its number of updates.

    UserError: no run folder, no checkpoint, or no such weights (single-model mode has 'policy' alone).
    """
    if not (run / "config.json").is_file() or not (run / "checkpoints").is_dir():
        raise UserError("not a run folder", where=str(run), expected="config.json and checkpoints/ of a run")
    cfg = from_dict(Experiment, read_config(run), where=str(run / "config.json"))
    sources = {"policy": cfg.policy}
    if cfg.generator.mode == "two" and not api_model(cfg.generator.source):
        sources["rubric"] = dataclasses.replace(cfg.policy, source=cfg.generator.source or cfg.policy.source, sha256="")
    load = trained_loader(cfg)
    models = {name: load(source) for name, source in sources.items()}
    if cfg.advantage.kind == "gae":
        head = functools.partial(load_with_head, std=cfg.critic.head_std, seed=cfg.seed)
        steps = optimizer_steps(cfg, tuple(sources))
        models |= {f"critic_{name}": head(critic_source(cfg, name)) for name in sources if steps[name]}
    if weights not in models:
        raise UserError(f"the run trained no weights {weights!r}", where="--weights", expected=f"one of {', '.join(models)}",
                        nearest=nearest(weights, models))  # fmt: skip
    optimizer = make_optimizer(cfg.optimizer, updates=1)  # the shape of its state is what counts here
    template = {name: init_state(model.params, optimizer) for name, model in models.items()}
    checkpoints = Checkpoints(run / "checkpoints", keep=cfg.run.keep)
    try:
        restored = checkpoints.restore_latest(template)
    finally:
        checkpoints.close()
    if restored is None:
        raise UserError("the run has no checkpoint yet", where=str(run / "checkpoints"), expected="a run that has saved once")
    for reason in restored.skipped:
        print(f"checkpoint skipped: {reason}", file=sys.stderr)
    return dataclasses.replace(models[weights], params=restored.state[weights].params), restored.step


def export_run(run: pathlib.Path, out: pathlib.Path, weights: str = "policy", dtype: str = "float32") -> None:
    """Write a run's weights to the new folder `out`. UserError as in load_trained, or when `out` exists."""
    if out.exists():
        raise UserError("the folder exists already", where=str(out), expected="a new folder; nothing is written over")
    print(f"loading {weights} of {run}", flush=True)
    model, step = load_trained(run, weights)
    params: Any = jax.tree.map(lambda p: p.astype(jnp.dtype(dtype)), model.params)
    print(f"writing the weights after update {step} in {dtype} to {out}", flush=True)
    gap = export_hf(params, model.spec, model.folder, out)
    print(f"read back: largest difference of a logit {gap:.1e}")


def main(argv: list[str]) -> int:
    """Command line. Exit code 2 for bad input."""
    try:
        if len(argv) > 1:
            raise UserError(f"unknown argument {argv[1]!r}", where="command line", expected="--run=... --out=...")
        run, out = (pathlib.Path(p).expanduser().absolute() for p in (FLAGS.run, FLAGS.out))
        export_run(run, out, FLAGS.weights, FLAGS.dtype)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


FLAGS = flags.FLAGS

if __name__ == "__main__":
    flags.DEFINE_string("run", None, "a run folder", required=True)
    flags.DEFINE_string("out", None, "folder to make", required=True)
    flags.DEFINE_string("weights", "policy", "policy; rubric in two-model mode; critic_policy, critic_rubric of PPO")
    flags.DEFINE_enum("dtype", "float32", list(DTYPES), "dtype of the weights in the files")
    app.run(main, flags_parser=parse_flags)
