"""The programs of a run as shapes on a slice that nobody owns: what is compiled for a plan is what the run would compile.

Axes: M micro-batches, B rows of one, T tokens of a row, S segments of a row.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from coevo_jax import aot
from coevo_jax.config import Experiment, api_model, judge_sampler
from coevo_jax.config.validate import generator_learns
from coevo_jax.learn.losses import resolve_loss
from coevo_jax.learn.packing import TokenBatch
from coevo_jax.learn.publish import make_publish
from coevo_jax.learn.update import TrainState, logprobs_program, make_optimizer, make_update, rows_devices, state_shardings
from coevo_jax.mesh import make_mesh, param_shardings, replicated, train_rules
from coevo_jax.models.forward import param_shapes
from coevo_jax.models.known import STOP_IDS, known_spec
from coevo_jax.models.quantize import INPUT_AXES, quantized_infos
from coevo_jax.models.spec import ModelSpec
from coevo_jax.sampler import ahead, scoring
from coevo_jax.sampler.engine import Engine


@dataclasses.dataclass(frozen=True)
class Planned:
    """One program: a function (or a jitted one, with options of its own) over shapes, and which arguments are donated."""

    name: str
    function: Any
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    out_shardings: Any = None

    @property
    def donated(self) -> int:
        """Bytes of a device that must be written in place."""
        return sum(device_bytes(self.args[i]) for i in self.donate)


@dataclasses.dataclass(frozen=True)
class Slice:
    """A config on a topology: its mesh, specs and engines. `layers` cuts the models' depth (0: all), to compile sooner."""

    cfg: Experiment
    topology: aot.Topology
    layers: int = 0

    @functools.cached_property
    def mesh(self) -> Mesh:
        return make_mesh(self.cfg.mesh, self.topology.devices)

    @property
    def rules(self) -> Any:
        return train_rules(self.cfg.mesh)

    @functools.cached_property
    def policy(self) -> ModelSpec:
        return self._cut(known_spec(self.cfg.policy.source, "policy.source"))

    @functools.cached_property
    def generator(self) -> ModelSpec | None:
        """The rubric generator's own model, or None where it is the policy's or behind an endpoint."""
        own = self.cfg.generator
        if own.mode != "two" or api_model(own.source):
            return None
        return self._cut(known_spec(own.source, "generator.source")) if own.source else self.policy

    @functools.cached_property
    def judge(self) -> ModelSpec | None:
        """None where the judge has no weights here."""
        judge = self.cfg.judge
        if judge.protocol == "oracle" or api_model(judge.source):
            return None
        return self._cut(known_spec(judge.source, "judge.source"))

    def _cut(self, spec: ModelSpec) -> ModelSpec:
        return dataclasses.replace(spec, layers=min(self.layers or spec.layers, spec.layers))

    def learns(self, role: str) -> bool:
        """Does the run train this role's own weights?"""
        return role == "policy" or generator_learns(self.cfg)

    @property
    def trained(self) -> dict[str, ModelSpec]:
        """Sets of weights by role, trained but for a generator that nothing trains (`learns`)."""
        return {"policy": self.policy} | ({"rubric": self.generator} if self.generator else {})

    @functools.cached_property
    def engine(self) -> Engine:
        """The policy's (and, of the same architecture, the generator's)."""
        return Engine(self.policy, self.cfg.sampler, STOP_IDS, mesh=self.mesh)

    @functools.cached_property
    def judge_engine(self) -> Engine:
        assert self.judge is not None
        return Engine(self.judge, judge_sampler(self.cfg.sampler, self.cfg.judge), STOP_IDS, mesh=self.mesh)

    @property
    def chips(self) -> int:
        return len(self.topology.devices)


# ------------------------------------------------------------------------------------------------------------------ shapes


def device_bytes(tree: Any) -> int:
    """Bytes on one device of arrays known by shape and sharding."""
    return sum(int(x.dtype.itemsize) * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))


