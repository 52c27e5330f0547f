"""Weights in an Orbax folder, on a disk or in a bucket (gs://): every process reads the slices that its devices hold.

Orbax writes the arrays; they are read here through tensorstore, which needs nothing else to reach a bucket. The least that can be
read is a chunk, and Orbax makes one of a whole array unless told otherwise: `save` makes chunks of about a MiB, a layer at most.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from coevo_jax.errors import UserError
from coevo_jax.models.forward import ParamInfo
from coevo_jax.models.lora import trained_shapes
from coevo_jax.models.spec import ModelSpec

ITEM = "params"  # subfolder, beside config.json and the tokenizer's files
BUCKET = "gs://"
CHUNK_BYTES = 1 << 20
CACHE_BYTES = 1 << 30  # of chunks that several devices of a process share
EXPECTED = "a folder written by python -m coevo_jax.models.export --format=orbax"


def save(params: Any, folder: pathlib.Path) -> None:
    """Write `folder`/params."""
    args = jax.tree.map_with_path(_save_args, params)
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(folder.absolute() / ITEM, args=ocp.args.StandardSave(params, save_args=args))


def _save_args(path: Any, array: Any) -> ocp.SaveArgs:
    if path[0].key == "layers":
        return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,))
    # Chunks divide their array: of a vocabulary of odd size they would be single rows, and the array is better left whole.
    divisible = array.ndim > 1 and min(size & -size for size in array.shape) >= 32
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES if divisible else None)


class OrbaxFolder:
    """An open Orbax source. UserError: it can't be reached, or is none. item: its subfolder; prefix: of the names of its arrays,
    where the parameters are a part of what is stored."""

    def __init__(self, source: str, item: str = ITEM, prefix: str = ""):
        self.item, self.prefix = item, prefix
        self.where = source if source.startswith(BUCKET) else str(pathlib.Path(source).absolute())
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
        self._store = _store(self.where)
        try:
            self._files = ts.KvStore.open(self._store, context=self._context).result()
        except (ValueError, OSError) as error:
            raise self._unreadable(error) from error
        tree = self.read_file(f"{item}/_METADATA")
        if tree is None:
            raise UserError("no Orbax folder is there", where=self.where, expected=EXPECTED)
        try:
            self._metadata = json.loads(tree)
            keys = [[part["key"] for part in item["key_metadata"]] for item in self._metadata["tree_metadata"].values()]
        except (ValueError, KeyError, TypeError) as error:
            raise self._unreadable(error) from error
        names = [".".join(map(str, key)) for key in keys]
        self.names = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}

    def read_file(self, name: str) -> bytes | None:
        """The bytes of a file, None when it is absent."""
        try:
            found = self._files.read(name).result()
        except (ValueError, OSError) as error:
            raise self._unreadable(error) from error
        return found.value if found.state == "value" else None

    def hash(self) -> str:
        """Identity of what is stored, without reading it: every write makes new names of data files, which the manifest lists."""
        parts = [self.read_file(f"{self.item}/{name}") or b"" for name in ("_METADATA", "manifest.ocdbt")]
        return "part:" + hashlib.sha256(b"\0".join(parts)).hexdigest()

    def params(self, spec: ModelSpec, dtype: Any, shardings: Any) -> Any:
        """What trains of an architecture (its parameters, unless the spec has adapters) with the given shardings. UserError names
        an array that is missing, extra or of another shape."""
        infos = trained_shapes(spec)
        flat, treedef = jax.tree.flatten_with_path(infos, is_leaf=lambda x: isinstance(x, ParamInfo))
        wanted = {".".join(k.key for k in path): info.shape for path, info in flat}
        for name in sorted(self.names ^ wanted.keys()):
            what = "is missing" if name in wanted else "is not part of this architecture"
            raise UserError(f"array {_shown(name)} {what}", where=self.where, expected="the arrays that config.json describes")
        stores = [self._open(name) for name in wanted]
        for (name, shape), store in zip(wanted.items(), stores, strict=True):
            if store.shape != shape:
                raise UserError(
                    f"array {_shown(name)} has shape {list(store.shape)}", where=self.where, expected=f"{list(shape)}"
                )
        placed = jax.tree.leaves(shardings)
        return jax.tree.unflatten(treedef, [self._read(s, jnp.dtype(dtype), p) for s, p in zip(stores, placed, strict=True)])

    def _open(self, name: str) -> ts.TensorStore:
        driver = "zarr3" if self._metadata.get("use_zarr3") else "zarr"
        path = self.prefix + name
        kvstore: Any = {"driver": "ocdbt", "base": self._within(f"{self.item}/"), "path": f"{path}/"}
        if not self._metadata.get("use_ocdbt", True):
            kvstore = self._within(f"{self.item}/{path}/")
        try:
            return ts.open({"driver": driver, "kvstore": kvstore}, open=True, context=self._context).result()
        except (ValueError, OSError) as error:
            raise self._unreadable(error) from error

    def _within(self, path: str) -> dict[str, Any]:
        return self._store | {"path": self._store["path"] + path}

    def _read(self, store: ts.TensorStore, dtype: np.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
        """One array. Slices are asked for all at once; devices that hold the same one share it."""
        places = sharding.addressable_devices_indices_map(store.shape).values()
        slices = {_key(index, store.shape): index for index in places if index is not None}
        pending = {key: store[index].read() for key, index in slices.items()}

        def part(index: Any) -> np.ndarray:
            try:
                return pending[_key(index, store.shape)].result().astype(dtype)
            except (ValueError, OSError) as error:
                raise self._unreadable(error) from error

        return jax.make_array_from_callback(store.shape, sharding, part)

    def _unreadable(self, error: Exception) -> UserError:
        return UserError(f"the Orbax folder can't be read: {error}", where=self.where, expected=EXPECTED)


def _store(where: str) -> dict[str, Any]:
    """tensorstore's description of a folder."""
    if where.startswith(BUCKET):
        bucket, _, path = where.removeprefix(BUCKET).partition("/")
        return {"driver": "gcs", "bucket": bucket, "path": f"{path.strip('/')}/" if path.strip("/") else ""}
    return {"driver": "file", "path": f"{where.rstrip('/')}/"}


def _key(index: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    return tuple(part.indices(size) for part, size in zip(index, shape, strict=True))


def _shown(name: str) -> str:
    return repr(name.replace(".", "/"))
