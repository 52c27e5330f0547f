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
from jax.sharding import NamedSharding, PartitionSpec

from coevo_jax.config.check_dpo import ALONE as DPO_MODES
from coevo_jax.critic import critic_optimizer
from coevo_jax.learn.critic import ValueBatch, make_critic_update, make_estimate
from coevo_jax.learn.losses import resolve_loss
from coevo_jax.learn.packing import TokenBatch
from coevo_jax.learn.publish import make_publish
from coevo_jax.learn.reward_model import PairBatch, make_reward_update
from coevo_jax.learn.update import TrainState, logprobs_program, make_optimizer, make_update, rows_devices, state_shardings
from coevo_jax.mesh import RULES, param_shardings, replicated
from coevo_jax.models.forward import param_shapes
from coevo_jax.models.lora import adapted, frozen_part, trained_shapes, whole
from coevo_jax.models.quantize import INPUT_AXES, quantized_infos
from coevo_jax.models.spec import ModelSpec
from coevo_jax.plan.cast import Slice
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


# ------------------------------------------------------------------------------------------------------------------ shapes


def device_bytes(tree: Any) -> int:
    """Bytes on one device of arrays known by shape and sharding."""
    return sum(int(x.dtype.itemsize) * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))


def _is_info(x: Any) -> bool:
    return hasattr(x, "axes")


def _shaped(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def trained_params(s: Slice, spec: ModelSpec) -> Any:
    """The trainer's parameters; with adapters their base."""
    infos, dtype = param_shapes(spec), jnp.dtype(s.cfg.policy.param_dtype)
    shapes = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, dtype), infos, is_leaf=_is_info)
    return _shaped(shapes, param_shardings(infos, s.mesh, s.rules))


def tuned(s: Slice, spec: ModelSpec) -> ModelSpec:
    """The spec of programs that train."""
    return adapted(spec, s.cfg.lora) if s.cfg.lora.rank > 0 else spec


def base_params(s: Slice, spec: ModelSpec) -> tuple[Any, ...]:
    """The frozen base, an update's last argument where adapters train."""
    return (frozen_part(trained_params(s, spec)),) if s.cfg.lora.rank > 0 else ()


def whole_params(s: Slice, spec: ModelSpec) -> Any:
    """What a forward pass of the trainer takes."""
    base = next(iter(base_params(s, spec)), None)
    return whole(tuned(s, spec), base, train_state(s, spec).params)


def reference_params(s: Slice, spec: ModelSpec) -> Any:
    """Frozen for the KL term: matrices in the dtype of the computation (learn.publish.cast_matrices); of adapters these alone."""
    if s.cfg.lora.rank > 0:
        return train_state(s, spec).params

    def leaf(path: Any, x: Any) -> Any:
        dtype = jnp.dtype(s.cfg.policy.dtype) if path[-1].key in INPUT_AXES else x.dtype
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)

    return jax.tree_util.tree_map_with_path(leaf, trained_params(s, spec))


def train_state(s: Slice, spec: ModelSpec, optimizer: Any = None) -> TrainState:
    """Parameters, moments and step."""
    optimizer, params, spec = optimizer or make_optimizer(s.cfg.optimizer, 1), trained_params(s, spec), tuned(s, spec)
    if spec.lora is not None:
        infos = trained_shapes(spec)
        shapes = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, jnp.float32), infos, is_leaf=_is_info)
        params = _shaped(shapes, param_shardings(infos, s.mesh, s.rules))
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


def value_batch(s: Slice) -> ValueBatch:
    """What a critic learns from: packed rows [M,B,T] of returns and values."""
    rows = batch(s, ())
    one = jax.ShapeDtypeStruct(rows.mask.shape, np.float32, sharding=rows.mask.sharding)
    return ValueBatch(rows.tokens, rows.positions, rows.segment_ids, rows.mask, one, one, rows.parent_ids)


