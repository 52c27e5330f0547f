"""What a report shows of a run folder, read once and in little memory: metric columns, phases, alarms and chosen rollout rows.

A long run's rollouts do not fit a page. Questions are chosen whole, so that a question's history has no holes: first those of the
rows that a reader filters for (failures, ties, extremes, truncations), then those that come back in the most updates.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import heapq
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from coevo_jax.errors import UserError
from coevo_jax.records.metrics import read_metrics
from coevo_jax.records.rollouts import read_rollouts, rollout_files

ALARM = "/alarm"
DROPPED = ("prompt_ids", "completion_ids", "prompt", "question", "record", "cycle", "accepted_ids", "rejected_ids")
MOST_OF_A_KIND = 40  # rows of a filter's kind whose questions come before all others
DIGITS = 5  # significant ones of a number
Told = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Phase:
    """Consecutive updates of one stage of one cycle: `first` to `last`, both among them, as steps."""

    stage: str
    cycle: int
    role: str
    first: int
    last: int


@dataclasses.dataclass
class Question:
    """A question's rows, oldest first, and what they are found by."""

    record: str
    text: str
    rows: list[dict[str, Any]]
    flags: list[str]


@dataclasses.dataclass
class RunData:
    """All that a page needs of a run. columns: values by metric, None where a row has none. all_questions: in the rollouts."""

    name: str
    folder: str
    config: dict[str, Any]
    steps: list[int]
    columns: dict[str, list[float | str | None]]
    phases: list[Phase]
    alarms: list[dict[str, Any]]
    questions: list[Question]
    all_questions: int = 0
    all_rows: int = 0
    rows: int = 0


def collect(folder: pathlib.Path, budget: int, longest: int, tell: Told = lambda what, done, total: None) -> RunData:
    """Read a run. budget: bytes of JSON that its rows may take; longest: characters of one text.

    UserError: the folder is no run, or a file of it is not readable.
    """
    if not (folder / "metrics.jsonl").exists():
        what = "no such folder" if not folder.exists() else "the folder holds no metrics.jsonl, so it is no run"
        raise UserError(what, where=str(folder), expected="the --workdir of a run")
    rows = read_metrics(folder / "metrics.jsonl")
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
    data = RunData(
        name=str(folder.name), folder=str(folder), config=config, steps=[int(row["step"]) for row in rows],
        columns=columns_of(rows), phases=phases_of(rows), alarms=alarms_of(rows), questions=[],
    )  # fmt: skip
    if (folder / "rollouts").exists():
        _add_questions(data, folder / "rollouts", budget, longest, tell)
    return data


# ------------------------------------------------------------------------------------------------------------- metrics


def columns_of(rows: list[dict[str, Any]]) -> dict[str, list[float | str | None]]:
    """Every metric's values over the rows, numbers to a few digits; what a page draws."""
    names = sorted({name for row in rows for name in row} - {"step"})
    return {name: [short(row.get(name)) for row in rows] for name in names}


def short(value: Any) -> Any:
    """A number to a few significant digits, None for what is no number JSON knows; other values as they are."""
    if isinstance(value, bool) or not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.{DIGITS}g}")


def phases_of(rows: list[dict[str, Any]]) -> list[Phase]:
    """The alternation: runs of rows of one stage and cycle."""
    out: list[Phase] = []
    for row in rows:
        stage, cycle, role, step = str(row.get("stage", "")), int(row.get("cycle", 0)), str(row.get("role", "")), int(row["step"])
        if out and (out[-1].stage, out[-1].cycle) == (stage, cycle):
            out[-1] = dataclasses.replace(out[-1], last=step)
        else:
            out.append(Phase(stage, cycle, role, step, step))
    return out


def alarms_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Alarms that are on, a line each: step, role, name, and the value of the metric they watch."""
    out = []
    for row in rows:
        for name in sorted(row):
            if name.endswith(ALARM) and row[name] == 1.0:
                metric = "judge/failure_share" if name == "judge/alarm" else name.removesuffix(ALARM)
                out.append({"step": row["step"], "role": row.get("role", ""), "name": metric, "value": short(row.get(metric))})
    return out


# ------------------------------------------------------------------------------------------------------------- rollouts


def flags_of(row: dict[str, Any]) -> list[str]:
    """What a reader filters rows by: failed, truncated, invalid, tie, untrained."""
    verdicts = list(verdicts_of(row))
    flags = ["failed"] if any(v["status"] != "ok" for v in verdicts) or row.get("reward", 0.0) is None else []
    flags += ["truncated"] if row.get("finish") == "length" else []
    flags += ["invalid"] if row.get("rubric_status", "ok") != "ok" else []
    parts = row.get("parts") or {}
    tied = "margin" in parts and parts["margin"] == 0 and row.get("rubric_status") == "ok"
    flags += ["tie"] if tied else []
    flags += [] if row.get("trained", True) else ["untrained"]
    return flags


def verdicts_of(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The judge's records in a row."""
    for value in row.values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict) and "status" in item and "raw" in item:
                yield item


@dataclasses.dataclass
class _Seen:
    """Of a question: where its rows lie, how many bytes they take, in how many updates it came."""

    files: list[int]
    size: int = 0
    rows: int = 0
    updates: int = 0


