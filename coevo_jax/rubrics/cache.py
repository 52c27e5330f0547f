"""Rubrics that are built once a question, in a folder: one JSON file a rubric, named by the hash of all it was made from.

A file appears whole or not at all. One that doesn't read is a miss and is written again. Runs may share a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import tempfile
from typing import Any

from coevo_jax.records.files import disk_errors, dumps


def content_key(**parts: Any) -> str:
    """Name of what is made from `parts` (JSON values): equal contents give equal names, whatever their order of keys."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class RubricFolder:
    """key -> JSON object. UserError: the folder can't be written."""

    def __init__(self, folder: pathlib.Path | str):
        self.folder = pathlib.Path(folder).expanduser()
        self.hits = self.misses = self.damaged = 0
        with disk_errors(self.folder, "make the folder of rubrics"):
            self.folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> dict[str, Any] | None:
        """What was put under the key, or None."""
        try:
            value = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            self.misses += 1
            return None
        except ValueError:
            value = None
        if not isinstance(value, dict):
            self.misses, self.damaged = self.misses + 1, self.damaged + 1
            return None
        self.hits += 1
        return value

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Write an entry over a damaged one or one of the same content."""
        path = self.folder / f"{key}.json"
        text = dumps(value) + "\n"
        with disk_errors(path, "write a rubric"):
            number, name = tempfile.mkstemp(dir=self.folder, suffix=".tmp")  # of its own: two processes may build the same rubric
            try:
                with open(number, "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(name, path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
