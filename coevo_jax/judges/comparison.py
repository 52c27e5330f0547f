"""The judgement of Rubric-ARM (arXiv 2602.01511): two answers side by side under a numbered list, in four sections.

    ## Compliance check
    Gatekeeper: criterion 1
    A: <does it meet that rule, and why>
    B: <...>
    ## Analysis of A
    1. [Hard Rule] <why>
    2. [Principle] <why>
    ## Analysis of B
    ...
    ## Final judgement
    Justification: <why>
    Winner: Response A

Two questions are asked of it, each by itself: who wins (parse.parse_winner: after the last closing reasoning tag, the last
verdict), and is its structure whole (`faults`), which the judge in training is paid for. Words that are merely there count for
nothing: every criterion of this list is to be addressed, once for each answer, under its tag, with words of its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from coevo_jax.errors import UserError
from coevo_jax.judges.base import Instrument, JudgeItem, WritingJudge
from coevo_jax.records.verdicts import Status, Verdict
from coevo_jax.rubrics import Rubric, numbered_list
from coevo_jax.rubrics.json_criteria import normalise
from coevo_jax.text.parse import parse_winner, visible

TEMPLATE = "judge_comparison"
HEADINGS = ("Compliance check", "Analysis of A", "Analysis of B", "Final judgement")
SIDES = ("A", "B")
WORDS = 2  # least words of an explanation beyond those of its criterion
_HEADING = re.compile(r"#{1,6}[ \t]*(?:\*\*)?([^\n*]+?)(?:\*\*)?[ \t]*:?")
_GATE = re.compile(r"Gatekeeper:\s*(?:criterion\s+(\d{1,3})|(none))\s*\.?", re.IGNORECASE)
_SIDE = re.compile(r"(?:Response\s+)?([AB]):\s*(.*)", re.IGNORECASE)
_POINT = re.compile(rf"(\d{{1,3}})[.)]\s*\[({numbered_list.HARD}|{numbered_list.PRINCIPLE})\]:?\s*(.*)", re.IGNORECASE)
_WHY = re.compile(r"Justification:\s*(.*)", re.IGNORECASE | re.DOTALL)
_WINNER = re.compile(r"Winner:\s*Response\s+[AB]\s*\.?", re.IGNORECASE)
_WORD = re.compile(r"[^\W\d_]{2,}")


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What a judge's text says. winner: 'A', 'B' or None where it names none (`status` says how); faults: of its structure."""

    status: Status
    winner: str | None
    faults: tuple[str, ...]
    raw: str = ""
    detail: str = ""

    @property
    def whole(self) -> bool:
        """Is every criterion addressed, with a justification and a decision?"""
        return not self.faults

    def verdict(self) -> Verdict:
        """As a record of judges of pairs: 1 where the answer in slot A wins, 0 where B does."""
        return Verdict(self.status, None if self.winner is None else float(self.winner == "A"), self.raw, (), None, self.detail)


def read(text: str, rubric: Rubric, truncated: bool = False, opened: bool = False) -> Judgement:
    """A judge's text: its winner and the faults of its structure. No ties."""
    found = parse_winner(text, truncated=truncated, opened=opened)
    return Judgement(found.status, found.value, faults(text, rubric, truncated, opened), text, found.detail)


def faults(text: str, rubric: Rubric, truncated: bool = False, opened: bool = False) -> tuple[str, ...]:
    """What is wrong with a judgement's structure; nothing: format reward 1."""
    seen = visible(text, truncated=truncated, opened=opened)
    if seen.value is None:
        return (seen.detail,)
    sections = _sections(seen.value)
    if isinstance(sections, str):
        return (sections,)
    out = [*_compliance(sections[0], rubric)]
    for side, lines in zip(SIDES, sections[1:3]):
        out += [f"analysis of {side}: {fault}" for fault in _analysis(lines, rubric)]
    return tuple(out + _final(sections[3]))


def _sections(text: str) -> list[list[str]] | str:
    """The lines of the four sections, or what is wrong with the headings."""
    names = [name.casefold() for name in HEADINGS]
    sections: list[list[str]] = []
    for line in (line.strip() for line in text.splitlines() if line.strip()):
        heading = _HEADING.fullmatch(line)
        if heading is None:
            if not sections:
                return "text before the first heading"
            sections[-1].append(line)
            continue
        if len(sections) == len(names) or heading[1].strip().casefold() != names[len(sections)]:
            return f"the heading {heading[1].strip()[:40]!r} where {', '.join(HEADINGS)} are due in this order"
        sections.append([])
    return sections if len(sections) == len(names) else f"no section {HEADINGS[len(sections)]!r}"


