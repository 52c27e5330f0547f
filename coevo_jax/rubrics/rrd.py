"""RRD (arXiv 2602.05125): a rubric of yes/no items, refined by splitting what most answers satisfy and dropping what misleads.

For each item of a queue, begun by a proposal that reads the question and sample answers:
  empty or met before                                     rejected
  satisfied by no sample                                  rejected
  satisfied by more than `more_than`, depth below `depth`  replaced by two finer items, written from the samples that satisfy it
  misaligned (the weak reference has it, the strong not)  rejected
  overlapping with, or contradicting, an accepted item    rejected
  else                                                    accepted
until the queue is empty or `rejections` items are rejected. An item whose reading failed is dropped and counted, not rejected.

`refine` is a generator: it yields what it wants to know and is sent the answers, so that many questions are asked in one batch
(`run_all`). Axes: N samples, M accepted items.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from coevo_jax.rubrics.json_criteria import Criterion, Rubric, normalise
from coevo_jax.text.parse import Parsed, last_json_object, number_in, parse_yes_no

Reader = Callable[[str, bool, bool], Parsed[Any]]  # (text, truncated, opened)


@dataclasses.dataclass(frozen=True)
class Ask:
    """A prompt (template and slots) and how its reply reads."""

    template: str
    slots: dict[str, str]
    read: Reader


@dataclasses.dataclass(frozen=True)
class Limits:
    """more_than: the paper splits at more than 2 of 8 samples, EvoLM's port at 2 or more (more_than = 1)."""

    depth: int = 3
    more_than: int = 2
    rejections: int = 15


@dataclasses.dataclass
class Refined:
    """Accepted items in order and, [N,M], which samples satisfy them. counts: items by fate. detail: why there are none.
    references: [2,M], of the strong and the weak reference."""

    items: list[str]
    votes: np.ndarray
    counts: dict[str, int]
    detail: str = ""
    references: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((2, 0)))


Refining = Generator[list[Ask], list[Parsed[Any]], Refined]
FATES = ("accepted", "split", "repeated", "unsatisfied", "misaligned", "overlapping", "conflicting", "failed")
REJECTED = ("repeated", "unsatisfied", "misaligned", "overlapping", "conflicting")


def refine(question: str, samples: Sequence[str], strong: str, weak: str, limits: Limits | None = None) -> Refining:
    """The refinement of one question. samples: answers, best from several models (the paper: 8 of two models, T 0.7, top-p 0.95);
    strong, weak: reference answers of a strong and a weak model."""
    limits, N = limits or Limits(), len(samples)
    counts = dict.fromkeys(FATES, 0)
    (proposed,) = yield [Ask("rrd_propose", {"question": question, "answers": _numbered(samples)}, _read_items())]
    if proposed.value is None:
        return Refined([], np.zeros((N, 0)), counts, proposed.detail)
    queue = deque((text, 0) for text in proposed.value)
    seen: set[str] = set()
    accepted: list[str] = []
    answers = [*samples, strong, weak]
    known: dict[str, list[bool | None]] = {}
    while queue and sum(counts[fate] for fate in REJECTED) < limits.rejections:
        text, depth = queue.popleft()
        name = normalise(text)
        if not name or name in seen:
            counts["repeated"] += 1
            continue
        seen.add(name)
        if name not in known:  # of the whole queue at once: what an answer satisfies depends on nothing else
            yield from _look(question, [text, *(other for other, _ in queue)], answers, known)
        fate = yield from _fate(question, text, depth, samples, known[name], accepted, queue, limits)
        counts[fate] += 1
        if fate == "accepted":
            accepted.append(text)
    votes = np.asarray([known[normalise(text)] for text in accepted], np.float64).reshape(len(accepted), N + 2).T
    return Refined(accepted, votes[:N], counts, "" if accepted else "no item was accepted", votes[N:])


def _look(
    question: str, texts: Sequence[str], answers: Sequence[str], known: dict[str, list[bool | None]]
) -> Generator[list[Ask], list[Parsed[Any]], None]:
    """Which answers satisfy each text, by its normal form; None where the reply doesn't read."""
    new = {name: text for text in reversed(texts) if (name := normalise(text)) and name not in known}
    asks = [_yes_no("criterion_yes_no", question=question, answer=a, criterion=t) for t in new.values() for a in answers]
    replies = iter((yield asks))
    for name in new:
        known[name] = [next(replies).value for _ in answers]


def _fate(
    question: str, text: str, depth: int, samples: Sequence[str], votes: list[bool | None], accepted: list[str],
    queue: deque[tuple[str, int]], limits: Limits,
) -> Generator[list[Ask], list[Parsed[Any]], str]:  # fmt: skip
    """What becomes of an item; children join the queue."""
    own, strong, weak = votes[: len(samples)], votes[-2], votes[-1]
    if None in votes:
        return "failed"
    if not any(own):
        return "unsatisfied"
    if sum(bool(v) for v in own) > limits.more_than and depth < limits.depth:
        having = [sample for sample, vote in zip(samples, own) if vote]
        slots = {"question": question, "answers": _numbered(having), "item": text, "accepted": _listed(accepted)}
        (children,) = yield [Ask("rrd_split", slots, _read_items(2))]
        if children.value is None:
            return "failed"
        queue.extend((child, depth + 1) for child in children.value)
        return "split"
    if weak and not strong:
        return "misaligned"
    if not accepted:
        return "accepted"
    slots = {"question": question, "item": text, "accepted": _listed(accepted)}
    overlap, conflict = yield [_yes_no("rrd_overlap", **slots), _yes_no("rrd_conflict", **slots)]
    if overlap.value is None or conflict.value is None:
        return "failed"
    return "overlapping" if overlap.value else "conflicting" if conflict.value else "accepted"


