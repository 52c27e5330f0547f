"""Programs run in turns, each in a process of its own: what they printed, how long they took, the most memory they held."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

REPO = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent), str(REPO)]

from coevo_jax.errors import UserError  # noqa: E402
from coevo_jax.huge_pages import with_huge_pages  # noqa: E402

PEERS = pathlib.Path(__file__).resolve().parent / "peers"


@dataclasses.dataclass(frozen=True)
class Turn:
    """One finished process. peak_gib: the largest resident set that the system saw."""

    lines: list[str]
    seconds: float
    peak_gib: float

    @property
    def last(self) -> dict[str, Any]:
        """The object of the last line."""
        return json.loads(self.lines[-1])


def shared_peer(script: str) -> pathlib.Path:
    """A peer's script in the shared folder (COEVO_SHARED moves it). UserError where it is absent."""
    path = pathlib.Path(os.environ.get("COEVO_SHARED", REPO.parent / "shared")) / "peers" / script
    if not path.is_file():
        raise UserError("the peer's script is not there", where=str(path), expected="the shared folder, or COEVO_SHARED=FOLDER")
    return path


def take_turn(name: str, command: Sequence[str], environ: Mapping[str, str]) -> Turn:
    """Run a command to its end. RuntimeError with its last words when it failed."""
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(list(command), stdout=subprocess.PIPE, stderr=log, text=True, env=dict(environ))
        assert process.stdout is not None
        lines = [line.rstrip("\n") for line in process.stdout if line.strip()]
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        said = log.read()
    if process.returncode:
        raise RuntimeError(f"{name} ended with exit code {process.returncode}:\n" + "\n".join([*lines[-5:], said[-3000:]]))
    return Turn(lines, time.monotonic() - start, usage.ru_maxrss / 2**20)


def our_environment() -> dict[str, str]:
    """As run.py starts: huge pages for malloc, on the CPU."""
    return with_huge_pages({**os.environ, "JAX_PLATFORMS": "cpu"})


def peer_environment() -> dict[str, str]:
    """The user's own, without our packages and our settings."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "GLIBC_TUNABLES")}
