"""reference_logps.jsonl of a run folder: summed log-probs of given pairs under the weights that the run began with.

The first line holds a hash of all that they depend on and the number of pairs, each other line {id, chosen, rejected}. It grows
by whole lines, so a kill costs the last chunk; floats are written so that the same bits are read.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable

from coevo_jax.errors import UserError
from coevo_jax.records.files import disk_errors

NAME = "reference_logps.jsonl"
Logps = dict[str, tuple[float, float]]  # by a pair's id: of its chosen and of its rejected answer


def read(path: pathlib.Path, wanted: str) -> Logps | None:
    """What the file holds, a line that was cut off left out; None where there is no file. UserError: it has another hash."""
    if not path.exists():
        return None
    with disk_errors(path, "read the reference log-probs"):
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # behind the last line break lies what was cut off
    try:
        found = [json.loads(line) for line in lines]
        head = found[0]["hash"] if found else wanted
        logps = {row["id"]: (float(row["chosen"]), float(row["rejected"])) for row in found[1:]}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"the reference log-probs can't be read: {error!r}", where=str(path),
                        expected="the file as the run wrote it, or a new --workdir") from error  # fmt: skip
    if head != wanted:
        raise UserError(
            f"the reference log-probs are of another model, data set, tokenizer or prompt: {head}, and this run has {wanted}",
            where=str(path), expected="the model, data and prompt settings that the run began with, or another --workdir",
        )  # fmt: skip
    return logps


def begin(path: pathlib.Path, hash_: str, pairs: int, known: Logps) -> None:
    """Write the file anew with what is known: a line that was cut off goes."""
    temporary = path.with_name(path.name + ".tmp")
    with disk_errors(path, "write the reference log-probs"):
        temporary.write_text(json.dumps({"hash": hash_, "pairs": pairs}) + "\n", encoding="utf-8")
        append(temporary, known)
        os.replace(temporary, path)


def append(path: pathlib.Path, logps: Logps) -> None:
    """Add lines, and see them on the disk."""
    with disk_errors(path, "write the reference log-probs"), open(path, "a", encoding="utf-8") as file:
        file.writelines(_lines(logps))
        file.flush()
        os.fsync(file.fileno())


def _lines(logps: Logps) -> Iterable[str]:
    for name, (chosen, rejected) in logps.items():
        yield json.dumps({"id": name, "chosen": chosen, "rejected": rejected}) + "\n"
