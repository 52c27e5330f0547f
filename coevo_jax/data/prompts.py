"""Sets of records: from files, bundled sources, procedural tasks and weighted mixtures; ids, hash, token limit, held-out part.

A source is a path, 'demo' | 'demo_heldout' | 'tiny' | 'tiny_rubrics' (bundled), 'reasoning_gym:TASK?option=value&...',
or a mixture 'SOURCE:WEIGHT,SOURCE:WEIGHT'. A path may map the file's columns: 'q.parquet?prompt=question&reference=gold'.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from coevo_jax.config import DataConfig
from coevo_jax.data.readers import Columns, Row, read_records
from coevo_jax.errors import UserError, nearest

HERE = pathlib.Path(__file__).parent
# By kind of record, the sources that come with the package.
BUNDLED = {
    "prompts": {
        "demo": HERE / "demo_prompts.jsonl",
        "demo_heldout": HERE / "heldout_prompts.jsonl",
        "tiny": HERE / "tiny_prompts.jsonl",
        "tiny_rubrics": HERE / "tiny_rubrics.jsonl",  # with a column 'rubric', for rubric.source=data
    },
    "pairs": {"tiny": HERE / "tiny_pairs.jsonl", "demo": HERE / "demo_pairs.jsonl"},
    "rankings": {"labelled": HERE / "labelled_rankings.jsonl", "tiny": HERE / "tiny_rankings.jsonl"},
    "chat": {
        "demo": HERE / "warmup" / "rubrics.jsonl",
        "tiny": HERE / "warmup" / "tiny.jsonl",
        "dynamic": HERE / "warmup" / "dynamic.jsonl",
        "tiny_dynamic": HERE / "warmup" / "tiny_dynamic.jsonl",
    },
}
# By kind of record, our columns that a file may call otherwise.
NAMES = {
    "prompts": ("prompt", "reference", "id"),
    "pairs": ("prompt", "chosen", "rejected", "margin", "id"),
    "rankings": ("prompt", "answers", "scores", "ranks", "id"),
    "chat": ("messages", "question", "id"),
}
PROCEDURAL = "reasoning_gym:"


@dataclasses.dataclass(frozen=True, eq=False)
class PromptSet:
    """Records in a fixed order. `parts`: (start, size, share) of each component of a mixture; shares sum to 1.

    hash: of the records and the parts. heldout: records set aside. counts: what the reading dropped, by reason.
    """

    records: tuple[Row, ...]
    parts: tuple[tuple[int, int, float], ...]
    source: str = ""
    heldout: tuple[Row, ...] = ()
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    hash: str = ""

    def __post_init__(self) -> None:
        if not self.hash:
            object.__setattr__(self, "hash", content_hash(self.records, self.parts))

    def __len__(self) -> int:
        return len(self.records)

    @property
    def filtered(self) -> int:
        """Prompts over the token limit that were left out."""
        return self.counts.get("over_limit", 0)

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]], source: str = "") -> PromptSet:
        """A set of one component from records at hand; each must have an 'id'."""
        rows = tuple(dict(record) for record in records)
        if not rows:
            raise UserError("the set holds no records", where=source, expected="at least one record")
        return cls(rows, ((0, len(rows), 1.0),), source)


@dataclasses.dataclass
class _Part:
    """One component while it is read: records with ids, and where each came from."""

    source: str
    weight: float | None
    records: list[Row]
    places: list[str]


def read_prompts(
    cfg: DataConfig,
    count_tokens: Callable[[str], int] | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> PromptSet:
    """The prompts of `cfg.prompts`, those over `cfg.max_prompt_tokens` filtered or refused, `cfg.heldout` of them set aside.

    count_tokens: length in tokens of the longest prompt that is rendered from the question; None = no limit.
    seed: of the order whose last records are held out. progress: called with the numbers of prompts measured and to be measured.
    """
    columns = {} if cfg.prompt_column == "prompt" else {"prompt": cfg.prompt_column}
    parts = _read_parts(cfg.prompts, "prompts", columns, "data.prompts")
    counts = {"read": sum(len(part.records) for part in parts), "over_limit": 0, "heldout_duplicates": 0}
    if count_tokens is not None:
        report = progress or (lambda done, total: None)
        counts["over_limit"] = _limit(parts, cfg, count_tokens, report)
    heldout: list[Row] = []
    if cfg.heldout:
        heldout, counts["heldout_duplicates"] = _hold_out(parts, cfg.heldout, seed)
    counts["heldout"] = len(heldout)
    return _assemble(parts, cfg.prompts, heldout, counts)


def read_pairs(source: str, columns: Columns | None = None, key: str = "") -> PromptSet:
    """Pairs {id, prompt, chosen, rejected} from a file or a mixture of files. columns: our name -> the file's."""
    return _assemble(_read_parts(source, "pairs", columns or {}, key), source)


