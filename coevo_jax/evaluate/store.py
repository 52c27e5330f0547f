"""Rows by example in a JSONL file that a kill can't spoil: what a system said, and the rubrics that a generator wrote.

A file belongs to one identity (model, prompt, settings), whose hash is in its name, so another prompt never meets old rows. A row
is bound to the content of its example: where that changed it is judged again.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from coevo_jax.errors import UserError
from coevo_jax.evaluate.records import Example, Judged
from coevo_jax.evaluate.writers import Writer, Written, digest
from coevo_jax.records.files import disk_errors, dumps
from coevo_jax.rubrics import Criterion, Rubric

VERSION = 1  # of what a row means


def content_of(example: Example) -> str:
    """A hash of all that an example shows and says."""
    return digest(VERSION, [str(v) for v in vars(example).values()])


class RowStore:
    """Rows by content hash. A torn last line is dropped on opening; a bad line elsewhere is a UserError."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        with disk_errors(path, "open the rows"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with disk_errors(path, "cut the rows"):
                os.truncate(path, whole)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            row = self._row(line, number)
            self.rows[row["content"]] = row

    def _row(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row: dict[str, Any] = json.loads(line)
            row["content"]
        except (ValueError, KeyError, TypeError) as error:
            expected = "a row that this program wrote; without the file its rows are made again"
            raise UserError(f"the row can't be read: {error}", where=f"{self.path}:{number}", expected=expected) from error
        return row

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows; they are on the disk when it returns."""
        text = "".join(dumps(row) + "\n" for row in rows)
        with disk_errors(self.path, "write the rows"), open(self.path, "ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        self.rows |= {row["content"]: dict(row) for row in rows}


def judged_row(example: Example, judged: Judged) -> dict[str, Any]:
    """A row of rows.jsonl."""
    return {
        "id": example.id, "content": content_of(example), "subset": example.subset, "label": example.label,
        "games": [list(game) for game in judged.games], "rubric_status": judged.rubric_status,
        "rubric_detail": judged.rubric_detail, "rubric": judged.rubric, "calls": judged.calls,
        "failures": dict(judged.failures), "notes": list(judged.notes),
    }  # fmt: skip


def judged_of(row: Mapping[str, Any]) -> Judged:
    """What a row says."""
    games = tuple(tuple(game) for game in row["games"])
    return Judged(row["id"], games, row["calls"], row["failures"], row["rubric"], row["rubric_status"], row["rubric_detail"],
                  tuple(row["notes"]))  # fmt: skip


class KeptWriter:
    """A writer whose rubrics are kept: several judges execute the same ones, and a run that goes on writes none again. What an
    endpoint failed to give is asked for again."""

    def __init__(self, inner: Writer, folder: pathlib.Path):
        self.inner = inner
        self.store = RowStore(folder / f"rubrics-{digest(VERSION, dict(inner.identity))}.jsonl")

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def identity(self) -> Mapping[str, Any]:
        return self.inner.identity

    def write(self, examples: Sequence[Example]) -> list[Written]:
        """One rubric an example, in their order."""
        keys = [content_of(example) for example in examples]
        missing = [i for i, key in enumerate(keys) if key not in self.store.rows]
        fresh = self.inner.write([examples[i] for i in missing]) if missing else []
        out = {keys[i]: written for i, written in zip(missing, fresh)}
        kept = [(i, w) for i, w in zip(missing, fresh) if w.rubric is not None or w.status in ("parse_fail", "truncated")]
        if kept:
            self.store.add([_rubric_row(examples[i], keys[i], written) for i, written in kept])
        return [out[key] if key in out else _written(self.store.rows[key]) for key in keys]


def _rubric_row(example: Example, key: str, written: Written) -> dict[str, Any]:
    criteria = None if written.rubric is None else [
        {"text": c.text, "weight": c.weight, "levels": [list(level) for level in c.levels], "title": c.title}
        for c in written.rubric.criteria
    ]  # fmt: skip
    return {"id": example.id, "content": key, "question": example.prompt, "completion": written.text, "status": written.status,
            "detail": written.detail, "criteria": criteria}  # fmt: skip


def _written(row: Mapping[str, Any]) -> Written:
    if row["criteria"] is None:
        return Written(None, row["completion"], row["status"], row["detail"])
    criteria = tuple(
        Criterion(c["text"], c["weight"], tuple((a, b) for a, b in c["levels"]), c["title"]) for c in row["criteria"]
    )
    return Written(Rubric(criteria, row["completion"]), row["completion"], row["status"], row["detail"])
