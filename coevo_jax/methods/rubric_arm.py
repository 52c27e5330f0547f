"""Rubric-ARM (arXiv 2602.01511): a generator of numbered lists and a judge of pairs, two models trained in turn on labels.

After a supervised warm-up of both, a round over its own part of the pairs: (a) one list for each pair, kept (`cache_batch`);
(b) GRPO on the judge under the kept lists: 1 for naming the preferred answer, and arm.format_weight for a judgement whose
structure is whole; (c) GRPO on the generator: 1 where the frozen judge's one greedy verdict under the list names the preferred
answer. The slot of the preferred answer is shuffled by (seed, round, pair) and written down. Then, with arm.policy, a policy
trains on what both say (methods/arm_policy.py).

Failures are design.md 4.1: a verdict of the frozen judge that fails removes its list from the group; a list or a judgement that
can't be read is an outcome of the role in training. A kept list that stays invalid removes its pair from the judge's phase.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from coevo_jax.config import Experiment, ModelConfig, arm
from coevo_jax.data import PromptSet, SlotStream
from coevo_jax.data.arm import OwnStream, keep_short, overlap, read_labelled, split
from coevo_jax.distributed import most_owned, own
from coevo_jax.errors import UserError
from coevo_jax.judges import JudgeItem, comparison
from coevo_jax.methods import arm_policy, arm_warmup
from coevo_jax.methods.arm_judge import (
    ROLE,
    ArmJudge,
    add_slots,
    add_verdicts,
    better_slot,
    judge_request,
    judgements,
    pair_item,
    prompt,
    read,
    room,
    winner,
)
from coevo_jax.methods.arm_lists import add_lists, parse_list, write_lists
from coevo_jax.methods.arm_measure import TEST, measure_batch
from coevo_jax.methods.context import Context
from coevo_jax.methods.groups import collect, to_batch
from coevo_jax.methods.members import Group, Member
from coevo_jax.methods.stage import Batch, Stage, Step
from coevo_jax.progress import RunConsole
from coevo_jax.records.facts import Facts
from coevo_jax.records.verdicts import Verdict
from coevo_jax.rubrics import Criterion, Rubric, numbered_list
from coevo_jax.text.chat import ChatTokenizer
from coevo_jax.text.prompts import render_prompt

LISTS = "arm_lists"  # the store of kept lists, by slot of the judge's phase

# ---------------------------------------------------------------------------------------------------- the schedule


def stages(cfg: Experiment) -> list[Stage]:
    """Look, warm up, look; the rounds; look; the policy."""
    settings, out = cfg.arm, arm_warmup.stages(cfg)
    looks = settings.measure != "none" and settings.rounds > 0 and settings.test > 0
    look = lambda name, cycle: [Stage(name, ROLE, cycle, 1, measure_batch, loss="none")] if looks else []  # noqa: E731
    out = look("measure_start", 0) + out + (look("measure_warm", 0) if out else [])
    for number in range(settings.rounds):
        out += _round(cfg, number)
        if settings.measure == "rounds" or number == settings.rounds - 1:
            out += look("measure", number)
    return out + arm_policy.stages(cfg, settings.rounds)


def _round(cfg: Experiment, number: int) -> list[Stage]:
    """One round's stages; with generator_first the lists are made by the generator that the round has trained."""
    settings = cfg.arm
    per_update = max(settings.cached // settings.judge_prompts, 1)
    kept = math.ceil(math.ceil(settings.part / settings.judge_prompts) / per_update)
    judge = [
        Stage("cache", "rubric", number, kept, cache_batch, loss="none"),
        Stage("judge", ROLE, number, settings.judge_updates, judge_batch, temperature=settings.judge_sampling.temperature,
              most=most_owned(settings.judge_prompts) * settings.judge_group),
    ]  # fmt: skip
    judge = judge if settings.judge == "trained" and settings.judge_updates else []
    most = most_owned(settings.generator_prompts) * settings.generator_group
    lists = [Stage("generator", "rubric", number, settings.generator_updates, generator_batch, most=most)]
    lists = lists if settings.generator_updates else []
    return judge + lists if settings.order == "judge_first" else lists + judge


def held(cfg: Experiment) -> dict[str, tuple[str, ModelConfig]]:
    """Weights of a judge or generator that nothing trains."""
    if cfg.schedule.mode != arm.MODE:
        return {}
    out = {}
    if cfg.arm.judge == "trained" and not arm.trains_judge(cfg):
        out[ROLE] = ("arm.judge", arm.judge_model(cfg))
    if cfg.generator.frozen:
        source = cfg.generator.source or cfg.policy.source
        out["rubric"] = ("generator", dataclasses.replace(cfg.policy, source=source, sha256=""))
    return out


def stores(cfg: Experiment) -> dict[str, int]:
    """Slots of the kept lists, and those of the policy's part."""
    return {LISTS: cfg.arm.judge_prompts} | arm_policy.stores(cfg)


def templates(cfg: Experiment) -> dict[str, str]:
    """Prompt templates by key."""
    return {"rubric.prompt": cfg.rubric.prompt, "arm.judge_prompt": cfg.arm.judge_prompt if cfg.arm.judge == "trained" else ""}


def streams(cfg: Experiment, tokenizer: ChatTokenizer, count: Callable[[str], int], console: RunConsole) -> dict[str, SlotStream]:
    """The test pairs, a stream a role and round over that round's part, and the demonstrations."""
    settings, out = cfg.arm, arm_warmup.streams(cfg)
    if not settings.rounds:
        return out
    found = read_labelled(cfg.data.pairs)
    limit = min(cfg.sampler.max_prompt, cfg.update.pack_length - settings.judge_sampling.max_new_tokens)
    limit -= cfg.rubric_sampling.max_new_tokens

    def length(record: dict[str, Any]) -> int:
        item = JudgeItem(record["prompt"], Rubric(()), record["chosen"], 0, other=record["rejected"])
        messages = render_prompt(settings.judge_prompt, **comparison.slots(item))
        return len(tokenizer.render_messages(messages, thinking=False))

    where = f"data.pairs={cfg.data.pairs}"
    kept = keep_short(found.records, length, limit, cfg.data.over_limit == "refuse", where)
    aside, parts = split(kept, cfg.seed, settings.test, settings.part, settings.rounds, where)
    dropped = len(found) - len(kept)
    sizes = ", ".join(str(len(part)) for part in parts)
    left = f", {dropped} over the limit left out" if dropped else ""
    console.note(f"of {len(kept)} pairs {len(aside)} to test, parts of {sizes}{left}")
    if aside:
        out[TEST] = SlotStream(PromptSet.of(aside, cfg.data.pairs), cfg.seed, 1, TEST)
    for number, part in enumerate(parts):
        records = PromptSet.of(part, cfg.data.pairs)
        out[_stream("judge", number)] = OwnStream(records, cfg.seed, settings.judge_prompts, _stream("judge", number))
        out[_stream("generator", number)] = SlotStream(
            records, cfg.seed, settings.generator_prompts, _stream("generator", number)
        )
    return out


def _stream(role: str, round_: int) -> str:
    return f"arm_{role}_{round_}"


def check(ctx: Context) -> None:
    """Nothing trains on a question of the test pairs, and every demonstration fits a row."""
    arm_warmup.check(ctx)
    if TEST not in ctx.streams:
        return
    test = ctx.streams[TEST].prompts.records
    trained = [(arm_warmup.STREAMS["rubric"], "arm.demonstrations")] + (
        [("policy", "data.prompts")] if ctx.cfg.arm.policy != "none" else []
    )
    for name, key in trained:
        if name in ctx.streams and (both := overlap(test, ctx.streams[name].prompts.records)):
            raise UserError(f"{len(both)} questions of the test pairs are in {key}, the first {both[0][:60]!r}",
                            where=f"data.pairs, {key}", expected="data that share no question, or another seed")  # fmt: skip


def show(ctx: Context) -> list[tuple[str, str, list[int]]]:
    """One prompt of each role, for a dry run."""
    streams_ = ctx.streams
    pairs = next((stream.prompts.records for name, stream in streams_.items() if name.startswith("arm_")), ())
    record = pairs[0] if pairs else {"prompt": "(the question)", "chosen": "(an answer)", "rejected": "(another answer)"}
    rubric = Rubric((Criterion("The response (an item of the list)", 3.0, title=numbered_list.HARD),))
    out = [("list prompt", "rubric", ctx.rubric_prompt(record["prompt"]))]
    if ROLE in ctx.voices:
        item = pair_item(record["prompt"], rubric, record["chosen"], record["rejected"], "A", 0)
        out.append(("judge prompt", ROLE, prompt(ctx, item)))
    if ctx.cfg.arm.policy != "none":
        out.append(("answer prompt", "policy", ctx.answer_prompt(streams_["policy"].prompts.records[0]["prompt"])))
    return out


# ---------------------------------------------------------------------------------------------------- (a) keep lists


def cache_batch(ctx: Context, step: Step) -> Batch:
    """Lists for the next `arm.cached` pairs of the round, by the generator of now. Lists of an earlier round are forgotten."""
    store, stream, settings = ctx.stores[LISTS], ctx.streams[_stream("judge", step.cycle)], ctx.cfg.arm
    assert isinstance(stream, OwnStream)
    slots = own(settings.judge_prompts)
    if not any(record["round"] == step.cycle for slot in slots for record in store.of(slot)):
        store.clear()
    per_update = max(settings.cached // settings.judge_prompts, 1)
    wanted = []
    for slot in slots:
        done = len(store.of(slot))
        wanted += [(slot, done + i, index) for i, index in enumerate(stream.owned(slot)[done : done + per_update])]
    records = [stream.prompts.records[index] for *_, index in wanted]
    facts = Facts()
    places = [(slot, number) for slot, number, _ in wanted]
    lists = write_lists(ctx, step, places, [r["prompt"] for r in records], facts)
    rows = []
    for (slot, *_), record, parsed in zip(wanted, records, lists):
        text = numbered_list.render(parsed) if parsed is not None else None
        store.add(slot, {"round": step.cycle, "id": record["id"], "list": text})
        rows.append({"update": step.update, "cycle": step.cycle, "role": "rubric", "slot": slot, "group": slot,
                     "record": record["id"], "question": record["prompt"], "rubric": text})  # fmt: skip
    return Batch([], facts, rows)


def kept_list(ctx: Context, slot: int, round_: int, record_id: str) -> Rubric | None:
    """The list kept for a pair in this round; None where none was valid. RuntimeError where there is none of this round: an old
    one must never serve."""
    for record in ctx.stores[LISTS].of(slot):
        if record["id"] == record_id and record["round"] == round_:
            return None if record["list"] is None else parse_list(ctx, record["list"])
    raise RuntimeError(f"no list was kept for the pair {record_id!r} in round {round_} (slot {slot})")


# ---------------------------------------------------------------------------------------------------- (b) the judge


def judge_batch(ctx: Context, step: Step) -> Batch:
    """G judgements of each pair under its kept list."""
    cfg, stream = ctx.cfg, ctx.streams[_stream("judge", step.cycle)]
    facts, sat = Facts(), list[tuple[str, bool]]()

    def make(slots: list[int], attempt: int) -> list[Group]:
        groups, items, prompts = [], [], []
        for slot in slots:
            record = stream.next(slot)
            rubric = kept_list(ctx, slot, step.cycle, record["id"])
            facts.share("arm/no_list_share", [rubric is None])
            if rubric is None:
                continue
            where = better_slot(cfg.seed, step.cycle, record["id"])
            item = pair_item(
                record["prompt"], rubric, record["chosen"], record["rejected"], where, judge_request(slot, attempt, 0)
            )
            ids = prompt(ctx, item)
            facts.share("arm/prompt_too_long_share", [len(ids) > min(room(ctx), _row_room(cfg))])
            if len(ids) > min(room(ctx), _row_room(cfg)):
                continue
            note = {"better_in": where, "rubric": numbered_list.render(rubric), "answers": [item.answer, item.other]}
            groups.append(Group(slot, attempt, ids, record["prompt"], record["id"], [], note))
            items.append(item)
            prompts.append(ids)
        drawn = judgements(ctx, step.update, prompts, [item.request for item in items], cfg.arm.judge_group)
        for group, item, completions in zip(groups, items, drawn):
            for completion in completions:
                found = read(ctx, completion, item.rubric)
                hit = found.winner == group.note["better_in"]
                sat.append((group.note["better_in"], hit))
                group.members.append(_judged(completion, found, hit, cfg))
                _add_judgement(facts, found)
        return groups

    groups, advantages = collect(ctx, own(cfg.arm.judge_prompts), make)
    add_slots(facts, sat)
    return to_batch(ctx, step, groups, advantages, facts)


def _row_room(cfg: Experiment) -> int:
    return cfg.update.pack_length - cfg.arm.judge_sampling.max_new_tokens


def _judged(completion: Any, found: comparison.Judgement, hit: bool, cfg: Experiment) -> Member:
    """R_j = I[winner = preferred] + arm.format_weight * R_format; a judgement that names nobody is wrong, not failed."""
    fmt = cfg.arm.format_weight * found.whole
    note = {"winner": found.winner, "faults": list(found.faults[:3]), "status": found.status}
    terms = {"correct": float(hit), "format": fmt} if cfg.arm.format_weight else {}
    return Member(completion, found.raw, hit + fmt, {"correct": float(hit), "format": float(found.whole)}, note, terms)


def _add_judgement(facts: Facts, found: comparison.Judgement) -> None:
    facts.share("judge/format_share", [found.whole])
    facts.share("judge/unread_share", [found.winner is None])
    facts.share("judge/truncated_share", [found.status == "truncated"])
    facts.mean("judge/says_a", [found.winner == "A"] if found.winner else [])


# ---------------------------------------------------------------------------------------------------- (c) the generator


def generator_batch(ctx: Context, step: Step) -> Batch:
    """G lists a question, each rewarded by one verdict of the judge, which stays as it is in this phase."""
    cfg, stream, judge = ctx.cfg, ctx.streams[_stream("generator", step.cycle)], ArmJudge(ctx)
    facts, verdicts, rubrics, sat = Facts(), list[Verdict](), list[Rubric](), list[tuple[str, bool]]()

    def make(slots: list[int], attempt: int) -> list[Group]:
        records = {slot: stream.next(slot) for slot in slots}
        prompts = {slot: ctx.rubric_prompt(record["prompt"], training=True) for slot, record in records.items()}
        fits = [slot for slot in slots if len(prompts[slot]) <= cfg.sampler.max_prompt]
        facts.share("arm/prompt_too_long_share", [slot not in fits for slot in slots])
        requests = [
            ctx.request(prompts[slot], cfg.arm.generator_group, "rubric", "rubric", step.update, cfg.rubric_sampling, slot=slot,
                        attempt=attempt)
            for slot in fits
        ]  # fmt: skip
        groups, items, asked = [], [], []
        for slot, completions in zip(fits, ctx.generate("rubric", requests)):
            record = records[slot]
            where = better_slot(cfg.seed, step.cycle, record["id"])
            note = {"better_in": where, "chosen": record["chosen"], "rejected": record["rejected"]}
            group = Group(slot, attempt, prompts[slot], record["prompt"], record["id"], [], note)
            for index, completion in enumerate(completions):
                member, rubric = _listed(ctx, completion)
                group.members.append(member)
                facts.share("rubric/valid_share", [rubric is not None])
                if rubric is None:
                    continue
                rubrics.append(rubric)
                request = judge_request(slot, attempt, index)
                items.append(pair_item(record["prompt"], rubric, record["chosen"], record["rejected"], where, request))
                asked.append((member, where))
            groups.append(group)
        verdicts.extend(found := judge.judge(items, step.update))
        sat.extend(_reward(cfg, asked, found))
        return groups

    groups, advantages = collect(ctx, own(cfg.arm.generator_prompts), make)
    add_verdicts(facts, verdicts, cfg.judge.alarm_failure_share)
    add_lists(facts, rubrics)
    add_slots(facts, sat)
    return to_batch(ctx, step, groups, advantages, facts)


def _listed(ctx: Context, completion: Any) -> tuple[Member, Rubric | None]:
    """A list of the generator in training; one that can't be read is worth 0 and the judge is not asked."""
    parsed = parse_list(ctx, ctx.raw(completion.tokens, "rubric"), completion.finish == "length", detail=True)
    member = Member(completion, ctx.text(completion.tokens, "rubric"), None, {"format": float(parsed.ok)})
    member.note = {"rubric_status": parsed.status, "rubric_detail": parsed.detail}
    if parsed.value is None:
        member.reward = 0.0
    return member, parsed.value


def _reward(cfg: Experiment, asked: list[tuple[Member, str]], verdicts: list[Verdict]) -> list[tuple[str, bool]]:
    """R_r = I[winner = preferred], plus arm.generator_format. A failed verdict leaves the list without a reward."""
    out = []
    for (member, where), verdict in zip(asked, verdicts):
        member.note["judge"] = dataclasses.asdict(verdict)
        if (name := winner(verdict)) is None:
            continue
        hit = name == where
        member.reward = hit + cfg.arm.generator_format
        member.parts["correct"] = float(hit)
        out.append((where, hit))
    return out
