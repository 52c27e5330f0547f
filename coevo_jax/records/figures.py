"""matplotlib (extra 'eval') without a display, and files that come out the same for the same data."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from coevo_jax.errors import UserError


def pyplot() -> Any:
    """matplotlib.pyplot. UserError when it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("matplotlib is not installed", where="plots", expected="pip install 'coevo-jax[eval]'") from None
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "coevo"
    import matplotlib.pyplot as plt

    return plt


def save_figure(figure: Any, folder: pathlib.Path, stem: str, kinds: Sequence[str] = ("svg", "png")) -> list[pathlib.Path]:
    """Write `stem`.svg and so on into `folder`, which is made, and close the figure."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.{kind}" for kind in kinds]
    for path in paths:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot().close(figure)
    return paths
