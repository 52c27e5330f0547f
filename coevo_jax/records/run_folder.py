"""A run folder: config.json, metrics.jsonl, rollouts/, checkpoints/. One process group owns it at a time."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import pathlib
import socket
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import IO, Any

from coevo_jax.errors import UserError
from coevo_jax.records.files import disk_errors, dumps, plain, write_atomic

CONFIG, LOCK = "config.json", ".lock"
# Keys that change how a run is recorded but not what it computes.
FREE_KEYS = ("run",)


@dataclasses.dataclass
class RunFolder:
    """An open run folder. `resumed`: it held this config already. close() releases the lock."""

    path: pathlib.Path
    resumed: bool
    lock: IO[str] | None = None

    @property
    def metrics(self) -> pathlib.Path:
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> pathlib.Path:
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.path / "checkpoints"

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()
            self.lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_run(
    workdir: str | os.PathLike[str],
    config: Mapping[str, Any],
    *,
    ignore: Iterable[str] = FREE_KEYS,
    resume: bool = True,
    primary: bool = True,
) -> RunFolder:
    """Create the run folder, or open it to continue. Nothing is written when it raises for what it finds there.

    config: nested dict of the resolved experiment. ignore: dotted keys (a key covers those under it) that may differ.
    primary: only process 0 locks and writes; the others just get the paths.
    UserError: another config, another process, not a run folder, resume not allowed, unwritable, disk full.
    """
    path = pathlib.Path(workdir).expanduser().absolute()
    wanted: dict[str, Any] = plain(dict(config))
    if not primary:
        return RunFolder(path, resumed=True)
    _check_is_run_folder(path)
    with disk_errors(path, "create the run folder"):
        path.mkdir(parents=True, exist_ok=True)
        lock = _take_lock(path)
    try:
        stored = read_config(path) if (path / CONFIG).exists() else None
        if stored is not None:
            _check_may_resume(path, stored, wanted, tuple(ignore), resume)
        with disk_errors(path, "create the run folder"):
            for name in ("rollouts", "checkpoints"):
                (path / name).mkdir(exist_ok=True)
        if stored != wanted:
            write_atomic(path / CONFIG, json.dumps(wanted, indent=2, ensure_ascii=False) + "\n")
    except BaseException:
        lock.close()
        raise
    return RunFolder(path, resumed=stored is not None, lock=lock)


def check_run(workdir: str | os.PathLike[str], config: Mapping[str, Any], *, ignore: Iterable[str] = FREE_KEYS) -> None:
    """Raise what open_run would raise for what it finds there, and create nothing: for use before the models are loaded, so that
    a config that turns out wrong later leaves no folder behind that refuses the right one."""
    path = pathlib.Path(workdir).expanduser().absolute()
    _check_is_run_folder(path)
    if (path / LOCK).exists():
        with disk_errors(path, "read the run folder"):
            _take_lock(path).close()
    if (path / CONFIG).exists():
        _check_may_resume(path, read_config(path), plain(dict(config)), tuple(ignore), resume=True)


def read_config(path: pathlib.Path) -> dict[str, Any]:
    """The config that a run folder holds. UserError when it is unreadable."""
    file = path / CONFIG
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"the run folder's config cannot be read: {error}", where=str(file), expected="JSON") from error
    if not isinstance(found, dict):
        raise UserError("the run folder's config is not a JSON object", where=str(file), expected="an object of config groups")
    return found


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}; an empty group keeps its own key."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, name + "."))
        else:
            flat[name] = value
    return flat


def config_differences(stored: Mapping[str, Any], config: Mapping[str, Any], ignore: Iterable[str] = FREE_KEYS) -> list[str]:
    """Lines 'key: stored -> wanted' of every key outside `ignore` on which two configs differ."""
    old, new = flatten(stored), flatten(config)
    free = tuple(ignore)
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if any(key == name or key.startswith(name + ".") for name in free):
            continue
        left, right = (dumps(side[key]) if key in side else "absent" for side in (old, new))
        if left != right:
            lines.append(f"{key}: {left} -> {right}")
    return lines


def _check_is_run_folder(path: pathlib.Path) -> None:
    with disk_errors(path, "read the run folder"):
        if not path.exists():
            return
        if not path.is_dir():
            raise UserError("the run folder's path is a file", where=str(path), expected="a new or empty folder, or a run folder")
        # A kill while the folder was made leaves the lock and a temporary file, which hold nothing.
        names = sorted(item.name for item in path.iterdir() if item.name != LOCK and not item.name.endswith(".tmp"))
        if names and CONFIG not in names and set(names) - {"rollouts", "checkpoints"}:
            raise UserError(
                f"the folder is not empty and is not a run folder (it holds {', '.join(names[:3])})",
                where=str(path),
                expected=f"a new or empty folder, or one with {CONFIG}",
            )


def _check_may_resume(
    path: pathlib.Path, stored: dict[str, Any], config: dict[str, Any], ignore: tuple[str, ...], resume: bool
) -> None:
    differences = config_differences(stored, config, ignore)
    if differences:
        raise UserError(
            "the run folder belongs to another config: "
            + "; ".join(differences[:20])
            + (" ..." if len(differences) > 20 else ""),
            where=str(path / CONFIG),
            expected=f"the same config (free to change: {', '.join(f'{name}.*' for name in ignore)}), or another --workdir",
        )
    if not resume:
        raise UserError(
            "the run folder holds a run already", where=str(path), expected="a new --workdir, or a command that continues a run"
        )


def _take_lock(path: pathlib.Path) -> IO[str]:
    """An advisory lock that the kernel drops when the process dies, so a kill never leaves a stale one."""
    lock = open(path / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - held until RunFolder.close
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise UserError(
            f"another process works on this run folder ({owner})",
            where=str(path),
            expected="to stop it first, or another --workdir",
        ) from None
    lock.truncate(0)
    lock.write(f"pid {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return lock
