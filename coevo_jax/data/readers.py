"""Rows of a JSONL or Parquet file, and what a row of each kind must hold.

Every fault is a UserError with the file and the line (JSONL) or row (Parquet, from 1).
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypedDict

from coevo_jax.errors import UserError, nearest

Row = dict[str, Any]
Columns = Mapping[str, str]  # our name of a column -> the file's
SUFFIXES = (".jsonl", ".ndjson", ".parquet")
ROLES = ("system", "user", "assistant")
# Other spellings of chat data: {"from": "human", "value": ...}.
ROLE_ALIASES = {"human": "user", "gpt": "assistant", "prompter": "user"}


class Prompt(TypedDict, total=False):
    """A question. A file's other columns stay under their own names, for verifiers."""

    id: str
    prompt: str
    reference: str


class Pair(TypedDict):
    """Two answers to a question, the first one preferred. Where the row has a number `margin`, by how much."""

    id: str
    prompt: str
    chosen: str
    rejected: str


class Ranking(TypedDict):
    """Several answers to a question; a higher score is better, equal scores are ties."""

    id: str
    prompt: str
    answers: list[str]
    scores: list[float]


class Chat(TypedDict):
    """A conversation with at least one assistant turn."""

    id: str
    messages: list[dict[str, str]]


# ------------------------------------------------------------------------------------------------------------- rows


def read_rows(path: str, key: str = "", only: Collection[str] = ()) -> Iterator[tuple[str, Row]]:
    """('file:line', row) of each row. `key`: the configuration key that named the file. No rows: UserError."""
    # only: of a Parquet file, the columns to decode; none = all.
    file = check_file(path, key)
    empty = True
    try:
        for place, row in _parquet_rows(file, only) if file.suffix == ".parquet" else _jsonl_rows(file):
            empty = False
            yield place, row
    except OSError as error:
        raise UserError(f"could not read the file: {error.strerror or error}", where=path, expected="a readable file") from None
    if empty:
        raise UserError("the file holds no rows", where=path, expected="at least one row")


def check_file(path: str, key: str = "") -> pathlib.Path:
    """The path of a data file that exists and whose suffix is known."""
    file = pathlib.Path(path)
    where = f"{key}={path}" if key else path
    expected = "a file whose name ends in " + ", ".join(SUFFIXES)
    if not file.exists():
        siblings = [str(item) for item in sorted(file.parent.iterdir())] if file.parent.is_dir() else []
        raise UserError("no such data file", where=where, expected=expected, nearest=nearest(str(file), siblings))
    if not file.is_file():
        raise UserError("the path is a folder, not a data file", where=where, expected=expected)
    if file.suffix not in SUFFIXES:
        raise UserError(f"unknown kind of data file {file.suffix!r}", where=where, expected=expected)
    return file


def _jsonl_rows(file: pathlib.Path) -> Iterator[tuple[str, Row]]:
    with open(file, "rb") as lines:
        for number, raw in enumerate(lines, 1):
            place = f"{file}:{number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                byte = f"0x{raw[error.start]:02x} at byte {error.start + 1}"
                raise UserError(f"the line is not UTF-8 ({byte})", where=place, expected="UTF-8 text") from None
            if line.strip():
                yield place, _json_row(line, place)