def _is_info(x: Any) -> bool:
    return hasattr(x, "axes")


def _shaped(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def trained_params(s: Slice, spec: ModelSpec) -> Any:
    """The trainer's parameters."""
    infos, dtype = param_shapes(spec), jnp.dtype(s.cfg.policy.param_dtype)
    shapes = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, dtype), infos, is_leaf=_is_info)
    return _shaped(shapes, param_shardings(infos, s.mesh, s.rules))


def reference_params(s: Slice, spec: ModelSpec) -> Any:
    """Frozen for the KL term: matrices in the dtype of the computation (learn.publish.cast_matrices)."""

    def leaf(path: Any, x: Any) -> Any:
        dtype = jnp.dtype(s.cfg.policy.dtype) if path[-1].key in INPUT_AXES else x.dtype
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)

    return jax.tree_util.tree_map_with_path(leaf, trained_params(s, spec))


def train_state(s: Slice, spec: ModelSpec) -> TrainState:
    """Parameters, moments and step."""
    optimizer, params = make_optimizer(s.cfg.optimizer, 1), trained_params(s, spec)
    shapes = jax.eval_shape(lambda p: TrainState(p, optimizer.transform.init(p), jnp.zeros((), jnp.int32)), params)
    return _shaped(shapes, state_shardings(spec, optimizer, s.mesh, s.rules))