def read_rankings(source: str, columns: Columns | None = None, key: str = "") -> PromptSet:
    """Rankings {id, prompt, answers, scores} from a file or a mixture of files."""
    return _assemble(_read_parts(source, "rankings", columns or {}, key), source)


def read_chat(source: str, columns: Columns | None = None, key: str = "") -> PromptSet:
    """Conversations {id, messages} or rubric examples {id, question, rubric} from a file or a mixture of files."""
    return _assemble(_read_parts(source, "chat", columns or {}, key), source)


# ----------------------------------------------------------------------------------------------------------- reading


def _read_parts(source: str, kind: str, columns: Columns, key: str) -> list[_Part]:
    components = parse_mixture(source, key)
    parts = [_read_part(name, weight, kind, columns, key) for name, weight in components]
    if len(parts) > 1:  # ids of two files may coincide
        for number, part in enumerate(parts):
            part.records = [{**record, "id": f"{number}/{record['id']}"} for record in part.records]
    return parts


def parse_mixture(source: str, key: str = "") -> list[tuple[str, float | None]]:
    """'a.jsonl:0.7,b.jsonl:0.3' -> [('a.jsonl', 0.7), ('b.jsonl', 0.3)]; weight None when not given (shares by size)."""
    if pathlib.Path(source).is_file():
        return [(source, None)]
    where = f"{key}={source}" if key else source
    found: list[tuple[str, float | None]] = []
    for component in source.split(","):
        name, colon, last = component.strip().rpartition(":")
        weight = _number(last) if colon else None
        found.append((component.strip(), None) if weight is None else (name, weight))
        if not found[-1][0] or (weight is not None and not (weight > 0 and math.isfinite(weight))):
            raise UserError(f"{component!r} is no component of a mixture", where=where, expected="SOURCE:WEIGHT, weight above 0")
    weighted = [weight is not None for _, weight in found]
    if any(weighted) and not all(weighted):
        missing = found[weighted.index(False)][0]
        raise UserError(
            f"the component {missing!r} has no weight", where=where, expected="a weight for all components or for none"
        )
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _read_part(source: str, weight: float | None, kind: str, columns: Columns, key: str) -> _Part:
    part = _Part(source, weight, [], [])
    if source.startswith(PROCEDURAL):
        from coevo_jax.data.reasoning import generate

        _only_prompts(source, kind)
        for record in generate(source, key):
            part.records.append(record)
            part.places.append(f"{source}, {record['id']}")
        return part
    bundled = BUNDLED.get(kind, {})
    if source in bundled:
        path, columns, key = str(bundled[source]), {}, ""
    else:
        path, own = _column_map(source, kind, key)
        columns = {**columns, **own}
        _check_name(path, kind, key)
    owners: dict[str, str] = {}
    for place, record, name in read_records(path, kind, columns, key):
        part.records.append({"id": _identify(record, name, owners, place), **record})
        part.places.append(place)
    return part


def _column_map(source: str, kind: str, key: str) -> tuple[str, dict[str, str]]:
    """'q.parquet?prompt=question&id=uid' -> the path, and our names of columns with the file's."""
    path, mark, query = source.partition("?")
    if not mark or pathlib.Path(source).exists():
        return source, {}
    found: dict[str, str] = {}
    for part in query.split("&"):
        name, _, column = part.partition("=")
        if name not in NAMES[kind] or not column:
            known = ", ".join(NAMES[kind])
            raise UserError(
                f"{part!r} maps no column of {kind}",
                where=f"{key}={source}" if key else source,
                expected=f"OURS=THEIRS with & between, OURS one of {known}",
                nearest=nearest(name, NAMES[kind]),
            )
        found[name] = column
    return path, found


def _only_prompts(source: str, kind: str) -> None:
    if kind != "prompts":
        raise UserError(f"{source} gives prompts, not {kind}", where=source, expected="a JSONL or Parquet file")


def _check_name(source: str, kind: str, key: str) -> None:
    """A bare word that is neither a file nor a bundled source was meant as one of the latter."""
    if pathlib.Path(source).exists() or not re.fullmatch(r"[^./\\]+", source):
        return
    known = [*BUNDLED.get(kind, {}), *([PROCEDURAL + "TASK"] if kind == "prompts" else [])]
    raise UserError(
        f"no source or file {source!r}",
        where=f"{key}={source}" if key else source,
        expected=f"a .jsonl or .parquet path{', or one of ' * bool(known)}{', '.join(known)}",
        nearest=nearest(source, known),
    )


