"""metrics.jsonl: one row an update, appended and synced; cut back to a checkpoint's cursor on resume (design.md 4.8)."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
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


class Means:
    """Gathers samples by name and gives their mean and population std; counters and shares beside them.

    Sums are exact (math.fsum), so the order in which samples come, or on how many processes, changes no bit.
    """

    def __init__(self) -> None:
        self._samples: dict[str, list[float]] = {}
        self._counts: dict[str, int] = {}
        self._shares: dict[str, tuple[int, int]] = {}

    def add(self, name: str, values: float | Iterable[float] | np.ndarray) -> None:
        """Sample values of `name`; an empty list registers the name (its mean is then null)."""
        items = [values] if isinstance(values, int | float) else list(np.asarray(values, np.float64).reshape(-1))
        self._samples.setdefault(name, []).extend(float(item) for item in items)

    def count(self, name: str, number: int = 1) -> None:
        """Add to a whole-number counter."""
        self._counts[name] = self._counts.get(name, 0) + int(number)

    def share(self, name: str, hits: int, total: int) -> None:
        """Add to a share; it is null while its total is 0."""
        seen = self._shares.get(name, (0, 0))
        self._shares[name] = (seen[0] + int(hits), seen[1] + int(total))

    def merge(self, other: Means) -> None:
        """Add everything that another process or part of the step gathered."""
        for name, values in other._samples.items():
            self.add(name, values)
        for name, number in other._counts.items():
            self.count(name, number)
        for name, (hits, total) in other._shares.items():
            self.share(name, hits, total)

    def row(self, *, counts: bool = False) -> dict[str, Value]:
        """{'x/mean', 'x/std' (and 'x/count')} for samples, 'x' for counters and shares."""
        row: dict[str, Value] = {}
        for name, values in self._samples.items():
            mean, std = _mean_std(values)
            row[f"{name}/mean"], row[f"{name}/std"] = mean, std
            if counts:
                row[f"{name}/count"] = len(values)
        row.update(self._counts)
        row.update({name: hits / total if total else None for name, (hits, total) in self._shares.items()})
        return row


def _mean_std(values: list[float]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan  # the writer turns these into null and names them
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
