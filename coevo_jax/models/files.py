"""Model files on disk: user cache, hashes, safetensors folders read slice by slice, folders written at once or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from coevo_jax.errors import UserError, nearest

WHOLE_HASH = 1 << 30  # bytes; larger sources are hashed in part unless the caller asks for all
FLOATS = ("F32", "BF16", "F16", "F64")  # safetensors' names
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json",
    "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def user_cache() -> pathlib.Path:
    """The user's cache folder; COEVO_CACHE moves it."""
    return pathlib.Path(os.environ.get("COEVO_CACHE") or pathlib.Path.home() / ".cache" / "coevo-jax")


def file_sha256(path: pathlib.Path) -> str:
    """Hex sha256 of a file. UserError when it can't be read."""
    try:
        with open(path, "rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"the file can't be read: {error.strerror}", where=str(path), expected="a readable file") from error


def source_hash(files: Sequence[pathlib.Path], whole: bool = False) -> str:
    """Identity of weight files: the sha256 of one file, that of the files' hashes in order for several.

    Sources over 1 GiB are hashed by size, first MiB and a MiB of every 256 ('part:' in front) unless `whole`.
    """
    if whole or sum(f.stat().st_size for f in files) <= WHOLE_HASH:
        hashes = [file_sha256(f) for f in files]
        return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with open(file, "rb") as f:
            for start in range(0, size, 256 << 20):
                f.seek(start)
                digest.update(f.read(1 << 20))
    return "part:" + digest.hexdigest()


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object from a file. UserError with file and line."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path.name} can't be read: {error.strerror}", where=str(path), expected="a readable file") from error
    except ValueError as error:
        raise UserError(f"{path.name} is not valid JSON: {error}", where=str(path), expected="a JSON object") from error
    if not isinstance(value, dict):
        raise UserError(f"{path.name} holds a {type(value).__name__}", where=str(path), expected="a JSON object")
    return value


class SafetensorsFolder:
    """Tensors of a Hugging Face folder: model.safetensors, or shards with an index. Slices are read, not files."""

    whole = False

    def __init__(self, folder: pathlib.Path):
        self.where = str(folder)
        self._file_of: dict[str, pathlib.Path] = {}
        self._open: dict[pathlib.Path, Any] = {}
        index = folder / "model.safetensors.index.json"
        if index.exists():
            self.files = self._from_index(folder, index)
        elif (folder / "model.safetensors").exists():
            self.files = [folder / "model.safetensors"]
        else:
            others = [p.name for p in sorted(folder.iterdir()) if p.suffix in (".bin", ".safetensors", ".pt", ".gguf")]
            raise UserError("the folder holds no model.safetensors and no index of shards", where=self.where,
                            expected="model.safetensors or model.safetensors.index.json",
                            nearest=nearest("model.safetensors", others) or ", ".join(others[:3]))  # fmt: skip
        self._shapes = {name: shape for file in self.files for name, shape in self._scan(file)}
        for name in self._file_of:
            if name not in self._shapes:
                raise UserError(f"tensor {name!r} of the index is missing from its shard", where=str(self._file_of[name]),
                                expected="the tensors that the index lists")  # fmt: skip

    def _from_index(self, folder: pathlib.Path, index: pathlib.Path) -> list[pathlib.Path]:
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise UserError("the index has no weight_map", where=str(index), expected="tensor name -> file name")
        self._file_of = {name: folder / str(file) for name, file in listed.items()}
        files = sorted(set(self._file_of.values()))
        for file in files:
            if not file.exists():
                raise UserError(
                    f"shard {file.name} is missing", where=str(index), expected=f"{len(files)} shards beside the index"
                )
        return files

    def _scan(self, file: pathlib.Path) -> Iterator[tuple[str, tuple[int, ...]]]:
        try:
            opened = safe_open(file, "numpy")
            self._open[file] = opened
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                self._file_of[name] = file
                tensor = opened.get_slice(name)
                if tensor.get_dtype() not in FLOATS:
                    raise UserError(f"tensor {name!r} has dtype {tensor.get_dtype()}", where=str(file),
                                    expected=f"one of {', '.join(FLOATS)}")  # fmt: skip
                yield name, tuple(tensor.get_shape())
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"the file can't be read: {error}", where=str(file), expected="a complete safetensors file"
            ) from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return self._open[self._file_of[name]].get_slice(name)[index]


@contextlib.contextmanager
def new_folder(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder that appears under its name whole or not at all. UserError when the name is taken or the disk refuses."""
    if out.exists():
        raise UserError("the folder exists already", where=str(out), expected="a new folder; nothing is written over")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = pathlib.Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    except OSError as error:
        raise UserError(f"the folder can't be made: {error}", where=str(out), expected="a writable place") from error
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp makes it private
        os.rename(temporary, out)
    except OSError as error:
        raise UserError(f"the folder can't be written: {error}", where=str(out), expected="a writable place with room") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy_tokenizer(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copy the tokenizer's files, as far as they exist."""
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
