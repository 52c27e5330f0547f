"""Controls against reward hacking over groups (config record ControlConfig): length shaping, rubric dropout, what is watched.

Formulas: learn/control.py. The loop sets alarms on what is watched and the console names the rows behind them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from coevo_jax.config import Experiment
from coevo_jax.judges import JudgeItem
from coevo_jax.learn.control import centred, concordance, kept_criteria, repeated_ngrams, soft_overlong, verdict_like
from coevo_jax.methods.context import Context, request_id
from coevo_jax.methods.members import Group, Member
from coevo_jax.methods.stage import Behind, Step
from coevo_jax.records.facts import Facts
from coevo_jax.rubrics import Rubric


def shape_lengths(cfg: Experiment, groups: Sequence[Group]) -> None:
    """control.overlong_buffer: take from each answer's reward what its length costs. Call it once, before advantages."""
    control, longest = cfg.control, cfg.answer.max_new_tokens
    if not control.overlong_buffer:
        return
    for member in (m for group in groups for m in group.members):
        if member.reward is None:
            continue
        cost = control.overlong_penalty * soft_overlong(len(member.completion.tokens), longest, control.overlong_buffer)
        member.terms = (member.terms or {"reward": member.reward}) | {"overlong": cost}
        member.parts = member.parts | {"overlong": cost}
        member.reward += cost


def drop_criteria(cfg: Experiment, rubric: Rubric, step: Step, slot: int, attempt: int, facts: Facts) -> Rubric:
    """control.rubric_dropout: the rubric without some of its criteria, keyed by (seed, update, slot, attempt); the weights of the
    others add up to what all did, so one answer's score doesn't fall for what isn't asked."""
    share, count = cfg.control.rubric_dropout, len(rubric.criteria)
    if not share or not count:
        return rubric
    kept = kept_criteria(count, share, _uniforms((cfg.seed, step.update, slot, attempt), count))
    facts.ratio("control/dropped_criteria_share", count - len(kept), count)
    total = sum(c.weight for c in rubric.criteria)
    rest = sum(rubric.criteria[i].weight for i in kept)
    scale = total / rest if rest > 0 else 1.0
    criteria = tuple(dataclasses.replace(rubric.criteria[i], weight=rubric.criteria[i].weight * scale) for i in kept)
    return Rubric(criteria, rubric.raw)


def _uniforms(identity: tuple[int, ...], count: int) -> np.ndarray:
    digest = hashlib.blake2b(repr(("rubric_dropout", *identity)).encode(), digest_size=32).digest()
    return np.random.RandomState(np.frombuffer(digest, "<u4")).uniform(size=count)


def ask_heldout(ctx: Context, step: Step, asked: Sequence[tuple[Group, int, Member, JudgeItem]]) -> None:
    """Scores of the held-out judge for the first control.heldout_answers of each group, in the updates that are its turn. They
    enter no reward: members get the part 'heldout'."""
    control = ctx.cfg.control
    if ctx.heldout is None or step.update % control.heldout_every:
        return
    chosen = [(g, i, m, item) for g, i, m, item in asked if i < control.heldout_answers]
    items = [dataclasses.replace(item, request=request_id("heldout", g.slot, g.attempt, i)) for g, i, _, item in chosen]
    if not items:
        return
    with ctx.timed("heldout"):
        verdicts = ctx.heldout.judge(items, step.update)
    for (_, _, member, _), verdict in zip(chosen, verdicts):
        member.note = member.note | {"heldout": dataclasses.asdict(verdict)}
        if verdict.score is not None:
            member.parts = member.parts | {"heldout": verdict.score}


# ---------------------------------------------------------------------------------------------------------------- watching


def watch(cfg: Experiment, role: str, groups: Sequence[Group]) -> tuple[Facts, Behind]:
    """What is watched of an update's groups, and for each metric the rows that drive it: (size, 'group 3 sample 1')."""
    facts, behind = Facts(), Behind()
    for group in groups:
        name = f"group {group.attempt * cfg.schedule.prompts + group.slot} sample "
        scored = [(i, m) for i, m in enumerate(group.members) if m.reward is not None]
        lengths = centred([len(m.completion.tokens) for _, m in scored])
        rewards = centred([float(m.reward or 0.0) for _, m in scored])
        first = [float(i == 0) for i in range(len(scored))]
        facts.add("correlation", "control/length_correlation", [x for row in zip(lengths, rewards, first) for x in row])
        behind.add("control/length_correlation", [(abs(n * r), name + str(i)) for (i, _), n, r in zip(scored, lengths, rewards)])
        _watch_parts(facts, behind, name, scored, rewards)
        if role == "policy":
            _watch_answers(cfg, facts, behind, name, group)
            _watch_judges(facts, behind, name, scored)
    return facts, behind


def _watch_parts(facts: Facts, behind: Behind, name: str, scored: Sequence[tuple[int, Member]], rewards: np.ndarray) -> None:
    """Share of the rewards' variance inside groups that a further part brings: sum cov(part, reward) / sum var(reward)."""
    parts = list(dict.fromkeys(part for _, m in scored for part in m.terms))
    for part in parts[1:]:
        values = centred([m.terms.get(part, 0.0) for _, m in scored])
        facts.add("ratio_if", f"control/part_share/{part}", [float(values @ rewards), float(rewards @ rewards)])
        behind.add(f"control/part_share/{part}", [(abs(v * r), name + str(i)) for (i, _), v, r in zip(scored, values, rewards)])


def _watch_answers(cfg: Experiment, facts: Facts, behind: Behind, name: str, group: Group) -> None:
    for i, member in enumerate(group.members):
        again, all_of_them = repeated_ngrams(member.completion.tokens, cfg.control.ngram)
        facts.ratio("control/repeated_ngrams", again, all_of_them)
        behind.add("control/repeated_ngrams", [(again / max(all_of_them, 1), name + str(i))])
        found = verdict_like(member.text)
        facts.share("control/verdict_like_share", [bool(found)])
        if found:
            member.note = member.note | {"verdict_like": found}
            behind.add("control/verdict_like_share", [(1.0, f"{name}{i} ({found[:40]!r})")])


def _watch_judges(facts: Facts, behind: Behind, name: str, scored: Sequence[tuple[int, Member]]) -> None:
    """The judge that rewards against the one that doesn't."""
    both = [(i, m.parts["judge"], m.parts["heldout"]) for i, m in scored if "judge" in m.parts and "heldout" in m.parts]
    facts.mean("control/judge_gap", [own - other for _, own, other in both])
    facts.mean("control/judge_agreement", concordance([own for _, own, _ in both], [other for *_, other in both]))
    rows = [(abs(own - other), name + str(i)) for i, own, other in both]
    behind.add("control/judge_gap", rows)
    behind.add("control/judge_agreement", rows)