def run_all(
    tasks: Sequence[Generator[list[Ask], list[Parsed[Any]], Any]], ask: Callable[[list[Ask]], list[Parsed[Any]]]
) -> list[Any]:
    """The results of several tasks in their order; each round asks for all of them in one call of `ask`."""
    results: list[Any] = [None] * len(tasks)
    sent: dict[int, list[Parsed[Any]] | None] = dict.fromkeys(range(len(tasks)))
    while sent:
        wanted: dict[int, list[Ask]] = {}
        for i, replies in sent.items():
            try:
                wanted[i] = tasks[i].send(replies) if replies is not None else next(tasks[i])
            except StopIteration as stop:
                results[i] = stop.value
        replies_of = iter(ask([one for asks in wanted.values() for one in asks]) if wanted else [])
        sent = {i: [next(replies_of) for _ in asks] for i, asks in wanted.items()}
    return results


# ---------------------------------------------------------------------------------------------------- weights


def rubric_of(refined: Refined, weights: Sequence[float]) -> Rubric | None:
    """The accepted items as a rubric of these weights, without those of weight 0; None where nothing is left."""
    pairs = [(text, float(w)) for text, w in zip(refined.items, weights, strict=True) if w > 0]
    return Rubric(tuple(Criterion(text, w) for text, w in pairs)) if pairs else None


def uniform(count: int) -> np.ndarray:
    """1 / M each."""
    return np.full(count, 1.0 / count) if count else np.zeros(0)


def whitened_uniform(votes_NxM: np.ndarray, shrink: float = 0.1, ridge: float = 1e-4, floor: float = 1e-8) -> np.ndarray:
    """w ~ S^(-1/2) 1, S the second moment of the votes, not centred: X'X / N (the paper's WU weights; constants of EvoLM's port).

    S is shrunk to (1 - shrink) S + shrink I and gets ridge I; eigenvalues are at least `floor`; negative weights become 0 and the
    sum 1. One sample or none says nothing of the items: uniform. Items with equal votes share their weight.
    """
    X = np.asarray(votes_NxM, np.float64)
    if X.ndim != 2:
        raise ValueError(f"votes must be [N,M], not {X.shape}")
    N, M = X.shape
    if N <= 1 or M == 0:
        return uniform(M)
    S = (1 - shrink) * (X.T @ X) / N + (shrink + ridge) * np.eye(M)
    values, vectors = np.linalg.eigh(S)
    weights = vectors @ (np.maximum(values, floor) ** -0.5 * vectors.sum(axis=0))
    weights = np.maximum(weights, 0.0)
    return weights / weights.sum() if weights.sum() > 0 else uniform(M)


def ask_weights(question: str, refined: Refined) -> Generator[list[Ask], list[Parsed[Any]], Parsed[np.ndarray]]:
    """Weights that a model gives to the items, normalised; a failure where they don't read."""
    slots = {"question": question, "items": _listed(refined.items)}
    (found,) = yield [Ask("rrd_weights", slots, _read_weights(len(refined.items)))]
    if found.value is None:
        return found
    weights = np.asarray(found.value, np.float64)
    return Parsed("ok", weights / weights.sum())


# ---------------------------------------------------------------------------------------------------- prompts and replies


def _numbered(answers: Sequence[str]) -> str:
    return "\n\n".join(f"Answer {i}:\n{answer}" for i, answer in enumerate(answers, start=1))


def _listed(items: Sequence[str]) -> str:
    return "\n".join(f"{i}. {' '.join(item.split())}" for i, item in enumerate(items, start=1)) or "(none yet)"


def _yes_no(template: str, **slots: str) -> Ask:
    return Ask(template, slots, lambda text, truncated, opened: parse_yes_no(text, truncated=truncated, opened=opened))


def _read_items(exactly: int = 0) -> Reader:
    def read(text: str, truncated: bool, opened: bool) -> Parsed[Any]:
        found = last_json_object(text, "items", truncated=truncated, opened=opened)
        if found.value is None:
            return found
        items = found.value.get("items")
        if not isinstance(items, list) or not items or not all(isinstance(item, str) for item in items):
            return Parsed("parse_fail", None, "items is no list of texts")
        if exactly and len(items) != exactly:
            return Parsed("parse_fail", None, f"{len(items)} items, {exactly} are needed")
        return Parsed("ok", [item.strip() for item in items])

    return read


def _read_weights(count: int) -> Reader:
    def read(text: str, truncated: bool, opened: bool) -> Parsed[Any]:
        found = last_json_object(text, "weights", truncated=truncated, opened=opened)
        if found.value is None:
            return found
        weights = found.value.get("weights")
        if not isinstance(weights, list) or len(weights) != count:
            return Parsed("parse_fail", None, f"no list of {count} weights")
        read = [number_in(weight, 0.0, 100.0) for weight in weights]
        if any(w.value is None for w in read) or not any(w.value for w in read):
            return Parsed("parse_fail", None, "weights are no numbers from 0 to 100 of which one is above 0")
        return Parsed("ok", [w.value for w in read])

    return read
