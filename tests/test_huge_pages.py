"""Huge pages: the setting joins others, the program restarts once and keeps its arguments, and who says no is left alone."""

import os
import pathlib
import subprocess
import sys

import pytest

from coevo_jax import huge_pages
from coevo_jax.huge_pages import NAME, with_huge_pages

SCRIPT = """
import os, sys
sys.path.insert(0, {repo!r})
from coevo_jax.huge_pages import restart_with_huge_pages
print("begun", flush=True)
restart_with_huge_pages()
print(os.environ.get("GLIBC_TUNABLES"), sys.argv[1:])
"""


def test_the_setting_joins_others():
    assert with_huge_pages({"A": "b"}) == {"A": "b", NAME: "glibc.malloc.hugetlb=1"}
    assert with_huge_pages({NAME: "glibc.malloc.arena_max=1"})[NAME] == "glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1"
    assert with_huge_pages({NAME: "glibc.malloc.hugetlb=0"}) == {NAME: "glibc.malloc.hugetlb=0"}


@pytest.mark.parametrize(("given", "starts"), [({}, 2), ({NAME: "glibc.malloc.hugetlb=0"}, 1)])
def test_a_program_restarts_once_with_its_arguments(tmp_path, given, starts):
    if not huge_pages._can_help():
        pytest.skip("no huge pages here")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(repo=str(pathlib.Path(__file__).parent.parent)))
    environ = {k: v for k, v in os.environ.items() if k != NAME} | given
    done = subprocess.run([sys.executable, str(script), "a b", "-c"], env=environ, capture_output=True, text=True, check=True)
    expected = given.get(NAME, "glibc.malloc.hugetlb=1")
    assert done.stdout.splitlines() == ["begun"] * starts + [f"{expected} ['a b', '-c']"]


def test_a_kernel_without_them_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    monkeypatch.setattr(huge_pages, "SWITCH", tmp_path / "enabled")
    monkeypatch.delenv(NAME, raising=False)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("restarted"))
    huge_pages.restart_with_huge_pages()
    monkeypatch.setattr(huge_pages, "SWITCH", tmp_path / "absent")
    huge_pages.restart_with_huge_pages()
