"""Sampling under a grammar: the matchers of llguidance on the host give a bit mask a slot, the device puts NEGATIVE elsewhere.

    rows = GuidedRows(slots, vocab)                    # host: which slots are guided, and where each one is in its grammar
    rows.start(slot, request.grammar, "request 3")     # when a slot takes a guided sample
    logits = apply_mask(logits, rows.masks())          # in the decode program, before the draw: log-prob and entropy are then
    rows.accept(slot, token)                           #   those of the constrained distribution
    rows.stop(slot)

A guided row needs its last token before its next mask, so a dispatch with one is of one step. Needs the extra 'guided'.

Axes: B slots, V vocabulary, W = ceil(V / 32) words of a mask; bit v % 32 of word v // 32 is token v.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coevo_jax.config import RubricConfig
from coevo_jax.errors import UserError
from coevo_jax.sampler.draw import NEGATIVE
from coevo_jax.text.chat import ChatTokenizer
from coevo_jax.text.grammars import LEAD, rubric_lark, score_lark, scores_lark

EXACT = '%llguidance {"no_forcing": true}\n'  # every spelling of a text that is forced, not only the tokenizer's own


def llguidance() -> Any:
    """The library, or a UserError that names the extra."""
    if importlib.util.find_spec("llguidance") is None:
        raise UserError("guided sampling needs the package llguidance", where="rubric.guided, judge.guided",
                        expected="pip install 'coevo-jax[guided]'")  # fmt: skip
    import llguidance
    import llguidance.numpy

    return llguidance


# ---------------------------------------------------------------------------------------------------- grammars


@dataclasses.dataclass(frozen=True)
class Grammar:
    """The texts a completion may be, in llguidance's Lark dialect, and the tokenizer that spells them.

    own_spelling: text that the grammar leaves no choice about is spelled as the tokenizer does, not in any other way. That is
    shorter and what the model knows; off, exactly the tokens that keep the text possible are allowed.
    """

    lark: str
    tokenizer: ChatTokenizer
    own_spelling: bool = True

    @classmethod
    def from_schema(cls, schema: dict[str, Any], tokenizer: ChatTokenizer, **options: Any) -> Grammar:
        """JSON of a schema, written as json.dumps does: no whitespace but after a comma and a colon."""
        style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        body = json.dumps({**schema, "x-guidance": style})
        return cls(f"start: {LEAD} body\nbody: %json {body}", tokenizer, **options)

    @classmethod
    def from_regex(cls, regex: str, tokenizer: ChatTokenizer, **options: Any) -> Grammar:
        """The whole texts that match (the syntax of Rust's regex)."""
        return cls(f"start: /{llguidance().regex_to_lark(regex, '')}/", tokenizer, **options)

    def matcher(self, vocab: int) -> Any:
        """A fresh LLMatcher at the start of the grammar. UserError where the grammar is none."""
        return _compiled(self, vocab).deep_copy()


@functools.lru_cache(maxsize=64)
def _compiled(grammar: Grammar, vocab: int) -> Any:
    ll = llguidance()
    tokenizer, begins = vocabulary(grammar.tokenizer, vocab)
    matcher = ll.LLMatcher(tokenizer, ("" if grammar.own_spelling and begins is None else EXACT) + grammar.lark, log_level=0)
    if matcher.is_error():
        raise UserError(f"the grammar can't be used: {_reason(matcher)}", expected="Lark as llguidance reads it")
    return matcher


@functools.lru_cache(maxsize=64)
def rubric_grammar(tokenizer: ChatTokenizer, cfg: RubricConfig) -> Grammar:
    """Rubrics that rubrics.parse_rubric accepts. Weights in steps of 0.05, or of 0.1 where the tokenizer has no digits."""
    fine = tokenizer.decode(tokenizer.encode("0.05")).strip() == "0.05"
    return Grammar(rubric_lark(cfg, 20 if fine else 10), tokenizer)


@functools.lru_cache(maxsize=64)
def verdict_grammar(tokenizer: ChatTokenizer, criteria: int = 0) -> Grammar:
    """Verdicts of json_criteria on so many criteria; 0: those of json_score."""
    return Grammar(scores_lark(criteria) if criteria else score_lark(), tokenizer)


def check_no_reasoning(tokenizer: ChatTokenizer, thinking: bool, where: str) -> None:
    """UserError where a prompt ends inside a reasoning block: a grammar has no room to close it."""
    if tokenizer.opens_reasoning(thinking):
        raise UserError("the chat template opens a reasoning block, and a guided text has none", where=where,
                        expected=f"{where}=false, or a template that opens none")  # fmt: skip


# ---------------------------------------------------------------------------------------------------- the tokenizer


@functools.lru_cache(maxsize=8)
def vocabulary(tokenizer: ChatTokenizer, vocab: int) -> tuple[Any, tuple[int, ...] | None]:
    """(LLTokenizer over `vocab` ids, the model's; None or the ids of a closed vocabulary that begin others). Stop ids end a text.

    Byte-level and byte-fallback tokenizers spell every text, and are read as they are. Any other is closed: it gives the bytes of
    its ids by decoding them, can't spell every text, and has no spelling of its own that could be relied on.
    """
    if vocab < tokenizer.vocab_size:
        raise UserError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab}", where="grammar")
    ll, ends = llguidance(), list(tokenizer.stop_ids)
    try:
        return ll.LLTokenizer(tokenizer.backend_json(), n_vocab=vocab, eos_token=ends), None
    except ValueError:  # a decoder that the library doesn't know
        pass
    words = _Decoded(tokenizer, vocab)
    begins = tuple(i for i, a in enumerate(words.tokens) if any(b != a and b.startswith(a) for b in words.tokens))
    return ll.LLTokenizer(ll.TokenizerWrapper(words), eos_token=ends, slices=[]), begins


