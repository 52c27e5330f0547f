"""A profiler trace of chosen updates, by `run.profile`: FIRST:LAST, both traced. docs/performance.md says how to read it."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from coevo_jax.errors import UserError
from coevo_jax.records.files import disk_errors, write_atomic

FOLDER, PROGRAMS = "profile", "programs.json"


def parse_window(text: str) -> tuple[int, int] | None:
    """(first, last) of 'FIRST:LAST' or of one update; None for ''. UserError for anything else."""
    if not text:
        return None
    first, _, last = text.partition(":")
    last = last or first
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise UserError(f"run.profile={text!r} is no window of updates", where="run.profile", expected="FIRST:LAST, such as 3:4")
    return int(first), int(last)


class Profile:
    """Starts the trace before the first update of the window and writes it after the last, or where the run ends earlier.

    Leave the first updates of a stage out: their time is mostly compilation.
    """

    def __init__(self, folder: pathlib.Path, window: str):
        self._folder, self._window, self._on = folder / FOLDER, parse_window(window), False

    def before(self, update: int) -> None:
        """An update begins."""
        if self._window is not None and not self._on and self._window[0] <= update <= self._window[1]:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # calls of Python would slow the host down and fill the file
            jax.profiler.start_trace(str(self._folder), profiler_options=options)
            self._on = True

    def after(self, update: int, memory: Callable[[], Mapping[str, Any]]) -> str:
        """An update is finished. Where the trace has been written: its folder, with the memory of each program beside it."""
        if not self._on or self._window is None or update < self._window[1]:
            return ""
        self.close()
        with disk_errors(self._folder, "make the folder of the trace"):
            self._folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self._folder / PROGRAMS, json.dumps(memory(), indent=1) + "\n")
        return str(self._folder)

    def close(self) -> None:
        """Write what was traced."""
        if self._on:
            self._on = False
            jax.profiler.stop_trace()
