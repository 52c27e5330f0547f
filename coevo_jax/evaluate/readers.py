"""From a benchmark's file to Examples: a column map each, under the field names that its authors published.

A file in our own form {id, prompt, response_a, response_b, label} is read whatever the benchmark. 'FILE?prompt=question&id=uid'
renames columns. Every fault is a UserError with file and line: bad or truncated JSON, a missing column, a label that is none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from coevo_jax.data.readers import Row, messages, read_rows, take, text
from coevo_jax.errors import UserError, nearest
from coevo_jax.evaluate.records import Example
from coevo_jax.evaluate.rules_pairs import category

Columns = Mapping[str, str]  # our name -> the file's
Reader = Callable[[Row, Columns, str, str], Iterator[Example]]  # (row, columns, place, id) -> examples
LABELS = {"a": "A", "b": "B", "tie": "tie", "a>b": "A", "b>a": "B", "a=b": "tie"}


@dataclasses.dataclass(frozen=True)
class Source:
    """How a benchmark's rows are read: its reader and the names of the columns in its published files."""

    read: Reader
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)


def read_examples(data: str, source: Source, limit: int = 0) -> list[Example]:
    """The examples of a file, the first `limit` of them (0: all). Ids are unique."""
    path, renamed = _split(data)
    columns = {**source.columns, **renamed}
    out: list[Example] = []
    places: dict[str, str] = {}
    for number, (place, row) in enumerate(read_rows(path, "--data"), 1):
        own = row.get(columns.get("id", "id"))
        if own is not None and (isinstance(own, bool) or not isinstance(own, str | int)):
            raise UserError(f"the id is {own!r}", where=place, expected="a text or a whole number")
        # A file in our own form is read by its own names.
        plain = "response_a" in row and "response_b" in row and not renamed
        reader, names = (read_pair, {}) if plain and source.read is not read_judgebench else (source.read, columns)
        for example in reader(row, names, place, str(number) if own is None else str(own)):
            if example.id in places:
                expected = f"different ids (also at {places[example.id]})"
                raise UserError(f"the id {example.id!r} comes twice", where=place, expected=expected)
            places[example.id] = place
            out.append(example)
        if limit and len(out) >= limit:
            break
    return out[:limit] if limit else out


def _split(data: str) -> tuple[str, dict[str, str]]:
    path, mark, query = data.partition("?")
    if not mark or pathlib.Path(data).exists():
        return data, {}
    renamed = dict(part.partition("=")[::2] for part in query.split("&"))
    if not all(renamed.values()):
        raise UserError(f"{query!r} names no columns", where=f"--data={data}", expected="FILE?OURS=THEIRS with & between")
    return path, renamed


# -------------------------------------------------------------------------------------------------------------- values


def heads(*parts: object) -> bool:
    """A coin that belongs to `parts`: which answer of a chosen and a rejected one is called A."""
    return bool(hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=1).digest()[0] & 1)


def _prompt(row: Row, columns: Columns, place: str) -> str:
    value = take(row, "prompt", columns, place)
    return (
        conversation(value, columns.get("prompt", "prompt"), place) if isinstance(value, list) else text(value, "prompt", place)
    )


def conversation(value: Any, name: str, place: str) -> str:
    """A conversation as the text that an answer is judged against: its only turn, or all of them with their roles."""
    turns = messages(value, name, place)
    if len(turns) == 1:
        return turns[0]["content"]
    return "\n\n".join(f"{turn['role'].capitalize()}: {turn['content']}" for turn in turns)


def _answer(value: Any, name: str, place: str) -> str:
    """An answer, which may be empty: a text, a conversation that ends with the assistant, or an object that holds it."""
    if isinstance(value, list):
        turns = messages(value, name, place)
        if turns[-1]["role"] != "assistant":
            raise UserError(
                f"{name} ends with the role {turns[-1]['role']}", where=place, expected="an assistant turn at the end"
            )
        return turns[-1]["content"]
    if isinstance(value, dict):
        value = next((value[key] for key in ("text", "response", "content") if key in value), None)
    if not isinstance(value, str):
        raise UserError(f"{name} is not a text", where=place, expected="a text, or a conversation that ends with the assistant")
    return value


def _answers(value: Any, name: str, place: str) -> list[str]:
    if not isinstance(value, list):
        value = [value]
    return [_answer(item, f"{name}[{i}]", place) for i, item in enumerate(value, 1)]


def _label(value: Any, place: str, names: Mapping[Any, str] = LABELS) -> str:
    key = value.strip().lower() if isinstance(value, str) else value
    if isinstance(key, bool) or not isinstance(key, str | int) or key not in names:
        known = ", ".join(dict.fromkeys(map(str, names)))
        raise UserError(
            f"the label is {value!r}", where=place, expected=f"one of {known}", nearest=nearest(str(key), map(str, names))
        )
    return names[key]


