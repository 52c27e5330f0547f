"""Memory of a device phase by phase: the peak of each program, and everything else that is alive on the device then.

Nothing is rounded in favour of a plan: what a program takes as an argument is in its peak, all other state stands beside it.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from coevo_jax import aot
from coevo_jax.config.check_dpo import ALONE as DPO_MODES
from coevo_jax.config.several import policy_names
from coevo_jax.learn.publish import same_places
from coevo_jax.learn.update import rows_devices
from coevo_jax.mesh import mesh_axes
from coevo_jax.models.load import critic_source
from coevo_jax.models.remat import kept_bytes
from coevo_jax.models.spec import ModelSpec
from coevo_jax.plan.cast import Slice
from coevo_jax.plan.compiled import Program
from coevo_jax.plan.programs import (
    base_params,
    device_bytes,
    judge_weights,
    prefill_program,
    reference_params,
    train_state,
)
from coevo_jax.sampler import ahead
from coevo_jax.sampler.engine import Engine

HEADROOM = 0.03  # of what the compiler lets a program use: left free, for the runtime and fragments
GIB = aot.GIB


@dataclasses.dataclass(frozen=True)
class Phase:
    """A program at work and what stands beside it, in bytes of a device."""

    name: str
    program: str
    program_bytes: int
    beside: dict[str, int]
    budget: int

    @property
    def peak(self) -> int:
        return self.program_bytes + sum(self.beside.values())

    @property
    def over(self) -> int:
        """Bytes that do not fit (negative: what is left)."""
        return self.peak - self.budget


def budget_of(chip: aot.Chip) -> int:
    """Bytes that a phase may use."""
    return int(chip.hbm_program * (1 - HEADROOM))


def residents(s: Slice) -> dict[str, int]:
    """What lives through the whole run, by name: of each trained model its parameters, moments, reference and decode copy, its
    critic, the weights of frozen policies, and those of every judge (of whom only some hold them at a time: Slice.turns).
    With adapters the parameters are these, and models of one source have one base."""
    out: dict[str, int] = {}
    for role, spec in s.trained.items():
        if not s.learns(role):  # held for decoding alone
            out[f"{role} decode copy"] = device_bytes(ahead.weights(spec, s.mesh, s.cfg.policy.dtype))
            continue
        out |= _state(s, role, spec)
        if not s.samples:
            continue
        if s.cfg.loss.kl_weight > 0 and s.cfg.update.reference == "device" and s.cfg.schedule.mode not in DPO_MODES:
            out[f"{role} reference"] = device_bytes(reference_params(s, spec))
        shared = s.cfg.lora.rank == 0 and s.cfg.policy.dtype == s.cfg.policy.param_dtype and same_places(spec, s.rules, s.mesh)
        out[f"{role} decode copy"] = 0 if shared else device_bytes(ahead.weights(spec, s.mesh, s.cfg.policy.dtype))
    for name, spec in s.critics.items():
        out |= _state(s, name, spec)
    for name, spec in s.frozen.items():
        out[f"{name} decode copy"] = device_bytes(ahead.weights(spec, s.mesh, s.cfg.policy.dtype))
    return out | {f"{name} weights": device_bytes(judge_weights(s, False, name)) for name in s.judges}


def _state(s: Slice, name: str, spec: ModelSpec) -> dict[str, int]:
    state = train_state(s, spec)
    params = device_bytes(state.params)
    out = {f"{name} parameters": params, f"{name} moments": device_bytes(state) - params}
    return out | ({base_name(s, name): device_bytes(base_params(s, spec)[0])} if base_name(s, name) == f"{name} base" else {})


def base_name(s: Slice, role: str) -> str:
    """The resident that is the frozen base under a role's adapters, named after the first role of its source; '' without."""
    if s.cfg.lora.rank == 0:
        return ""
    policies = dict(zip(policy_names(s.cfg), (s.cfg.policy, *s.cfg.policies)))

    def source(name: str) -> str:
        if name.startswith("critic_"):
            return critic_source(s.cfg, name.removeprefix("critic_")).source
        return policies[name].source if name in policies else s.cfg.generator.source or s.cfg.policy.source

    return next(f"{name} base" for name in (*s.trained, *s.critics) if source(name) == source(role))


