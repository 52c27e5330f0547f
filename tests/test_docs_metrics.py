"""docs/metrics.md names every metric that the code can write, and the rows of a run hold no other."""

import ast
import fnmatch
import pathlib
import re

import pytest

REPO = pathlib.Path(__file__).resolve().parent.parent
FACTS = {"mean", "mean_std", "share", "alarm", "std", "total", "ratio", "add"}  # methods that take a name first, add second
BEFORE = {"mean_std": ("/mean", "/std")}
NAME = re.compile(r"[a-z_*]+(?:/[a-z_*]+)+")


def glossary() -> list[str]:
    """Every name and pattern of the table's first column."""
    lines = (REPO / "docs" / "metrics.md").read_text().splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def known(name: str, names: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in names)


def text_of(node: ast.expr) -> str:
    """A string constant, or an f-string with * for what it puts in; '' for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    return ""


def written_names() -> dict[str, str]:
    """Names that the code gives to Facts, by the place where it does."""
    out: dict[str, str] = {}
    for path in sorted((REPO / "coevo_jax").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTS and node.args
            ):
                continue
            place = 1 if node.func.attr == "add" else 0
            name = text_of(node.args[place]) if len(node.args) > place else ""
            for end in BEFORE.get(node.func.attr, ("",)):
                if NAME.fullmatch(name + end) and re.search("[a-z]", name):
                    out[name + end] = f"{path.relative_to(REPO)}:{node.lineno}"
    return out


def test_every_name_in_the_code_is_in_the_glossary():
    names = glossary()
    found = written_names()
    assert len(found) > 50 and "rubric/valid_share" in found and "control/judge_gap" in found
    assert {name: place for name, place in found.items() if not known(name, names)} == {}


def test_the_rows_of_a_run_are_in_the_glossary(tmp_path):
    train_support = pytest.importorskip("train_support")
    names = glossary()
    done = train_support.run(tmp_path / "run", "schedule.cycles=1", "schedule.k=2")
    missing = sorted({name for row in done.rows for name in row if not known(name, names)})
    assert missing == [] and len({name for row in done.rows for name in row}) > 60


def test_a_name_that_is_not_there_is_missed():
    assert not known("brand/new", glossary()) and not known("newcomer", glossary())
