"""A plan as text and as one JSON object."""

from __future__ import annotations

import dataclasses
from typing import Any

from coevo_jax import aot
from coevo_jax.config.several import policy_names
from coevo_jax.plan.calls import has_steps
from coevo_jax.plan.cast import Slice, left_out
from coevo_jax.plan.estimate import Estimate
from coevo_jax.plan.phases import HEADROOM, Phase, advice, at_a_time, residents
from coevo_jax.plan.programs import programs
from coevo_jax.plan.step import Figures, Step, Workload, chip_hours

GIB, MIB = aot.GIB, 2**20
MODEL = "A model: compiled for the slice by libtpu, never run. Memory is the compiler's account, seconds are modelled."


def as_json(s: Slice, found: list[Phase], step: Step, work: Workload) -> dict[str, Any]:
    """fits, programs, phases, step_seconds (the mean of a policy and a rubric step, where the run has both), mfu, what they rest
    on, and what is left out."""
    policy, rubric = step.seconds
    kinds = max(sum(has_steps(s.cfg)), 1)  # of steps that the run has
    mean = (policy + rubric) / kinds
    return {
        "model": MODEL,
        "topology": s.topology.name,
        "chips": s.chips,
        "mesh": {**s.mesh.shape, "train": s.cfg.mesh.train},
        "fits": all(p.over <= 0 for p in found),
        "exact": all(p.exact for p in step.programs.values()),
        "headroom": HEADROOM,
        "programs": [_program(p) for p in step.programs.values()],
        "phases": [
            {"name": p.name, "program": p.program, "peak_bytes": p.peak, "budget_bytes": p.budget, "beside": p.beside,
             "program_bytes": p.program_bytes, "fits": p.over <= 0, "advice": advice(s, p) if p.over > 0 else []}
            for p in found
        ],
        "step_seconds": mean,
        "step": {name: {"policy": a, "rubric": b} for name, (a, b) in step.parts.items()},
        "policy_step_seconds": policy,
        "rubric_step_seconds": rubric,
        "sampled_tokens_per_second": sum(step.sampled_tokens) / kinds / mean if mean else 0.0,
        "trained_tokens_per_second": sum(step.trained_tokens) / kinds / mean if mean else 0.0,
        "mfu": step.mfu,
        "mfu_of_step": step.mfu_step,
        "decode_collectives_share": step.decode_collectives,
        "rows_running_on_a_host": step.rows_running,
        "micro_batches": step.micro_batches,
        "chip_hours": chip_hours(s, step),
        "lengths": work.text,
        "left_out": left_out(s),
    }  # fmt: skip


def table(plans: list[dict[str, Any]]) -> str:
    """Several plans, one a line."""
    out = [MODEL, "fits | worst phase GiB of budget | seconds a step | update MFU | chip-hours | what"]
    for p in plans:
        worst = max(p["phases"], key=lambda x: x["peak_bytes"] - x["budget_bytes"])
        what = " ".join(p["overrides"]) if "overrides" in p else f"{p['topology']}, efficiency {p['efficiency']:.2f}"
        if p.get("blame"):
            b = p["blame"]
            what += (
                f"; {b['part']} took {b['seconds']:.1f} s, before {b['seconds_before']:.1f}: {b['program']}, {b['collective']}"
            )
        out.append(f"{'yes' if p['fits'] else 'NO':4s} | {worst['peak_bytes'] / GIB:.2f} of {worst['budget_bytes'] / GIB:.2f} "
                   f"({worst['name']}) | {p['step_seconds']:.1f} | {p['mfu']:.1%} | {p['chip_hours']:,.0f} | {what}")  # fmt: skip
    return "\n".join(out if plans else [*out, "none fits"])


def _program(p: Figures) -> dict[str, Any]:
    out = dataclasses.asdict(p)
    out["collective_bytes_by_kind"] = out["collective_bytes"]
    out["collective_bytes"] = sum(p.collective_bytes.values())
    out["runs"] = {"policy": p.runs[0], "rubric": p.runs[1]}
    return out


def as_text(s: Slice, found: list[Phase], step: Step, work: Workload) -> str:
    """For a person."""
    lines = [
        MODEL,
        f"{s.cfg.name} on {s.topology.name}: {s.chips} chips, mesh {dict(s.mesh.shape)}, training over {s.cfg.mesh.train}",
        "",
    ]
    lines += _programs(step)
    lines += _phases(s, found)
    lines += _step(s, step, work)
    lines += [f"  not counted: {line}" for line in left_out(s)]
    return "\n".join(lines)


