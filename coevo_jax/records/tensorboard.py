"""TensorBoard scalars of a run, by `run.tensorboard`. metrics.jsonl stays the record; this is a view of it."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from coevo_jax.errors import UserError


class Scalars:
    """Writes every number of a metrics row under role/name at the update's step; nothing when not enabled."""

    def __init__(self, folder: pathlib.Path, enabled: bool, purge_step: int = 0):
        self._writer = _writer(folder, purge_step) if enabled else None

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        if self._writer is None:
            return
        for name, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
                self._writer.add_scalar(f"{row['role']}/{name}", value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()


def _writer(folder: pathlib.Path, purge_step: int) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise UserError(
            "TensorBoard output needs a package that is not installed", where="run.tensorboard",
            expected="pip install 'coevo-jax[tensorboard]', or run.tensorboard=false",
        ) from error  # fmt: skip
    return SummaryWriter(str(folder), purge_step=purge_step)  # a resumed run's later points are superseded
