"""Pairs of a policy's own answers: a stage that labels them, a stage that trains on them, and the two in turn (iterated DPO).

Not a method: methods give the labelling function. `label(ctx, step, items, facts)` returns one PairLabel an item, in their order,
and adds metrics of its own to `facts`; it is called once an update, with every pair of this process, and so must not wait for
other processes. A pair is kept only if both orders name the same answer. Its reference is the policy of the labelling, which
trains on nothing: log-probs of its answers are kept with it, and no copy of the weights. Tokens are trained as sampled; nothing
is decoded and encoded again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coevo_jax.config import Experiment
from coevo_jax.distributed import most_owned, to_all
from coevo_jax.judges.pairwise import agreed, both_orders, order_flipped
from coevo_jax.learn.preference import PreferenceSample
from coevo_jax.methods.context import Context, request_id
from coevo_jax.methods.stage import Batch, Stage, Step
from coevo_jax.preference.buffer import hashed
from coevo_jax.preference.guards import same_text
from coevo_jax.records.facts import Facts
from coevo_jax.sampler import Completion

LABELLED, COMPARED = 0, 1  # PairItem.attempt: a pair to train on, a pair of two iterations' answers


@dataclasses.dataclass(frozen=True)
class PairItem:
    """Two answers to the question of `record`, as read by a judge. (slot, attempt, pair) is its identity in the update."""

    slot: int
    attempt: int
    pair: int
    record: dict[str, Any]
    first: str
    second: str

    @property
    def question(self) -> str:
        return self.record["prompt"]

    def request(self, reverse: bool) -> int:
        """Identity of a judge's call: `first` sits in slot A of the forward one and in slot B of the reverse one."""
        return request_id("judge", self.slot, self.attempt, self.pair, retry=int(reverse))


@dataclasses.dataclass(frozen=True)
class PairLabel:
    """Winners of both calls: 'A', 'B', 'tie', or None where the judge failed (or had no rubric). raw: its texts. note: what else
    the record keeps, such as which checkpoints wrote and judged."""

    forward: str | None
    reverse: str | None
    raw: tuple[str, str] = ("", "")
    rubric: str = ""
    note: dict[str, Any] = dataclasses.field(default_factory=dict)


Label = Callable[[Context, Step, list[PairItem], Facts], list[PairLabel]]


# ---------------------------------------------------------------------------------------------------------------- stages


def iterations(cfg: Experiment, label: Label, role: str = "policy", cycles: int = 0) -> list[Stage]:
    """Iterated DPO: `cycles` times (schedule.cycles where 0) a labelling and a training stage; each labelling is the reference of
    the training behind it. With dpo.compare a last comparison, of the trained policy with the one before."""
    out = []
    cycles = cycles or cfg.schedule.cycles
    for cycle in range(cycles):
        out += [label_stage(label, cycle, cfg.schedule.k, role), preferred_stage(cfg, cycle, role)]
    return [*out, compare_stage(label, cycles, cfg.dpo.compare, role)] if cfg.dpo.compare else out


def label_stage(label: Label, cycle: int, updates: int, role: str = "policy", name: str = "label") -> Stage:
    """Updates that train nothing: dpo.answers of the policy `role` to the next question of each prompt slot, labelled."""
    make = functools.partial(label_batch, label=label, role=role)
    return Stage(name, role, cycle, updates, make, loss="none", policy=role)


def compare_stage(label: Label, cycle: int, updates: int, role: str = "policy", name: str = "compare") -> Stage:
    """Updates that train nothing and keep nothing: the policy answers the compared questions of the cycle before again."""
    make = functools.partial(label_batch, label=label, role=role, keep=False)
    return Stage(name, role, cycle, updates, make, loss="none", policy=role)


