"""A run folder: config.json, inputs.json, metrics.jsonl, rollouts/, checkpoints/. One process group owns it at a time.

inputs.json has a hash of each file whose content a run depends on and whose name alone the config holds.
"""

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

from coevo_jax.config.several import rule_of
from coevo_jax.errors import UserError
from coevo_jax.records.files import disk_errors, dumps, plain, write_atomic

CONFIG, INPUTS, LOCK = "config.json", "inputs.json", ".lock"
# Keys that change how a run is recorded, or how an endpoint is reached, but not what is computed.
_REACH = (
    "base_url",
    "key_env",
    "concurrency",
    "timeout_s",
    "retries",
    "backoff_s",
    "max_wait_s",
    "price_in",
    "price_out",
    "cache",
)
FREE_KEYS = ("run", "evaluate", *(f"{role}.endpoint.{name}" for role in ("judge", "generator") for name in _REACH))
# Inputs into which a saved cursor points: another content can't be allowed.
FIXED_INPUTS = ("data.prompts", "warmup.data", "pairs.data", "dpo.data")
ALLOW_INPUTS = "run.allow_changed_inputs"


@dataclasses.dataclass(frozen=True)
class Input:
    """Something that a config names and a run reads. hash: of what was read; where: its file, or its source as configured."""

    hash: str
    where: str


@dataclasses.dataclass
class RunFolder:
    """An open run folder. `resumed`: it held this config already; `changed`: inputs that differ and were allowed to.

    close() releases the lock.
    """

    path: pathlib.Path
    resumed: bool
    lock: IO[str] | None = None
    changed: tuple[str, ...] = ()

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
    inputs: Mapping[str, Input] | None = None,
    allow_changed_inputs: bool = False,
) -> RunFolder:
    """Create the run folder, or open it to continue. Nothing is written when it raises for what it finds there.

    config: nested dict of the resolved experiment. ignore: dotted keys (a key covers those under it) that may differ.
    primary: only process 0 locks and writes; the others just get the paths. inputs: by the key that names them; one that changed
    since the run began is refused, unless allow_changed_inputs (those of FIXED_INPUTS always).
    UserError: another config, another input, another process, not a run folder, resume not allowed, unwritable, disk full.
    """
    path = _folder(workdir)
    wanted: dict[str, Any] = plain(dict(config))
    if not primary:
        return RunFolder(path, resumed=True)
    _check_is_run_folder(path)
    with disk_errors(path, "create the run folder"):
        path.mkdir(parents=True, exist_ok=True)
        lock = take_lock(path)
    try:
        stored = read_config(path) if (path / CONFIG).exists() else None
        if stored is not None:
            _check_may_resume(path, stored, wanted, tuple(ignore), resume)
        known = _read_inputs(path) if stored is not None else {}
        changed = _changed_inputs(path, known, inputs or {}, allow_changed_inputs)
        with disk_errors(path, "create the run folder"):
            for name in ("rollouts", "checkpoints"):
                (path / name).mkdir(exist_ok=True)
            _write_inputs(path, known, inputs or {}, changed)  # before the config, so that a folder with one has both
        if stored != wanted:
            write_atomic(path / CONFIG, json.dumps(wanted, indent=2, ensure_ascii=False) + "\n")
    except BaseException:
        lock.close()
        raise
    return RunFolder(path, stored is not None, lock, tuple(changed))


def check_run(workdir: str | os.PathLike[str], config: Mapping[str, Any], *, ignore: Iterable[str] = FREE_KEYS) -> None:
    """Raise what open_run would raise for what it finds there, and create nothing: for use before the models are loaded, so that
    a config that turns out wrong later leaves no folder behind that refuses the right one."""
    path = _folder(workdir)
    _check_is_run_folder(path)
    if (path / LOCK).exists():
        with disk_errors(path, "read the run folder"):
            take_lock(path).close()
    if (path / CONFIG).exists():
        _check_may_resume(path, read_config(path), plain(dict(config)), tuple(ignore), resume=True)


def read_config(path: pathlib.Path) -> dict[str, Any]:
    """The config that a run folder holds. UserError when it is unreadable."""
    return _read_object(path / CONFIG, "config")


def _read_object(file: pathlib.Path, what: str) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"the run folder's {what} cannot be read: {error}", where=str(file), expected="JSON") from error
    if not isinstance(found, dict):
        raise UserError(f"the run folder's {what} is not a JSON object", where=str(file), expected="an object")
    return found


def _read_inputs(path: pathlib.Path) -> dict[str, Any]:
    """{'hashes': ..., 'where': ..., 'changes': [...]}, empty for a run that was begun before they were recorded."""
    if not (path / INPUTS).exists():
        return {}
    found = _read_object(path / INPUTS, "list of inputs")
    if not isinstance(found.get("hashes"), dict):
        raise UserError("the run folder's list of inputs has no hashes", where=str(path / INPUTS), expected="an object 'hashes'")
    return found


