"""Export the trained weights of a run to a Hugging Face folder; it is read back and its logits are compared.

    python -m coevo_jax.export --run=runs/smollm2_demo --out=exported [--weights=policy|rubric] [--dtype=float32] [--adapter]

Of a run with adapters (lora.rank) these are merged into the base; --adapter writes them alone, as the PEFT library stores them.

The newest good checkpoint is taken. `coevo_jax.models.export` does the same for a model that is no run.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from coevo_jax.errors import UserError, parse_flags
from coevo_jax.models.export import export_hf
from coevo_jax.models.load import DTYPES
from coevo_jax.models.peft import export_adapter
from coevo_jax.trained import load_adapters, load_trained


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


def export_run_adapter(run: pathlib.Path, out: pathlib.Path, weights: str = "policy") -> None:
    """Write a run's adapters to the new folder `out`. UserError as in load_adapters, or when `out` exists."""
    model, trained, cfg = load_adapters(run, weights)
    export_adapter(trained, model.spec, cfg.lora, model.source, out)
    print(f"wrote an adapter of rank {cfg.lora.rank} over {model.source!r}")


def main(argv: list[str]) -> int:
    """Command line. Exit code 2 for bad input."""
    try:
        if len(argv) > 1:
            raise UserError(f"unknown argument {argv[1]!r}", where="command line", expected="--run=... --out=...")
        run, out = (pathlib.Path(p).expanduser().absolute() for p in (FLAGS.run, FLAGS.out))
        if FLAGS.adapter:
            export_run_adapter(run, out, FLAGS.weights)
        else:
            export_run(run, out, FLAGS.weights, FLAGS.dtype)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


FLAGS = flags.FLAGS

if __name__ == "__main__":
    flags.DEFINE_string("run", None, "a run folder", required=True)
    flags.DEFINE_string("out", None, "folder to make", required=True)
    flags.DEFINE_string(
        "weights", "policy", "policy, rubric in two-model mode, policy_1, ... of several, or critic_policy, ... of PPO"
    )
    flags.DEFINE_bool("adapter", False, "the adapter alone, in float32, of a run with lora.rank")
    flags.DEFINE_enum("dtype", "float32", list(DTYPES), "dtype of the weights in the files")
    app.run(main, flags_parser=parse_flags)
