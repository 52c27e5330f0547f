"""A plan of Rubric-ARM: three models of which one trains at a time, on a slice that nobody owns.

Policy, generator and judge of one architecture share their programs (plan/programs.py makes them); their parameters, moments and
references all stay on the devices. The modelled seconds are those of one update of each phase: the judge's, the generator's and
the policy's, each with the judgements that it asks for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from coevo_jax.config import Experiment, arm
from coevo_jax.cost import decode_kernels
from coevo_jax.errors import UserError
from coevo_jax.models.spec import ModelSpec
from coevo_jax.plan.cast import Slice
from coevo_jax.plan.compiled import Program
from coevo_jax.plan.phases import HEADROOM, Phase, advice
from coevo_jax.plan.report import GIB, MODEL
from coevo_jax.plan.step import (
    TEMPLATE,
    Workload,
    costs,
    drain_on_host,
    figures_of,
    lognormal_lengths,
    packed_rows,
    prefilled,
    splash_kernels,
)

PHASES = ("judge", "generator", "policy")


class ArmSlice(Slice):
    """Rubric-ARM on a topology. `judges` are EvoLM's, and there are none: this judge is among `trained`."""

    def check(self) -> None:
        """UserError for what has no plan."""
        _ = self.mesh, self.trained

    @functools.cached_property
    def trained(self) -> dict[str, ModelSpec]:
        """Policy, generator and judge."""
        own = {
            "rubric": (self.cfg.generator.source, "generator.source"),
            "judge": (self.cfg.arm.judge_source, "arm.judge_source"),
        }
        out = {name: self._known(source, key) if source else self.policy for name, (source, key) in own.items()}
        out = {"policy": self.policy, **out}
        if self.cfg.arm.judge != "trained":
            del out["judge"]
        if len(set(out.values())) > 1:
            raise UserError("models of several architectures have no plan yet", expected="one architecture for the three",
                            where="policy.source, generator.source, arm.judge_source")  # fmt: skip
        return out

    def learns(self, role: str) -> bool:
        """Does the run train this role's own weights?"""
        return {"policy": True, "rubric": arm.trains_lists(self.cfg), "judge": arm.trains_judge(self.cfg)}[role]


def planned(cfg: Experiment) -> Experiment:
    """The config whose update programs hold the largest batch of the three phases."""
    settings, schedule = cfg.arm, cfg.schedule
    judged, listed = settings.judge_prompts * settings.judge_group, settings.generator_prompts * settings.generator_group
    group = max(schedule.group, math.ceil(max(judged, listed) / schedule.prompts))
    return dataclasses.replace(cfg, schedule=dataclasses.replace(schedule, group=group))


@dataclasses.dataclass(frozen=True)
class Text:
    """What a phase writes in an update: so many texts of a kind from so many prompts. trained: they are its update's samples."""

    kind: str  # answer | list | judgement
    count: int
    prompts: int
    trained: bool


def texts(cfg: Experiment) -> dict[str, list[Text]]:
    """By phase; without groups that draw again."""
    a, s = cfg.arm, cfg.schedule
    judged, listed, answers = a.judge_prompts * a.judge_group, a.generator_prompts * a.generator_group, s.prompts * s.group
    return {
        "judge": [Text("judgement", judged, a.judge_prompts, True)],
        "generator": [Text("list", listed, a.generator_prompts, True), Text("judgement", listed, listed, False)],
        "policy": [
            Text("list", s.prompts, s.prompts, False), Text("answer", answers + s.prompts, s.prompts, True),
            Text("judgement", 2 * answers, 2 * answers, False),
        ],
    }  # fmt: skip


def lengths_of(cfg: Experiment, work: Workload, kind: str, count: int) -> Any:
    """Prompts and completions of `count` texts of a kind. A judgement is as long as a verdict of `work`, a list as a rubric."""
    new = {"answer": cfg.answer, "list": cfg.rubric_sampling, "judgement": cfg.arm.judge_sampling}[kind].max_new_tokens
    mean = {"answer": work.answer, "list": work.rubric, "judgement": work.verdict}[kind]
    prompt = {
        "answer": work.question,
        "list": work.question + TEMPLATE,
        "judgement": work.question + 2 * TEMPLATE + 2 * min(work.answer, cfg.answer.max_new_tokens)
        + min(work.rubric, cfg.rubric_sampling.max_new_tokens),
    }[kind]  # fmt: skip
    return lognormal_lengths(count, work.seed, cfg.sampler.max_prompt, new, mean, prompt)


