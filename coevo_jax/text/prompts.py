"""Prompt templates: plain files that a researcher edits, filled by one function.

A file has sections, each begun by a line [system], [user] or [assistant]; lines before the first are a comment. Slots:

    {{answer}}        text of unknown origin, between delimiters that belong to this very text
    {{criterion|line}}  on one line, without delimiters
    {{question|raw}}  as it stands

A model's text is hostile (design.md 4.11), so fenced is the default. The delimiter carries a hash of the text, and whatever looks
like a delimiter inside the text is escaped: no text can close its own fence.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import re

from coevo_jax.errors import UserError, nearest

FOLDER = pathlib.Path(__file__).parent / "prompts"
_SECTION = re.compile(r"^\[(system|user|assistant)\][ \t]*$", re.MULTILINE)
_SLOT = re.compile(r"\{\{[ \t]*([A-Za-z_]\w*)[ \t]*(?:\|[ \t]*(\w+)[ \t]*)?\}\}")
_ALMOST = re.compile(r"\{\{[ \t]*[A-Za-z_]")  # JSON never opens two braces and a letter
FILTERS = ("fenced", "line", "raw")


def prompt_names() -> list[str]:
    """The templates that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.txt"))


def render_prompt(name_or_path: str, **slots: str) -> list[dict[str, str]]:
    """Messages of a template with its slots filled. UserError for an unknown template or slot, or a slot without value."""
    where, sections = _load(name_or_path)
    names = {slot for _, text in sections for slot, _ in _SLOT.findall(text)}
    _check_slots(where, names, set(slots))

    def fill(found: re.Match[str]) -> str:
        value = slots[found[1]]
        if found[2] == "raw":
            return value
        return " ".join(value.split()) if found[2] == "line" else fence(found[1], value, names)

    # One pass: a slot's value is never searched for slots.
    return [{"role": role, "content": _SLOT.sub(fill, text)} for role, text in sections]


def prompt_slots(name_or_path: str) -> set[str]:
    """Names of a template's slots. UserError as in render_prompt."""
    return {slot for _, text in _load(name_or_path)[1] for slot, _ in _SLOT.findall(text)}


def template_identity(name_or_path: str) -> tuple[str, str]:
    """(hash, file) of a template as it is rendered in this process; comments do not count. UserError as in render_prompt."""
    where, sections = _load(name_or_path)
    return hashlib.sha256(repr(sections).encode()).hexdigest()[:16], where


def fence(label: str, text: str, labels: set[str] | frozenset[str] = frozenset()) -> str:
    """`text` between <label HASH> and </label HASH>. What looks like a delimiter of one of `labels` is escaped inside."""
    tag = f"{label} {hashlib.blake2b(text.encode('utf-8', 'replace'), digest_size=2).hexdigest()}"
    look_alike = "|".join(map(re.escape, sorted({label, *labels})))
    inner = re.sub(rf"<(?=\s*/?\s*(?:{look_alike})\b)", "&lt;", text, flags=re.IGNORECASE)
    return f"<{tag}>\n{inner}\n</{tag}>"


@functools.lru_cache(maxsize=64)
def _load(name_or_path: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """(where, sections) of a template. Read once a process: an edit while a run goes on must not change its prompts."""
    path = pathlib.Path(name_or_path)
    if path.suffix != ".txt" and "/" not in name_or_path:
        path = FOLDER / f"{name_or_path}.txt"
        if not path.is_file():
            known = prompt_names()
            raise UserError(
                f"no prompt template {name_or_path!r}",
                where=str(FOLDER),
                expected=f"a path to a .txt file, or one of {', '.join(known)}",
                nearest=nearest(name_or_path, known),
            )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the prompt template can't be read: {error}", where=str(path), expected="a text file in UTF-8"
        ) from error
    return str(path), _sections(text, str(path))


def _sections(text: str, where: str) -> tuple[tuple[str, str], ...]:
    heads = list(_SECTION.finditer(text))
    if not any(head[1] == "user" for head in heads):
        raise UserError("the prompt template has no [user] section", where=where, expected="a line that is [user], then the text")
    if any(head[1] == "system" for head in heads[1:]):
        raise UserError("[system] is not the first section", where=where, expected="[system] at most once, and first")
    _check_syntax(text, heads[0].end(), where)
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return tuple((head[1], text[head.end() : end].strip()) for head, end in zip(heads, ends))


def _check_syntax(text: str, start: int, where: str) -> None:
    """A slot that is misspelt would be sent to the model as it stands."""
    for found in _ALMOST.finditer(text, start):
        line = text.count("\n", 0, found.start()) + 1
        slot = _SLOT.match(text, found.start())
        if not slot:
            raise UserError("a slot is malformed", where=f"{where}:{line}", expected="such as {{question}} or {{criterion|line}}")
        if slot[2] and slot[2] not in FILTERS:
            expected, close = f"one of {', '.join(FILTERS)}", nearest(slot[2], FILTERS)
            raise UserError(f"no such filter {slot[2]!r} of a slot", where=f"{where}:{line}", expected=expected, nearest=close)


def _check_slots(where: str, wanted: set[str], given: set[str]) -> None:
    expected = f"the slots {', '.join(sorted(given))}" if given else "no slots"
    for name in sorted(wanted - given):
        raise UserError(f"slot {name!r} has no value here", where=where, expected=expected, nearest=nearest(name, given))
    for name in sorted(given - wanted):
        raise UserError(f"slot {name!r} is missing", where=where, expected=expected, nearest=nearest(name, wanted))