def _number(value: Any, name: str, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{name} is {value!r}", where=place, expected="a finite number")
    return float(value)


def _subset(row: Row, columns: Columns) -> str:
    value = row.get(columns.get("subset", "subset"))
    return "" if value is None else str(value)


# --------------------------------------------------------------------------------------------------------------- pairs


def read_pair(row: Row, columns: Columns, place: str, name: str) -> Iterator[Example]:
    """prompt, response_a, response_b, label (A, B or tie); annotators: labels of several people."""
    people = row.get(columns.get("annotators", "annotators")) or ()
    yield Example(
        name,
        _prompt(row, columns, place),
        (_answer(take(row, "response_a", columns, place), "response_a", place),
         _answer(take(row, "response_b", columns, place), "response_b", place)),
        label=_label(take(row, "label", columns, place), place),
        annotators=tuple(_label(person, place) for person in people),
        subset=_subset(row, columns),
    )  # fmt: skip


def coded_pair(names: Mapping[Any, str]) -> Reader:
    """A pair whose label is a code of the data set's own."""

    def read(row: Row, columns: Columns, place: str, name: str) -> Iterator[Example]:
        label = _label(take(row, "label", columns, place), place, names)
        yield next(read_pair({**row, columns.get("label", "label"): label}, columns, place, name))

    return read


def read_pandalm(row: Row, columns: Columns, place: str, name: str) -> Iterator[Example]:
    """instruction, input, response1, response2, annotator1 to annotator3 (0 tie, 1 and 2); the label is the majority's, a tie
    where there is none."""
    codes = {0: "tie", 1: "A", 2: "B"}
    people = [_label(take(row, f"annotator{i}", columns, place), place, codes) for i in (1, 2, 3)]
    label = majority(people)
    parts = [take(row, "instruction", columns, place), row.get("input") or ""]
    answers = tuple(_answer(take(row, f"response{i}", columns, place), f"response{i}", place) for i in (1, 2))
    yield Example(name, "\n\n".join(filter(None, parts)), answers, label=label, annotators=tuple(people))


def read_chosen(row: Row, columns: Columns, place: str, name: str) -> Iterator[Example]:
    """prompt, chosen, rejected: which of them is called A belongs to the id. Equal score_chosen and score_rejected are a tie."""
    chosen = _answer(take(row, "chosen", columns, place), "chosen", place)
    rejected = _answer(take(row, "rejected", columns, place), "rejected", place)
    tied = row.get("score_chosen") is not None and row.get("score_chosen") == row.get("score_rejected")
    first = heads("chosen", name)
    answers = (chosen, rejected) if first else (rejected, chosen)
    label = "tie" if tied else "A" if first else "B"
    yield Example(name, _prompt(row, columns, place), answers, label=label, subset=_subset(row, columns))


def read_helpsteer3(row: Row, columns: Columns, place: str, name: str) -> Iterator[Example]:
    """context, response1, response2, overall_preference from -3 (the first is much better) to 3, 0 a tie; subset: the domain."""
    value = _number(take(row, "overall_preference", columns, place), "overall_preference", place)
    answers = tuple(_answer(take(row, f"response{i}", columns, place), f"response{i}", place) for i in (1, 2))
    label = "tie" if value == 0 else "A" if value < 0 else "B"
    prompt = _prompt(row, {**columns, "prompt": columns.get("prompt", "context")}, place)
    yield Example(name, prompt, answers, label=label, subset=_subset(row, {"subset": "domain", **columns}))


def read_ppe(row: Row, columns: Columns, place: str, name: str) -> Iterator[Example]:
    """PPE best of k: prompt, response_1 to response_k, scores (right or not), and pairs of places (from 0) of which one is right:
    sampled_conflict_pairs, else conflict_pairs."""
    scores = take(row, "scores", columns, place)
    column = "sampled_conflict_pairs" if "sampled_conflict_pairs" in row else "conflict_pairs"
    pairs = take(row, column, columns, place)
    prompt = _prompt(row, columns, place)
    for i, j in pairs:
        if not 0 <= min(i, j) <= max(i, j) < len(scores) or bool(scores[i]) == bool(scores[j]):
            raise UserError(f"{column} names the pair ({i}, {j})", where=place, expected="one right and one wrong answer")
        answers = tuple(_answer(take(row, f"response_{k + 1}", columns, place), f"response_{k + 1}", place) for k in (i, j))
        yield Example(f"{name}/{i}-{j}", prompt, answers, label="A" if scores[i] else "B")


def read_judgebench(row: Row, columns: Columns, place: str, name: str) -> Iterator[Example]:
    """pair_id, source, question, response_A, response_B, label A>B or B>A; subset: the category of the source."""
    label = _label(take(row, "label", columns, place), place, {"a>b": "A", "b>a": "B", "a": "A", "b": "B"})
    answers = tuple(_answer(take(row, f"response_{s}", columns, place), f"response_{s}", place) for s in "AB")
    source = str(take(row, "source", columns, place))
    yield Example(name, _prompt(row, columns, place), answers, label=label, subset=category(source))


# --------------------------------------------------------------------------------------------------------------- lists


def read_rewardbench2(row: Row, columns: Columns, place: str, name: str) -> Iterator[Example]:
    """prompt, chosen (right answers), rejected (wrong ones), subset."""
    right = _answers(take(row, "chosen", columns, place), "chosen", place)
    wrong = _answers(take(row, "rejected", columns, place), "rejected", place)
    scores = (1.0,) * len(right) + (0.0,) * len(wrong)
    subset = str(take(row, "subset", columns, place))
    yield Example(name, _prompt(row, columns, place), (*right, *wrong), scores=scores, subset=subset)


def read_styles(row: Row, columns: Columns, place: str, name: str) -> Iterator[Example]:
    """RM-Bench: prompt, chosen and rejected in three styles each (concise, detailed, detailed with markdown), domain."""
    chosen = _answers(take(row, "chosen", columns, place), "chosen", place)
    rejected = _answers(take(row, "rejected", columns, place), "rejected", place)
    if len(chosen) != len(rejected):
        raise UserError(f"{len(chosen)} chosen and {len(rejected)} rejected answers", where=place, expected="as many, by style")
    scores = (1.0,) * len(chosen) + (0.0,) * len(rejected)
    subset = _subset(row, {"subset": "domain", **columns})
    yield Example(name, _prompt(row, columns, place), (*chosen, *rejected), scores=scores, subset=subset)


def read_list(row: Row, columns: Columns, place: str, name: str) -> Iterator[Example]:
    """prompt and responses [{text, score}], or answers with scores (higher is better) or ranks (1 is best); rubric, reference."""
    if columns.get("responses", "responses") in row:
        items = take(row, "responses", columns, place)
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise UserError("responses is not a list of objects", where=place, expected="[{text, score}, ...]")
        answers = [_answer(item, f"responses[{i}]", place) for i, item in enumerate(items, 1)]
        scores = [_number(item.get("score"), f"responses[{i}].score", place) for i, item in enumerate(items, 1)]
    else:
        ranks = columns.get("ranks", "ranks") in row
        answers = _answers(take(row, "answers", columns, place), "answers", place)
        values = take(row, "ranks" if ranks else "scores", columns, place)
        if not isinstance(values, list) or len(values) != len(answers):
            raise UserError("scores do not fit the answers", where=place, expected=f"a list of {len(answers)} numbers")
        scores = [(-1 if ranks else 1) * _number(v, f"scores[{i}]", place) for i, v in enumerate(values, 1)]
    if not answers:
        raise UserError("the row has no answers", where=place, expected="at least one")
    rubric, reference = row.get("rubric"), row.get("reference")
    subset = _subset(row, {"subset": "category", **columns})
    yield Example(name, _prompt(row, columns, place), tuple(answers), scores=tuple(scores), subset=subset,
                  reference=reference if isinstance(reference, str) else "", rubric=_levels(rubric))  # fmt: skip


def _levels(rubric: Any) -> Any:
    """A single criterion with levels (Prometheus: worst first) as a rubric of one criterion."""
    if isinstance(rubric, dict) and isinstance(rubric.get("criterion"), str):
        levels = {str(i): level for i, level in enumerate(rubric.get("levels") or [], 1) if isinstance(level, str)}
        return {"criteria": [{"criterion": rubric["criterion"], "weight": 1.0, "scoring_levels": levels}]}
    return rubric


# ------------------------------------------------------------------------------------------------------------ criteria


def read_criteria(row: Row, columns: Columns, place: str, name: str) -> Iterator[Example]:
    """InfoBench: prompt, yes/no criteria, an answer and for each criterion whether it is met."""
    criteria, met = take(row, "criteria", columns, place), take(row, "verdicts", columns, place)
    if not isinstance(criteria, list) or not criteria or not all(isinstance(c, str) and c.strip() for c in criteria):
        raise UserError("criteria is not a list of texts", where=place, expected="at least one criterion")
    if not isinstance(met, list) or len(met) != len(criteria) or not all(isinstance(m, bool) for m in met):
        raise UserError("the verdicts do not fit the criteria", where=place, expected=f"{len(criteria)} times true or false")
    answer = _answer(take(row, "answer", columns, place), "answer", place)
    yield Example(name, _prompt(row, columns, place), (answer,), criteria=tuple(criteria), met=tuple(met),
                  subset=_subset(row, columns))  # fmt: skip


def majority(labels: Sequence[str]) -> str:
    """The label that more than half of the annotators give, a tie where there is none."""
    return next((label for label in labels if 2 * labels.count(label) > len(labels)), "tie")