def batch(s: Slice, passes: tuple[str, ...]) -> TokenBatch:
    """Packed rows [M,B,T] as Learner.update makes them; `passes`: log-probs that came before (old_logp, ref_logp)."""
    u, schedule = s.cfg.update, s.cfg.schedule
    devices = rows_devices(s.mesh, s.rules)
    B = -(-u.rows_per_micro // devices) * devices
    M = -(-schedule.prompts * schedule.group // B)
    spread = NamedSharding(s.mesh, PartitionSpec(None, s.rules.batch))
    kinds = {"mask": np.bool_, "truncated": np.bool_, "advantage": np.float32, "sampler_logp": np.float32}
    kinds |= dict.fromkeys(passes, np.float32)
    names = ("tokens", "positions", "segment_ids", "targets", "parent_ids", "advantage", "sampler_logp", "mask", *passes)
    arrays = {n: jax.ShapeDtypeStruct((M, B, u.pack_length), kinds.get(n, np.int32), sharding=spread) for n in names}
    for n in ("truncated", "owner"):
        arrays[n] = jax.ShapeDtypeStruct((M, B, u.max_segments), kinds.get(n, np.int32), sharding=spread)
    return TokenBatch(**arrays)


def judge_weights(s: Slice, split: bool) -> Any:
    """The judge's weights where decoding wants them, stacked or a tree a layer."""
    assert s.judge is not None
    dtype = jnp.dtype(s.cfg.judge.dtype)
    if s.cfg.judge.weights == "full":
        return (ahead.split_weights if split else ahead.weights)(s.judge, s.mesh, dtype)
    infos = quantized_infos(param_shapes(s.judge), dtype)
    return ahead.quantized_weights(infos, s.mesh, dtype, split)


# ---------------------------------------------------------------------------------------------------------------- programs


def update_program(s: Slice, spec: ModelSpec, role: str) -> Planned:
    """Gradients over all micro-batches and one optimizer step."""
    optimizer = make_optimizer(s.cfg.optimizer, 1)
    passes = ("ref_logp",) * (s.cfg.loss.kl_weight > 0) + ("old_logp",) * (s.cfg.update.inner_iterations > 1)
    jitted = make_update(spec, optimizer, resolve_loss(s.cfg.loss), s.cfg, s.mesh)
    return Planned(f"{role} update", jitted, (train_state(s, spec), batch(s, passes), _scalar(s, jnp.float32)), donate=(0,))


def logprobs(s: Slice, spec: ModelSpec, role: str, reference: bool) -> Planned:
    """A pass without gradients: under the reference, or under the weights before the inner iterations."""
    params = reference_params(s, spec) if reference else trained_params(s, spec)
    name = f"{role} {'reference' if reference else 'old'} log-probs"
    return Planned(name, logprobs_program(spec, s.cfg, s.mesh), (params, batch(s, ()), _scalar(s, jnp.float32)))


def publish_program(s: Slice, spec: ModelSpec, role: str) -> Planned:
    """The trainer's weights to the sampler's: cast and resharded."""
    return Planned(f"{role} publish", make_publish(spec, s.cfg.policy.dtype, s.rules, s.mesh), (trained_params(s, spec),))


def decode_program(s: Slice, engine: Engine, name: str, weights: Any = None) -> Planned:
    """A dispatch of decode."""
    return _sampler_program(name, ahead.decode_program(engine), weights)


def prefill_program(engine: Engine, name: str, weights: Any = None) -> Planned:
    """The largest packed prefill: it goes on from shared heads, where there are any."""
    return _sampler_program(name, ahead.prefill_program(engine, engine.variants[-1]), weights)


def scoring_program(engine: Engine, name: str, weights: Any) -> Planned:
    """The largest packed batch of next-token probabilities, as criterion_logits asks for them."""
    variant = engine.next_variants[-1]
    prefilled = ahead.prefill_program(engine, variant)
    function = functools.partial(
        scoring.next_token_program, spec=engine.spec, variant=variant, dtype=weights["final_norm"].dtype, mesh=engine.mesh
    )
    assert engine.mesh is not None
    whole = replicated(engine.mesh)
    last = jax.ShapeDtypeStruct((scoring.most_sequences(variant),), jnp.int32, sharding=whole)
    ids = jax.ShapeDtypeStruct((scoring.IDS_STEP,), jnp.int32, sharding=whole)
    return Planned(name, function, (weights, last, ids, *prefilled.args[1:]))


def _sampler_program(name: str, program: ahead.Program, weights: Any) -> Planned:
    args = program.args if weights is None else (weights, *program.args[1:])
    return Planned(name, program.function, args, program.donate, program.out_shardings)


def _scalar(s: Slice, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct((), dtype, sharding=replicated(s.mesh))


def programs(s: Slice) -> dict[str, Callable[[], Planned]]:
    """Every program of a step by name, made when called. In single-model mode the rubric update is the policy update: the same
    program over the same weights, switched by the prompt."""
    cfg = s.cfg
    out: dict[str, Callable[[], Planned]] = {}
    made: dict[ModelSpec, str] = {}
    for role, spec in s.trained.items():
        if spec in made:  # one program serves both models
            continue
        made[spec] = role
        if s.learns(role):
            out[f"{role} update"] = functools.partial(update_program, s, spec, role)
            if cfg.loss.kl_weight > 0:
                out[f"{role} reference log-probs"] = functools.partial(logprobs, s, spec, role, True)
            if cfg.update.inner_iterations > 1:
                out[f"{role} old log-probs"] = functools.partial(logprobs, s, spec, role, False)
            out[f"{role} publish"] = functools.partial(publish_program, s, spec, role)
        engine = s.engine if spec == s.policy else Engine(spec, cfg.sampler, STOP_IDS, mesh=s.mesh)
        out[f"{role} prefill"] = functools.partial(prefill_program, engine, f"{role} prefill")
        out[f"{role} decode"] = functools.partial(decode_program, s, engine, f"{role} decode")
    if s.judge is None:
        return out
    if cfg.judge.protocol == "criterion_logits":
        out["judge scoring"] = lambda: scoring_program(s.judge_engine, "judge scoring", judge_weights(s, False))
        return out
    out["judge prefill"] = lambda: prefill_program(s.judge_engine, "judge prefill", judge_weights(s, False))
    out["judge decode"] = lambda: decode_program(s, s.judge_engine, "judge decode", judge_weights(s, True))
    return out