def preferred_stage(cfg: Experiment, cycle: int, role: str = "policy", name: str = "dpo", labelled: int = 0) -> Stage:
    """Training on the pairs that were kept, by a fresh optimizer: dpo.updates updates, or one pass. labelled: updates of the
    labelling, schedule.k where 0. Of a pass, updates that no pair is left for are skipped."""
    longest = (labelled or cfg.schedule.k) * cfg.schedule.prompts * (cfg.dpo.answers // 2)
    updates = cfg.dpo.updates or -(-longest // cfg.dpo.pairs)
    make = functools.partial(preferred_batch, role=role)
    return Stage(name, role, cycle, updates, make, loss="dpo", counts_as_policy=True, policy=role, fresh=True,
                 most=cfg.dpo.pairs)  # fmt: skip


def stores(cfg: Experiment, role: str = "policy") -> dict[str, int]:
    """For Mode.stores: the pairs of a role, and the answers that its next iteration is compared with."""
    return {pairs_store(role): cfg.schedule.prompts, compared_store(role): cfg.schedule.prompts}


def pairs_store(role: str) -> str:
    """The store of a role's labelled pairs (Context.stores)."""
    return f"{role}_pairs"


def compared_store(role: str) -> str:
    """The store of answers that the next iteration is compared with."""
    return f"{role}_compared"


# ------------------------------------------------------------------------------------------------------------- labelling


@dataclasses.dataclass
class _Draft:
    """A pair in the making: its item and both completions."""

    item: PairItem
    prompt: list[int]
    answers: tuple[Completion, Completion]

    @property
    def cut(self) -> bool:
        return any(c.finish == "length" for c in self.answers)


def label_batch(ctx: Context, step: Step, label: Label, role: str, keep: bool = True) -> Batch:
    """Draw, judge in both orders, keep agreed pairs with their log-probs under the weights of now. No samples to train on."""
    facts = Facts()
    store = ctx.stores[pairs_store(role)]
    if keep and any(record["cycle"] != step.cycle for slot in ctx.slots for record in store.of(slot)):
        store.clear()  # of the iteration before: its reference is not this one's
    drafts = _draw(ctx, step, role, facts) if keep else []
    compared = _compared(ctx, step, role, drafts)
    asked = [d for d in drafts if _usable(ctx, d)]
    found = label(ctx, step, [*(d.item for d in asked), *(item for item, _ in compared)], facts)
    if len(found) != len(asked) + len(compared):
        raise ValueError(f"a labelling function gave {len(found)} labels for {len(asked) + len(compared)} pairs")
    labels, versus = found[: len(asked)], found[len(asked) :]
    kept = [(d, lab) for d, lab in zip(asked, labels) if agreed(lab.forward, lab.reverse) is not None]
    records = _records(ctx, step, role, kept) if keep else []
    for (draft, _), record in zip(kept, records):
        store.add(draft.item.slot, record)
    _store_compared(ctx, step, role, compared)
    if keep:
        _add_labels(facts, drafts, labels, records)
    wins = [score for lab in versus if (score := both_orders(lab.forward, lab.reverse)) is not None]
    facts.mean("policy/win_rate_previous", wins)
    rows = [_row(step, d.item, lab, d) for d, lab in zip(asked, labels)]
    rows += [_row(step, item, lab) for (item, _), lab in zip(compared, versus)]
    return Batch([], facts, rows)


def _draw(ctx: Context, step: Step, role: str, facts: Facts) -> list[_Draft]:
    """dpo.answers of the next question of each slot, two by two."""
    cfg, records = ctx.cfg, {slot: ctx.streams[role].next(slot) for slot in ctx.slots}
    prompts = {slot: ctx.answer_prompt(record["prompt"], role) for slot, record in records.items()}
    out = ctx.generate(role, [
        ctx.request(prompts[slot], cfg.dpo.answers, "answer", role, step.update, cfg.answer, slot=slot) for slot in records
    ])  # fmt: skip
    drafts = []
    for (slot, record), answers in zip(records.items(), out):
        lengths = [len(c.tokens) for c in answers]
        facts.mean_std("completions/length", lengths)
        facts.total("tokens/completion", sum(lengths))
        facts.share("completions/truncated_share", [c.finish == "length" for c in answers])
        for pair, (a, b) in enumerate(zip(answers[::2], answers[1::2])):
            item = PairItem(slot, LABELLED, pair, record, ctx.text(a.tokens, role), ctx.text(b.tokens, role))
            drafts.append(_Draft(item, prompts[slot], (a, b)))
    return drafts


def _usable(ctx: Context, draft: _Draft) -> bool:
    """Answers that read the same have no better one; a cut one is none that ends."""
    item = draft.item
    return not same_text(item.first, item.second) and (ctx.cfg.dpo.keep_truncated or not draft.cut)


def _records(ctx: Context, step: Step, role: str, kept: Sequence[tuple[_Draft, PairLabel]]) -> list[dict[str, Any]]:
    """What the store keeps of each pair. All processes come here together, with pairs or without."""
    cfg, sides = ctx.cfg, []
    for draft, lab in kept:
        own = agreed(lab.forward, lab.reverse) == "own"
        sides.append(draft.answers if own else draft.answers[::-1])
    samples = [PreferenceSample(np.asarray(d.prompt, np.int32), a.tokens, b.tokens) for (d, _), (a, b) in zip(kept, sides)]
    assert ctx.pair_logps is not None
    with ctx.timed("reference"):
        logps = ctx.pair_logps(role, samples, most_owned(cfg.schedule.prompts) * (cfg.dpo.answers // 2))
    return [
        {
            "cycle": step.cycle, "record": draft.item.record["id"], "prompt": list(map(int, draft.prompt)),
            "chosen": a.tokens.tolist(), "rejected": b.tokens.tolist(), "reference": list(reference),
            "rubric": lab.rubric, "judge_raw_forward": lab.raw[0], "judge_raw_reverse": lab.raw[1], "agree": True,
            "policy_updates": step.policy_updates, "update": step.update, "seed": cfg.seed, **lab.note,
        }
        for (draft, lab), (a, b), reference in zip(kept, sides, logps)
    ]  # fmt: skip


def _add_labels(facts: Facts, drafts: Sequence[_Draft], labels: Sequence[PairLabel], records: Sequence[dict[str, Any]]) -> None:
    failed = [lab.forward is None or lab.reverse is None for lab in labels]
    flips = [order_flipped(lab.forward, lab.reverse) for lab in labels]
    facts.total("pairs/drawn", len(drafts))
    facts.total("pairs/judged", len(labels))
    facts.total("pairs/kept", len(records))
    facts.ratio("pairs/keep_rate", len(records), len(drafts))
    facts.share("pairs/identical_share", [same_text(d.item.first, d.item.second) for d in drafts])
    facts.share("pairs/truncated_share", [d.cut for d in drafts])
    facts.share("judge/failure_share", failed)
    facts.ratio("judge/agreement", len(records), len(labels) - sum(failed))
    facts.mean("judge/order_flip_share", [flip for flip in flips if flip is not None])
    facts.mean("judge/first_slot_share", [w == "A" for lab in labels for w in (lab.forward, lab.reverse) if w is not None])
    add_lengths(facts, [(len(r["chosen"]), len(r["rejected"])) for r in records])


def add_lengths(facts: Facts, lengths: Sequence[tuple[int, int]]) -> None:
    """Tokens of chosen and rejected answers: how much longer the chosen one is, which a judge may like for itself."""
    facts.mean("pairs/length_difference", [a - b for a, b in lengths])
    facts.mean("pairs/longer_chosen_share", [a > b for a, b in lengths])


def _row(step: Step, item: PairItem, lab: PairLabel, draft: _Draft | None = None) -> dict[str, Any]:
    """Of the rollout file. Of compared answers the first is the present policy's."""
    ids = {} if draft is None else {
        "prompt_ids": list(map(int, draft.prompt)), "completion_ids": [c.tokens.tolist() for c in draft.answers],
        "finish": [c.finish for c in draft.answers],
    }  # fmt: skip
    return {
        "update": step.update, "cycle": step.cycle, "role": step.role, "slot": item.slot, "pair": item.pair,
        "what": "labelled" if item.attempt == LABELLED else "compared", "record": item.record["id"], "question": item.question,
        "answers": [item.first, item.second], "rubric": lab.rubric, "forward": lab.forward, "reverse": lab.reverse,
        "judge_raw": list(lab.raw), "agree": agreed(lab.forward, lab.reverse) is not None, **ids, **lab.note,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- comparing


def _compared(ctx: Context, step: Step, role: str, drafts: Sequence[_Draft]) -> list[tuple[PairItem, dict[str, Any]]]:
    """Answers of now to questions that the iteration before answered, with its answers beside them: (item, what is kept of it).

    dpo.compare updates of each iteration do so, the first ones, always with the questions of the first iteration.
    """
    if step.within >= ctx.cfg.dpo.compare:
        return []
    store, out = ctx.stores[compared_store(role)], []
    if step.cycle == 0:  # nothing to compare with: the first answers are what the next iteration meets
        for draft in drafts:
            if draft.item.pair == 0:
                kept = _asked(draft.item.record) | {"text": draft.item.first, "cycle": 0, "within": step.within}
                store.add(draft.item.slot, kept)
        return []
    earlier = {
        slot: record for slot in ctx.slots for record in store.of(slot)
        if (record["cycle"], record["within"]) == (step.cycle - 1, step.within)
    }  # fmt: skip
    answers = ctx.generate(role, [
        ctx.request(ctx.answer_prompt(record["prompt"], role), 1, "answer", role, step.update, ctx.cfg.answer, slot=slot,
                    attempt=COMPARED)
        for slot, record in earlier.items()
    ])  # fmt: skip
    for (slot, record), (answer,) in zip(earlier.items(), answers):
        asked = _asked(record)
        out.append((PairItem(slot, COMPARED, 0, asked, ctx.text(answer.tokens, role), record["text"]), asked))
    return out


def _asked(record: dict[str, Any]) -> dict[str, Any]:
    """What a judge may need of a question's record."""
    return {name: record[name] for name in ("id", "prompt", "reference", "rubric") if name in record}


def _store_compared(ctx: Context, step: Step, role: str, compared: Sequence[tuple[PairItem, dict[str, Any]]]) -> None:
    store = ctx.stores[compared_store(role)]
    for item, asked in compared:
        store.add(item.slot, {**asked, "text": item.first, "cycle": step.cycle, "within": step.within})


# -------------------------------------------------------------------------------------------------------------- training


def preferred_batch(ctx: Context, step: Step, role: str) -> Batch:
    """The next dpo.pairs of the stored pairs in a seeded order that no number of processes changes; none after the one pass."""
    store, D = ctx.stores[pairs_store(role)], ctx.cfg.dpo.pairs
    counted = to_all("preferred", {str(slot): len(store.of(slot)) for slot in ctx.slots})
    sizes = {int(slot): n for part in counted for slot, n in part.items()}
    places = [(slot, i) for slot in sorted(sizes) for i in range(sizes[slot])]
    N, start, end = len(places), step.within * D, (step.within + 1) * D
    end = end if ctx.cfg.dpo.updates else min(end, N)
    chosen = [places[_walk(ctx.cfg.seed, role, step.cycle, at, N)] for at in range(start, end)] if N else []
    records = [store.of(slot)[i] for slot, i in chosen if slot in ctx.slots]
    facts = Facts()
    facts.add("most", "epoch", [end / N] if N else [])
    facts.total("pairs/trained", len(records))
    add_lengths(facts, [(len(r["chosen"]), len(r["rejected"])) for r in records])
    return Batch([_sample(record) for record in records], facts, [])


def _walk(seed: int, role: str, cycle: int, at: int, N: int) -> int:
    """Which of N pairs lies at position `at` of an endless walk that passes through one order after the other."""
    return int(_order(seed, role, cycle, at // N, N)[at % N])


@functools.lru_cache(maxsize=8)
def _order(seed: int, role: str, cycle: int, epoch: int, N: int) -> np.ndarray:
    return np.random.RandomState(hashed("preferred", seed, role, cycle, epoch) % 2**32).permutation(N)


def _sample(record: dict[str, Any]) -> PreferenceSample:
    prompt, chosen, rejected = (np.asarray(record[name], np.int32) for name in ("prompt", "chosen", "rejected"))
    return PreferenceSample(prompt, chosen, rejected, tuple(record["reference"]))