def _changed_inputs(path: pathlib.Path, known: dict[str, Any], inputs: Mapping[str, Input], allow: bool) -> list[str]:
    """Lines 'key: hash -> hash (file)' of the inputs that changed, all of them allowed. An input that is new is none."""
    hashes = {key: item.hash for key, item in inputs.items()}
    before = {key: value for key, value in known.get("hashes", {}).items() if key in hashes}
    lines = config_differences(before, {key: hashes[key] for key in before}, ignore=())
    changed = [key for key in sorted(before) if before[key] != hashes[key]]
    lines = [f"{line} ({inputs[key].where})" for key, line in zip(changed, lines, strict=True)]
    refused = [key for key in changed if key in FIXED_INPUTS or not allow]
    if refused:
        fixed = any(key in FIXED_INPUTS for key in refused)
        raise UserError(
            f"{', '.join(refused)}: the content is not what this run began with: {'; '.join(lines)}",
            where=", ".join(dict.fromkeys(inputs[key].where for key in refused)),
            expected=f"the content listed in {path / INPUTS}, "
            + ("" if fixed else f"--config.{ALLOW_INPUTS}=true to go on with the new one, ")
            + "or another --workdir",
        )
    return lines


def _write_inputs(path: pathlib.Path, known: dict[str, Any], inputs: Mapping[str, Input], changed: list[str]) -> None:
    wanted = {
        "hashes": known.get("hashes", {}) | {key: item.hash for key, item in inputs.items()},
        "where": known.get("where", {}) | {key: item.where for key, item in inputs.items()},
        "changes": [*known.get("changes", []), *changed],
    }
    if inputs and wanted != known:
        write_atomic(path / INPUTS, json.dumps(wanted, indent=2, ensure_ascii=False) + "\n")


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}, {'a': [{'b': 1}]} -> {'a.0.b': 1}; an empty group keeps its own key."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, name + "."))
        else:
            flat[name] = value
    return flat


def config_differences(stored: Mapping[str, Any], config: Mapping[str, Any], ignore: Iterable[str] = FREE_KEYS) -> list[str]:
    """Lines 'key: stored -> wanted' of every key outside `ignore` on which two configs differ. What is free in a record is so in
    the lists of such records."""
    old, new = flatten(stored), flatten(config)
    free = tuple(ignore)
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if any(rule_of(key) == name or rule_of(key).startswith(name + ".") for name in free):
            continue
        left, right = (dumps(side[key]) if key in side else "absent" for side in (old, new))
        if left != right:
            lines.append(f"{key}: {left} -> {right}")
    return lines


def _folder(workdir: str | os.PathLike[str]) -> pathlib.Path:
    """A bucket's address would become a local folder of that name, which a preempted machine takes with it."""
    if "://" in str(workdir):
        raise UserError(
            "the run folder can't lie in a bucket: rows are appended, folders renamed and a lock is held in it",
            where=str(workdir),
            expected="a folder of a disk, or of a shared file system (NFS) with several hosts",
        )
    return pathlib.Path(workdir).expanduser().absolute()


def _check_is_run_folder(path: pathlib.Path) -> None:
    with disk_errors(path, "read the run folder"):
        if not path.exists():
            return
        if not path.is_dir():
            raise UserError("the run folder's path is a file", where=str(path), expected="a new or empty folder, or a run folder")
        # A kill while the folder was made leaves the lock and a temporary file, which hold nothing.
        names = sorted(item.name for item in path.iterdir() if item.name != LOCK and not item.name.endswith(".tmp"))
        if names and CONFIG not in names and set(names) - {"rollouts", "checkpoints", INPUTS}:
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
            expected=f"the same config (free to change: {_free(ignore)}), or another --workdir",
        )
    if not resume:
        raise UserError(
            "the run folder holds a run already", where=str(path), expected="a new --workdir, or a command that continues a run"
        )


def _free(names: tuple[str, ...]) -> str:
    """The free groups, and that there are single keys beside them."""
    groups = [f"{name}.*" for name in names if "." not in name]
    return ", ".join(groups) + (", how an endpoint is reached" if len(groups) < len(names) else "")


def take_lock(path: pathlib.Path, what: str = "run folder") -> IO[str]:
    """An advisory lock that the kernel drops when the process dies, so a kill never leaves a stale one. UserError: it is held."""
    lock = open(path / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - held until RunFolder.close
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise UserError(
            f"another process works on this {what} ({owner})",
            where=str(path),
            expected="to stop it first, or another --workdir",
        ) from None
    lock.truncate(0)
    lock.write(f"pid {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return lock