def _compliance(lines: Sequence[str], rubric: Rubric) -> list[str]:
    """The gatekeeper is one of the list's hard rules (none where it has none), then a line for A and one for B."""
    hard = {i for i, c in enumerate(rubric.criteria, start=1) if numbered_list.tag(c) == numbered_list.HARD}
    gate = _GATE.fullmatch(lines[0]) if lines else None
    if gate is None or (int(gate[1]) not in hard if gate[1] else bool(hard)):
        return ["compliance check: no gatekeeper that is a hard rule of the list"]
    said = [found for line in lines[1:] if (found := _SIDE.fullmatch(line))]
    if [found[1].upper() for found in said] != list(SIDES) or len(said) != len(lines) - 1:
        return ["compliance check: not one line for A and one for B"]
    own = rubric.criteria[int(gate[1]) - 1].text if gate[1] else ""
    return [f"compliance check: nothing said of {found[1].upper()}" for found in said if not explains(found[2], own)]


def _analysis(lines: Sequence[str], rubric: Rubric) -> list[str]:
    """One line for each criterion of the list, in its order, under its tag, with an explanation."""
    points = [_POINT.fullmatch(line) for line in lines]
    out = [f"{line[:40]!r} is no line 'N. [tag] explanation'" for line, point in zip(lines, points) if point is None]
    found = [point for point in points if point is not None]
    if [int(point[1]) for point in found] != list(range(1, len(rubric.criteria) + 1)):
        return [*out, f"criteria {[int(point[1]) for point in found]} of {len(rubric.criteria)}"]
    for point, criterion in zip(found, rubric.criteria):
        if point[2].casefold() != numbered_list.tag(criterion).casefold():
            out.append(f"criterion {point[1]} is no {point[2]}")
        if not explains(point[3], criterion.text):
            out.append(f"criterion {point[1]} has no explanation")
    return out


def _final(lines: Sequence[str]) -> list[str]:
    """A justification, and one decision as the last line."""
    if not lines or not _WINNER.fullmatch(lines[-1]):
        return ["final judgement: the last line is not 'Winner: Response A' or 'Winner: Response B'"]
    if any(_WINNER.fullmatch(line) for line in lines[:-1]):
        return ["final judgement: more than one decision"]
    why = _WHY.fullmatch("\n".join(lines[:-1]))
    return [] if why and explains(why[1], "") else ["final judgement: no justification"]


def explains(text: str, criterion: str) -> bool:
    """Are there words beyond a repetition of the criterion?"""
    plain, own = normalise(text), normalise(criterion)
    return len(_WORD.findall(plain.replace(own, " ") if own else plain)) >= WORDS


# ------------------------------------------------------------------------------------------------- prompt and example


def slots(item: JudgeItem) -> dict[str, str]:
    """What the prompt shows: item.answer sits in slot A, item.other in slot B."""
    rubric = numbered_list.render(item.rubric)
    return {"question": item.question, "answer_a": item.answer, "answer_b": item.other, "rubric": rubric}


def make(instrument: Instrument) -> WritingJudge:
    """A frozen model that judges pairs in this form, such as the judge of a finished run."""
    return WritingJudge("comparison", instrument, slots, instrument.cfg.pairs_prompt or TEMPLATE, read_verdict)


def read_verdict(text: str, item: JudgeItem, truncated: bool, opened: bool) -> Verdict:
    """Who wins: 1 where the answer in slot A does, 0 where that in B does."""
    return read(text, item.rubric, truncated, opened).verdict()


def write(rubric: Rubric, gate: int, said: Mapping[str, Sequence[str]], checked: Mapping[str, str], why: str, winner: str) -> str:
    """A judgement in the form above. gate: number of the gatekeeper, 0 = none; said: by side, an explanation a criterion;
    checked: by side, what the compliance check says. UserError where `faults` would find any."""
    lines = [f"## {HEADINGS[0]}", f"Gatekeeper: criterion {gate}" if gate else "Gatekeeper: none"]
    lines += [f"{side}: {checked[side]}" for side in SIDES]
    for side, heading in zip(SIDES, HEADINGS[1:3]):
        lines.append(f"## {heading}")
        tags = [numbered_list.tag(criterion) for criterion in rubric.criteria]
        lines += [f"{i}. [{tag}] {text}" for i, (tag, text) in enumerate(zip(tags, said[side]), start=1)]
    lines += [f"## {HEADINGS[3]}", f"Justification: {why}", f"Winner: Response {winner}"]
    text = "\n".join(lines)
    if wrong := faults(text, rubric):
        raise UserError(f"the judgement is not whole: {wrong[0]}", expected="an explanation for each criterion and answer")
    return text
