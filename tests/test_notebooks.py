"""Notebooks run from top to bottom over a fresh run, cell by cell in one namespace."""

import json
import pathlib

import pytest

REPO = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("path", sorted((REPO / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch, capsys):
    from train_support import run

    run(tmp_path / "run", "schedule.cycles=2", "schedule.k=3")
    monkeypatch.setenv("RUN", str(tmp_path / "run"))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    names: dict[str, object] = {"__name__": "__main__"}
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells):
        assert cell["outputs"] == [], "notebooks are kept without outputs"
        exec(compile("".join(cell["source"]), f"{path.name} cell {number}", "exec"), names)
    shown = capsys.readouterr().out
    assert "12 updates" in shown and "reward/mean" in shown and "sample 0: reward" in shown
