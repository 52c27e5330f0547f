"""The documentation's code runs: blocks marked python are executed, every command names what is there, and the tour works."""

import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from coevo_jax.cli import parse_flags, resolve

REPO = pathlib.Path(__file__).resolve().parent.parent
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAM = r"python (?:run\.py|-m coevo_jax[\w.]*|tpu/\S+\.py|benchmarks/\S+\.py)"
COMMAND = re.compile(rf"(?:^|`)\s*(?:[A-Z_]+=\S+ )*({PROGRAM}[^`\n]*)", re.MULTILINE)
ELSEWHERE = re.compile(r"\.\.\.|/mnt/|gs://|/path/to|FOLDER|DIR|RUN|SRC|<|\$")  # stands for something of the reader's


def blocks(kind: str) -> list[tuple[str, str]]:
    return [(page.name, text) for page in PAGES for found, text in BLOCK.findall(page.read_text()) if found == kind]


def commands() -> list[tuple[str, list[str]]]:
    """Every documented command, split as a shell does."""
    out = []
    for page in PAGES:
        for found in COMMAND.findall(re.sub(r"\\\n\s*", "", page.read_text())):
            try:
                out.append((page.name, shlex.split(found, comments=True)))
            except ValueError:  # a quote that ends on the next line
                out.append((page.name, found.split("#")[0].split()))
    return out


@pytest.mark.parametrize(("page", "code"), blocks("python"), ids=lambda value: value[:24].replace("\n", " "))
def test_a_python_block_runs(page, code, tmp_path, monkeypatch):
    head = re.match(r"# (\w+)\.py\n", code)
    if head is None:
        exec(compile(code, page, "exec"), {"__name__": "example"})
        return
    (tmp_path / f"{head[1]}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__(head[1])
    sys.modules.pop(head[1])


def test_there_are_commands_and_blocks_to_check():
    assert len(commands()) > 40 and len(blocks("python")) >= 4 and len(blocks("bash")) >= 6


def test_every_command_names_a_program_that_is_there():
    missing = []
    for page, words in commands():
        if words[1] == "-m":
            path = REPO / words[2].replace(".", "/")
            there = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
        else:
            there = (REPO / words[1]).exists()
        if not there:
            missing.append((page, " ".join(words[:3])))
    assert missing == []


RUNS = [(page, words[2:]) for page, words in commands() if words[1] == "run.py" and not ELSEWHERE.search(" ".join(words))]


@pytest.mark.parametrize(("page", "argv"), RUNS, ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else value)
def test_every_run_command_has_a_config_that_holds(page, argv):
    resolve(parse_flags(argv, "configs/smollm2_demo.py"))


def run(argv: list[str], folder: pathlib.Path) -> None:
    done = subprocess.run([sys.executable, *argv], cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (argv, done.stdout[-2000:], done.stderr[-2000:])


@pytest.mark.slow
@pytest.mark.parametrize("page", ["tour.md", "extend.md"])
def test_the_commands_of_a_page_run_one_after_the_other(page, tmp_path):
    """In an empty folder that has the repository's run.py and configs; what needs the embedded model is asked for its config."""
    for name in ("run.py", "configs", "coevo_jax"):
        (tmp_path / name).symlink_to(REPO / name)
    for found, text in BLOCK.findall((REPO / "docs" / page).read_text()):
        if found == "python" and (head := re.match(r"# (\w+)\.py\n", text)):
            (tmp_path / f"{head[1]}.py").write_text(text)
        for line in text.splitlines() if found == "bash" else ():
            words = shlex.split(line, comments=True)
            run([*words[1:], "--print_config"] if "smollm2" in line else words[1:], tmp_path)