def _json_row(line: str, place: str) -> Row:
    try:
        row = json.loads(line.strip())
    except (json.JSONDecodeError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "nested too deep"
        raise UserError(f"the line is not JSON: {reason}", where=place, expected="one JSON object a line") from None
    if not isinstance(row, dict):
        raise UserError(f"the line is {_kind(row)}, not an object", where=place, expected="one JSON object a line")
    return row


def _parquet_rows(file: pathlib.Path, only: Collection[str]) -> Iterator[tuple[str, Row]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            columns = [name for name in table.schema_arrow.names if name in only] or None  # none of them: an error will list all
            for batch in table.iter_batches(batch_size=1024, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", row
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # of the file system; damaged pages are OSErrors without a number
            raise
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"not a readable Parquet file: {reason}", where=f"{file}, after row {number}", expected="Parquet"
        ) from None


# ------------------------------------------------------------------------------------------------------------ values


def _kind(value: Any) -> str:
    names = {str: "a text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def take(row: Row, name: str, columns: Columns, place: str) -> Any:
    """The value of our column `name`; UserError with the nearest column when the row has none."""
    column = columns.get(name, name)
    if column not in row:
        found = ", ".join(row) or "no columns"
        raise UserError(
            f"the row has no column {column!r}", where=place, expected=f"{column} (it has {found})", nearest=nearest(column, row)
        )
    return row[column]


def text(value: Any, name: str, place: str) -> str:
    """A non-empty text that can be written as UTF-8."""
    if not isinstance(value, str):
        raise UserError(f"{name} is {_kind(value)}", where=place, expected="a text")
    if not value.strip():
        raise UserError(f"{name} is empty", where=place, expected="a text that is not empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{name} holds half a surrogate pair, which is not text", where=place, expected="valid Unicode") from None
    return value


def messages(value: Any, name: str, place: str) -> list[dict[str, str]]:
    """A conversation as [{role, content}]: roles system (first only), user, assistant; 'from' and 'value' serve as well."""
    if not isinstance(value, list) or not value:
        kind = "an empty list" if value == [] else _kind(value)
        raise UserError(f"{name} is {kind}", where=place, expected="a list of messages {role, content}")
    turns = []
    for number, item in enumerate(value, 1):
        spot = f"{name}[{number}]"
        if not isinstance(item, dict):
            raise UserError(f"{spot} is {_kind(item)}", where=place, expected="an object {role, content}")
        role = item.get("role", item.get("from"))
        role = ROLE_ALIASES.get(role, role) if isinstance(role, str) else role
        if role not in ROLES or (role == "system" and number > 1):
            close = nearest(role, ROLES) if isinstance(role, str) else ""
            raise UserError(
                f"{spot} has the role {role!r}", where=place, expected=f"{', '.join(ROLES)} (system first)", nearest=close
            )
        content = item.get("content", item.get("value"))
        # An empty system message is a statement (no default); an empty turn is a fault.
        turns.append({"role": role, "content": content if role == "system" and content == "" else text(content, spot, place)})
    return turns


def first_user_turn(value: Any, name: str, place: str) -> str:
    """A text as it stands, or the first user message of a list; '' when there is none. Lenient about what follows."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise UserError(f"{name} is {_kind(value)}", where=place, expected="a text or a list of messages {role, content}")
    for item in value:
        if not isinstance(item, dict):
            raise UserError(f"a message of {name} is {_kind(item)}", where=place, expected="an object {role, content}")
        role = item.get("role", item.get("from"))
        if ROLE_ALIASES.get(str(role), role) == "user":
            content = item.get("content", item.get("value"))
            if content is not None and not isinstance(content, str):
                raise UserError(f"the first user turn of {name} is {_kind(content)}", where=place, expected="a text")
            return content or ""
    return ""


def _answer(value: Any, name: str, place: str) -> str:
    """An answer: a text, or a conversation whose last turn is the assistant's."""
    if not isinstance(value, list):
        return text(value, name, place)
    turns = messages(value, name, place)
    if turns[-1]["role"] != "assistant":
        raise UserError(f"{name} ends with the role {turns[-1]['role']}", where=place, expected="an assistant turn at the end")
    return turns[-1]["content"]


# ------------------------------------------------------------------------------------------------------------- kinds


def prompt_record(row: Row, columns: Columns, place: str) -> Row:
    """A Prompt; other columns stay, under their own names."""
    used = {columns.get(name, name) for name in ("prompt", "reference", "id")}
    record = {"prompt": text(take(row, "prompt", columns, place), columns.get("prompt", "prompt"), place)}
    reference = take(row, "reference", columns, place) if "reference" in columns else row.get("reference")
    if reference is not None:
        if not isinstance(reference, str | int | float):
            raise UserError(f"reference is {_kind(reference)}", where=place, expected="a text or a number")
        record["reference"] = str(reference)
    return record | {name: value for name, value in row.items() if name not in used and name not in record}


def pair_record(row: Row, columns: Columns, place: str) -> Row:
    """A Pair. Answers are texts or conversations that end with the assistant."""
    chosen, rejected = (
        _answer(take(row, name, columns, place), columns.get(name, name), place) for name in ("chosen", "rejected")
    )
    if chosen == rejected:
        raise UserError("chosen and rejected are the same text", where=place, expected="two different answers")
    record = {
        "prompt": text(take(row, "prompt", columns, place), columns.get("prompt", "prompt"), place),
        "chosen": chosen,
        "rejected": rejected,
    }
    margin = take(row, "margin", columns, place) if "margin" in columns else row.get("margin")
    if margin is None:
        return record
    if not _is_number(margin):
        raise UserError(f"margin is {_kind(margin)}", where=place, expected="a finite number")
    return record | {"margin": float(margin)}


def ranking_record(row: Row, columns: Columns, place: str) -> Row:
    """A Ranking from answers and scores (higher is better) or ranks (1 is best); or from `responses`, objects {text, score}, of
    which empty ones (a model that said nothing) are left out."""
    if "answers" not in columns and "answers" not in row and isinstance(row.get("responses"), list):
        objects = [one for one in row["responses"] if not isinstance(one, dict) or one.get("text") != ""]
        objects = [one if isinstance(one, dict) else {} for one in objects]
        row = row | {"answers": [one.get("text") for one in objects], "scores": [one.get("score") for one in objects]}
    prompt = text(take(row, "prompt", columns, place), columns.get("prompt", "prompt"), place)
    value = take(row, "answers", columns, place)
    if not isinstance(value, list) or len(value) < 2:
        kind = f"a list of {len(value)}" if isinstance(value, list) else _kind(value)
        raise UserError(f"answers is {kind}", where=place, expected="a list of at least two texts")
    answers = [_answer(item, f"answers[{number}]", place) for number, item in enumerate(value, 1)]
    ranks = columns.get("ranks", "ranks") in row
    numbers = take(row, "ranks" if ranks else "scores", columns, place)
    good = isinstance(numbers, list) and len(numbers) == len(answers)
    if not good or not all(_is_number(item) for item in numbers):
        name = "ranks" if ranks else "scores"
        raise UserError(f"{name} does not fit the answers", where=place, expected=f"a list of {len(answers)} finite numbers")
    return {"prompt": prompt, "answers": answers, "scores": [-float(item) if ranks else float(item) for item in numbers]}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def chat_record(row: Row, columns: Columns, place: str) -> Row:
    """A Chat, or a rubric example {question, rubric} (and `candidates`), which the warm-up renders with the deployed prompt."""
    if "messages" not in columns and "messages" not in row and "rubric" in row:
        rubric = row["rubric"]
        if not isinstance(rubric, dict) or not rubric:
            raise UserError(f"rubric is {_kind(rubric)}", where=place, expected="an object with criteria")
        record = {"question": text(take(row, "question", columns, place), "question", place), "rubric": rubric}
        return record | _candidates(row, place)
    column = columns.get("messages", "messages" if "messages" in row or "conversations" not in row else "conversations")
    turns = messages(take(row, column, {}, place), column, place)
    if not any(turn["role"] == "assistant" for turn in turns):
        raise UserError(f"{column} has no assistant turn", where=place, expected="at least one turn to learn from")
    if next(turn["role"] for turn in turns if turn["role"] != "system") != "user":
        raise UserError(f"{column} begins with the assistant", where=place, expected="a user turn first")
    return {"messages": turns}


def _candidates(row: Row, place: str) -> Row:
    """{candidates: answers that the writer of the rubric sees}, where the row has some."""
    if (value := row.get("candidates")) is None:
        return {}
    if not isinstance(value, list) or len(value) < 2:
        kind = f"a list of {len(value)}" if isinstance(value, list) else _kind(value)
        raise UserError(f"candidates is {kind}", where=place, expected="a list of at least two texts")
    return {"candidates": [text(one, f"candidates[{number}]", place) for number, one in enumerate(value, 1)]}


KINDS: dict[str, Callable[[Row, Columns, str], Row]] = {
    "prompts": prompt_record,
    "pairs": pair_record,
    "rankings": ranking_record,
    "chat": chat_record,
}


def read_records(path: str, kind: str, columns: Columns | None = None, key: str = "") -> Iterator[tuple[str, Row, str]]:
    """(place, record without an id, the row's own id or '') of each row of `path`; columns: our name -> the file's."""
    columns = columns or {}
    column = columns.get("id", "id")
    for place, row in read_rows(path, key):
        own = take(row, "id", columns, place) if "id" in columns else row.get(column)
        if own is not None and (isinstance(own, bool) or not isinstance(own, str | int)):
            raise UserError(f"{column} is {_kind(own)}", where=place, expected="a text or a whole number")
        yield place, KINDS[kind](row, columns, place), "" if own is None else str(own)
