"""What makes a checkpoint folder trustworthy: sha256 of every file, written before the folder takes its final name."""

from __future__ import annotations

import concurrent.futures
import hashlib
import io
import json
import pathlib
import zipfile
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from coevo_jax.records.files import dumps, write_atomic

MANIFEST = "manifest.json"
# Orbax writes these two at the top level while it commits, after the manifest.
_LATE_FILES = ("_CHECKPOINT_METADATA", "commit_success.txt")


def write_manifest(folder: pathlib.Path) -> None:
    """Record size and sha256 of every file under `folder`."""
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).as_posix() not in _LATE_FILES
    )
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        hashes = list(pool.map(_sha256, files))
    entries = {path.relative_to(folder).as_posix(): [path.stat().st_size, digest] for path, digest in zip(files, hashes)}
    write_atomic(folder / MANIFEST, json.dumps({"format": 1, "files": entries}, indent=0, sort_keys=True))


def why_bad(folder: pathlib.Path) -> str | None:
    """None when every file is there with the bytes that were written; else what is wrong with which file."""
    try:
        entries = json.loads((folder / MANIFEST).read_text())["files"]
        sizes = {folder / name: (int(size), str(digest)) for name, (size, digest) in entries.items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    if not sizes:
        return f"{MANIFEST} lists no file"
    for path in (folder / _LATE_FILES[0], *sizes):
        if not path.is_file():
            return f"{path.relative_to(folder)} is missing"
    for path, (size, _) in sizes.items():
        if path.stat().st_size != size:
            return f"{path.relative_to(folder)} has {path.stat().st_size} bytes instead of {size}"
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            hashes = list(pool.map(_sha256, sizes))
    except OSError as error:
        return f"a file cannot be read ({error})"
    wrong = [path for path, digest in zip(sizes, hashes) if digest != sizes[path][1]]
    return f"{wrong[0].relative_to(folder)} does not have the bytes that were written (sha256)" if wrong else None


def _sha256(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ManifestHandler(ocp.CompositeCheckpointHandler):
    """Orbax's composite handler, which also writes the manifest: a folder that was committed always has one."""

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        write_manifest(pathlib.Path(directory))


@ocp.args.register_with_handler(ManifestHandler, for_save=True, for_restore=True)
class Items(ocp.args.Composite):
    """The named parts of one checkpoint folder."""


class HostHandler(ocp.AsyncCheckpointHandler):
    """Host state: each process writes its own JSON and arrays, whose names and shapes may vary from save to save."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1)

    async def async_save(self, directory: Any, args: HostSave) -> list[Any]:  # type: ignore[override]
        """The bytes are made here, so later changes of the host state do not reach the file; they are written behind."""
        folder = pathlib.Path(directory)
        name = f"process_{args.process:05d}"
        files = {f"{name}.json": dumps(args.host).encode(), f"{name}.npz": _npz(args.arrays)}
        return [self._pool.submit((folder / file).write_bytes, data) for file, data in files.items()]

    def save(self, directory: Any, args: HostSave) -> None:  # type: ignore[override]
        raise TypeError("host state is saved by an asynchronous checkpointer")

    def restore(self, directory: Any, args: HostRestore) -> list[tuple[dict[str, Any], dict[str, np.ndarray]]]:  # type: ignore[override]
        """(host, arrays) of every process that saved, in the order of processes."""
        return read_host(pathlib.Path(directory))

    def finalize(self, directory: Any) -> None:
        """Nothing is left to do: every process wrote its own whole files."""

    def close(self) -> None:
        self._pool.shutdown()


@ocp.args.register_with_handler(HostHandler, for_save=True)
class HostSave(ocp.args.CheckpointArgs):
    def __init__(self, host: dict[str, Any], arrays: dict[str, np.ndarray], process: int):
        self.host, self.arrays, self.process = host, arrays, process


@ocp.args.register_with_handler(HostHandler, for_restore=True)
class HostRestore(ocp.args.CheckpointArgs):
    pass


def read_host(folder: pathlib.Path) -> list[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """(host, arrays) of every process that saved, in the order of processes."""
    parts = []
    for path in sorted(folder.glob("process_*.json")):
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
            host = json.loads(path.read_bytes())
            parts.append((host, {name: arrays[name] for name in arrays.files}))
    return parts


def _npz(arrays: dict[str, np.ndarray]) -> bytes:
    """An .npz of any array names (np.savez reserves some). Stored, not deflated: token ids are few beside the optimizer."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)
    return buffer.getvalue()
