"""What is asked of the engine and what it gives back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from coevo_jax.config import SamplerConfig, Sampling
from coevo_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Request:
    """`n` samples of one prompt. (role, update, request) with the run seed and the sample's number name the noise."""

    prompt: np.ndarray  # int32 token ids
    n: int
    role: str
    update: int
    request: int
    sampling: Sampling
    grammar: Any = None  # sampler.guided.Grammar: the completion is one of its texts
    forced: np.ndarray | None = None  # int32: the first tokens of every completion, not drawn (their log-probs are recorded)


@dataclasses.dataclass(frozen=True)
class Completion:
    """Drawn tokens (the stop id included), log-probs and entropies of the distributions they were drawn from, in nats."""

    tokens: np.ndarray  # int32
    logprobs: np.ndarray  # float32
    entropy: np.ndarray  # float32
    finish: str  # stop | length


def check_prompt(prompt: Sequence[int] | np.ndarray, limit: int, vocab: int, where: str) -> np.ndarray:
    """The prompt as int32, or a UserError that says what is wrong with it."""
    ids = np.asarray(prompt)
    if ids.ndim != 1 or ids.size == 0:
        raise UserError("an empty prompt cannot be continued", where=where, expected="at least one token id")
    if ids.dtype.kind not in "iu":
        raise UserError(f"prompt ids have dtype {ids.dtype}", where=where, expected="integers")
    if ids.size > limit:
        raise UserError(f"prompt has {ids.size} tokens", where=where, expected=f"at most {limit} (sampler.max_prompt)")
    if ids.min() < 0 or ids.max() >= vocab:
        raise UserError(f"prompt holds token id {int(ids.max() if ids.max() >= vocab else ids.min())}", where=where,
                        expected=f"ids of a vocabulary of {vocab}")  # fmt: skip
    return ids.astype(np.int32)


def check_sampling(s: Sampling, cfg: SamplerConfig, where: str) -> None:
    """Refuse values that the decode program cannot honour."""
    checks = {
        "max_new_tokens": (1 <= s.max_new_tokens <= cfg.max_new, f"1 to {cfg.max_new} (sampler.max_new)"),
        "min_new_tokens": (0 <= s.min_new_tokens <= s.max_new_tokens, f"0 to max_new_tokens = {s.max_new_tokens}"),
        "temperature": (math.isfinite(s.temperature) and s.temperature >= 0, "a finite number >= 0 (0 = greedy)"),
        "top_p": (0 < s.top_p <= 1, "above 0, up to 1 (1 = full support)"),
        "top_k": (s.top_k >= 0, "a whole number >= 0 (0 = full support)"),
    }
    for name, (good, expected) in checks.items():
        if not good:
            raise UserError(f"{name} = {getattr(s, name)}", where=where, expected=expected)


def check_request(r: Request, cfg: SamplerConfig, vocab: int) -> Request:
    """The request with its prompt as int32, or a UserError."""
    where = f"request {r.request} of role {r.role!r}, update {r.update}"
    if r.n < 1:
        raise UserError(f"{r.n} samples are asked for", where=where, expected="at least 1")
    check_sampling(r.sampling, cfg, where)
    if r.grammar is not None and r.sampling.min_new_tokens:
        raise UserError("a guided text ends where its grammar does", where=where, expected="min_new_tokens = 0")
    if r.forced is not None:
        room = min(cfg.forced_tokens, r.sampling.max_new_tokens)
        forced = check_prompt(r.forced, cfg.max_new, vocab, f"forced tokens of {where}")
        if len(forced) > room:
            raise UserError(f"{len(forced)} tokens are forced", where=where, expected=f"at most {room} (sampler.forced_tokens)")
        r = dataclasses.replace(r, forced=forced)
    return dataclasses.replace(r, prompt=check_prompt(r.prompt, cfg.max_prompt, vocab, where))
