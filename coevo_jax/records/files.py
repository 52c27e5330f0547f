"""Small file helpers that never leave half a file behind and turn a full or unwritable disk into a UserError."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np

from coevo_jax.errors import UserError

_SURROGATE = re.compile("[\ud800-\udfff]")


def free_space(path: pathlib.Path) -> str:
    """Free space of the file system that holds `path` (or its nearest parent that exists), for messages."""
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            return f"{shutil.disk_usage(folder).free / 2**20:.1f} MiB free"
    return "free space unknown"


@contextlib.contextmanager
def disk_errors(path: pathlib.Path, doing: str) -> Iterator[None]:
    """Any OSError inside becomes a UserError that names the path and the free space."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, doing, error) from error


def disk_error(path: pathlib.Path, doing: str, error: BaseException) -> UserError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error).strip().splitlines()[0]
    return UserError(
        f"could not {doing}: {reason}",
        where=f"{path} ({free_space(path)})",
        expected="a writable folder with enough free space; what was saved before is untouched",
    )


def write_atomic(path: pathlib.Path, text: str) -> None:
    """Write, fsync, rename: a reader sees the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with disk_errors(path, f"write {path.name}"), open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def plain(value: Any) -> Any:
    """NumPy and JAX values as JSON ones; a non-finite float becomes null (JSON has no NaN)."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, np.ndarray | np.generic) or hasattr(value, "__array__"):
        return plain(np.asarray(value).tolist())
    if isinstance(value, pathlib.PurePath):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def dumps(value: Any) -> str:
    """One line of JSON, text as UTF-8. A lone surrogate, which a model can write as a JSON escape, stays an escape."""
    text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