def _identify(record: Row, own: str, owners: dict[str, str], place: str) -> str:
    """The row's own id, or one made from its content, which stays when rows are inserted before it."""
    if own:
        if own in owners:
            raise UserError(f"the id {own!r} is taken by {owners[own]}", where=place, expected="ids that differ")
        owners[own] = place
        return own
    base = content_id(record)
    name, copy = base, 1
    while name in owners:
        copy += 1
        name = f"{base}-{copy}"
    owners[name] = place
    return name


def content_id(record: Mapping[str, Any]) -> str:
    """16 hex digits of the prompt, or of the whole record where there is none."""
    text = (
        record["prompt"]
        if set(record) >= {"prompt"} and "chosen" not in record and "answers" not in record
        else _canonical(record)
    )
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def _canonical(record: Mapping[str, Any]) -> str:
    # A value that JSON can't hold (a date, an object of a task) counts by its type: its repr may hold an address.
    return json.dumps(record, ensure_ascii=True, sort_keys=True, default=lambda value: type(value).__name__)


def content_hash(records: Iterable[Mapping[str, Any]], parts: Sequence[tuple[int, int, float]] = ()) -> str:
    """sha256 of the records in order, and of the shares of a mixture."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(_canonical(record).encode() + b"\n")
    if len(parts) > 1:
        digest.update(json.dumps(parts).encode())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------- limit and held-out


def _limit(parts: list[_Part], cfg: DataConfig, count_tokens: Callable[[str], int], progress: Callable[[int, int], Any]) -> int:
    """Drop the prompts that are over the limit, or refuse the first; the number dropped."""
    total, counted, dropped = sum(len(part.records) for part in parts), 0, 0
    for part in parts:
        kept = []
        for record, place in zip(part.records, part.places):
            counted += 1
            if counted % 1000 == 0:
                progress(counted, total)
            length = count_tokens(record["prompt"])
            if length <= cfg.max_prompt_tokens:
                kept.append((record, place))
            elif cfg.over_limit == "refuse":
                raise _over_limit(record, place, length, cfg.max_prompt_tokens)
        dropped += len(part.records) - len(kept)
        if not kept:
            raise UserError(
                f"all {len(part.records)} prompts are over the limit of {cfg.max_prompt_tokens} tokens",
                where=part.source,
                expected="a larger data.max_prompt_tokens, or shorter prompts",
            )
        part.records, part.places = [record for record, _ in kept], [place for _, place in kept]
    return dropped


def _over_limit(record: Row, place: str, length: int, limit: int) -> UserError:
    return UserError(
        f"the prompt {record['id']!r} has {length} tokens, over the limit of {limit}",
        where=place,
        expected=f"data.max_prompt_tokens of at least {length}, or data.over_limit=filter",
    )


def _hold_out(parts: list[_Part], count: int, seed: int) -> tuple[list[Row], int]:
    """Take the last `count` records of the seed's order out of `parts`, and drop records whose question is among them."""
    everything = [(number, record) for number, part in enumerate(parts) for record in part.records]
    if count >= len(everything):
        raise UserError(
            f"data.heldout={count} leaves nothing of {len(everything)} prompts",
            where="data.heldout",
            expected=f"at most {len(everything) - 1}",
        )
    order = np.random.RandomState(seed % 2**32).permutation(len(everything))
    chosen = [everything[index][1] for index in order[len(order) - count :]]
    questions, ids = {normalise_space(record["prompt"]) for record in chosen}, {record["id"] for record in chosen}
    duplicates = 0
    for part in parts:
        kept = [record for record in part.records if normalise_space(record["prompt"]) not in questions]
        duplicates += sum(record["id"] not in ids for record in part.records) - len(kept)
        if not kept:
            raise UserError(
                f"data.heldout={count} leaves nothing of {part.source}", where="data.heldout", expected="a smaller number"
            )
        part.records = kept
    return chosen, duplicates


def normalise_space(text: str) -> str:
    """Runs of white space as one blank, none at the ends."""
    return " ".join(text.split())


def _assemble(parts: list[_Part], source: str, heldout: Sequence[Row] = (), counts: Mapping[str, int] | None = None) -> PromptSet:
    weights = [float(len(part.records)) if part.weight is None else part.weight for part in parts]
    total = math.fsum(weights)
    spans, start = [], 0
    for part, weight in zip(parts, weights):
        spans.append((start, len(part.records), weight / total))
        start += len(part.records)
    records = tuple(record for part in parts for record in part.records)
    return PromptSet(records, tuple(spans), source, tuple(heldout), counts or {"read": len(records)})
