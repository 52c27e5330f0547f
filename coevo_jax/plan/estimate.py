"""An analytic estimate of memory and time, to choose what is worth a compile. Rough on purpose; a plan never rests on it.

Axes: T tokens of a row, D model, F feed-forward, V vocabulary, L layers.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from coevo_jax.config import Experiment
from coevo_jax.cost import product_parameters
from coevo_jax.cost.program import OF_BANDWIDTH, OF_PEAK
from coevo_jax.cost.useful import head_parameters
from coevo_jax.learn.update import rows_devices
from coevo_jax.models.remat import kept_bytes, kept_parts, made_again
from coevo_jax.plan.calls import calls, has_steps
from coevo_jax.plan.cast import Slice
from coevo_jax.plan.lengths import drain_of
from coevo_jax.plan.phases import at_a_time, budget_of, residents
from coevo_jax.plan.programs import device_bytes
from coevo_jax.plan.step import Workload, text_lengths, trained_rows
from coevo_jax.sampler import ahead

REMATS = ("full", "attention+qkv", "attention+qkv+residual", "attention+qkv+residual+gate", "attention+qkv+residual+gate+up")
RESERVE = 2 << 30  # bytes: what a dispatch of decode or a prefill needs beside its arguments


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes of a device in an update and in a rollout, and seconds of a policy step (a rubric step, where it is alone)."""

    update_bytes: float
    rollout_bytes: float
    update_seconds: float
    decode_seconds: float
    budget: int

    @property
    def seconds(self) -> float:
        return self.update_seconds + self.decode_seconds

    @property
    def may_fit(self) -> bool:
        """With a tenth to spare for what the estimate does not know."""
        return max(self.update_bytes, self.rollout_bytes) <= 1.1 * self.budget


def estimate(s: Slice, work: Workload) -> Estimate:
    """Of the config as it is."""
    return Estimate(
        update_bytes(s), rollout_bytes(s), update_seconds(s, work), decode_seconds(s, work), budget_of(s.topology.chip)
    )


