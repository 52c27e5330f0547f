"""Other ways to run a config on a slice (--search), and the same work a chip on larger slices (--scale)."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from coevo_jax import aot
from coevo_jax.config import Experiment
from coevo_jax.config.override import print_config
from coevo_jax.errors import UserError
from coevo_jax.plan.cast import Slice
from coevo_jax.plan.compiled import Say, compile_all
from coevo_jax.plan.estimate import estimate, scaled, variants
from coevo_jax.plan.phases import phases
from coevo_jax.plan.report import as_json
from coevo_jax.plan.step import Step, Workload, model_step

BEST = 5
EFFICIENT = 0.85


def search(s: Slice, work: Workload, cache: pathlib.Path, *, full: bool, say: Say) -> list[dict[str, Any]]:
    """The best by estimate, compiled: those that fit, fastest first, each with the overrides that make it."""
    hosts = len(set(s.topology.hosts))
    ranked, tried = [], 0
    for cfg in variants(s.cfg, hosts, s.chips):
        try:
            found = estimate(dataclasses.replace(s, cfg=cfg), work)
        except UserError:  # slots or rows that do not divide: no candidate
            continue
        tried += 1
        if found.may_fit:
            ranked.append((found.seconds, cfg))
    ranked.sort(key=lambda x: x[0])
    say(f"{tried} configs estimated, {len(ranked)} may fit; the best {min(BEST, len(ranked))} are compiled")
    out = [_tried(dataclasses.replace(s, cfg=cfg), s.cfg, seconds, work, cache, full, say) for seconds, cfg in ranked[:BEST]]
    return sorted((o for o in out if o["fits"]), key=lambda o: o["step_seconds"])


def _tried(
    s: Slice, before: Experiment, estimated: float, work: Workload, cache: pathlib.Path, full: bool, say: Say
) -> dict[str, Any]:
    changes = overrides(before, s.cfg)
    say(f"{' '.join(changes) or 'the config as it is'}: {estimated:.0f} s by estimate")
    try:
        compiled = compile_all(s, cache, full=full, say=say)
    except UserError as error:
        say(f"  {error}")
        return {"fits": False, "overrides": changes, "estimated_seconds": estimated, "error": str(error)}
    plan = as_json(s, phases(s, compiled), model_step(s, compiled, work), work)
    say(f"  {'fits' if plan['fits'] else 'does not fit'}, {plan['step_seconds']:.0f} s a step")
    return {"overrides": changes, "estimated_seconds": estimated, **plan}


def overrides(before: Experiment, after: Experiment) -> list[str]:
    """The flags that lead from one config to the other."""
    lines = set(print_config(before).splitlines())
    return [f"--config.{line}" for line in print_config(after).splitlines() if line not in lines]


def scale(s: Slice, names: Sequence[str], work: Workload, cache: pathlib.Path, *, full: bool, say: Say) -> list[dict[str, Any]]:
    """The config on its slice and on larger ones with prompts and slots grown alike. efficiency: seconds of the first over those
    of the other; where it is below EFFICIENT, `blame` names the part, its program and its largest collective."""
    out: list[dict[str, Any]] = []
    first: tuple[Slice, Step] | None = None
    for name in (s.topology.name, *names):
        topology = aot.topology(name)
        other = dataclasses.replace(s, topology=topology, cfg=grown(s.cfg, s.chips, len(topology.devices)))
        say(f"{name}: {other.chips} chips, {other.cfg.schedule.prompts} prompts")
        compiled = compile_all(other, cache, full=full, say=say)
        step = model_step(other, compiled, work)
        first = first or (other, step)
        plan = as_json(other, phases(other, compiled), step, work)
        efficiency = sum(first[1].seconds) / sum(step.seconds)
        blame = worst(first[1], step) if efficiency < EFFICIENT else None
        out.append({"efficiency": efficiency, "prompts": other.cfg.schedule.prompts, "blame": blame, **plan})
    return out


def grown(cfg: Experiment, chips: int, more: int) -> Experiment:
    """Prompts, rows of a micro-batch and slots times more / chips."""
    ratio = more / chips
    if (cfg.schedule.prompts * ratio) % 1 or (cfg.update.rows_per_micro * ratio) % 1:
        raise UserError(f"{cfg.schedule.prompts} prompts do not grow from {chips} to {more} chips", where="--scale",
                        expected="slices with a multiple of the chips")  # fmt: skip
    schedule = dataclasses.replace(cfg.schedule, prompts=round(cfg.schedule.prompts * ratio))
    update = dataclasses.replace(cfg.update, rows_per_micro=round(cfg.update.rows_per_micro * ratio))
    classes = scaled(cfg.sampler.length_classes, ratio, 1)
    sampler = dataclasses.replace(cfg.sampler, length_classes=classes, slots=sum(n for n, _ in classes))
    judge, *others = (
        dataclasses.replace(one, length_classes=scaled(one.length_classes, ratio, 1)) for one in (cfg.judge, *cfg.panel.judges)
    )
    panel = dataclasses.replace(cfg.panel, judges=tuple(others))
    return dataclasses.replace(cfg, schedule=schedule, update=update, sampler=sampler, judge=judge, panel=panel)


def worst(before: Step, after: Step) -> dict[str, Any]:
    """The part that grew most, and what of its program's collectives takes longest."""
    name = max(after.parts, key=lambda n: sum(after.parts[n]) - sum(before.parts.get(n, (0.0, 0.0))))
    role = {"answers": "policy", "rubrics": "policy", "verdicts": "judge"}.get(name.split(":")[0], "")
    program = f"{role} {name.split(': ')[1]}" if role else name
    kinds = after.programs[program].collective_bytes
    return {
        "part": name,
        "program": program,
        "seconds": sum(after.parts[name]) / 2,
        "seconds_before": sum(before.parts.get(name, (0.0, 0.0))) / 2,
        "collective": max(kinds, key=lambda k: kinds[k]) if kinds else "none",
        "exposed_seconds": after.programs[program].exposed_seconds,
    }
