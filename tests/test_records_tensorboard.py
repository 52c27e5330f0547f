"""TensorBoard scalars: every number of a row at the update's step, by flag; a missing package is named."""

from __future__ import annotations

import pathlib
import sys
import types

import pytest

from coevo_jax.errors import UserError
from coevo_jax.records.tensorboard import Scalars


class Writer:
    def __init__(self, folder: str, purge_step: int):
        self.folder, self.purge_step, self.points, self.open = folder, purge_step, [], True

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.points.append((name, value, step))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.open = False


def test_numbers_go_to_role_and_step(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Writer] = []
    module = types.ModuleType("tensorboardX")
    module.SummaryWriter = lambda folder, purge_step: made.append(Writer(folder, purge_step)) or made[-1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    scalars = Scalars(tmp_path, True, purge_step=4)
    scalars.write({"step": 4, "role": "policy", "stage": "policy", "reward/mean": 0.5, "groups/made": 3, "kl": None})
    scalars.close()
    assert made[0].points == [("policy/reward/mean", 0.5, 4), ("policy/groups/made", 3, 4)]
    assert made[0].purge_step == 4 and not made[0].open


def test_off_needs_no_package_and_on_names_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)  # import fails
    Scalars(tmp_path, False).write({"step": 0, "role": "policy", "kl": 1.0})
    with pytest.raises(UserError, match=r"run\.tensorboard"):
        Scalars(tmp_path, True)
