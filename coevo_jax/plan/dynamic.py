"""What a step of DynamicRubric samples and judges, for plans (schedule.mode=dynamic): a policy step and a generator step.

Axes: P prompts, K candidates, G rubrics of a prompt, N labelled answers, M items of a rubric.
"""

from __future__ import annotations

import numpy as np

from coevo_jax.config import Experiment
from coevo_jax.plan.cast import Slice
from coevo_jax.plan.lengths import Lengths, lognormal_lengths

ITEMS = 6  # of a rubric, assumed
ITEM_TOKENS = 60  # of the verifier's prompt behind the answer: the item and the question about it
ANCHORS = 7  # labelled answers of a prompt (Nectar)


def counts(cfg: Experiment) -> dict[str, tuple[int, int]]:
    """Texts of each kind in a policy and in a generator step: answers, rubrics, and answers that the verifier reads (all items of
    an answer behind one shared head)."""
    P, group = cfg.schedule.prompts, cfg.schedule.group
    shown, G = cfg.dynamic.candidates or group, cfg.dynamic.group or group
    return {"answer": (P * group, P * shown), "rubric": (P, P * G), "judgement": (P * group, P * (shown + ANCHORS))}


def has_steps(cfg: Experiment) -> tuple[bool, bool]:
    """Are there policy steps, and generator steps?"""
    policy, generator = updates(cfg)
    return policy > 0, generator > 0


def calls(s: Slice) -> list[tuple[str, str, tuple[int, int], tuple[int, int]]]:
    """(kind, role, texts, distinct prompts) in a policy and in a generator step, as plan.calls.Call takes them."""
    P, (policy, generator), n = s.cfg.schedule.prompts, has_steps(s.cfg), counts(s.cfg)
    both = {kind: (policy * a, generator * b) for kind, (a, b) in n.items()}
    own = (policy * P, generator * P)
    orders = own if s.cfg.dynamic.shuffle == "group" else both["rubric"]  # an order of its own is a prompt of its own
    out = [("answer", "policy", both["answer"], own), ("rubric", s.owner("rubric"), both["rubric"], orders)]
    return out + ([("judgement", "judge", both["judgement"], both["judgement"])] if s.judges else [])


def rubric_prompt(cfg: Experiment, question: float, answer: float, template: float) -> float:
    """Mean tokens of the generator's prompt: the candidates are in it."""
    shown = (cfg.dynamic.candidates or cfg.schedule.group) if cfg.dynamic.conditioned == "set" else 0
    return question + template + shown * answer


def judged(cfg: Experiment, seed: int, count: int, question: float, answer: float, template: float, generator: bool) -> Lengths:
    """An answer with all its items as the packed prefill feeds it: head once, tails behind it. In a generator step the items of G
    rubrics, none of them in common (the most there can be); in a policy step those of one."""
    items = ITEMS * ((cfg.dynamic.group or cfg.schedule.group) if generator else 1)
    most = cfg.judge.max_prompt or cfg.sampler.max_prompt
    heads = lognormal_lengths(count, seed, most, 1, 1, question + template + answer)
    text = f"{items} items of {ITEM_TOKENS} tokens behind each answer; {heads.text}"
    return Lengths(heads.prompts + items * ITEM_TOKENS, np.zeros(count, np.int64), text)


def updates(cfg: Experiment) -> tuple[int, int]:
    """Policy and generator updates of the whole run."""
    k, rounds, options = cfg.schedule.k, cfg.schedule.cycles, cfg.dynamic
    trained = min(rounds, options.static_from - 1) if options.static_from else rounds
    policy = 0 if cfg.schedule.order == "generator_only" else rounds * (options.policy_updates or k)
    return policy, trained * (options.generator_updates or k)
