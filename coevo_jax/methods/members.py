"""Completions with rewards, in groups of one prompt: what methods hand to each other."""

from __future__ import annotations

import dataclasses
from typing import Any

from coevo_jax.sampler import Completion


@dataclasses.dataclass
class Member:
    """One completion of a group: text, reward (None: the instrument failed), the reward's parts, what the dump shows.
    terms: numbers that add up to the reward, the one that it is about first; empty where there is but one. prompt: its own, where
    the samples of a group differ in it."""

    completion: Completion
    text: str
    reward: float | None
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    note: dict[str, Any] = dataclasses.field(default_factory=dict)
    terms: dict[str, float] = dataclasses.field(default_factory=dict)
    prompt: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Group:
    """The completions of one prompt. `note` goes to every row of the dump."""

    slot: int
    attempt: int
    prompt: list[int]
    question: str
    record_id: str
    members: list[Member]
    note: dict[str, Any] = dataclasses.field(default_factory=dict)
