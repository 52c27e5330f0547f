"""DynamicRubric (arXiv 2607.20083): in each round the generator learns to tell the present policy's answers apart in the order of
labelled ones, then the policy trains on the frozen generator's rubrics.

Generator stage of round t: K answers of the policy to a labelled prompt -> G rubrics of weighted yes/no items, written with the
answers in sight; a frozen verifier answers each (item, answer) alone -> R_disc over the K answers, R_anchor over the labelled
ones, which no generator sees (learn/dynamic.py). Policy stage: the rollout group is the candidate set; the reward of an answer is
its score E under one rubric. E is relative to its set: it is never compared across prompts.

What failures mean is design.md 4.1: a vote that failed is no vote; a rubric with an item that no candidate has a vote for, or
with a labelled answer that a vote failed for, leaves its group; an answer with a failed vote has no reward. An invalid rubric is
an outcome: R_disc 0, R_anchor the least of its group; in the policy stage it is written again, colder.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from coevo_jax.config import DynamicConfig, Experiment
from coevo_jax.data import PromptSet, SlotStream, read_rankings
from coevo_jax.data.rankings import split, why_unusable
from coevo_jax.errors import UserError
from coevo_jax.judges.verifier import Asked, Votes, items_of, verify
from coevo_jax.learn import dynamic
from coevo_jax.learn.advantages import Advantages
from coevo_jax.methods.context import Context, request_id
from coevo_jax.methods.control import shape_lengths
from coevo_jax.methods.groups import collect, to_batch
from coevo_jax.methods.members import Group, Member
from coevo_jax.methods.stage import Batch, Stage, Step
from coevo_jax.progress import RunConsole
from coevo_jax.records.facts import Facts
from coevo_jax.records.verdicts import STATUSES, Verdict
from coevo_jax.rubrics import Rubric, parse_rubric, render_rubric
from coevo_jax.rubrics.weighted_items import mentions_surface
from coevo_jax.sampler import Completion
from coevo_jax.text.candidates import check_template
from coevo_jax.text.chat import ChatTokenizer
from coevo_jax.text.parse import Parsed

ANCHORS = "anchors"  # streams of labelled rankings: anchors_0, anchors_1, ... by round
DATA_KEYS: Mapping[str, str] = {f"{ANCHORS}_{t}": f"data.rankings of round {t + 1}" for t in range(100)}


# ---------------------------------------------------------------------------------------------------- the mode's parts


def stages(cfg: Experiment) -> list[Stage]:
    """Rounds: generator, then policy. From dynamic.static_from on the generator rests."""
    out, options, k = list[Stage](), cfg.dynamic, cfg.schedule.k
    for t in range(cfg.schedule.cycles):
        if trains_generator(options, t):
            most = cfg.schedule.prompts * group_size(cfg)
            out.append(Stage("rubric", "rubric", t, options.generator_updates or k, generator_batch, most=most))
        if cfg.schedule.order != "generator_only":
            out.append(Stage("policy", "policy", t, options.policy_updates or k, policy_batch, counts_as_policy=True))
    return out


def trains_generator(options: DynamicConfig, round_: int) -> bool:
    """Does the generator train in a round (from 0)?"""
    return not options.static_from or round_ + 1 < options.static_from


def group_size(cfg: Experiment) -> int:
    """G: rubrics of a prompt."""
    return cfg.dynamic.group or cfg.schedule.group


def templates(cfg: Experiment) -> dict[str, str]:
    """The generator's prompt, which the run folder binds."""
    return {"dynamic.prompt" if cfg.dynamic.conditioned == "set" else "dynamic.blind_prompt": cfg.dynamic.template}


def streams(cfg: Experiment, tokenizer: ChatTokenizer, count: Callable[[str], int], console: RunConsole) -> dict[str, SlotStream]:
    """A stream of anchors for each round: the train part of data.rankings and of what has joined by then."""
    out = {}
    for t, records in enumerate(anchors_by_round(cfg, count, console.note)):
        source = ",".join(filter(None, (cfg.data.rankings, *cfg.dynamic.new_rankings[:t])))
        out[f"{ANCHORS}_{t}"] = SlotStream(PromptSet.of(records, source), cfg.seed, cfg.schedule.prompts, f"{ANCHORS}_{t}")
    return out


