"""Checkpoints of a run: one atomic folder a save, checked on restore, the last good one never deleted (design.md 4.8).

Orbax writes device arrays (asynchronously, each process its shards); beside them lie each process's host state and arrays.
A save goes to a temporary folder, gets its manifest there and takes its name by one rename: what has the name is whole.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import absl.logging
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from coevo_jax.errors import UserError
from coevo_jax.records.files import disk_error, disk_errors, plain
from coevo_jax.records.fingerprint import fingerprint
from coevo_jax.records.integrity import HostRestore, HostSave, Items, ManifestHandler, read_host, why_bad

TEMPORARY = ".orbax-checkpoint-tmp"
_STEP = re.compile(r"step_(\d+)(?:\.(\d+))?")
_DISK_TROUBLE = re.compile(
    r"no space left|disk quota|file too large|permission denied|read-only file system|not a directory|input/output error"
    r"|RESOURCE_EXHAUSTED|PERMISSION_DENIED",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint held. host, arrays: those of process 0; *_parts: of every process that saved, in order.

    skipped: newer checkpoints that were passed over, each with its reason. reference: fingerprint of the run's reference.
    """

    step: int
    state: Any
    host: dict[str, Any]
    arrays: dict[str, np.ndarray]
    skipped: list[str]
    host_parts: list[dict[str, Any]]
    array_parts: list[dict[str, np.ndarray]]
    reference: dict[str, str]