def tokens_of_chip(s: Slice) -> tuple[float, int]:
    """Tokens of a micro-batch that a chip's group holds, and the chips that share their products."""
    u, devices = s.cfg.update, rows_devices(s.mesh, s.rules)
    height = -(-u.rows_per_micro // devices) * devices
    return u.pack_length * height / devices, s.chips // devices


def update_bytes(s: Slice) -> float:
    """State, gradients, what the layers keep, one layer at work and the head."""
    spec, (tokens, shared) = s.policy, tokens_of_chip(s)
    alive = at_a_time(s, residents(s))
    beside = sum(n for name, n in alive.items() if not name.endswith("decode copy"))
    size = 4 if s.cfg.lora.rank > 0 else jnp.dtype(s.cfg.policy.param_dtype).itemsize
    gradients = alive["policy parameters"] * 4 / size
    layer = (product_parameters(spec) - head_parameters(spec)) / spec.layers
    gathered = 2 * 2.0 * layer / (shared if s.cfg.mesh.train == "tensor" else 1)
    tokens = tokens / shared if s.cfg.mesh.train == "context" else tokens
    work = tokens * (10.0 * spec.mlp_size / (1 if s.cfg.mesh.train == "context" else shared) + 8.0 * spec.hidden_size) + gathered
    head = 8.0 * head_parameters(spec) / s.mesh.shape["tensor"]
    return beside + gradients + tokens * kept_bytes(spec, s.cfg.update.remat) * spec.layers + work + head


def rollout_bytes(s: Slice) -> float:
    """Everything that lives, the layers' second copy, the slots and a reserve."""
    alive = sum(at_a_time(s, residents(s)).values())
    if not s.samples:
        return alive
    layers = device_bytes(ahead.split_weights(s.policy, s.mesh)["layers"])
    heads = device_bytes(ahead.store(s.engine)) if s.cfg.sampler.share_heads else 0
    return alive + layers + device_bytes(ahead.state(s.engine)) + heads + RESERVE


def update_seconds(s: Slice, work: Workload) -> float:
    """Products and attention at 0.75 of the peak; sums over `tensor` after each block, which nothing hides, over one link."""
    cfg, spec, (tokens, shared) = s.cfg, s.policy, tokens_of_chip(s)
    rows = trained_rows(s, work)[not has_steps(cfg)[0]]
    pairs = cfg.update.pack_length / 2 * tokens * rows.visited
    once = 2.0 if cfg.lora.rank > 0 else 3.0  # a frozen matrix has no gradient
    products = 2.0 * product_parameters(spec) * tokens * (once + made_again(spec, cfg.update.remat))
    passes = 4.5 + ("attention" not in kept_parts(cfg.update.remat))  # of splash, its forward pass counted as 1
    attention = 4.0 * pairs * spec.heads * spec.head_dim * spec.layers * passes
    flops = (products + attention) / shared / (s.topology.chip.bf16_flops * OF_PEAK)
    heads = cfg.mesh.train == "tensor" and shared > 1
    sums = 6 * spec.layers * 2 * 2.0 * tokens * spec.hidden_size * (shared - 1) / shared if heads else 0.0
    return rows.micro_batches * (flops + sums / (2 * s.topology.chip.ici_link))


def decode_seconds(s: Slice, work: Workload) -> float:
    """Weights and what is filled of the cache, read at 0.8 of the bandwidth, as often as the scheduler's rules dispatch."""
    rate, total = s.topology.chip.hbm_bandwidth * OF_BANDWIDTH, 0.0
    hosts = math.prod(s.mesh.shape[axis] for axis in ("data", "fsdp"))
    for call in calls(s, work.criteria):
        (spec, engine), tensor = s.player(call.role), s.mesh.shape["tensor"]
        classes = tuple((n // hosts, size) for n, size in engine.classes)
        if not (count := call.counts[not has_steps(s.cfg)[0]]) or call.kind == "judgement":  # which decodes nothing
            continue
        lengths = text_lengths(s, work, call.kind, count, call.role)
        drain = drain_of(classes, lengths, -(-count // hosts), engine.cfg.steps_per_dispatch, engine.cfg.read_lag)
        slots = sum(n for n, _ in classes)
        cache = slots * drain.read * 4.0 * spec.layers * spec.kv_heads * spec.head_dim / tensor
        step = (2.0 * product_parameters(spec) / tensor + cache) / rate
        total += drain.dispatches * engine.cfg.steps_per_dispatch * step
    return total


def variants(cfg: Experiment, hosts: int, chips: int) -> list[Experiment]:
    """Configs around one: how training lies on the mesh, tensor, rows of a micro-batch, remat, and slots."""
    out = []
    for train in ("context", "fsdp", "tensor"):
        for tensor in (4, 2, 1) if train != "context" else (4,):
            for remat in dict.fromkeys((cfg.update.remat, *REMATS)):
                for rows in (1, 2):
                    for share in (0.5, 0.75, 1.0, 1.5, 2.0):
                        out.append(_variant(cfg, hosts * 4 // tensor, chips, train, tensor, remat, rows, share))
    return list(dict.fromkeys(out))


def _variant(
    cfg: Experiment, shards: int, chips: int, train: str, tensor: int, remat: str, rows: int, share: float
) -> Experiment:
    mesh = dataclasses.replace(cfg.mesh, train=train, tensor=tensor)
    devices = chips if train == "fsdp" else chips // tensor
    apart = 512 * tensor if train == "context" else 128
    length = -(-cfg.update.pack_length // apart) * apart
    update = dataclasses.replace(cfg.update, remat=remat, rows_per_micro=rows * devices, pack_length=length)
    classes = scaled(cfg.sampler.length_classes, share, shards)
    sampler = dataclasses.replace(cfg.sampler, slots=sum(n for n, _ in classes), length_classes=classes)
    judge = dataclasses.replace(cfg.judge, length_classes=scaled(cfg.judge.length_classes, 1.0, shards))
    return dataclasses.replace(cfg, mesh=mesh, update=update, sampler=sampler, judge=judge)


def scaled(classes: tuple[tuple[int, int], ...], share: float, shards: int) -> tuple[tuple[int, int], ...]:
    """Slots times `share`, each class a multiple of the shards they are dealt to and at least one each."""
    return tuple((max(1, round(n * share / shards)) * shards, size) for n, size in classes)
