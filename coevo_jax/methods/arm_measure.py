"""What Rubric-ARM's generator and judge are worth on the test pairs, whose questions nothing trains on.

Each pair gets one greedy list and arm.votes judgements in each order. A pair without a list, or a judgement that names nobody,
counts as not correct: what fails can't serve as a reward either.
"""

from __future__ import annotations

from collections.abc import Sequence

from coevo_jax.distributed import own
from coevo_jax.methods.arm_judge import ArmJudge, better_slot, judge_request, judgements, pair_item, prompt, read, room, winner
from coevo_jax.methods.arm_lists import write_lists
from coevo_jax.methods.context import Context
from coevo_jax.methods.stage import Batch, Step
from coevo_jax.records.facts import Facts

TEST = "arm_test"  # the stream that holds the test pairs
Votes = list[str | None]  # of the judgements of a pair in one order: whom each names, by slot


def measure_batch(ctx: Context, step: Step) -> Batch:
    """A look at the test pairs; it trains nothing."""
    pairs = ctx.streams[TEST].prompts.records
    mine = list(own(len(pairs)))
    made = Facts()
    lists = write_lists(ctx, step, [(i, 0) for i in mine], [pairs[i]["prompt"] for i in mine], made, greedy=True)
    items, owner = [], []
    for i, rubric in zip(mine, lists):
        if rubric is None:
            continue
        for order, slot in enumerate("AB"):
            request = judge_request(i, 0, order)
            items.append(pair_item(pairs[i]["prompt"], rubric, pairs[i]["chosen"], pairs[i]["rejected"], slot, request))
            owner.append((i, slot))
    votes, facts, rows = dict(zip(owner, _votes(ctx, step, items, made))), Facts(), []
    for i in mine:
        both = {slot: votes.get((i, slot), [None]) for slot in "AB"}
        where = better_slot(ctx.cfg.seed, step.cycle, pairs[i]["id"])
        _add(facts, both, where)
        rows.append({"update": step.update, "cycle": step.cycle, "role": step.role, "slot": i, "group": i,
                     "record": pairs[i]["id"], "question": pairs[i]["prompt"], "votes": both, "better_in": where})  # fmt: skip
    facts.extend(made)
    return Batch([], facts.prefixed("test"), rows)


def _votes(ctx: Context, step: Step, items: list, facts: Facts) -> list[Votes]:
    """Whom each of the judgements of an item names."""
    if ctx.cfg.arm.judge == "oracle":
        return [[winner(verdict)] for verdict in ArmJudge(ctx).judge(items, step.update)]
    prompts = [prompt(ctx, item) for item in items]
    fit = [i for i, ids in enumerate(prompts) if len(ids) <= room(ctx)]
    out: list[Votes] = [[None] for _ in items]
    drawn = judgements(ctx, step.update, [prompts[i] for i in fit], [items[i].request for i in fit], ctx.cfg.arm.votes)
    for i, completions in zip(fit, drawn):
        found = [read(ctx, completion, items[i].rubric) for completion in completions]
        out[i] = [judgement.winner for judgement in found]
        facts.share("judge/format_share", [judgement.whole for judgement in found])
        facts.share("judge/unread_share", [judgement.winner is None for judgement in found])
        facts.mean("judge/says_a", [judgement.winner == "A" for judgement in found if judgement.winner])
    return out


def _add(facts: Facts, both: dict[str, Votes], where: str) -> None:
    """Metrics of one pair. both: votes by the slot of the preferred answer; where: the slot that it is shown in when once."""
    first = {slot: votes[0] for slot, votes in both.items()}
    named = [{slot: "better", "AB".replace(slot, ""): "worse"}.get(str(vote)) for slot, vote in first.items()]
    facts.share("accuracy", [first[where] == where])
    facts.share("accuracy_both_orders", [all(vote == slot for slot, vote in first.items())])
    facts.share("consistent_share", [named[0] is not None and named[0] == named[1]])
    facts.share("vote_accuracy", [vote(both[where]) == where])
    for slot in "AB":
        facts.share(f"accuracy_{slot.lower()}", [first[slot] == slot])


def vote(votes: Sequence[str | None]) -> str | None:
    """The winner that most of the readable votes name; None where two are named as often, or none."""
    counts = {slot: sum(v == slot for v in votes) for slot in "AB"}
    if counts["A"] == counts["B"]:
        return None
    return "A" if counts["A"] > counts["B"] else "B"