def update_seconds(s: Slice, compiled: dict[str, Program], work: Workload) -> dict[str, dict[str, float]]:
    """Modelled seconds of one update of each phase, by part."""
    hosts = math.prod(s.mesh.shape[axis] for axis in ("data", "fsdp"))
    out: dict[str, dict[str, float]] = {}
    for phase, found in texts(s.cfg).items():
        parts: dict[str, float] = {}
        for text in found:
            lengths = lengths_of(s.cfg, work, text.kind, text.count)
            ran, visited = prefilled(lengths.prompts[: -(-text.prompts // hosts)], s.engine)
            one = costs(compiled["policy prefill"], s, kernels=splash_kernels(visited))["seconds"]
            parts[f"{text.kind}s: prefill"] = ran * one
            drain = drain_on_host(s, s.engine, lengths, text.count)
            trips = (s.engine.cfg.steps_per_dispatch,)
            one = costs(compiled["policy decode"], s, trips=trips, kernels=decode_kernels(drain.read))["seconds"]
            parts[f"{text.kind}s: decode"] = drain.dispatches * one
            if text.trained:
                parts |= _update(s, compiled, packed_rows(s, lengths))
        parts["publish"] = figures_of(compiled["policy publish"], s).seconds
        out[phase] = parts
    return out


def _update(s: Slice, compiled: dict[str, Program], rows: Any) -> dict[str, float]:
    """The passes and optimizer steps over packed rows."""
    out = {}
    for kind, runs in (("reference log-probs", 1), ("old log-probs", 1), ("update", s.cfg.update.inner_iterations)):
        if (program := compiled.get(f"policy {kind}")) is not None:
            out[kind] = runs * figures_of(program, s, (rows.micro_batches,), splash_kernels(rows.visited)).seconds
    return out


# ---------------------------------------------------------------------------------------------------------------- report


def as_json(s: Slice, found: list[Phase], seconds: dict[str, dict[str, float]], work: Workload) -> dict[str, Any]:
    """fits, phases of memory, seconds an update of each phase of the method, hours of the whole schedule."""
    return {
        "model": MODEL,
        "topology": s.topology.name,
        "chips": s.chips,
        "mesh": {**s.mesh.shape, "train": s.cfg.mesh.train},
        "fits": all(p.over <= 0 for p in found),
        "headroom": HEADROOM,
        "phases": [
            {"name": p.name, "program": p.program, "peak_bytes": p.peak, "budget_bytes": p.budget, "beside": p.beside,
             "program_bytes": p.program_bytes, "fits": p.over <= 0, "advice": advice(s, p) if p.over > 0 else []}
            for p in found
        ],
        "update_seconds": seconds,
        "hours": hours(s.cfg, seconds),
        "lengths": work.text,
    }  # fmt: skip


def hours(cfg: Experiment, seconds: dict[str, dict[str, float]]) -> float:
    """Of the rounds and a policy by GRPO; without the warm-up, kept lists, looks at the test pairs and groups drawn again."""
    a, total = cfg.arm, {phase: sum(parts.values()) for phase, parts in seconds.items()}
    rounds = a.rounds * (a.judge_updates * total["judge"] + a.generator_updates * total["generator"])
    return (rounds + (cfg.schedule.cycles * cfg.schedule.k * total["policy"] if cfg.arm.policy == "grpo" else 0.0)) / 3600


def as_text(s: Slice, found: list[Phase], seconds: dict[str, dict[str, float]], work: Workload) -> str:
    """For a person."""
    lines = [MODEL, f"{s.cfg.name} on {s.topology.name}: {s.chips} chips, mesh {dict(s.mesh.shape)}", ""]
    for p in found:
        beside = ", ".join(f"{name} {size / GIB:.2f}" for name, size in p.beside.items())
        verdict = "fits" if p.over <= 0 else "DOES NOT FIT"
        lines.append(f"  {p.name:34s} {p.peak / GIB:6.2f} of {p.budget / GIB:.2f} GiB  {verdict}: program "
                     f"{p.program_bytes / GIB:.2f}; beside it {beside}")  # fmt: skip
        lines += [f"  {'':34s} change: {line}" for line in (advice(s, p) if p.over > 0 else [])]
    lines += ["", f"one update, modelled ({work.text})"]
    for phase, parts in seconds.items():
        lines.append(f"  {phase:10s} {sum(parts.values()):8.1f} s: " + ", ".join(f"{n} {v:.1f}" for n, v in parts.items()))
    return "\n".join([*lines, f"  {hours(s.cfg, seconds):,.0f} hours on this slice for the rounds and the policy"])


def run(args: Any, cfg: Experiment, work: Workload, say: Any) -> tuple[str, dict[str, Any]]:
    """The plan as text and as JSON; args: those of plan/cli.py."""
    from coevo_jax import aot
    from coevo_jax.plan.compiled import compile_all
    from coevo_jax.plan.phases import phases

    s = ArmSlice(planned(cfg), aot.topology(args.topology), args.layers)
    s.check()
    compiled = compile_all(s, args.cache, full=args.full, say=say)
    found, seconds = phases(s, compiled), update_seconds(dataclasses.replace(s, cfg=cfg), compiled, work)
    return as_text(s, found, seconds, work), as_json(s, found, seconds, work)
