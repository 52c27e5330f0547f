"""results.json and results.md of a benchmark: a line a system, what stands beside each number, and the transfer table."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from coevo_jax.evaluate.records import Judged, Score

# EvoLM's health limits of an evaluation: failed scores, pairs with a failure.
MOST_FAILED_CALLS, MOST_OPEN = 0.02, 0.10


@dataclasses.dataclass(frozen=True)
class Result:
    """A system's score on the examples that were judged, and what its verdicts and rubrics came to."""

    generator: str
    judge: str
    hash: str
    score: Score
    judged: int
    examples: int
    calls: int
    failures: Mapping[str, int]
    rubrics: Mapping[str, int]

    @property
    def complete(self) -> bool:
        """Was every example judged?"""
        return self.judged == self.examples

    @property
    def failed_calls(self) -> float:
        """Share of the judge's calls that failed."""
        return sum(self.failures.values()) / self.calls if self.calls else 0.0


def result_of(sources: tuple[str, str], hash_: str, score: Score, judged: Sequence[Judged], examples: int) -> Result:
    """A result from the records behind it."""
    failures: Counter[str] = Counter()
    for one in judged:
        failures.update(one.failures)
    rubrics = Counter(one.rubric_status for one in judged if one.rubric_status)
    return Result(*sources, hash_, score, len(judged), examples, sum(one.calls for one in judged), dict(failures), dict(rubrics))


def to_json(result: Result) -> dict[str, Any]:
    """A system's part of results.json."""
    s = result.score
    return {
        "generator": result.generator, "judge": result.judge, "hash": result.hash, "score": s.score, "strict": s.strict,
        "tie_share": s.tie_share, "failure_share": s.failure_share, "interval": [s.low, s.high], "n": s.n,
        "complete": result.complete, "examples": result.examples, "rule": s.rule, "parts": dict(s.parts),
        "subsets": {name: {"score": value, "n": n} for name, (value, n) in s.subsets.items()},
        "calls": result.calls, "failed_calls": result.failed_calls, "failures": dict(result.failures),
        "rubrics": dict(result.rubrics),
    }  # fmt: skip


def markdown(title: str, facts: Mapping[str, Any], results: Sequence[Result]) -> str:
    """The report as text."""
    lines = [f"# {title}", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += [f"- rule: {rule}" for rule in dict.fromkeys(r.score.rule for r in results)]
    header = ["generator", "judge", "score", "95 %", "strict", "ties", "failures", "failed calls", "n"]
    lines += ["", *table(header, [_line(r) for r in results])]
    if len({r.generator for r in results}) > 1 or len({r.judge for r in results}) > 1:
        lines += ["", "## Transfer", "", "Rows: whose rubrics; columns: who executes them.", "", *_transfer(results)]
    lines += _beside(results) + _subsets(results) + _warnings(results)
    return "\n".join(lines) + "\n"


def _line(r: Result) -> list[str]:
    s = r.score
    n = str(s.n) if r.complete else f"{s.n} of {r.examples}"
    return [r.generator, r.judge, num(s.score), f"{num(s.low)} to {num(s.high)}", num(s.strict), num(s.tie_share),
            num(s.failure_share), num(r.failed_calls), n]  # fmt: skip


def _transfer(results: Sequence[Result]) -> list[str]:
    generators, judges = (list(dict.fromkeys(getattr(r, name) for r in results)) for name in ("generator", "judge"))
    cells = {(r.generator, r.judge): f"{num(r.score.score)} [{num(r.score.low)}, {num(r.score.high)}]" for r in results}
    return table(["", *judges], [[g, *(cells.get((g, j), "") for j in judges)] for g in generators])


def _beside(results: Sequence[Result]) -> list[str]:
    names = list(dict.fromkeys(name for r in results for name in r.score.parts))
    if not names:
        return []
    rows = [[name, *(num(r.score.parts.get(name)) for r in results)] for name in names]
    return ["", "## Beside it", "", *table(["", *(f"{r.generator} + {r.judge}" for r in results)], rows)]


def _subsets(results: Sequence[Result]) -> list[str]:
    names = list(dict.fromkeys(name for r in results for name in r.score.subsets))
    if not names:
        return []
    rows = []
    for name in names:
        found = [r.score.subsets.get(name) for r in results]
        count = next((n for one in found if one for n in one[1:]), 0)
        rows.append([name or "(none)", str(count), *(num(one[0]) if one else "" for one in found)])
    return ["", "## Subsets", "", *table(["", "n", *(f"{r.generator} + {r.judge}" for r in results)], rows)]


def _warnings(results: Sequence[Result]) -> list[str]:
    lines = []
    for r in results:
        name = f"{r.generator} + {r.judge}"
        if r.failed_calls > MOST_FAILED_CALLS:
            kinds = ", ".join(f"{status} {n}" for status, n in sorted(r.failures.items()))
            lines.append(f"- {name}: {r.failed_calls:.1%} of {r.calls} verdicts failed ({kinds}); at most 2 % is healthy.")
        if r.score.failure_share > MOST_OPEN:
            lines.append(f"- {name}: {r.score.failure_share:.1%} of the decisions stayed open; at most 10 % is healthy.")
        invalid = {status: n for status, n in r.rubrics.items() if status != "ok"}
        if invalid:
            lines.append(f"- {name}: {sum(invalid.values())} of {sum(r.rubrics.values())} rubrics were invalid: {invalid}.")
    return ["", "## Warnings", "", *lines] if lines else []


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]


def num(value: float | None) -> str:
    """Three decimals; '-' for none."""
    if value is None or math.isnan(value):
        return "-"
    return str(int(value)) if value == int(value) and abs(value) >= 2 else f"{value:.3f}"
