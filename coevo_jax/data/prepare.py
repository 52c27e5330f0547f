"""From local JSONL or Parquet files to a prompt file: first user turns, without duplicates, over-long ones and benchmark overlap.

Rows stream through: what stays in memory is 16 bytes a distinct prompt and the benchmarks' n-grams. A manifest beside the output
has the counts, the options and the sha256 of every file; the same input and options give the same bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import IO, Any

from coevo_jax.data.prompts import content_id, normalise_space
from coevo_jax.data.readers import Row, first_user_turn, read_rows, text
from coevo_jax.errors import UserError, nearest
from coevo_jax.text.chat import ChatTokenizer

COLUMNS = ("prompt", "messages", "conversations")  # tried in this order when no column is named
BENCHMARK_COLUMNS = ("prompt", "question", "turns", "instruction", "problem", "query", "input", "messages", "conversations")
# A word, or one character of a script that is written without blanks.
CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af"
WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+")
REPORT_EVERY = 5.0  # seconds between lines of progress


@dataclasses.dataclass(frozen=True)
class Options:
    """What to prepare. column '' = the first of COLUMNS that a row has; tokenizer: a source, '' = no length filter."""

    inputs: tuple[str, ...]
    output: str
    column: str = ""
    tokenizer: str = ""
    max_tokens: int = 0
    min_tokens: int = 0
    benchmarks: tuple[str, ...] = ()
    benchmark_column: str = ""
    ngram: int = 13
    keep: tuple[str, ...] = ()
    overwrite: bool = False


@dataclasses.dataclass
class Counts:
    """Where the rows went; they sum to `read`."""

    read: int = 0
    kept: int = 0
    no_user_turn: int = 0
    duplicate: int = 0
    benchmark_exact: int = 0
    benchmark_ngram: int = 0
    too_long: int = 0
    too_short: int = 0


# -------------------------------------------------------------------------------------------------------- benchmarks


def words(value: str) -> list[str]:
    """Words for comparison: compatibility forms and case folded, punctuation dropped."""
    return WORD.findall(unicodedata.normalize("NFKC", value).casefold())


class Benchmarks:
    """Questions of benchmark files, to be kept out of training: whole, or sharing `n` words in a row."""

    def __init__(self, n: int):
        self.n = n
        self.files: dict[str, dict[str, int]] = {}
        self._whole: dict[str, str] = {}
        self._grams: dict[str, str] = {}
        self._ends: set[tuple[str, str]] = set()  # first and last word of each n-gram: a cheap test before the join

    def add(self, path: str, column: str = "") -> None:
        """Take the questions of a file; each text of a list (turns) is one of its own."""
        self.files[path] = {"questions": 0, "exact": 0, "ngram": 0}
        for place, row in read_rows(path, "--benchmark"):
            for question in _texts(row, column, place):
                self.files[path]["questions"] += 1
                self._add_question(words(question), path)

    def _add_question(self, tokens: list[str], path: str) -> None:
        if tokens:
            self._whole.setdefault(" ".join(tokens), path)
        for first in range(len(tokens) - self.n + 1):
            gram = tokens[first : first + self.n]
            self._grams.setdefault(" ".join(gram), path)
            self._ends.add((gram[0], gram[-1]))

    def overlap(self, prompt: str) -> str:
        """'exact', 'ngram' or ''; counted for the benchmark file."""
        if not self.files:
            return ""
        tokens = words(prompt)
        found, kind = self._whole.get(" ".join(tokens)), "exact"
        if found is None:
            found, kind = self._shared_gram(tokens), "ngram"
        if found is None:
            return ""
        self.files[found][kind] += 1
        return kind

    def _shared_gram(self, tokens: list[str]) -> str | None:
        for first in range(len(tokens) - self.n + 1):
            if (tokens[first], tokens[first + self.n - 1]) in self._ends:
                found = self._grams.get(" ".join(tokens[first : first + self.n]))
                if found is not None:
                    return found
        return None


def _texts(row: Row, column: str, place: str) -> Iterator[str]:
    name = column or next((known for known in BENCHMARK_COLUMNS if known in row), "")
    if name not in row:
        wanted = column or "one of " + ", ".join(BENCHMARK_COLUMNS)
        expected = f"{wanted} (it has {', '.join(row)}); --benchmark_column names it"
        raise UserError("the row has no column with a question", where=place, expected=expected, nearest=nearest(column, row))
    value = row[name]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        yield from (text(item, name, place) for item in value)
    else:
        yield text(first_user_turn(value, name, place), name, place)


# ------------------------------------------------------------------------------------------------------------- stream


def prepare(
    options: Options, log: IO[str] | None = None, load: Callable[[str], ChatTokenizer] = ChatTokenizer.load
) -> dict[str, Any]:
    """Write the prompt file and its manifest; the manifest. UserError for bad input, and then nothing is written.

    load: from options.tokenizer to a tokenizer; the command takes any source of a policy, this function by itself a folder.
    """
    output, manifest_path = pathlib.Path(options.output), manifest_of(options.output)
    _check(options, output, manifest_path)
    tokenizer = _load_tokenizer(options.tokenizer, load) if options.tokenizer else None
    benchmarks = Benchmarks(options.ngram)
    for path in options.benchmarks:
        benchmarks.add(path, options.benchmark_column)
    counts = Counts()
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            progress = _Progress(counts, log or sys.stderr)
            for record in _filter_length(_distinct(options, counts, benchmarks, progress), options, counts, tokenizer):
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                counts.kept += 1
            progress.show(final=True)
            file.flush()
            os.fsync(file.fileno())
        if not counts.kept:
            raise UserError("no prompt is left", where=", ".join(options.inputs), expected=f"at least one; {_shares(counts)}")
        manifest = _manifest(options, counts, benchmarks, temporary, tokenizer.hash if tokenizer else "")
        _replace(temporary, output, manifest, manifest_path)
    except OSError as error:
        raise UserError(
            f"could not write {output}: {error.strerror or error}", where=str(output), expected="a writable folder"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
    return manifest


def manifest_of(output: str) -> pathlib.Path:
    """The manifest's path: the output's with '.manifest.json' in place of its suffix."""
    return pathlib.Path(output).with_suffix(".manifest.json")


def _check(options: Options, output: pathlib.Path, manifest: pathlib.Path) -> None:
    if output.suffix != ".jsonl":
        raise UserError("the output is JSON lines", where=f"--output {output}", expected="a name that ends in .jsonl")
    if not output.parent.is_dir():
        raise UserError("no such folder", where=f"--output {output}", expected="a folder that exists")
    used = {pathlib.Path(path).resolve() for path in (*options.inputs, *options.benchmarks)}
    if output.resolve() in used:
        raise UserError("the output is one of the inputs", where=f"--output {output}", expected="another name")
    for path in (output, manifest):
        if path.exists() and not options.overwrite:
            raise UserError("the output exists", where=str(path), expected="another --output, or --overwrite")
    if (options.max_tokens or options.min_tokens) and not options.tokenizer:
        raise UserError("a length in tokens needs a tokenizer", where="--max_tokens, --min_tokens", expected="--tokenizer SOURCE")
    if options.tokenizer and not (options.max_tokens or options.min_tokens):
        raise UserError("the tokenizer has nothing to do", where="--tokenizer", expected="--max_tokens N")
    if options.ngram < 2:
        raise UserError(
            f"--ngram {options.ngram} would match almost everything", where="--ngram", expected="at least 2 (13 is usual)"
        )


def _distinct(options: Options, counts: Counts, benchmarks: Benchmarks, progress: _Progress) -> Iterator[Row]:
    """First user turns as records, duplicates and benchmark questions left out."""
    seen: set[bytes] = set()
    only = {options.column, *options.keep} if options.column else {*COLUMNS, *options.keep}
    for path in options.inputs:
        for place, row in read_rows(path, "--input", only):
            counts.read += 1
            progress.show()
            prompt = _prompt_of(row, options.column, place)
            if not prompt.strip():
                counts.no_user_turn += 1
                continue
            text(prompt, options.column or "prompt", place)
            digest = hashlib.blake2b(normalise_space(prompt).encode(), digest_size=16).digest()
            if digest in seen:
                counts.duplicate += 1
                continue
            seen.add(digest)
            kind = benchmarks.overlap(prompt)
            if kind:
                setattr(counts, f"benchmark_{kind}", getattr(counts, f"benchmark_{kind}") + 1)
                continue
            yield {"id": content_id({"prompt": prompt}), "prompt": prompt} | _kept_columns(row, options.keep, place)


def _prompt_of(row: Row, column: str, place: str) -> str:
    name = column or next((known for known in COLUMNS if known in row), "")
    if name not in row:
        wanted = f"{column} (--column)" if column else f"one of {', '.join(COLUMNS)}; --column names another"
        expected = f"{wanted}; it has {', '.join(row) or 'none of these'}"
        raise UserError("the row has no column with a prompt", where=place, expected=expected, nearest=nearest(column, row))
    return first_user_turn(row[name], name, place)


def _kept_columns(row: Row, keep: Sequence[str], place: str) -> Row:
    for name in keep:
        if name not in row:
            expected = f"{name} (--keep)"
            raise UserError(f"the row has no column {name!r}", where=place, expected=expected, nearest=nearest(name, row))
    return {name: row[name] for name in keep if name not in ("id", "prompt")}


def _filter_length(records: Iterable[Row], options: Options, counts: Counts, tokenizer: ChatTokenizer | None) -> Iterator[Row]:
    """Records within the token limits."""
    for record in records:
        length = rendered_length(tokenizer, record["prompt"]) if tokenizer is not None else options.min_tokens
        if tokenizer is not None and options.max_tokens and length > options.max_tokens:
            counts.too_long += 1
        elif length < options.min_tokens:
            counts.too_short += 1
        else:
            yield record


def rendered_length(tokenizer: ChatTokenizer, prompt: str) -> int:
    """Tokens of the prompt that a policy answers: one user turn in its chat template, no system prompt, thinking off."""
    return len(tokenizer.render([{"role": "user", "content": prompt}], thinking=False, system=""))


def _load_tokenizer(source: str, load: Callable[[str], ChatTokenizer]) -> ChatTokenizer:
    try:
        return load(source)
    except UserError as error:
        where = f"--tokenizer {source}" if error.where in ("", source) else f"--tokenizer {source}, {error.where}"
        raise UserError(error.what, where=where, expected=error.expected, nearest=error.nearest) from error


# ----------------------------------------------------------------------------------------------------------- manifest


def _manifest(
    options: Options, counts: Counts, benchmarks: Benchmarks, written: pathlib.Path, tokenizer_hash: str
) -> dict[str, Any]:
    return {
        "output": {"path": options.output, "sha256": sha256_of(written), "prompts": counts.kept},
        "counts": dataclasses.asdict(counts),
        "inputs": [{"path": path, "sha256": sha256_of(pathlib.Path(path))} for path in options.inputs],
        "benchmarks": [
            {"path": path, "sha256": sha256_of(pathlib.Path(path)), **found} for path, found in benchmarks.files.items()
        ],
        "options": {
            "column": options.column or "auto",
            "keep": list(options.keep),
            "ngram": options.ngram,
            "max_tokens": options.max_tokens,
            "min_tokens": options.min_tokens,
            "tokenizer": options.tokenizer,
            "tokenizer_hash": tokenizer_hash,  # as in a run folder's inputs.json
        },
    }


def sha256_of(path: pathlib.Path) -> str:
    """sha256 of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace(temporary: pathlib.Path, output: pathlib.Path, manifest: dict[str, Any], manifest_path: pathlib.Path) -> None:
    """Both files under their names; a kill in between leaves an old manifest whose hash does not fit, never half a file."""
    beside = manifest_path.with_name(f".{manifest_path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(temporary, output)
        os.replace(beside, manifest_path)
    finally:
        beside.unlink(missing_ok=True)


def _shares(counts: Counts) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in dataclasses.asdict(counts).items() if value)


class _Progress:
    """A line every few seconds, on the same spot of a terminal."""

    def __init__(self, counts: Counts, log: IO[str]):
        self.counts, self.log = counts, log
        self.start = self.last = perf_counter()

    def show(self, final: bool = False) -> None:
        now = perf_counter()
        if not final and now - self.last < REPORT_EVERY:
            return
        self.last = now
        rate = self.counts.read / max(now - self.start, 1e-9)
        end = "\r" if self.log.isatty() and not final else "\n"
        self.log.write(f"{_shares(self.counts) or 'no rows yet'}; {now - self.start:.0f} s, {rate:,.0f} rows/s{end}")
        self.log.flush()
