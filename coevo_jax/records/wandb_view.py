"""Weights & Biases as a view of a run, by `run.wandb`; metrics.jsonl stays the record.

Updates that a kill made the run do again come a second time, with equal values: the x axis is the update, not W&B's own step.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

from coevo_jax.errors import UserError


class WandbView:
    """Logs every number of a metrics row under role/name over 'update'; nothing where mode is 'off'.

    A run folder is one W&B run, whatever the number of starts: its id is the folder's path. offline: files under
    FOLDER/wandb for `wandb sync`; nothing goes over the network.
    """

    def __init__(self, folder: pathlib.Path, mode: str, project: str, config: Mapping[str, Any]):
        self._run = None
        if mode == "off":
            return
        try:
            import wandb
        except ImportError as error:
            raise UserError("Weights & Biases needs a package that is not installed", where="run.wandb",
                            expected="pip install 'coevo-jax[wandb]', or run.wandb=off") from error  # fmt: skip
        name = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()
        self._run = wandb.init(
            project=project, name=folder.name, id=name, resume="allow", mode=mode, dir=str(folder), config=dict(config)
        )
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        if self._run is not None:
            numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool) and k != "step"}
            self._run.log({f"{row['role']}/{name}": value for name, value in numbers.items()} | {"update": row["step"]})

    def close(self) -> None:
        """Send what is left."""
        if self._run is not None:
            self._run.finish()