def _programs(step: Step) -> list[str]:
    out = ["programs, a device: peak GiB | TFLOP | GiB moved | GiB in collectives | seconds (of them exposed collectives)"]
    for p in step.programs.values():
        how = f"{p.layers} layers" if p.exact else f"{p.layers} layers by a line through shallow compiles"
        notes = "" if p.in_place else "; NOT IN PLACE: donated memory is copied"
        notes += f"; {p.warnings} involuntary rematerialisations" if p.warnings else ""
        out.append(
            f"  {p.name:28s} {p.peak_bytes / GIB:6.2f} | {p.flops / 1e12:9.2f} | {p.bytes / GIB:9.1f} | "
            f"{sum(p.collective_bytes.values()) / GIB:8.2f} | {p.seconds:8.3f} ({p.exposed_seconds:.3f})  {how}{notes}"
        )
        kinds = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in p.collective_bytes.items() if size > MIB)
        if kinds:
            out.append(f"  {'':28s} {kinds}; across hosts {p.crossing_bytes / GIB:.2f}")
    return [*out, ""]


def _phases(s: Slice, found: list[Phase]) -> list[str]:
    budget = found[0].budget / GIB if found else 0
    out = [f"phases: GiB of a device, of {budget:.2f} ({HEADROOM:.0%} of what the compiler allows stay free)"]
    for p in found:
        beside = ", ".join(f"{name} {size / GIB:.2f}" for name, size in p.beside.items())
        verdict = "fits" if p.over <= 0 else "DOES NOT FIT"
        out.append(f"  {p.name:34s} {p.peak / GIB:6.2f}  {verdict}: program {p.program_bytes / GIB:.2f}; beside it {beside}")
        out += [f"  {'':34s} change: {line}" for line in (advice(s, p) if p.over > 0 else [])]
    fits = all(p.over <= 0 for p in found)
    return [*out, f"  every phase fits: {'yes' if fits else 'NO'}", ""]


def _step(s: Slice, step: Step, work: Workload) -> list[str]:
    policy, rubric = step.seconds
    steps = has_steps(s.cfg)[0] * len(policy_names(s.cfg)) + has_steps(s.cfg)[1]
    out = [f"step, modelled ({work.text})", f"  {'seconds':28s} {'policy step':>12s} {'rubric step':>12s}"]
    out += [f"  {name:28s} {a:12.2f} {b:12.2f}" for name, (a, b) in step.parts.items()]
    tokens = sum(step.sampled_tokens) / (policy + rubric) if policy + rubric else 0.0
    running = ", ".join(f"{kind} {rows:.1f}" for kind, rows in step.rows_running.items())
    return [
        *out, f"  {'sum':28s} {policy:12.2f} {rubric:12.2f}",
        f"  {tokens:,.0f} tokens sampled a second; rows that run on a host: {running}",
        f"  micro-batches of an update: {step.micro_batches[0]} and {step.micro_batches[1]}",
        f"  MFU of the update {step.mfu:.1%} (within sequences, recomputation not counted), "
        f"of a policy step {step.mfu_step:.1%}",
        f"  exposed collectives take {step.decode_collectives:.1%} of the decode time",
        f"  {chip_hours(s, step):,.0f} chip-hours for {s.cfg.schedule.cycles} cycles of {steps} x {s.cfg.schedule.k} updates "
        f"({chip_hours(s, step) / s.chips:,.0f} hours on this slice)",
    ]  # fmt: skip


def estimate_text(s: Slice, found: Estimate) -> str:
    """An estimate for a person: what lives, both peaks and the seconds of a policy step."""
    alive = at_a_time(s, residents(s))
    budget = found.budget / GIB
    lines = ["An estimate by arithmetic: nothing was compiled, and a plan may say otherwise. GiB of a device."]
    lines += [f"{s.cfg.name} on {s.topology.name}: {s.chips} chips, mesh {dict(s.mesh.shape)}"]
    lines += [f"  {name:28s} {size / GIB:8.2f}" for name, size in alive.items() if size]
    lines += [f"  {'in an update':28s} {found.update_bytes / GIB:8.2f} of {budget:.2f}"]
    lines += [f"  {'in a rollout':28s} {found.rollout_bytes / GIB:8.2f} of {budget:.2f}"] if s.samples else []
    lines += [f"  may fit: {'yes' if found.may_fit else 'NO'} (up to a tenth over the budget counts as yes: an estimate errs)"]
    lines += [f"  programs of a plan: {', '.join(programs(s))}"]
    lines += [f"  seconds of a step, about: update {found.update_seconds:.0f}, sampling {found.decode_seconds:.0f}"]
    return "\n".join([*lines, *(f"  not counted: {line}" for line in left_out(s))])