class _Decoded:
    """A vocabulary by decoding its ids one by one, in the form that llguidance.TokenizerWrapper asks for."""

    def __init__(self, tokenizer: ChatTokenizer, vocab: int):
        texts = self._texts(tokenizer)
        silent = [i for i, text in enumerate(texts) if not text]
        self.tokens = [text.encode() or f"<|{i}|>".encode() for i, text in enumerate(texts)]
        self.tokens += [f"<|{i}|>".encode() for i in range(len(texts), vocab)]
        self.special_token_ids = [*silent, *range(len(texts), vocab)]
        self.eos_token_id, self.bos_token_id = tokenizer.stop_ids[0], None

    @staticmethod
    def _texts(tokenizer: ChatTokenizer) -> list[str]:
        """What each id adds after another one: at a text's start decoders drop a space."""
        first = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i))
        head = tokenizer.token_text(first)
        return [tokenizer.decode([first, i])[len(head) :] for i in range(tokenizer.vocab_size)]

    def __call__(self, text: bytes | str) -> list[int]:
        return []  # asked for forced text only, and none is forced


# ---------------------------------------------------------------------------------------------------- the slots


@dataclasses.dataclass
class _Row:
    """A guided slot. begins: ids of a closed vocabulary that begin others; accepted: tokens told so far."""

    matcher: Any
    where: str
    begins: tuple[int, ...]
    accepted: int = 0


class GuidedRows:
    """Which slots are guided, where each is in its grammar, and their masks."""

    def __init__(self, slots: int, vocab: int):
        self.vocab = vocab
        self._masks = np.full((slots, -(-vocab // 32)), -1, np.int32)
        self._running: dict[int, _Row] = {}
        self._executor: Any = None

    def __contains__(self, slot: int) -> bool:
        return slot in self._running

    def start(self, slot: int, grammar: Grammar, where: str) -> None:
        """The slot begins a text of the grammar. where: names the request in errors."""
        self._executor = self._executor or llguidance().LLExecutor()
        begins = vocabulary(grammar.tokenizer, self.vocab)[1] or ()
        self._running[slot] = _Row(grammar.matcher(self.vocab), where, begins)

    def accept(self, slot: int, token: int, drawn: int | None = None) -> None:
        """The slot drew `token`; nothing to do in a slot without a grammar. UserError where its grammar forbids it.

        drawn: how many tokens the slot's text has with this one; a token told before is then left alone (the slot was at rest).
        """
        row = self._running.get(slot)
        if row is None or (drawn is not None and drawn <= row.accepted):
            return
        row.accepted += 1
        if not row.matcher.consume_token(int(token)):
            raise UserError(f"token {token} is outside the grammar: {_reason(row.matcher)}", where=row.where)

    def move(self, slot: int, to: int) -> None:
        """The text goes on in another slot."""
        if slot in self._running:
            self._running[to] = self._running.pop(slot)
            self.stop(slot)

    def stop(self, slot: int) -> None:
        """The slot is free, or holds an unguided text from now on."""
        self._running.pop(slot, None)
        self._masks[slot] = -1

    def masks(self) -> np.ndarray:
        """Allowed next tokens [B,W] uint32, all ones where a slot isn't guided. One array, overwritten by the next call.

        UserError names the request that has come to a dead end: its grammar goes on, and no token of the vocabulary does.
        """
        if self._running:
            pairs = [(row.matcher, slot) for slot, row in self._running.items()]
            llguidance().numpy.fill_next_token_bitmask_par(self._executor, pairs, self._masks)
        for slot, row in self._running.items():
            for token in row.begins:
                self._drop_if_dead(slot, row.matcher, token)
            if row.matcher.is_error() or not self._masks[slot].any():
                raise UserError(f"no token continues the guided text: {_reason(row.matcher)}", where=row.where,
                                expected="a grammar that the tokenizer can spell")  # fmt: skip
        return self._masks.view(np.uint32)

    def _drop_if_dead(self, slot: int, matcher: Any, token: int) -> None:
        """Forbid a token that the grammar allows and after which the vocabulary has none: its longer neighbour is the way on."""
        words = self._masks[slot].view(np.uint32)
        bit = np.uint32(1 << token % 32)
        if matcher.is_error() or not words[token // 32] & bit:
            return
        ahead = matcher.deep_copy()
        if not ahead.consume_token(token) or not any(ahead.compute_bitmask()) or ahead.is_error():
            words[token // 32] &= ~bit


def _reason(matcher: Any) -> str:
    """The first line of what the library says: the rest is its state."""
    return (matcher.get_error() or matcher.stop_reason()).strip().split("\n")[0][:200]


# ---------------------------------------------------------------------------------------------------- the device


def apply_mask(logits_BxV: jax.Array, mask_BxW: jax.Array) -> jax.Array:
    """Logits with NEGATIVE at the tokens whose bit is 0."""
    B, V = logits_BxV.shape
    bits = (mask_BxW[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & jnp.uint32(1)
    return jnp.where(bits.reshape(B, -1)[:, :V] == 1, logits_BxV, jnp.float32(NEGATIVE))