def at_a_time(s: Slice, alive: dict[str, int], role: str = "") -> dict[str, int]:
    """Of the residents those that live while `role` works: of judges that take turns one turn's, the largest."""
    if not s.judges:
        return dict(alive)
    seated = s.seated({name: alive[f"{name} weights"] for name in s.judges}, role)
    return {name: size for name, size in alive.items() if name.split(" ")[0] not in set(s.judges) - seated}


def beside(s: Slice, program: str, alive: dict[str, int]) -> dict[str, int]:
    """What is alive while `program` runs and is none of its arguments. alive: `residents`."""
    role, kind = program.split(" ", 1)
    out = at_a_time(s, alive, role)
    if kind == "update":  # the decode copy goes before an update, which takes the state
        for name in (f"{role} parameters", f"{role} moments", f"{role} decode copy", base_name(s, role)):
            out.pop(name, None)
    elif kind == "publish":  # the old copy goes first, the new one is its result
        out.pop(f"{role} decode copy")
        if s.cfg.lora.rank == 0:  # adapters stay, and the base, beside what they were merged into
            out.pop(f"{role} parameters")
    elif kind == "values":
        for name in (f"{role} parameters", base_name(s, role)):
            out.pop(name, None)
    elif kind.endswith("log-probs"):
        for name in (f"{role} {'reference' if kind.startswith('reference') else 'parameters'}", base_name(s, role)):
            out.pop(name, None)
    else:
        out |= _sampler_state(s, role, kind)
        out.pop(f"{role} weights" if role in s.judges else f"{role} decode copy")
    return {name: size for name, size in out.items() if size}


def _sampler_state(s: Slice, role: str, kind: str) -> dict[str, int]:
    """Of a call of the engine: the copy of the layers that decodes, slots, shared heads and what one prefill left."""
    (spec, engine), judging = s.player(role), role in s.judges
    split = device_bytes((judge_weights(s, True, role) if judging else ahead.split_weights(spec, s.mesh))["layers"])
    if kind == "scoring":  # needs no slots
        return {}
    if kind == "prefill":
        slots = device_bytes(ahead.state(engine))
        return {f"{role} layers for decode": split, "slots": slots, "prefilled, not admitted": prefilled_bytes(engine)}
    stacked = device_bytes((judge_weights(s, False, role) if judging else ahead.weights(spec, s.mesh))["layers"])
    out = {f"{role} layers for prefill": stacked, "prefilled, not admitted": prefilled_bytes(engine)}
    if (engine.cfg.share_heads or engine.cfg.share_decode) and not engine.cfg.share_decode:
        out["shared heads"] = device_bytes(ahead.store(engine))
    return out


def prefilled_bytes(engine: Engine) -> int:
    """Keys and values of the largest prefill."""
    spec, variant = engine.spec, prefill_program(engine, "").function.keywords["variant"]
    tensor = engine.mesh.shape["tensor"] if engine.mesh is not None and spec.kv_heads % engine.mesh.shape["tensor"] == 0 else 1
    rows, length = variant.shape
    return 2 * rows * length * spec.layers * spec.kv_heads * spec.head_dim * jnp.dtype(engine.kv_dtype).itemsize // tensor


NAMES = {"update": "update", "publish": "publish", "prefill": "rollout: prefill", "decode": "rollout: decode"}


def phases(s: Slice, compiled: dict[str, Program]) -> list[Phase]:
    """Every phase of a step, in its order."""
    alive, budget = residents(s), budget_of(s.topology.chip)
    out = []
    for name, program in compiled.items():
        role, kind = name.split(" ", 1)
        title = f"judging: {kind}" if role in s.judges else NAMES.get(kind, kind)
        title += "" if role == "judge" else f" ({role})"
        out.append(Phase(title, name, program.memory.peak, beside(s, name, alive), budget))
    order = ("rollout", "judging", "reference", "pair", "old", "values", "update", "publish")
    return sorted(out, key=lambda p: next(i for i, word in enumerate(order) if p.name.startswith(word)))