def anchors_by_round(cfg: Experiment, count: Callable[[str], int], note: Callable[[str], None]) -> list[list[dict[str, Any]]]:
    """Anchors of each round in which the generator trains. UserError where a source has none that serve."""
    rounds: list[list[dict[str, Any]]] = []
    records: list[dict[str, Any]] = []
    for t in range(cfg.schedule.cycles):
        if not trains_generator(cfg.dynamic, t):
            break
        key = f"dynamic.new_rankings.{t - 1}" if t else "data.rankings"
        source = (cfg.data.rankings, *cfg.dynamic.new_rankings)[t] if t <= len(cfg.dynamic.new_rankings) else ""
        if source:
            taken = {record["id"] for record in records}
            found = _anchors(cfg, source, key, count, note)
            records = records + [{**r, "id": f"{t}/{r['id']}"} if r["id"] in taken else r for r in found]
        rounds.append(records)
    return rounds


def _anchors(
    cfg: Experiment, source: str, key: str, count: Callable[[str], int], note: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The train part of a source, without rows that can't serve as anchors."""
    options, why = cfg.dynamic, dict[str, int]()
    train, test = split(read_rankings(source, key=key).records, options.test_share)
    kept = []
    for record in train:
        reason = why_unusable(record, options.min_anchors, options.min_characters)
        if not reason and count(record["prompt"]) > cfg.data.max_prompt_tokens:
            reason = "over_limit"
        if reason:
            why[reason] = why.get(reason, 0) + 1
        else:
            kept.append(record)
    if not kept:
        raise UserError(f"no ranking of {len(train) + len(test)} serves as an anchor ({len(test)} are set aside; {why})",
                        where=f"{key}={source}", expected="other rankings, or smaller limits in dynamic and data")  # fmt: skip
    left_out = ", ".join(f"{n} {reason}" for reason, n in sorted(why.items()))
    note(f"{len(kept)} labelled rankings to train on, {len(test)} set aside" + (f"; left out: {left_out}" if left_out else ""))
    return kept


def check(ctx: Context) -> None:
    """The template shows what it should, and the shortest prompt of a generator fits."""
    options = ctx.cfg.dynamic
    key = "dynamic.prompt" if options.conditioned == "set" else "dynamic.blind_prompt"
    check_template(options.template, options.conditioned == "set", key)
    shown = max(ctx.cfg.schedule.group, options.candidates or 0)
    least = len(ctx.set_prompt("", [""] * shown))
    if least >= prompt_room(ctx, trains=True):
        raise UserError(f"the generator's prompt around {shown} candidates alone has {least} tokens",
                        where="sampler.max_prompt, update.pack_length",
                        expected=f"room for {least} tokens and the candidates' own")  # fmt: skip


def prompt_room(ctx: Context, trains: bool) -> int:
    """Most tokens of a generator's prompt: what the sampler takes and, where it trains, a packed row beside the rubric."""
    room = ctx.cfg.sampler.max_prompt
    return min(room, ctx.cfg.update.pack_length - ctx.cfg.rubric_sampling.max_new_tokens) if trains else room


# ---------------------------------------------------------------------------------------------------- candidates and prompts


def shuffled(identity: Sequence[int], count: int) -> list[int]:
    """An order of `count` candidates, keyed by `identity`."""
    digest = hashlib.blake2b(repr(("candidates", *identity)).encode(), digest_size=32).digest()
    return [int(i) for i in np.random.RandomState(np.frombuffer(digest, "<u4")).permutation(count)]


@dataclasses.dataclass(frozen=True)
class Shown:
    """The prompt of one rubric and the order in which it shows the candidates: ids are their places in the set."""

    ids: list[int]
    order: list[int]


def show(ctx: Context, step: Step, slot: int, attempt: int, sample: int, question: str, texts: Sequence[str]) -> Shown:
    """The generator's prompt over a candidate set, shuffled by (seed, update, slot, attempt, sample)."""
    own = sample if ctx.cfg.dynamic.shuffle == "sample" else 0
    order = shuffled((ctx.cfg.seed, step.update, slot, attempt, own), len(texts))
    return Shown(ctx.set_prompt(question, [texts[i] for i in order]), order)


def answer(ctx: Context, step: Step, records: Mapping[int, dict[str, Any]], attempt: int, n: int) -> dict[int, list[Completion]]:
    """n answers of the policy to each slot's prompt."""
    requests = [
        ctx.request(ctx.answer_prompt(record["prompt"]), n, "answer", "policy", step.update, ctx.cfg.answer, slot=slot,
                    attempt=attempt)
        for slot, record in records.items()
    ]  # fmt: skip
    return dict(zip(records, ctx.generate("policy", requests)))


def _parse(ctx: Context, completion: Completion) -> Parsed[Rubric]:
    text = ctx.raw(completion.tokens, "rubric")
    return parse_rubric(text, ctx.cfg.rubric, truncated=completion.finish == "length", opened=ctx.opened("rubric"))


def _asked(group: Group, items: Sequence[str], answers: Sequence[str], first: int = 0) -> Asked:
    """Answers of a prompt for the verifier; `first`: number of the first one among the prompt's answers."""
    requests = tuple(request_id("judge", group.slot, group.attempt, first + n) for n in range(len(answers)))
    return Asked(group.question, tuple(items), tuple(answers), requests)


def _verify(ctx: Context, step: Step, asked: list[Asked], verdicts: list[Verdict]) -> list[Votes]:
    assert ctx.judge is not None
    with ctx.timed("judge"):
        votes, said = verify(ctx.judge, asked, step.update, ctx.cfg.dynamic.yes_above)
    verdicts += said
    return votes


# ---------------------------------------------------------------------------------------------------- generator stage


@dataclasses.dataclass
class _Found:
    """What an update has seen, for its metrics."""

    facts: Facts = dataclasses.field(default_factory=Facts)
    verdicts: list[Verdict] = dataclasses.field(default_factory=list)
    rubrics: list[Rubric] = dataclasses.field(default_factory=list)


def generator_batch(ctx: Context, step: Step) -> Batch:
    """G rubrics of each labelled prompt, rewarded for telling the policy's answers apart and for the labelled order."""
    found, stream = _Found(), ctx.streams[f"{ANCHORS}_{step.cycle}"]
    count = ctx.cfg.dynamic.candidates or ctx.cfg.schedule.group

    def make(slots: list[int], attempt: int) -> list[Group]:
        records = {slot: stream.next(slot) for slot in slots}
        drawn = answer(ctx, step, records, attempt, count)
        texts = {slot: [ctx.text(c.tokens) for c in completions] for slot, completions in drawn.items()}
        lengths = {slot: [len(c.tokens) for c in completions] for slot, completions in drawn.items()}
        groups = _write_groups(ctx, step, records, texts, attempt, found.facts)
        _reward_rubrics(ctx, step, groups, records, texts, lengths, found)
        return groups

    groups, advantages = collect(ctx, ctx.slots, make, weigh)
    _add_rubrics(found.facts, found.rubrics)
    _add_verdicts(found.facts, found.verdicts, ctx.cfg.judge.alarm_failure_share)
    return to_batch(ctx, step, groups, advantages, found.facts)


def _write_groups(
    ctx: Context, step: Step, records: Mapping[int, dict[str, Any]], texts: Mapping[int, list[str]], attempt: int, facts: Facts
) -> list[Group]:
    """G rubrics for each slot whose candidates differ and whose prompt fits."""
    shown: dict[int, list[Shown]] = {}
    for slot, record in records.items():
        equal = len(set(texts[slot])) == 1
        facts.share("dynamic/equal_set_share", [equal])
        if equal:
            continue
        prompts = [show(ctx, step, slot, attempt, g, record["prompt"], texts[slot]) for g in range(group_size(ctx.cfg))]
        fits = max(len(one.ids) for one in prompts) <= prompt_room(ctx, trains=True)
        facts.share("dynamic/prompt_too_long_share", [not fits])
        if fits:
            shown[slot] = prompts
    requests, owners = [], []
    for slot, prompts in shown.items():
        for g, one in enumerate(prompts):
            requests.append(ctx.request(one.ids, 1, "rubric", "rubric", step.update, ctx.cfg.rubric_sampling, slot=slot,
                                        attempt=attempt, sample=g))  # fmt: skip
            owners.append(slot)
    groups = {
        slot: Group(slot, attempt, prompts[0].ids, records[slot]["prompt"], records[slot]["id"], [])
        for slot, prompts in shown.items()
    }
    for slot, (completion,) in zip(owners, ctx.generate("rubric", requests)):
        one = shown[slot][len(groups[slot].members)]
        member = Member(completion, ctx.text(completion.tokens, "rubric"), None, prompt=one.ids)
        member.note = {"order": one.order}
        groups[slot].members.append(member)
    return list(groups.values())


def _reward_rubrics(
    ctx: Context, step: Step, groups: list[Group], records: Mapping[int, dict[str, Any]], texts: Mapping[int, list[str]],
    lengths: Mapping[int, list[int]], found: _Found,
) -> None:  # fmt: skip
    """Ask the verifier about the candidates and the labelled answers, and set both rewards of each rubric."""
    parsed = {group.slot: [_parse(ctx, member.completion) for member in group.members] for group in groups}
    asked = []
    for group in groups:
        items = items_of([p.value for p in parsed[group.slot] if p.value is not None])
        own, labelled = texts[group.slot], records[group.slot]["answers"]
        asked += [_asked(group, items, own), _asked(group, items, labelled, len(own))]
    votes = _verify(ctx, step, asked, found.verdicts)
    for number, group in enumerate(groups):
        record, candidate_votes, label_votes = records[group.slot], votes[2 * number], votes[2 * number + 1]
        for member, rubric in zip(group.members, parsed[group.slot]):
            found.facts.share("rubric/valid_share", [rubric.ok])
            _set_rewards(ctx.cfg.dynamic, member, rubric, candidate_votes, label_votes, record["scores"])
            if rubric.value is not None:
                found.rubrics.append(rubric.value)
                scores = dynamic.scores(candidate_votes.of(rubric.value), _weights(rubric.value))
                _add_scores(found.facts, scores, lengths[group.slot])
        _settle(ctx, group, found.facts)


def _weights(rubric: Rubric) -> np.ndarray:
    return np.asarray([c.weight for c in rubric.criteria], np.float64)


def _set_rewards(
    options: DynamicConfig, member: Member, parsed: Parsed[Rubric], own: Votes, labelled: Votes, labels: Sequence[float]
) -> None:
    """parts: format and, of a valid rubric whose votes are there, disc, anchor, and what the order was worth."""
    member.note |= {"rubric_status": parsed.status, "rubric_detail": parsed.detail}
    member.parts = {"format": float(parsed.ok)}
    if parsed.value is None:
        return
    rubric, weights = parsed.value, _weights(parsed.value)
    member.note |= {
        "rubric": render_rubric(rubric), "votes": _listed(own.of(rubric)), "p_yes": _listed(own.of(rubric, "p")),
        "anchor_votes": _listed(labelled.of(rubric)),
    }  # fmt: skip
    disc, anchored = dynamic.discriminability(own.of(rubric), weights), dynamic.scores(labelled.of(rubric), weights)
    if np.isnan(disc) or np.isnan(anchored).any():
        return  # the verifier failed where the rewards need it
    form = dynamic.bt_anchor(anchored, labels)
    if options.anchor_loss == "listnet":
        form = dynamic.listnet_anchor(anchored, labels, options.tau)
    member.parts |= {"disc": disc, "anchor": form, "pair_accuracy": dynamic.pair_accuracy(anchored, labels)}


def _listed(table: np.ndarray) -> list[list[float | None]]:
    """As JSON has it: NaN is none of its numbers."""
    return [[None if np.isnan(x) else round(float(x), 6) for x in row] for row in table]


def _settle(ctx: Context, group: Group, facts: Facts) -> None:
    """Invalid rubrics get R_disc 0 and the group's least R_anchor. A member's reward is what trains, the sum of both advantages,
    which are its terms; None where the verifier failed."""
    anchors = [m.parts["anchor"] for m in group.members if "anchor" in m.parts]
    for member in group.members:
        if not member.parts["format"]:
            member.parts |= {"disc": 0.0, "anchor": min(anchors, default=0.0)}
    options = ctx.cfg.dynamic
    both, disc = (weigh(ctx, [group], objectives=o, skip=False) for o in (options.objectives, "discriminability"))
    for member, value, own in zip(group.members, both.values, disc.values):
        member.reward = float(value) if "disc" in member.parts else None
        if member.reward is not None and options.objectives == "both":
            member.terms = {"disc": float(own), "anchor": float(value - own)}
    facts.mean("rubric/pair_accuracy", [m.parts["pair_accuracy"] for m in group.members if "pair_accuracy" in m.parts])
    facts.share("dynamic/equal_group_share", [_is_equal(group)])


def _is_equal(group: Group) -> bool:
    """No rubric tells any two candidates apart: R_disc is 0 for all of them."""
    return all(m.parts["disc"] == 0.0 for m in group.members if "disc" in m.parts)


def weigh(ctx: Context, groups: list[Group], objectives: str = "", skip: bool = True) -> Advantages:
    """Advantages of two rewards (objectives: '' = the config's). Groups whose R_disc is all 0 are skipped where it counts."""
    members = [(group, member) for group in groups for member in group.members]
    ids = np.asarray([g.attempt * ctx.cfg.schedule.prompts + g.slot for g, _ in members], np.int64)
    disc, anchor = (np.asarray([m.parts.get(name, 0.0) for _, m in members], np.float64) for name in ("disc", "anchor"))
    valid = np.asarray(["disc" in m.parts for _, m in members], bool)
    options = ctx.cfg.dynamic
    objectives = objectives or options.objectives
    skipped = [] if not skip or objectives == "anchor" else [
        g.attempt * ctx.cfg.schedule.prompts + g.slot for g in groups if _is_equal(g)
    ]  # fmt: skip
    return dynamic.two_objectives(disc, anchor, ids, valid, skipped, ctx.cfg.advantage, objectives, options.anchor_weight)


# ---------------------------------------------------------------------------------------------------- policy stage


def policy_batch(ctx: Context, step: Step) -> Batch:
    """The policy's answers, scored within their own group by one rubric of the frozen generator."""
    found, counts = _Found(), dict.fromkeys(("written", "valid", "retried", "prompts_dropped"), 0)

    def make(slots: list[int], attempt: int) -> list[Group]:
        records = {slot: ctx.streams["policy"].next(slot) for slot in slots}
        groups = []
        for slot, completions in answer(ctx, step, records, attempt, ctx.cfg.schedule.group).items():
            members = [Member(c, ctx.text(c.tokens), None) for c in completions]
            record = records[slot]
            groups.append(Group(slot, attempt, ctx.answer_prompt(record["prompt"]), record["prompt"], record["id"], members))
        rubrics = _write_one(ctx, step, groups, attempt, counts, found.facts)
        judged = [group for group in groups if group.slot in rubrics]
        _score(ctx, step, judged, rubrics, found)
        shape_lengths(ctx.cfg, judged)
        return judged

    groups, advantages = collect(ctx, ctx.slots, make)
    facts = found.facts
    facts.ratio("rubric/valid_share", counts["valid"], counts["written"])
    facts.total("rubric/retried", counts["retried"])
    facts.total("rubric/prompts_dropped", counts["prompts_dropped"])
    _add_rubrics(facts, found.rubrics)
    _add_verdicts(facts, found.verdicts, ctx.cfg.judge.alarm_failure_share)
    return to_batch(ctx, step, groups, advantages, facts)


def _write_one(
    ctx: Context, step: Step, groups: list[Group], attempt: int, counts: dict[str, int], facts: Facts
) -> dict[int, Rubric]:
    """A valid rubric for each slot. An invalid one is written again, colder each time; a slot that never gets one is dropped."""
    shown: dict[int, Shown] = {}
    for group in groups:
        texts = [member.text for member in group.members]
        equal = len(set(texts)) == 1
        one = show(ctx, step, group.slot, attempt, 0, group.question, texts)
        fits = len(one.ids) <= prompt_room(ctx, trains=False)
        facts.share("dynamic/equal_set_share", [equal])
        facts.share("dynamic/prompt_too_long_share", [not fits])
        group.note = {"order": one.order}
        if fits and not equal:
            shown[group.slot] = one
    found: dict[int, Rubric] = {}
    for retry, temperature in enumerate((ctx.cfg.rubric_sampling.temperature, *ctx.cfg.rubric.retry_temperatures)):
        missing = [slot for slot in shown if slot not in found]
        sampling = dataclasses.replace(ctx.cfg.rubric_sampling, temperature=temperature)
        requests = [ctx.request(shown[slot].ids, 1, "policy_rubric", "rubric", step.update, sampling, slot=slot, attempt=attempt,
                                retry=retry) for slot in missing]  # fmt: skip
        parsed = {slot: _parse(ctx, completion) for slot, (completion,) in zip(missing, ctx.generate("rubric", requests))}
        found |= {slot: one.value for slot, one in parsed.items() if one.value is not None}
        if retry == 0:
            counts["written"], counts["valid"] = counts["written"] + len(missing), counts["valid"] + len(found)
        else:
            counts["retried"] += len(missing)
    counts["prompts_dropped"] += len(shown) - len(found)
    return {slot: found[slot] for slot in shown if slot in found}


def _score(ctx: Context, step: Step, groups: list[Group], rubrics: Mapping[int, Rubric], found: _Found) -> None:
    """Rewards of a group's answers: E under its rubric, None where a vote failed."""
    asked = [_asked(g, items_of([rubrics[g.slot]]), [m.text for m in g.members]) for g in groups]
    for group, votes in zip(groups, _verify(ctx, step, asked, found.verdicts)):
        rubric = rubrics[group.slot]
        table, weights = votes.of(rubric), _weights(rubric)
        scores = dynamic.scores(table, weights)
        group.note |= {"rubric": render_rubric(rubric), "rubric_raw": rubric.raw}
        for n, (member, score) in enumerate(zip(group.members, scores)):
            member.note = {"votes": _listed(table.T[n : n + 1])[0], "p_yes": _listed(votes.of(rubric, "p").T[n : n + 1])[0]}
            if not np.isnan(score):
                member.reward = float(score)
                member.parts = {"score": float(score)}
        found.rubrics.append(rubric)
        found.facts.mean("dynamic/discriminability", [x for x in [dynamic.discriminability(table, weights)] if not np.isnan(x)])
        _add_scores(found.facts, scores, [len(m.completion.tokens) for m in group.members])


# ---------------------------------------------------------------------------------------------------- metrics


def _add_scores(facts: Facts, scores: np.ndarray, lengths: Sequence[int]) -> None:
    """How far the scores of a set lie apart, and whether they follow length (inside the set: E is relative to it)."""
    good = ~np.isnan(scores)
    if good.sum() < 2:
        return
    x, n = scores[good], np.asarray(lengths, np.float64)[good]
    facts.mean("dynamic/score_gap", [x.max() - x.min()])
    facts.mean("dynamic/score_std", [x.std()])
    first = [1.0, *[0.0] * (len(x) - 1)]
    facts.add("correlation", "dynamic/length_correlation", np.stack([n - n.mean(), x - x.mean(), first], axis=1).ravel())


def _add_rubrics(facts: Facts, rubrics: Iterable[Rubric]) -> None:
    for rubric in rubrics:
        weights = [c.weight for c in rubric.criteria]
        facts.mean("dynamic/items", [len(weights)])
        facts.mean("dynamic/weight", weights)
        facts.mean("dynamic/one_weight_share", [len(set(weights)) == 1])
        facts.mean("dynamic/surface_share", [mentions_surface(c.text) for c in rubric.criteria])


def _add_verdicts(facts: Facts, verdicts: Sequence[Verdict], most_failures: float) -> None:
    failed = [v.status != "ok" for v in verdicts]
    facts.share("judge/failure_share", failed)
    facts.total("judge/verdicts", len(verdicts))
    facts.alarm("judge/alarm", failed, most_failures)
    for status in STATUSES[1:]:
        facts.share(f"judge/{status}_share", [v.status == status for v in verdicts])
    facts.mean("judge/yes_share", [v.score > 0.5 for v in verdicts if v.score is not None])