def _add_questions(data: RunData, folder: pathlib.Path, budget: int, longest: int, tell: Told) -> None:
    """Two passes over the files: sizes and kinds first, then the rows of the questions that were chosen."""
    updates = sorted({(update, role) for update, role, _, _ in rollout_files(folder)})
    seen: dict[str, _Seen] = {}
    kinds = _Kinds()
    for number, (update, role) in enumerate(updates):
        tell("rollouts read", number, 2 * len(updates))
        groups: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)
        for row in read_rollouts(folder, update, role):
            found = seen.setdefault(str(row.get("record", "")), _Seen([]))
            found.size += len(json.dumps(trimmed(row, longest), ensure_ascii=False))
            found.rows += 1
            if not found.files or found.files[-1] != number:
                found.files.append(number)
                found.updates += 1
            groups[row.get("group", 0)].append(row)
        for rows in groups.values():
            kinds.add(rows)
    chosen = _choose(seen, kinds, budget)
    data.all_questions, data.all_rows = len(seen), sum(found.rows for found in seen.values())
    wanted = {number for record in chosen for number in seen[record].files}
    questions: dict[str, Question] = {}
    for number in sorted(wanted):
        tell("rollouts read", len(updates) + number, 2 * len(updates))
        groups = collections.defaultdict(list)
        for row in read_rollouts(folder, *updates[number]):
            if str(row.get("record", "")) in chosen:
                groups[row.get("group", 0)].append(row)
        for rows in groups.values():
            flat = is_flat(rows)
            for row in rows:
                record = str(row.get("record", ""))
                question = questions.setdefault(record, Question(record, str(row.get("question", "")), [], []))
                own = flags_of(row) + (["flat"] if flat else [])
                question.rows.append({**trimmed(row, longest), "flags": own})
                question.flags = sorted({*question.flags, *own})
    data.questions = sorted(questions.values(), key=lambda q: (-len({row["update"] for row in q.rows}), q.text))
    data.rows = sum(len(question.rows) for question in data.questions)


def is_flat(rows: list[dict[str, Any]]) -> bool:
    """Have all rewards of a group one value, so that it teaches nothing?"""
    rewards = [row["reward"] for row in rows if row.get("reward") is not None]
    return len(rewards) > 1 and max(rewards) == min(rewards)


class _Kinds:
    """The questions of the first rows of each filter's kind, and of the highest and lowest rewards of each role."""

    def __init__(self) -> None:
        self.first: dict[str, list[str]] = collections.defaultdict(list)
        self.extremes: dict[tuple[str, int], list[tuple[float, str]]] = collections.defaultdict(list)

    def add(self, rows: list[dict[str, Any]]) -> None:
        """One group's rows."""
        for row in rows:
            record = str(row.get("record", ""))
            for flag in flags_of(row) + (["flat"] if is_flat(rows) else []):
                if len(self.first[flag]) < MOST_OF_A_KIND:
                    self.first[flag].append(record)
            if row.get("reward") is not None:
                for sign in (1, -1):
                    heap = self.extremes[str(row.get("role", "")), sign]
                    heapq.heappush(heap, (sign * row["reward"], record))
                    if len(heap) > MOST_OF_A_KIND:
                        heapq.heappop(heap)

    def records(self) -> list[str]:
        """Each once, a kind's first before any kind's second, so that every filter finds something."""
        lists = [*self.first.values(), *([record for _, record in sorted(heap, reverse=True)] for heap in self.extremes.values())]
        longest = max(map(len, lists), default=0)
        return list(dict.fromkeys(own[i] for i in range(longest) for own in lists if i < len(own)))


def _choose(seen: dict[str, _Seen], kinds: _Kinds, budget: int) -> set[str]:
    """Questions, whole, as far as the budget goes. At least one, whatever its size."""
    by_return = sorted(seen, key=lambda record: (-seen[record].updates, hashlib.blake2b(record.encode()).digest()))
    chosen: set[str] = set()
    left = budget
    # Half of the budget at most for the filters' questions: the histories that a reader follows need the rest.
    for order, floor in ((kinds.records(), budget // 2), (by_return, 0)):
        for record in order:
            if record not in chosen and (left - seen[record].size >= floor or not chosen):
                chosen.add(record)
                left -= seen[record].size
    return chosen


def trimmed(value: Any, longest: int) -> Any:
    """A row for the page: no token ids, long texts cut in their middle, numbers short."""
    if isinstance(value, dict):
        return {k: trimmed(v, longest) for k, v in value.items() if k not in DROPPED}
    if isinstance(value, list):
        return [trimmed(v, longest) for v in value]
    if isinstance(value, str) and len(value) > longest:
        half = longest // 2
        return f"{value[:half]}\n[... {len(value) - 2 * half} characters left out ...]\n{value[-half:]}"
    return short(value)


def names_of(folders: Iterable[pathlib.Path]) -> list[str]:
    """A short name for each run, different for each: the last parts of its path."""
    paths = [folder.resolve() for folder in folders]
    for depth in range(1, 1 + max((len(path.parts) for path in paths), default=1)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]
