"""What a policy step and a rubric step sample: texts by kind, who writes them, how many."""

from __future__ import annotations

import dataclasses

from coevo_jax.config import Experiment, JudgeConfig, api_model
from coevo_jax.config.validate import trains_generator
from coevo_jax.plan import dynamic
from coevo_jax.plan.cast import HELDOUT, Slice, timed_judges

PER_CRITERION = ("rar_explicit",)  # judge protocols that write an answer for each criterion


@dataclasses.dataclass(frozen=True)
class Call:
    """Texts of one kind that a role's engine writes, in a policy and in a rubric step. prompts: distinct ones of them."""

    kind: str  # answer | rubric | question | verdict
    role: str  # whose programs run it
    counts: tuple[int, int]
    prompts: tuple[int, int]

    @property
    def title(self) -> str:
        """Of its parts in a plan."""
        usual = self.role == {"verdict": "judge", "rubric": self.role}.get(self.kind, "policy")
        return f"{self.kind}s" + ("" if usual else f" ({self.role})")


def has_steps(cfg: Experiment) -> tuple[bool, bool]:
    """Are there policy steps, and rubric steps of their own?"""
    if cfg.schedule.mode == "dynamic":
        return dynamic.has_steps(cfg)
    return cfg.schedule.mode != "evolm" or cfg.schedule.order != "generator_only", trains_generator(cfg)


def calls(s: Slice, criteria: float = 5) -> list[Call]:
    """EvoLM: a policy step samples one rubric and a group of answers a prompt, and a verdict an answer; a rubric step the answers
    of a pair and a group of rubrics a prompt, and a verdict for both answers under each rubric."""
    mode, P, G = s.cfg.schedule.mode, s.cfg.schedule.prompts, s.cfg.schedule.group
    if not s.samples:
        return []
    if mode == "verifiable":
        return [Call("answer", "policy", (P * G, 0), (P, 0))]
    if mode == "iterated_dpo":
        return _labelling(s, criteria)
    if mode == "dynamic":
        return [Call(kind, role, *both) for kind, role, *both in dynamic.calls(s)]
    found = _rlcer(s, P, G) if mode == "rlcer" else _evolm(s, P, G)
    found += _verdicts(s, criteria, (P * G * G, 0) if mode == "rlcer" else (P * G, 2 * P * G))
    return [call for call in found if any(call.counts)]


def _rlcer(s: Slice, P: int, G: int) -> list[Call]:
    """A rubric an answer, with both in view, which the judge checks on all answers of the question."""
    return [
        Call("answer", "policy", (P * G, 0), (P, 0)),
        Call("rubric", s.owner("rubric" if "rubric" in s.trained else "policy"), (P * G, 0), (P * G, 0)),
    ]


def _labelling(s: Slice, criteria: float) -> list[Call]:
    """Of iterated DPO: answers, one rubric a question, both orders of a pair (or both of its answers) judged."""
    P, answers, cfg = s.cfg.schedule.prompts, s.cfg.schedule.prompts * s.cfg.dpo.answers, s.cfg
    out = [Call("answer", "policy", (answers, 0), (P, 0))]
    if cfg.rubric.source == "generator" and not api_model(cfg.generator.source):
        out.append(Call("rubric", s.owner("rubric"), (P, 0), (P, 0)))
    return out + _verdicts(s, criteria, (answers, 0))


def _evolm(s: Slice, P: int, G: int) -> list[Call]:
    cfg, pairs, (policy, rubric) = s.cfg, s.cfg.pairs, has_steps(s.cfg)
    names = ("temporal", "inferred", "conditioned", "frozen", "dataset")
    total = sum(getattr(pairs, name) for name in names) or 1.0
    share = {name: rubric * getattr(pairs, name) / total for name in names}
    fresh = round(P * (share["temporal"] + 2 * share["inferred"] + 2 * share["conditioned"]))
    asked = round(P * share["inferred"])
    out = [
        Call("answer", "policy", (policy * P * G, fresh), (policy * P, fresh)),
        Call("question", "policy", (0, asked), (0, asked)),
    ]
    for name in s.frozen:
        own = round(2 * P * share["frozen"] / len(s.frozen))
        out.append(Call("answer", s.owner(name), (0, own), (0, own)))
    if cfg.rubric.source == "generator" and not api_model(cfg.generator.source):
        role, more = s.owner("rubric" if "rubric" in s.trained else "policy"), round(P * share["conditioned"])
        out.append(Call("rubric", role, (policy * P, rubric * P * G + more), (policy * P, rubric * P + more)))
    return _merged(out)


def _merged(found: list[Call]) -> list[Call]:
    """Texts of one kind by one engine are one call."""
    out: dict[tuple[str, str], Call] = {}
    for call in found:
        before = out.get((call.kind, call.role))
        pair = [call.counts, call.prompts] if before is None else [
            (before.counts[0] + call.counts[0], before.counts[1] + call.counts[1]),
            (before.prompts[0] + call.prompts[0], before.prompts[1] + call.prompts[1]),
        ]  # fmt: skip
        out[call.kind, call.role] = Call(call.kind, call.role, *pair)
    return list(out.values())


def _verdicts(s: Slice, criteria: float, counts: tuple[int, int]) -> list[Call]:
    """Of the judges that serve (of turns: cast.timed_judges), where an engine of ours writes them."""
    policy, rubric = has_steps(s.cfg)
    out = []
    for name in sorted(timed_judges(s)) if s.judges else ():
        seat = s.judges[name]
        if seat.engine is None:
            continue
        both = _asked(s.cfg, seat.cfg, criteria, name == HELDOUT, counts)
        both = both[0] * policy, both[1] * rubric
        out.append(Call("verdict", name, both, both))
    return out


def _asked(cfg: Experiment, judge: JudgeConfig, criteria: float, heldout: bool, counts: tuple[int, int]) -> tuple[int, int]:
    answers, pairs = counts
    if heldout:  # some answers of each group, now and then
        answers, pairs = round(cfg.schedule.prompts * cfg.control.heldout_answers / cfg.control.heldout_every), 0
    if judge.pairs != "scores" and judge.order == "random":  # one call a pair, in place of one an answer
        pairs //= 2
    times = judge.samples * (criteria if judge.protocol in PER_CRITERION else 1)
    return round(answers * times), round(pairs * times)