# ------------------------------------------------------------------------------------------------------------------ advice


def advice(s: Slice, phase: Phase) -> list[str]:
    """What would make a phase fit that does not, each with what it saves on a device; the largest saving first."""
    role, kind = phase.program.split(" ", 1)
    options = _for_sampler(s, phase, role) if kind in ("prefill", "decode") else _for_update(s, phase)
    options += _for_residents(s, phase)
    options = sorted((o for o in options if o[0] > 0), key=lambda o: -o[0])
    return [f"{text} (saves {saved / GIB:.2f} of the {phase.over / GIB:.2f} GiB too many)" for saved, text in options]


def _for_sampler(s: Slice, phase: Phase, role: str) -> list[tuple[int, str]]:
    _, engine = s.player(role)
    held = device_bytes(ahead.state(engine))
    slots = sum(n for n, _ in engine.classes)
    keep = max(0.0, 1 - phase.over / held) if held else 0.0
    seat = s.judges.get(role)
    key = f"{seat.key}.length_classes" if seat and seat.cfg.length_classes else "sampler.length_classes"
    fewer = int(slots * keep)
    out = [(held - int(held * fewer / slots), f"fewer slots in {key}: {fewer} in place of {slots}")] if fewer else []
    if s.cfg.sampler.kv_dtype == "bfloat16":
        out.append((held // 2, "sampler.kv_dtype=int8"))
    return out


def _for_update(s: Slice, phase: Phase) -> list[tuple[int, str]]:
    u, spec = s.cfg.update, s.spec(phase.program.split(" ")[0])
    tokens = u.pack_length * max(1, u.rows_per_micro // rows_devices(s.mesh, s.rules))
    chips = math.prod(s.mesh.shape[axis] for axis in mesh_axes(s.rules.time))
    out: list[tuple[int, str]] = []
    if u.remat != "full":
        kept = kept_bytes(spec, u.remat) - kept_bytes(spec, "full")
        out.append((round(tokens / chips * kept * spec.layers), "update.remat=full"))
    if s.cfg.mesh.train == "fsdp" and s.mesh.shape["tensor"] > 1:
        kept = tokens * kept_bytes(spec, u.remat) * spec.layers
        out.append((round(kept * (1 - 1 / s.mesh.shape["tensor"])), "mesh.train=context: a row over the chips of a host"))
    if s.cfg.mesh.train == "tensor" and s.mesh.shape["data"] > 1:
        out.append((phase.program_bytes // 2, "mesh.train=fsdp with mesh.data=1 and mesh.fsdp=-1: the state over all chips"))
    return out


def _for_residents(s: Slice, phase: Phase) -> list[tuple[int, str]]:
    alive, cfg = residents(s), s.cfg
    out: list[tuple[int, str]] = []
    if cfg.optimizer.mu_dtype == "float32":
        out.append((sum(n for name, n in alive.items() if name.endswith("moments")) // 4, "optimizer.mu_dtype=bfloat16"))
    references = sum(n for name, n in alive.items() if name.endswith("reference"))
    if references and cfg.lora.rank == 0:
        out.append((references, "update.reference=host"))
    for name in at_a_time(s, alive):
        if (seat := s.judges.get(name.split(" ")[0])) and seat.engine and seat.cfg.weights == "full":
            out.append((alive[name] // 2, f"{seat.key}.weights=int8"))
    if s.mesh.shape["data"] > s.topology.slices:
        halved = sum(n for name, n in alive.items() if name.split(" ")[-1] in ("base", "parameters", "moments", "reference")) // 2
        out.append((halved, "a larger mesh.fsdp"))
    return out
