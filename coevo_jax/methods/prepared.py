"""What a mode is given to make something once, before the first update of a run (Mode.prepare)."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping


@dataclasses.dataclass(frozen=True)
class Prepared:
    """folder: of the run; updates: those that are done; began: fingerprints of the trained weights as loaded, by name.

    stopped: was this process asked to stop?"""

    folder: pathlib.Path
    updates: int
    began: Mapping[str, str]
    stopped: Callable[[], bool]