class Checkpoints:
    """Saves and restores in `folder`, keeping the newest `keep`. All processes call each method; process 0 tidies up."""

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2):
        if keep < 1:
            raise UserError(f"cannot keep {keep} checkpoints", where="run.keep", expected="1 or more")
        self.folder, self.keep = pathlib.Path(folder).absolute(), keep
        with disk_errors(self.folder, "create the checkpoint folder"):
            self.folder.mkdir(parents=True, exist_ok=True)
        options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        handler = ManifestHandler(composite_options=ocp.CompositeOptions(async_options=options))
        self._checkpointer = ocp.AsyncCheckpointer(handler, async_options=options)
        self._pending: pathlib.Path | None = None
        self._good: set[pathlib.Path] = set()  # written or checked by this process
        self._bad: set[pathlib.Path] = set()
        self._references: dict[str, str] = {}
        self._tidied = False
        self.best: int | None = None  # a step that is kept beside the newest
        absl.logging.get_absl_logger().addFilter(_keep_record)

    # ---- save ----

    def save(
        self,
        step: int,
        state: Any,
        host: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray] | None = None,
        *,
        block: bool = False,
    ) -> None:
        """Start saving; `state` (device arrays) may be donated and host state changed as soon as this returns.

        Waits for the save before it. An error of the disk, of this save or of the one before, is a UserError that names path
        and free space; older checkpoints stay. block: return only when this one is committed.
        """
        self.wait()
        self._tidy_temporary()
        path = self._new_path(step)
        self._check_space(path, state)
        meta = {"step": int(step), "references": self._references, "leaves": describe(state)}
        self._start(path, state, {"meta": meta, "host": plain(dict(host))}, dict(arrays or {}))
        self._pending = path
        if block:
            self.wait()

    def wait(self) -> None:
        """Until the running save is committed; then older checkpoints than the newest `keep` go. UserError as in save."""
        path, self._pending = self._pending, None
        self._finish(path or self.folder)
        if path is not None:
            self._good.add(path)
            self._delete_old()

    def close(self) -> None:
        """Wait for the running save and end the threads."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def _start(self, path: pathlib.Path, state: Any, host: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        items = Items(state=ocp.args.StandardSave(state), host=HostSave(host, arrays, jax.process_index()))
        try:
            self._checkpointer.save(path, args=items)
        except Exception as error:
            raise self._failed(path, error) from error

    def _finish(self, path: pathlib.Path) -> None:
        try:
            self._checkpointer.wait_until_finished()
        except Exception as error:
            raise self._failed(path, error) from error

    def _failed(self, path: pathlib.Path, error: Exception) -> Exception:
        """The error to raise for a failed save; the half-written folder gives its space back."""
        for item in self._temporaries():
            if jax.process_index() == 0:
                shutil.rmtree(item, ignore_errors=True)
        cause = _disk_trouble(error)
        return error if cause is None else disk_error(path, "save a checkpoint", cause)

    def _check_space(self, path: pathlib.Path, state: Any) -> None:
        """A save that cannot fit is refused before it fills the disk."""
        needed = sum(_local_bytes(leaf) for leaf in jax.tree.leaves(state))
        with disk_errors(path, "save a checkpoint"):
            free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise disk_error(path, "save a checkpoint", OSError(28, f"No space left: it needs {needed / 2**20:.1f} MiB"))

    def _new_path(self, step: int) -> pathlib.Path:
        """A name that is not taken: a bad or an older checkpoint of the same step is never written over."""
        serials = [serial for number, serial, _ in self._steps() if number == step]
        serial = f".{max(serials) + 1}" if serials else ""
        return self.folder / f"step_{step:08d}{serial}"

    def _delete_old(self) -> None:
        """Keep the newest `keep` and the best; those found bad do not count and go now that a newer good one exists."""
        if jax.process_index() != 0:
            return
        paths = [path for _, _, path in self._steps() if path not in self._bad]
        old = [path for path in paths[self.keep :] if _step_of(path) != self.best]
        for path in [*old, *sorted(self._bad)]:
            # The rename makes the removal atomic: a kill in the middle leaves no checkpoint with missing files.
            doomed = path.with_name(path.name + TEMPORARY)
            try:
                path.rename(doomed)
            except OSError:
                continue  # gone already, or it stays: never a reason to stop a run
            shutil.rmtree(doomed, ignore_errors=True)
        self._bad.clear()

    def _tidy_temporary(self) -> None:
        """Once, before the first save: remove what a killed process left half done."""
        if not self._tidied and jax.process_index() == 0:
            for path in self._temporaries():
                shutil.rmtree(path, ignore_errors=True)
        self._tidied = True

    # ---- restore ----

    def restore_latest(self, template: Any) -> Restored | None:
        """The newest good checkpoint, or None when none was ever committed.

        template: the state's pytree of arrays or jax.ShapeDtypeStruct with shardings; arrays come back with these shardings.
        UserError when every checkpoint is bad, or when the good one is of another model or optimizer than the template.
        """
        self.wait()
        steps = self._steps()
        chosen, skipped = self._choose(steps)
        if chosen is None:
            if steps:
                raise UserError(
                    "every checkpoint is corrupt or partial: " + "; ".join(skipped),
                    where=str(self.folder),
                    expected="at least one whole checkpoint, or another --workdir",
                )
            return None
        step, _, path = chosen
        parts = read_host(path / "host")
        meta = parts[0][0]["meta"]
        self._check_template(path, meta["leaves"], template)
        state = self._read_state(path, template)
        self._references = dict(meta["references"])
        hosts, arrays = [host["host"] for host, _ in parts], [array for _, array in parts]
        return Restored(step, state, hosts[0], arrays[0], skipped, hosts, arrays, dict(self._references))

    def good(self, step: int | None = None) -> tuple[int, pathlib.Path, list[str]]:
        """(step, folder, why newer ones were passed over) of the newest good checkpoint, or of a step's. UserError: none."""
        self.wait()
        steps = self._steps()
        chosen, skipped = self._choose([item for item in steps if step in (None, item[0])])
        if chosen is None:
            what, expected = "the run has no checkpoint yet", "a run that has saved once"
            if steps:
                what = "the run has no good checkpoint" + (f" of update {step}" if step is not None else "")
                expected = f"one of the updates {', '.join(str(item[0]) for item in steps)}"
            raise UserError("; ".join([what, *skipped]), where=str(self.folder), expected=expected)
        return chosen[0], chosen[2], skipped

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint by name; it is not checked."""
        steps = self._steps()
        return steps[0][0] if steps else None

    def _choose(self, steps: list[tuple[int, int, pathlib.Path]]) -> tuple[tuple[int, int, pathlib.Path] | None, list[str]]:
        """The newest whole checkpoint and why newer ones are none. Process 0 looks; all take its choice."""
        skipped: list[str] = []
        index = -1
        if jax.process_index() == 0:
            for position, (_, _, path) in enumerate(steps):
                reason = why_bad(path)
                if reason is None:
                    self._good.add(path)
                    index = position
                    break
                self._bad.add(path)
                skipped.append(f"{path.name}: {reason}")
            newest = steps[index][0] if index >= 0 else -1
            skipped += [
                f"{path.name}: not committed (the save was cut off)" for path in self._temporaries() if _step_of(path) > newest
            ]
        if jax.process_count() > 1:
            index = int(multihost_utils.broadcast_one_to_all(np.int32(index)))
        return (steps[index] if index >= 0 else None), skipped

    def _check_template(self, path: pathlib.Path, saved: dict[str, Any], template: Any) -> None:
        wanted = describe(template)
        for name in sorted(saved.keys() | wanted.keys()):
            if saved.get(name) != wanted.get(name):
                raise UserError(
                    f"the checkpoint is of another model or optimizer: {name} is {saved.get(name, 'absent')}",
                    where=str(path),
                    expected=f"{name}: {wanted.get(name, 'absent')}",
                )

    def _read_state(self, path: pathlib.Path, template: Any) -> Any:
        items = Items(state=ocp.args.StandardRestore(jax.tree.map(_abstract, template)), host=HostRestore())
        return jax.tree.map(_placed_like, template, self._checkpointer.restore(path, args=items).state)

    def _steps(self) -> list[tuple[int, int, pathlib.Path]]:
        """(step, serial, path) of every committed folder, newest first."""
        found = []
        for path in self._folders():
            match = _STEP.fullmatch(path.name)
            if match:
                found.append((int(match[1]), int(match[2] or 0), path))
        return sorted(found, reverse=True)

    def _temporaries(self) -> list[pathlib.Path]:
        return [path for path in self._folders() if TEMPORARY in path.name]

    def _folders(self) -> Iterator[pathlib.Path]:
        with disk_errors(self.folder, "read the checkpoint folder"):
            yield from sorted(path for path in self.folder.iterdir() if path.is_dir())

    # ---- the frozen reference ----

    def save_reference(self, params: Any, name: str = "reference") -> str:
        """Store the reference once a run and bind later checkpoints to it; returns its fingerprint.

        Called again with the same bits it writes nothing; with others it is a UserError: a reference is never re-anchored.
        """
        self.wait()
        self._tidy_temporary()
        path, found = self.folder / name, fingerprint(params)
        whole = path.is_dir() and why_bad(path) is None
        stored = read_host(path / "host")[0][0]["meta"]["fingerprint"] if whole else found
        for wanted in (stored, self._references.get(name, found)):
            if wanted != found:
                raise UserError(
                    f"the reference parameters differ from those this run began with ({found}, stored {wanted})",
                    where=str(path),
                    expected="the same model source, or another --workdir",
                )
        if not whole:
            if path.is_dir() and jax.process_index() == 0:
                shutil.rmtree(path)
            self._check_space(path, params)
            self._start(path, params, {"meta": {"fingerprint": found, "leaves": describe(params)}, "host": {}}, {})
            self._finish(path)
        self._references[name] = found
        return found

    def load_reference(self, template: Any, name: str = "reference") -> Any:
        """The stored reference with the template's shardings. UserError: missing, corrupt, not the checkpoint's."""
        self.wait()
        path = self.folder / name
        reason = why_bad(path) if path.is_dir() else "it is missing"
        if reason:
            raise UserError(
                f"the reference cannot be used: {reason}",
                where=str(path),
                expected="the reference that the run stored at its start",
            )
        meta = read_host(path / "host")[0][0]["meta"]
        self._check_template(path, meta["leaves"], template)
        params = self._read_state(path, template)
        found, wanted = fingerprint(params), self._references.get(name, meta["fingerprint"])
        if not found == wanted == meta["fingerprint"]:
            raise UserError(
                f"the reference has fingerprint {found}", where=str(path), expected=f"{wanted}, that of the checkpoint"
            )
        self._references[name] = found
        return params


def _keep_record(record: logging.LogRecord) -> bool:
    """Orbax logs tracebacks of a failed save from its threads; the same error is raised to the caller, and once is enough."""
    return not (record.exc_info and f"{os.sep}orbax{os.sep}checkpoint{os.sep}" in record.pathname)


def describe(tree: Any) -> dict[str, str]:
    """'float32[3,4]' by leaf name; the structure that a checkpoint and a template must share."""
    described = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        described[jax.tree_util.keystr(path)] = f"{array.dtype}[{','.join(map(str, array.shape))}]"
    return described


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return leaf


def _placed_like(leaf: Any, value: Any) -> Any:
    """`value`, free to move where `leaf` is: an array that no one placed must not come back pinned to the first device."""
    unplaced = (isinstance(leaf, jax.Array) and not leaf.committed) or (
        isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None
    )
    if not unplaced:
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(np.asarray(jax.random.key_data(value))), impl=jax.random.key_impl(value))
    return jnp.asarray(np.asarray(value))


def _local_bytes(leaf: Any) -> int:
    if isinstance(leaf, jax.Array):
        return sum(shard.data.nbytes for shard in leaf.addressable_shards if shard.replica_id == 0)
    return np.asarray(leaf).nbytes


def _step_of(path: pathlib.Path) -> int:
    match = _STEP.match(path.name)
    return int(match[1]) if match else -1


def _disk_trouble(error: BaseException | None) -> BaseException | None:
    """The error in the chain that speaks of the disk, or None."""
    while error is not None:
        if isinstance(error, OSError) or _DISK_TROUBLE.search(str(error)):
            return error
        error = error.__cause__ or error.__context__
    return None
