"""The prompt of DynamicRubric's generator: a question and the candidate answers, each between delimiters of its own.

Candidates are a model's text in front of a model that is rewarded by them: an injection surface. Each is fenced by a tag that
holds a hash of its text, and whatever looks like a tag of the question or of any candidate is escaped inside (text/prompts.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from coevo_jax.errors import UserError
from coevo_jax.text.prompts import fence, prompt_slots, render_prompt

SIGHTED = ("candidates", "candidate_lines")  # slots that show the candidates


def slots_of(question: str, candidates: Sequence[str]) -> dict[str, str]:
    """What a template may ask for: `question` and `candidates` fenced, or `question_line` and `candidate_lines` (a numbered line
    each) for models without room for delimiters."""
    names = [f"response_{n}" for n in range(1, len(candidates) + 1)]
    labels = {"question", "response", *names}
    return {
        "question": fence("question", question, labels),
        "candidates": "\n".join(fence(name, text, labels) for name, text in zip(names, candidates)),
        "question_line": " ".join(question.split()),
        "candidate_lines": "\n".join(f"{n} {' '.join(text.split())}".rstrip() for n, text in enumerate(candidates, 1)),
    }


def generator_messages(template: str, question: str, candidates: Sequence[str]) -> list[dict[str, str]]:
    """Messages of the generator's prompt; candidates in the order in which they are shown."""
    wanted, given = prompt_slots(template), slots_of(question, candidates)
    return render_prompt(template, **{name: text for name, text in given.items() if name in wanted})


def check_template(template: str, sighted: bool, where: str) -> None:
    """UserError unless the template shows the question, and the candidates where it should, and nothing that isn't there."""
    slots = prompt_slots(template)
    known = set(slots_of("", ()))
    if unknown := sorted(slots - known):
        raise UserError(f"slot {unknown[0]!r} has no value here", where=f"{where}={template}", expected=", ".join(sorted(known)))
    if not slots & {"question", "question_line"}:
        raise UserError("the template shows no question", where=f"{where}={template}", expected="a slot {{question|raw}}")
    if sighted != bool(slots & set(SIGHTED)):
        expected = "a slot {{candidates|raw}}" if sighted else "no slot of candidates"
        raise UserError(f"the template {'hides' if sighted else 'shows'} the candidates", where=f"{where}={template}",
                        expected=expected)  # fmt: skip
