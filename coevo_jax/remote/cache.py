"""Replies by content, in an append-only JSONL file.

A line is written by one system call once its reply is whole, so a kill loses at most the line under way; a line that is cut off
or damaged is a miss. Several runs may share a file: each sees what was there when it began, and what it adds itself.
"""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import threading
from typing import Any

from coevo_jax.errors import UserError
from coevo_jax.records.files import disk_errors, dumps

HEAD = b'{"key": "'  # how every line begins
TORN = b" cut off\n"  # closes a line that a kill cut off, so that it stays a miss even where only its newline was lost


class ReplyCache:
    """key -> JSON object. Only keys and places are held in memory. Safe for threads. UserError: unreadable, disk full."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path).expanduser()
        self.damaged = 0  # lines that could not be read
        self._places: dict[str, tuple[int, int]] = {}  # offset and bytes of a key's line
        self._lock = threading.Lock()
        with disk_errors(self.path, "open the reply cache"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._load()
        except BaseException:
            os.close(self._file)
            raise

    def __len__(self) -> int:
        return len(self._places)

    def get(self, key: str) -> dict[str, Any] | None:
        """What was put under `key`, or None."""
        place = self._places.get(key)
        if place is None:
            return None
        with disk_errors(self.path, "read the reply cache"):
            found = _entry(os.pread(self._file, place[1], place[0]))
        return found[1] if found and found[0] == key else None

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Append an entry; the first one of a key stays."""
        line = (dumps({"key": key, "value": value}) + "\n").encode()
        with self._lock, disk_errors(self.path, "write to the reply cache"):
            if key in self._places:
                return
            fcntl.flock(self._file, fcntl.LOCK_EX)  # another run may share the file
            try:
                start = self._append(line)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self._places[key] = (start, len(line))

    def sync(self) -> None:
        """Bring what was put onto the disk: a kill never loses it, a power cut might."""
        with disk_errors(self.path, "write the reply cache"):
            os.fsync(self._file)

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _append(self, line: bytes) -> int:
        """Write at the end, behind whatever a kill left there; returns the offset."""
        end = os.fstat(self._file).st_size
        if end and os.pread(self._file, 1, end - 1) != b"\n":
            os.write(self._file, TORN)
            end += len(TORN)
        if os.write(self._file, line) != len(line):
            raise OSError(28, "the disk is full")  # the torn line stays, and is a miss
        return end

    def _load(self) -> None:
        with disk_errors(self.path, "read the reply cache"), open(self.path, "rb") as file:
            offset = 0
            for line in file:
                found = _entry(line)
                if found:
                    self._places.setdefault(found[0], (offset, len(line)))
                elif line.strip():
                    self.damaged += 1
                if not offset and not HEAD.startswith(line.removesuffix(TORN)[: len(HEAD)]):
                    break
                offset += len(line)
            else:
                return
            raise UserError(
                "the file is no reply cache", where=str(self.path), expected="a new path, or a file that this project wrote"
            )


def _entry(line: bytes) -> tuple[str, dict[str, Any]] | None:
    """(key, value) of a whole line."""
    if not line.endswith(b"\n"):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("key"), str) or not isinstance(found.get("value"), dict):
        return None
    return found["key"], found["value"]
