"""A file of questions to a file of verdicts: `python -m coevo_jax.serve score`. Stopped at any time, the same command goes on.

A line of the output is written when its row is done, under the row's id, with a hash of the row and one of the system (weights,
prompts, settings, seed): an output of another system, or of rows that have changed, is refused and not mixed.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import IO, Any

from coevo_jax.data.readers import read_rows
from coevo_jax.errors import UserError
from coevo_jax.records.files import disk_errors, dumps
from coevo_jax.serve.asks import Ask, CompareAsk, Result, RubricAsk, ScoreAsk, read_rubric
from coevo_jax.serve.library import System

SHOWN = 10  # bad rows that a message names
KINDS = {RubricAsk: "rubric", ScoreAsk: "scores", CompareAsk: "verdict"}
COLUMNS = "question (or prompt), and answers (a list), or answer, or a and b, or none of them for a rubric alone"


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the input. hash: of what it asks."""

    id: str
    place: str
    ask: Ask
    hash: str


@dataclasses.dataclass
class Counts:
    """What became of the rows."""

    done: int = 0
    before: int = 0  # by an earlier process
    failed: int = 0  # without a score, a verdict or a rubric
    refused: int = 0  # the system can't answer them: too long


def read_asks(path: str, rubric: Any, seed: int = 0, most: int = 1024) -> list[Row]:
    """The rows of a JSONL or Parquet file. rubric: the config of rubrics. UserError: bad rows, named by their lines."""
    found: list[Row] = []
    bad: list[UserError] = []
    seen: dict[str, str] = {}
    for place, values in read_rows(path, "--in"):
        try:
            row = _row(place, values, rubric, seed, most)
            if row.id in seen:
                raise UserError(f"the id {row.id!r} is that of {seen[row.id]} too", where=place, expected="an id of its own")
            seen[row.id] = place
            found.append(row)
        except UserError as error:
            bad.append(error)
    if bad:
        lines = "; ".join(f"{error.where}: {error.what}" for error in bad[:SHOWN])
        more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise UserError(f"{len(bad)} bad rows: {lines}{more}", where=path, expected=bad[0].expected)
    return found


def _row(place: str, values: dict[str, Any], rubric: Any, seed: int, most: int) -> Row:
    ask = _ask(place, values, rubric, seed, most)
    name = values.get("id", re.split(r"\D", place)[-1])  # the number of its line or row
    if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
        raise UserError("the id is no text and no whole number", where=place, expected="an id, or none (then the line's number)")
    return Row(str(name), place, ask, hashlib.sha256(repr(ask).encode()).hexdigest()[:16])


def _ask(place: str, values: dict[str, Any], rubric: Any, seed: int, most: int) -> Ask:
    question = _text(place, values, "question" if "question" in values else "prompt")
    reference = _text(place, values, "reference") if values.get("reference") else ""
    own = values.get("seed", seed)
    if isinstance(own, bool) or not isinstance(own, int):
        raise UserError("the seed is no whole number", where=place, expected="a whole number, or none")
    given = read_rubric(values.get("rubric"), rubric, place) if _is_rubric(place, values) else None
    kinds = [name for name in ("answers", "answer", "a") if values.get(name) is not None]
    if len(kinds) > 1 or (values.get("b") is not None and kinds != ["a"]):
        raise UserError("the row has several kinds of answers", where=place, expected=COLUMNS)
    if kinds == ["a"]:
        return CompareAsk(question, _text(place, values, "a"), _text(place, values, "b"), given, reference, own)
    if not kinds:
        return RubricAsk(question, reference, own)
    answers = values["answers"] if kinds == ["answers"] else [_text(place, values, "answer")]
    if not isinstance(answers, list) or not 1 <= len(answers) <= most or not all(isinstance(a, str) for a in answers):
        raise UserError("answers is no list of texts", where=place, expected=f"1 to {most} texts")
    texts = tuple(_text(place, {"answers": answer}, "answers", empty=True) for answer in answers)
    return ScoreAsk(question, texts, given, reference, own)


