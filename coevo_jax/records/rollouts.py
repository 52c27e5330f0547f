"""rollouts/: what was sampled, judged and rewarded, one file an update and role. An update done again overwrites its file."""

from __future__ import annotations

import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from coevo_jax.errors import UserError
from coevo_jax.records.files import disk_errors, dumps, write_atomic

_NAME = re.compile(r"update_(\d+)_([a-z_][a-z_\d]*?)(?:\.p(\d+))?\.jsonl")


def rollout_path(folder: pathlib.Path, update: int, role: str, process: int = 0) -> pathlib.Path:
    """update_000123_policy.jsonl; a process other than 0 writes its own part beside it."""
    part = f".p{process:03d}" if process else ""
    return folder / f"update_{update:06d}_{role}{part}.jsonl"


def write_rollouts(
    folder: pathlib.Path, update: int, role: str, rows: Iterable[Mapping[str, Any]], process: int = 0
) -> pathlib.Path:
    """Write one update's rows (dicts; NumPy values are fine) at once: a kill leaves no half file."""
    path = rollout_path(folder, update, role, process)
    with disk_errors(path, "write the rollouts"):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(dumps(row) + "\n" for row in rows))
    return path


def rollout_files(folder: pathlib.Path) -> list[tuple[int, str, int, pathlib.Path]]:
    """(update, role, process, path) of every rollout file, in that order."""
    found = []
    for path in folder.glob("update_*.jsonl"):
        match = _NAME.fullmatch(path.name)
        if match:
            found.append((int(match[1]), match[2], int(match[3] or 0), path))
    return sorted(found)


def read_rollouts(folder: pathlib.Path, update: int | None = None, role: str | None = None) -> list[dict[str, Any]]:
    """The rows of one update and role, or of all. UserError names the file and line of a bad row.

    Parts of several processes are joined by group, the order in which one process writes them.
    """
    rows: list[dict[str, Any]] = []
    for (number, kind), parts in itertools.groupby(rollout_files(folder), key=lambda item: item[:2]):
        if (update is None or number == update) and (role is None or kind == role):
            paths = [path for *_, path in parts]
            found = [row for path in paths for row in _rows(path)]
            rows += sorted(found, key=lambda row: row.get("group", 0)) if len(paths) > 1 else found
    return rows


def _rows(path: pathlib.Path) -> list[dict[str, Any]]:
    return [_row(path, line, text) for line, text in enumerate(path.read_text(encoding="utf-8").split("\n"), 1) if text]


def _row(path: pathlib.Path, line: int, text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"a rollout row is not JSON: {error}", where=f"{path}, line {line}") from error


def drop_rollouts_after(folder: pathlib.Path, update: int) -> int:
    """Remove files of later updates than `update` (on resume they are done again); returns how many."""
    late = [path for number, _, _, path in rollout_files(folder) if number > update]
    for path in late:
        path.unlink()
    return len(late)
