"""Chat messages to token ids, once: the template decides about the first token, and nothing adds special tokens again.

What a system prompt means, for every role alike (the declared one is what is rendered):
  'text'  that text. Where a template knows no system turn, it is put before the first user turn.
  ''      none: the template's own default is kept out, by an empty system turn where leaving it out would bring the default in.
  None    whatever the template does by itself.
"""

from __future__ import annotations

import copy
import datetime
import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from coevo_jax.errors import UserError

REASONING_TAGS = ("<think>", "</think>", "<thinking>", "</thinking>", "<thought>", "</thought>", "<reasoning>", "</reasoning>")
_PROBE = "qzprobe"  # text that no template holds
_DATE = datetime.date(2024, 7, 26)  # templates that print a date get this one: a prompt must not change overnight
Message = dict[str, str]


class ChatTokenizer:
    """A tokenizer with its chat template. `stop_ids`: every id that ends a turn of this model, in rising order."""

    def __init__(self, tokenizer: Any, where: str, end_ids: Iterable[int] = ()):
        self._tok, self.where = tokenizer, where
        if not tokenizer.chat_template:
            raise UserError(
                "the tokenizer has no chat template",
                where=where,
                expected="chat_template in tokenizer_config.json, or a file chat_template.jinja; base models need one added",
            )
        self._template = _without_clock(tokenizer.get_chat_template(), where)
        special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special} | set(tokenizer.all_special_tokens)
        self._dropped = {tokenizer.convert_tokens_to_ids(t) for t in special if t not in REASONING_TAGS}
        self._unknown = tokenizer.unk_token_id
        hot = sorted((t for t in special if len(t) > 1 and t not in REASONING_TAGS), key=len, reverse=True)
        self._hot = re.compile("|".join(map(re.escape, hot))) if hot else None
        self.vocab_size: int = len(tokenizer)
        self.stop_ids: tuple[int, ...] = self._find_stop_ids(end_ids)

    @classmethod
    def load(cls, source: str | pathlib.Path) -> ChatTokenizer:
        """From a folder (tokenizer.json or tokenizer.model, tokenizer_config.json, config.json, generation_config.json) or a
        tokenizer file in one. Local files only."""
        path = pathlib.Path(source)
        if not path.exists():
            raise UserError(f"no tokenizer at {str(source)!r}", where=str(path), expected="a folder with tokenizer.json")
        folder = path if path.is_dir() else path.parent
        files = [folder / name for name in ("tokenizer.json", "tokenizer.model")]
        if path.is_dir() and not any(f.is_file() for f in files):
            raise UserError("the folder has no tokenizer", where=str(folder), expected="tokenizer.json or tokenizer.model")
        return cls(_from_files(path), str(path), _end_ids(folder) if path.is_dir() else ())

    # ------------------------------------------------------------------------------------------------ text to ids

    def render(
        self, messages: Sequence[Message], *, thinking: bool, system: str | None, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation, with the head of the assistant's turn.

        thinking: enable_thinking, where the template has it. A message's text never becomes a special token: those written
        out in it are broken up.
        """
        text = self.render_text(messages, thinking=thinking, system=system, add_generation_prompt=add_generation_prompt)
        return self._tok.encode(text, add_special_tokens=False)

    def render_messages(self, messages: Sequence[Message], *, thinking: bool, default_system: str | None = "") -> list[int]:
        """Like `render`, the system prompt being the messages' own, else `default_system`."""
        own = messages[0]["content"] if messages and messages[0]["role"] == "system" else default_system
        return self.render([m for m in messages if m["role"] != "system"], thinking=thinking, system=own)

    def render_text(
        self, messages: Sequence[Message], *, thinking: bool, system: str | None, add_generation_prompt: bool = True
    ) -> str:
        """The text of `render`, before its ids."""
        if any(m["role"] == "system" for m in messages):
            raise ValueError("the system prompt goes into `system`, not among the messages")
        turns = [{"role": m["role"], "content": self.defuse(m["content"])} for m in messages]
        turns = self._with_system(turns, None if system is None else self.defuse(system))
        return self._apply(turns, thinking, add_generation_prompt)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text. Special tokens written out in it are ordinary text. add_special_tokens: for a raw document, whose first
        token the tokenizer decides."""
        return self._tok.encode(text, add_special_tokens=add_special_tokens, split_special_tokens=True)

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a text that a template made: special tokens written in it are special tokens."""
        ids: list[int] = self._tok.encode(text, add_special_tokens=False)
        return ids

    def defuse(self, text: str) -> str:
        """The text with a space inside everything that would be read as a special token, so that it can't end its own turn."""
        return self._hot.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text) if self._hot else text

    # ------------------------------------------------------------------------------------------------ ids to text

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Text of ids without special tokens, but for reasoning tags. Ids over the vocabulary (padded embeddings) are none."""
        kept = [int(i) for i in ids if 0 <= int(i) < self.vocab_size and (keep_special or int(i) not in self._dropped)]
        return self._tok.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token_text(self, token: int) -> str:
        """What one id adds to a text; '' for special tokens."""
        return self.decode([token])

    # ------------------------------------------------------------------------------------------------ what the model is

    @functools.cached_property
    def hash(self) -> str:
        """Names vocabulary, merges, template and stop ids: equal hashes render equal ids."""
        parts = (self._tok.backend_tokenizer.to_str(), self._template, repr(self.stop_ids))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def backend_json(self) -> str:
        """The tokenizer as a tokenizer.json, added tokens included, padding and truncation off."""
        backend = copy.copy(self._tok.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return backend.to_str()

    def padding_token(self) -> tuple[int, str] | None:
        """A special token that no conversation has in it: the tokenizer's own for padding, one called so, or any other."""
        turns = [{"role": role, "content": _PROBE} for role in ("user", "assistant", "user", "assistant")]
        used = {*self.render(turns, thinking=False, system=None, add_generation_prompt=False), *self.stop_ids}
        own = [self._tok.pad_token_id] if self._tok.pad_token_id is not None else []
        texts = {i: self._tok.convert_ids_to_tokens(i) for i in sorted(self._dropped)}
        order = [*own, *(i for i, text in texts.items() if "pad" in text.lower()), *texts]
        return next(((i, self._tok.convert_ids_to_tokens(i)) for i in order if i not in used), None)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - a tokenizer lives as long as the process
    def opens_reasoning(self, thinking: bool) -> bool:
        """Does the prompt end inside a reasoning block, so that the completion closes a block that it never opened?"""
        text = self.render_text([{"role": "user", "content": "a"}], thinking=thinking, system="")
        return text.rstrip().endswith(tuple(tag for tag in REASONING_TAGS if not tag.startswith("</")))

    def _find_stop_ids(self, end_ids: Iterable[int]) -> tuple[int, ...]:
        """The tokenizer's end token, those of the model's config files, and the one that closes an assistant turn here."""
        found = {int(i) for i in end_ids if 0 <= int(i) < self.vocab_size}
        if self._tok.eos_token_id is not None:
            found.add(int(self._tok.eos_token_id))
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        tail = self._apply(turns, thinking=False, generation=False).rpartition(_PROBE)[2]
        closing = [i for i in self._tok.encode(tail, add_special_tokens=False) if i in self._dropped and i != self._unknown]
        found.update(closing[:1])
        if not found:
            raise UserError(
                "the tokenizer has no end token", where=self.where, expected="eos_token in tokenizer_config.json or config.json"
            )
        return tuple(sorted(found))

    # ------------------------------------------------------------------------------------------------ the template

    def _apply(self, turns: list[Message], thinking: bool, generation: bool) -> str:
        kwargs: dict[str, Any] = {"chat_template": self._template, "date_string": _DATE.strftime("%d %b %Y")}
        if "enable_thinking" in self._template:
            kwargs["enable_thinking"] = thinking
        import jinja2

        try:
            return self._tok.apply_chat_template(turns, tokenize=False, add_generation_prompt=generation, **kwargs)
        except jinja2.TemplateError as error:
            roles = ", ".join(turn["role"] for turn in turns)
            raise UserError(f"the chat template refuses the turns {roles}: {error}", where=self.where) from error

    def _with_system(self, turns: list[Message], system: str | None) -> list[Message]:
        if system is None or (system == "" and not self._brings_default):
            return turns
        if self._takes_system:
            return [{"role": "system", "content": system}, *turns]
        first = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), None)
        if first is None:
            raise UserError("no user turn that could carry the system prompt", where=self.where)
        folded = {"role": "user", "content": f"{system}\n\n{turns[first]['content']}"}
        return [*turns[:first], folded, *turns[first + 1 :]]

    @functools.cached_property
    def _takes_system(self) -> bool:
        """Does the template print a system turn? Some refuse it, some drop it silently."""
        try:
            text = self._apply([{"role": "system", "content": _PROBE}, {"role": "user", "content": "a"}], False, True)
        except UserError:
            return False
        return _PROBE in text

    @functools.cached_property
    def _brings_default(self) -> bool:
        """Is the rendering without a system turn longer than with an empty one? Then the template has a default of its own."""
        if not self._takes_system:
            return False
        user = [{"role": "user", "content": "a"}]
        return len(self._apply(user, False, True)) > len(self._apply([{"role": "system", "content": ""}, *user], False, True))


def _without_clock(template: str, where: str) -> str:
    """The template with its calls of strftime_now replaced by what they give on _DATE."""
    out = re.sub(r"""\bstrftime_now\(\s*(['"])([^'"]*)\1\s*\)""", lambda m: repr(_DATE.strftime(m[2])), template)
    if "strftime_now(" in out:
        expected = "strftime_now with a format in quotes, or a date written out"
        raise UserError("the chat template reads the clock, so prompts would change overnight", where=where, expected=expected)
    return out


def _from_files(path: pathlib.Path) -> Any:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # no torch is needed here, so it isn't missed
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # the libraries below raise whatever they like for a damaged file
        detail = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise UserError(f"the tokenizer can't be read: {detail}", where=str(path), expected="a whole tokenizer.json") from error


def _end_ids(folder: pathlib.Path) -> list[int]:
    """eos_token_id (a number or a list) of config.json and generation_config.json."""
    out: list[int] = []
    for path in (folder / "config.json", folder / "generation_config.json"):
        if not path.is_file():
            continue
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"not readable as JSON: {error}", where=str(path)) from error
        value = config.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise UserError(f"eos_token_id is {value!r}", where=str(path), expected="a number or a list of numbers")
        out.extend(ids)
    return out