def _is_rubric(place: str, values: dict[str, Any]) -> bool:
    given = values.get("rubric")
    if given is not None and not isinstance(given, str | dict):
        raise UserError("the rubric is no object and no text", where=place, expected='{"criteria": [...]} or a text')
    return given is not None


def _text(place: str, values: dict[str, Any], name: str, empty: bool = False) -> str:
    value = values.get(name)
    if not isinstance(value, str) or not (empty or value.strip()):
        raise UserError(f"{name} is no text" if value is not None else f"no {name}", where=place, expected=COLUMNS)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{name} holds half of a surrogate pair", where=place, expected="Unicode text") from None
    return value


# -------------------------------------------------------------------------------------------------------------- output


class Output:
    """The output file, open and locked. `done`: hashes of the rows that it holds, by id. UserError: it is of another system, or
    another process writes it."""

    def __init__(self, path: str, system: str, overwrite: bool = False):
        self.path, self.system = pathlib.Path(path).expanduser(), system
        with disk_errors(self.path, "open the output"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = open(self.path, "a+b")  # noqa: SIM115 - until close
        try:
            self._lock()
            if overwrite:
                self._file.truncate(0)
            self.done = self._read()
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError("another process writes the output", where=str(self.path), expected="to stop it first") from None

    def _read(self) -> dict[str, str]:
        """Hashes by id. A line that a kill cut off is taken away."""
        done: dict[str, str] = {}
        whole = 0
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            done |= self._entry(line, number)
            whole += len(line)
        with disk_errors(self.path, "write the output"):
            self._file.truncate(whole)
        return done

    def _entry(self, line: bytes, number: int) -> dict[str, str]:
        where = f"{self.path}:{number}"
        try:
            found = json.loads(line)
            name, row, system = (found[key] for key in ("id", "row", "system"))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError("the output holds a line that is no result", where=where,
                            expected="a new path, or an output of this command") from None  # fmt: skip
        if system != self.system:
            raise UserError(f"the output is of another system ({system}; this one is {self.system})", where=where,
                            expected="the same sources and settings, --overwrite, or another --out")  # fmt: skip
        return {name: row}

    def check(self, rows: list[Row]) -> list[Row]:
        """The rows that are not done. UserError where one has changed since."""
        for row in rows:
            if self.done.get(row.id, row.hash) != row.hash:
                raise UserError(f"the row {row.id!r} has changed since its result was written", where=row.place,
                                expected="the row as it was, --overwrite, or another --out")  # fmt: skip
        return [row for row in rows if row.id not in self.done]

    def write(self, rows: list[Row], results: list[Result | UserError]) -> None:
        """Append the results of some rows, and bring them onto the disk."""
        lines = [dumps(self._line(row, result)) + "\n" for row, result in zip(rows, results)]
        with disk_errors(self.path, "write the output"):
            self._file.write("".join(lines).encode())
            self._file.flush()
            os.fsync(self._file.fileno())

    def _line(self, row: Row, result: Result | UserError) -> dict[str, Any]:
        head = {"id": row.id, "row": row.hash, "system": self.system, "object": KINDS[type(row.ask)]}
        if isinstance(result, UserError):
            return head | {"error": result.what, "expected": result.expected}
        return head | result.to_json()  # type: ignore[union-attr]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def score_rows(
    system: System, rows: list[Row], output: Output, batch: int, progress: Callable[[int, int, Counts], None]
) -> Counts:
    """Answer the rows that are not done, `batch` at a time. progress(done, total, counts) after each batch."""
    todo, counts = output.check(rows), Counts()
    counts.before = len(rows) - len(todo)
    for part in _parts(todo, batch):
        results = system.ask_all([row.ask for row in part])
        output.write(part, results)
        counts.done += len(part)
        counts.refused += sum(isinstance(result, UserError) for result in results)
        counts.failed += sum(not isinstance(result, UserError) and not _ok(result) for result in results)
        progress(counts.before + counts.done, len(rows), counts)
    return counts


def _parts(rows: list[Row], size: int) -> Iterator[list[Row]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _ok(result: Any) -> bool:
    return bool(getattr(result, "ok", getattr(result, "status", "ok") == "ok"))
