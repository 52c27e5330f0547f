"""metrics.jsonl: one row an update, appended and synced; cut back to a checkpoint's cursor on resume (design.md 4.8)."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from coevo_jax.errors import UserError
from coevo_jax.records.files import disk_errors, dumps

Value = float | int | str | None


class MetricsWriter:
    """Appends rows to `path`. `cursor` is the number of whole rows; a torn last line is dropped on opening."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)
        with disk_errors(self.path, "open the metrics file"):
            self.path.touch()
        self._ends = _row_ends(self.path)
        self._cut()

    @property
    def cursor(self) -> int:
        return len(self._ends)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row. NaN and infinities become null and their names are listed under 'nonfinite'."""
        line = (dumps(clean_row(row)) + "\n").encode()
        try:
            with disk_errors(self.path, "write a metrics row"), open(self.path, "ab") as file:
                self._check_size(file.tell())
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except UserError:
            with contextlib.suppress(UserError):
                self._cut()
            raise
        self._ends.append(self._size + len(line))

    def truncate_to(self, rows: int) -> int:
        """Drop the rows after `rows` (a checkpoint's cursor); returns how many were dropped. UserError when rows are missing."""
        if rows > self.cursor:
            raise UserError(
                f"the metrics file has {self.cursor} rows, the checkpoint was saved after {rows}",
                where=str(self.path),
                expected="the metrics file of this run, as the run left it",
            )
        dropped = self.cursor - rows
        del self._ends[rows:]
        self._cut()
        return dropped

    @property
    def _size(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _check_size(self, size: int) -> None:
        if size != self._size:
            raise UserError(
                f"the metrics file has {size} bytes and should have {self._size}: something else changed it",
                where=str(self.path),
                expected="a file that only this run writes",
            )

    def _cut(self) -> None:
        # One truncate: a kill leaves the file as it was or as it should be. Never lengthens a file.
        with disk_errors(self.path, "cut the metrics file"):
            if self.path.stat().st_size > self._size:
                os.truncate(self.path, self._size)


def _row_ends(path: pathlib.Path) -> list[int]:
    """Byte offset after each whole row. Only the last line can be torn; an earlier bad one is an error."""
    ends: list[int] = []
    with open(path, "rb") as file:
        lines = file.readlines()
    for number, line in enumerate(lines, 1):
        whole = line.endswith(b"\n") and _is_object(line)
        if not whole and number == len(lines):
            break
        if not whole:
            raise UserError("a metrics row is not JSON", where=f"{path}, line {number}", expected="one JSON object a line")
        ends.append((ends[-1] if ends else 0) + len(line))
    return ends


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def clean_row(row: Mapping[str, Any]) -> dict[str, Value | list[str]]:
    """Scalars (Python, NumPy, JAX) as JSON ones; non-finite values are named under 'nonfinite'. TypeError for the rest."""
    clean: dict[str, Any] = {}
    bad: list[str] = []
    for name, value in row.items():
        value = _scalar(name, value)
        if isinstance(value, float) and not math.isfinite(value):
            bad.append(name)
            value = None
        clean[name] = value
    if bad:
        clean["nonfinite"] = bad
    return clean


def _scalar(name: str, value: Any) -> Value:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    array = np.asarray(value)
    if array.size != 1 or (array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16"):
        raise TypeError(f"metric {name!r} is not a scalar: {type(value).__name__} of shape {array.shape}")
    return array.reshape(()).astype(np.float64).item() if array.dtype.kind not in "biu" else array.reshape(()).item()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The whole rows of a metrics file; a torn last line (a run being written or killed) is left out."""
    path = pathlib.Path(path)
    try:
        ends = _row_ends(path)
    except OSError as error:
        raise UserError(f"the metrics file cannot be read: {error.strerror}", where=str(path)) from error
    data = path.read_bytes()[: ends[-1] if ends else 0]
    return [json.loads(line) for line in data.splitlines()]


def comparable(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that two equal runs share: everything but times, rates, memory and what an endpoint was asked or had cached."""
    kept = {name: value for name, value in row.items() if not _is_clock(name)}
    if "nonfinite" in kept:
        kept["nonfinite"] = [name for name in kept["nonfinite"] if not _is_clock(name)]
        if not kept["nonfinite"]:
            del kept["nonfinite"]
    return kept


def _is_clock(name: str) -> bool:
    if name.startswith(("time/", "rate/", "memory/", "api/")):
        return True
    return any(part.startswith("seconds") or part.endswith(("_seconds", "_per_second")) for part in name.split("/"))