def pair_batch(s: Slice) -> PairBatch:
    """Packed conversations [M,B,T] as Learner.update makes them of reward.pairs pairs."""
    u, spread = s.cfg.update, NamedSharding(s.mesh, PartitionSpec(None, s.rules.batch))
    devices = rows_devices(s.mesh, s.rules)
    B = -(-u.rows_per_micro // devices) * devices
    M = max(-(-s.cfg.reward.pairs // (B // 2)), 1)

    def of(width: int, kind: Any) -> Any:
        return jax.ShapeDtypeStruct((M, B, width), kind, sharding=spread)

    T, S, i32 = u.pack_length, u.max_segments, np.int32
    return PairBatch(of(T, i32), of(T, i32), of(T, i32), of(S, i32), of(S, np.bool_), of(S, i32), of(S, i32), of(S, np.float32))


def judge_weights(s: Slice, split: bool, name: str = "judge") -> Any:
    """A judge's weights where decoding wants them, stacked or a tree a layer; a reward model's as it is loaded."""
    seat = s.judges[name]
    dtype = jnp.dtype(seat.cfg.dtype)
    if seat.engine is None:
        infos = param_shapes(seat.spec)
        shapes = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, dtype), infos, is_leaf=_is_info)
        return _shaped(shapes, param_shardings(infos, s.mesh, RULES))
    if seat.cfg.weights == "full":
        return (ahead.split_weights if split else ahead.weights)(seat.spec, s.mesh, dtype)
    infos = quantized_infos(param_shapes(seat.spec), dtype)
    return ahead.quantized_weights(infos, s.mesh, dtype, split)


# ---------------------------------------------------------------------------------------------------------------- programs


def update_program(s: Slice, spec: ModelSpec, role: str) -> Planned:
    """Gradients over all micro-batches and one optimizer step."""
    optimizer = make_optimizer(s.cfg.optimizer, 1)
    if spec.scalar:
        reward = make_reward_update(tuned(s, spec), optimizer, s.cfg, s.mesh)
        return Planned(f"{role} update", reward, (train_state(s, spec), pair_batch(s), *base_params(s, spec)), donate=(0,))
    passes = ("ref_logp",) * (s.cfg.loss.kl_weight > 0) + ("old_logp",) * (s.cfg.update.inner_iterations > 1)
    jitted = make_update(tuned(s, spec), optimizer, resolve_loss(s.cfg.loss), s.cfg, s.mesh)
    args = train_state(s, spec), batch(s, passes), _scalar(s, jnp.float32)
    return Planned(f"{role} update", jitted, (*args, *base_params(s, spec)), donate=(0,))


def logprobs(s: Slice, spec: ModelSpec, role: str, reference: bool) -> Planned:
    """A pass without gradients: under the reference, or under the weights before the inner iterations."""
    params = reference_params(s, spec) if reference and s.cfg.lora.rank == 0 else whole_params(s, spec)
    name = f"{role} {'reference' if reference else 'old'} log-probs"
    return Planned(name, logprobs_program(spec, s.cfg, s.mesh), (params, batch(s, ()), _scalar(s, jnp.float32)))


def publish_program(s: Slice, spec: ModelSpec, role: str) -> Planned:
    """The trainer's weights to the sampler's: cast and resharded; of adapters after they are merged, in the sampler's dtype."""
    params = trained_params(s, spec)
    if s.cfg.lora.rank > 0:
        merged = jnp.dtype(s.cfg.policy.dtype)
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, merged, sharding=x.sharding), params)
    return Planned(f"{role} publish", make_publish(spec, s.cfg.policy.dtype, s.rules, s.mesh), (params,))


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


def critic_programs(s: Slice, name: str, spec: ModelSpec) -> dict[str, Callable[[], Planned]]:
    """A critic's pass before an update, and its own update."""
    optimizer = critic_optimizer(s.cfg)

    def values() -> Planned:
        return Planned(f"{name} values", make_estimate(spec, s.cfg, s.mesh), (whole_params(s, spec), batch(s, ())))

    def update() -> Planned:
        args = train_state(s, spec, optimizer), value_batch(s), *base_params(s, spec)
        return Planned(f"{name} update", make_critic_update(tuned(s, spec), optimizer, s.cfg, s.mesh), args, donate=(0,))

    return {f"{name} values": values, f"{name} update": update}


def _scalar(s: Slice, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct((), dtype, sharding=replicated(s.mesh))


def programs(s: Slice) -> dict[str, Callable[[], Planned]]:
    """Every program of a step by name, made when called. In single-model mode the rubric update is the policy update: the same
    program over the same weights, switched by the prompt. Models of one architecture share their programs."""
    out: dict[str, Callable[[], Planned]] = {}
    for role, spec in (s.trained | s.frozen).items():
        if s.owner(role) != role:
            continue
        if role in s.trained and s.learns(role):
            out |= _training(s, role, spec)
        if s.samples:
            engine = s.player(role)[1]
            out[f"{role} prefill"] = functools.partial(prefill_program, engine, f"{role} prefill")
            out[f"{role} decode"] = functools.partial(decode_program, s, engine, f"{role} decode")
    for name, spec in s.critics.items():
        out |= critic_programs(s, name, spec)
    for name in s.judges:
        out |= _judging(s, name)
    return out


def _training(s: Slice, role: str, spec: ModelSpec) -> dict[str, Callable[[], Planned]]:
    cfg = s.cfg
    if cfg.schedule.mode in DPO_MODES:
        from coevo_jax.plan.preference import preference_programs  # which is made of what is here

        return preference_programs(s, role, spec)
    out: dict[str, Callable[[], Planned]] = {f"{role} update": functools.partial(update_program, s, spec, role)}
    if not s.samples:
        return out
    if cfg.loss.kl_weight > 0:
        out[f"{role} reference log-probs"] = functools.partial(logprobs, s, spec, role, True)
    if cfg.update.inner_iterations > 1:
        out[f"{role} old log-probs"] = functools.partial(logprobs, s, spec, role, False)
    out[f"{role} publish"] = functools.partial(publish_program, s, spec, role)
    return out


def _judging(s: Slice, name: str) -> dict[str, Callable[[], Planned]]:
    """A judge's programs; none of a reward model (cast.left_out says so)."""
    seat = s.judges[name]
    engine = seat.engine
    if engine is None:
        return {}
    if seat.cfg.protocol == "criterion_logits":
        return {f"{name} scoring": lambda: scoring_program(engine, f"{name} scoring", judge_weights(s, False, name))}
    return {
        f"{name} prefill": lambda: prefill_program(engine, f"{name} prefill", judge_weights(s, False, name)),
        f"{name} decode": lambda: decode_program(s, engine, f"{name} decode", judge_weights(s, True, name)),
    }
