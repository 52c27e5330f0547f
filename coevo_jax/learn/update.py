"""One optimizer step: packed rows in, new state out. The old state's memory is donated to the new one.

Axes: M micro-batches, B rows of one, T tokens of a row. Rows are spread as the rules of mesh.py say.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from coevo_jax.config import Experiment, LossConfig, OptimizerConfig, UpdateConfig
from coevo_jax.errors import UserError
from coevo_jax.learn.losses import Loss, count, drop_truncated
from coevo_jax.learn.packing import TokenBatch
from coevo_jax.learn.pieces import square_sum, step_in_pieces
from coevo_jax.mesh import (
    RULES,
    ShardingRules,
    batch_sharding,
    mesh_axes,
    one_cpu,
    param_shardings,
    replicated,
    train_rules,
)
from coevo_jax.models.attention import time_order
from coevo_jax.models.forward import Params, forward
from coevo_jax.models.logprobs import token_logprobs
from coevo_jax.models.lora import trained_shapes, whole
from coevo_jax.models.quantize import Int8Weight
from coevo_jax.models.spec import ModelSpec
from coevo_jax.models.tables import over_head
from coevo_jax.sampler.programs import cpu_options

Metrics = dict[str, jax.Array]
CPU_TILE = 2048  # ids of a tile of the vocabulary on one CPU: the tile's logits of a micro-batch stay near the cores


class TrainState(struct.PyTreeNode):
    """What an update changes. `step` counts the updates that were applied. With adapters `params` are those, and no base."""

    params: Params
    opt_state: Any
    step: jax.Array


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optax transformation and its learning rate by step. It is a chain of two: the clip of the gradient's norm at `grad_clip`
    (0: none), and a rule that looks at one number at a time."""

    transform: optax.GradientTransformation
    lr: Callable[[Any], Any]
    rule: optax.GradientTransformation
    grad_clip: float


# -------------------------------------------------------------------------------------------------------------- optimizer


def make_optimizer(cfg: OptimizerConfig, updates: int = 0) -> Optimizer:
    """AdamW after a clip of the global gradient norm (grad_clip = 0: none). Weights decay, norms and biases don't.

    `updates`: length of a cosine schedule, which falls to 0; a constant one needs none.
    """
    if cfg.name != "adamw":
        raise UserError(f"unknown optimizer {cfg.name!r}", where="optimizer.name", expected="adamw")
    lr = _schedule(cfg, updates)
    adamw = optax.adamw(lr, cfg.b1, cfg.b2, cfg.eps, mu_dtype=cfg.mu_dtype, weight_decay=cfg.weight_decay, mask=_decays)
    clip = optax.clip_by_global_norm(cfg.grad_clip) if cfg.grad_clip > 0 else optax.identity()
    return Optimizer(optax.chain(clip, adamw), lr, adamw, cfg.grad_clip)


def _schedule(cfg: OptimizerConfig, updates: int) -> Callable[[Any], Any]:
    """Linear warm-up from lr / warmup_steps, so that the first update already moves, then constant or cosine."""
    after = max(updates - cfg.warmup_steps, 1)
    if cfg.schedule == "cosine" and updates < 1:
        raise UserError("a cosine schedule needs the number of updates", where="optimizer.schedule", expected="constant")

    def lr(step: Any) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        rise = jnp.minimum(1.0, (step + 1) / max(cfg.warmup_steps, 1))
        done = jnp.clip((step - cfg.warmup_steps) / after, 0.0, 1.0)
        fall = 0.5 * (1 + jnp.cos(jnp.pi * done)) if cfg.schedule == "cosine" else 1.0
        return cfg.lr * rise * fall

    return lr


def _decays(params: Params) -> Any:
    def is_weight(path: tuple[Any, ...], leaf: Any) -> bool:
        return not str(path[-1].key).endswith(("norm", "bias"))

    return jax.tree_util.tree_map_with_path(is_weight, params)


def init_state(params: Params, optimizer: Optimizer) -> TrainState:
    """A state at step 0. The parameters are taken as they are, not copied: the first update donates them."""
    state = TrainState(params, optimizer.transform.init(params), jnp.zeros((), jnp.int32))
    shardings = jax.tree.map(lambda p: p.sharding, params)
    example = jax.tree.leaves(shardings)[0]
    # Laid out as an update leaves it, so that the second update doesn't compile again.
    return _arrange(state, optimizer, shardings, example.mesh, jax.device_put) if isinstance(example, NamedSharding) else state


# ----------------------------------------------------------------------------------------------------------------- update


def make_update(spec: ModelSpec, optimizer: Optimizer, loss: Loss, cfg: Experiment, mesh: Mesh | None = None) -> Any:
    """jitted `update(state, batch [M,B,T], temperature) -> (state, metrics)`; the state passed in is donated. Where spec.lora
    trains adapters, the frozen base is a last argument, which is not.

    An update whose gradient is not finite changes nothing and reports nonfinite = 1. Metrics are float32 scalars: those of the
    loss, and loss, grad_norm, update_norm, param_norm, lr, nonfinite, tokens/trained.
    """
    loss_cfg, rules, pieces = loss_config(cfg), train_rules(cfg.mesh), one_cpu(mesh)

    def micro_loss(
        params: Params, batch: TokenBatch, denominators: Any, temperature: Any, base: Any
    ) -> tuple[jax.Array, Metrics]:
        logp, entropy = batch_logprobs(whole(spec, base, params), spec, batch, temperature, cfg, mesh)
        total, metrics = loss(logp, entropy, batch, denominators, loss_cfg)
        return total, {"loss": total, **metrics}

    def update(state: TrainState, batch: TokenBatch, temperature: Any, base: Any = None) -> tuple[TrainState, Metrics]:
        batch = drop_truncated(batch) if loss_cfg.mask_truncated else batch
        denominators = count(batch)
        grads, metrics = summed_gradients(
            lambda params, micro: micro_loss(params, micro, denominators, temperature, base),
            state.params,
            batch,
            spec,
            mesh,
            rules,
        )
        state, applied = apply_gradients(state, grads, optimizer, pieces)
        return state, {**metrics, **applied, "tokens/trained": batch.mask.sum().astype(jnp.float32)}

    out = None if mesh is None else (state_shardings(spec, optimizer, mesh, rules), replicated(mesh))
    options, places = compiler_options(mesh), in_shardings(mesh, rules, base=spec.lora is not None)
    return jax.jit(update, donate_argnums=0, in_shardings=places, out_shardings=out, compiler_options=options)


def loss_config(cfg: Experiment) -> LossConfig:
    """The loss record in force; compat.pack_mean replaces the aggregation."""
    return dataclasses.replace(cfg.loss, aggregation="pack") if cfg.compat.pack_mean else cfg.loss


def batch_logprobs(
    params: Params, spec: ModelSpec, batch: TokenBatch, temperature: Any, cfg: Experiment, mesh: Mesh | None = None
) -> tuple[jax.Array, jax.Array]:
    """Log-probs of the targets and entropies of one micro-batch, both [B,T] float32."""
    u, rules = cfg.update, train_rules(cfg.mesh)
    batch, back = in_time_order(batch, u.attention, mesh, rules)
    hidden = forward(
        params, spec, batch.tokens, batch.positions, batch.segment_ids,
        remat=u.remat, attention=u.attention, dtype=jnp.dtype(cfg.policy.dtype),
        mesh=mesh, rules=rules, parent_ids_BxT=batch.parent_ids if u.attention == "xla" else None,
    )  # fmt: skip
    out = _head_logprobs(params, spec, hidden, batch.targets, temperature, u, mesh, rules)
    out = out if back is None else jax.tree.map(lambda x: x[:, back], out)
    return out if mesh is None else lax.with_sharding_constraint(out, batch_sharding(mesh, rules))


def in_time_order(batch: Any, attention: str, mesh: Mesh | None, rules: ShardingRules) -> tuple[Any, Any]:
    """What the model sees of rows [B,T] in the order in which chips share their time, and the indices that lead back."""
    chips = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in mesh_axes(rules.time))
    if chips == 1 or attention == "xla":
        return batch, None
    order = time_order(batch.tokens.shape[1], chips)
    names = [name for name in ("tokens", "positions", "segment_ids", "targets") if hasattr(batch, name)]
    return batch.replace(**{name: getattr(batch, name)[:, order] for name in names}), np.argsort(order)


def _head_logprobs(
    params: Params, spec: ModelSpec, hidden: jax.Array, targets: jax.Array, temperature: Any, cfg: UpdateConfig,
    mesh: Mesh | None, rules: ShardingRules,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """token_logprobs by models/tables.py: a device has its part of the vocabulary and whole rows."""
    if mesh is None or mesh.size == 1:
        tile = vocab_tile(cfg, mesh, params)
        return token_logprobs(params, spec, hidden, targets, temperature, cfg.logprob_chunk, tile)
    head: Params = {name: params[name] for name in (("embed",) if spec.tied else ("unembed",))}
    temperatures = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), targets.shape)

    def run(head: Params, hidden: jax.Array, targets: jax.Array, temperatures: jax.Array, vocab: tuple[str, ...]) -> Any:
        tile = 0 if vocab else max(cfg.vocab_tile, 0)
        return token_logprobs(head, spec, hidden, targets, temperatures, cfg.logprob_chunk, tile, vocab)

    return over_head(run, head, hidden, mesh, rules, (targets, temperatures))


def vocab_tile(cfg: UpdateConfig, mesh: Mesh | None, params: Params) -> int:
    """update.vocab_tile, its -1 resolved: tiles where one CPU holds a head in full precision, else 0."""
    whole = not isinstance(params["embed"], Int8Weight)
    return cfg.vocab_tile if cfg.vocab_tile >= 0 else CPU_TILE if whole and one_cpu(mesh) else 0


def summed_gradients(
    micro_loss: Callable[[Params, TokenBatch], tuple[jax.Array, Metrics]],
    params: Params, batch: TokenBatch, spec: ModelSpec, mesh: Mesh | None, rules: ShardingRules = RULES,
) -> tuple[Params, Metrics]:  # fmt: skip
    """Gradients (float32) and metrics summed over micro-batches, '/max' metrics by the maximum.

    A scan whose length is data: packing pads the number of micro-batches so that few programs are compiled, and the empty ones
    at the end are not run.
    """
    gradient = jax.grad(micro_loss, has_aux=True)
    if batch.tokens.shape[0] == 1:  # no sums: they would hold a second copy of the gradient
        grads, metrics = gradient(params, one_micro(batch, jnp.int32(0), mesh, rules))
        grads = _like_params(jax.tree.map(lambda g: g.astype(jnp.float32), grads), spec, mesh, rules)
        return grads, {name: x.astype(jnp.float32) for name, x in metrics.items()}

    def step(i: jax.Array, carry: tuple[Params, Metrics]) -> tuple[Params, Metrics]:
        grads, metrics = gradient(params, one_micro(batch, i, mesh, rules))
        sums = jax.tree.map(lambda a, g: a + g.astype(a.dtype), carry[0], grads)
        return _like_params(sums, spec, mesh, rules), {name: _combine(name, carry[1][name], x) for name, x in metrics.items()}

    shapes = jax.eval_shape(micro_loss, params, jax.tree.map(lambda x: x[0], batch))[1]
    start = {name: jnp.full((), -jnp.inf if name.endswith("/max") else 0.0, jnp.float32) for name in shapes}
    zeros = _like_params(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params), spec, mesh, rules)
    return lax.fori_loop(0, used_micros(batch), step, (zeros, start))


def apply_gradients(state: TrainState, grads: Params, optimizer: Optimizer, pieces: bool = False) -> tuple[TrainState, Metrics]:
    """One optimizer step, or none where the gradient is not finite. pieces: by learn/pieces.py."""
    norm = jnp.sqrt(square_sum(grads)) if pieces else optax.tree.norm(grads)
    finite = jnp.isfinite(norm)
    apply = _apply_in_pieces if pieces else _apply_whole
    params, opt_state, update_norm, param_norm = apply(state, grads, optimizer, norm, finite)
    new = TrainState(params, opt_state, state.step + finite.astype(jnp.int32))
    metrics = {
        "grad_norm": norm,
        "update_norm": update_norm,
        "param_norm": param_norm,
        "lr": optimizer.lr(state.step),
        "nonfinite": 1.0 - finite.astype(jnp.float32),
    }
    return new, {name: x.astype(jnp.float32) for name, x in metrics.items()}


Applied = tuple[Params, Any, jax.Array, jax.Array]


def _apply_whole(state: TrainState, grads: Params, optimizer: Optimizer, norm: jax.Array, finite: jax.Array) -> Applied:
    """Parameters, state, and the norms of the change and of the parameters."""
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
        updates, opt_state = optimizer.transform.update(grads, state.opt_state, state.params)
    new = optax.apply_updates(state.params, updates), opt_state
    params, opt_state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (state.params, state.opt_state))
    return params, opt_state, jnp.where(finite, optax.tree.norm(updates), 0.0), optax.tree.norm(params)


def _apply_in_pieces(state: TrainState, grads: Params, optimizer: Optimizer, norm: jax.Array, finite: jax.Array) -> Applied:
    clip, (first, rule_state) = optimizer.grad_clip, state.opt_state
    scale = jnp.where(norm < clip, 1.0, clip / norm) if clip > 0 else jnp.float32(1.0)
    params, rule_state, changed, total = step_in_pieces(optimizer.rule, state.params, rule_state, grads, scale, finite)
    return params, (first, rule_state), jnp.sqrt(changed), jnp.sqrt(total)


def make_logprobs(spec: ModelSpec, cfg: Experiment, mesh: Mesh | None = None) -> Callable[[Params, TokenBatch, Any], jax.Array]:
    """`logprobs(params, batch, temperature) -> [M,B,T]` float32, without gradients: the old and the reference pass."""
    jitted = logprobs_program(spec, cfg, mesh)
    return lambda params, batch, temperature: jitted(params, without_passes(batch), temperature)


def without_passes(batch: TokenBatch) -> TokenBatch:
    """Without the log-probs of an earlier pass the structure, and so the program, is the same for every pass."""
    return batch.replace(old_logp=None, ref_logp=None)


def logprobs_program(spec: ModelSpec, cfg: Experiment, mesh: Mesh | None = None) -> Any:
    """The jitted function of make_logprobs, for batches `without_passes`."""
    rules = train_rules(cfg.mesh)

    def run(params: Params, batch: TokenBatch, temperature: Any) -> jax.Array:
        def step(i: jax.Array, out: jax.Array) -> jax.Array:
            logp, _ = batch_logprobs(params, spec, one_micro(batch, i, mesh, rules), temperature, cfg, mesh)
            return lax.dynamic_update_index_in_dim(out, logp, i, 0)

        return lax.fori_loop(0, used_micros(batch), step, jnp.zeros(batch.tokens.shape, jnp.float32))

    return jax.jit(run, in_shardings=in_shardings(mesh, rules), compiler_options=compiler_options(mesh))


# ------------------------------------------------------------------------------------------------ micro-batches and meshes


def rows_devices(mesh: Mesh | None, rules: ShardingRules = RULES) -> int:
    """Devices that the rows of a micro-batch are spread over."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in mesh_axes(rules.batch))


def compiler_options(mesh: Mesh | None) -> dict[str, Any] | None:
    """Those of the devices that will run the program, which need not be those of this machine (aot.py)."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return cpu_options("DOT") if platform == "cpu" else None


def one_micro(batch: TokenBatch, i: jax.Array, mesh: Mesh | None, rules: ShardingRules) -> TokenBatch:
    """Micro-batch i, rows where the rules want them."""
    micro = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), batch)
    if mesh is None:
        return micro
    return lax.with_sharding_constraint(micro, batch_sharding(mesh, rules))


def used_micros(batch: TokenBatch) -> jax.Array:
    """Micro-batches up to the last one with a token."""
    filled = jnp.any(batch.segment_ids > 0, axis=(1, 2))
    return jnp.max(jnp.where(filled, jnp.arange(1, len(filled) + 1, dtype=jnp.int32), 0))


def _combine(name: str, total: jax.Array, x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return jnp.maximum(total, x) if name.endswith("/max") else total + x


def _like_params(tree: Params, spec: ModelSpec, mesh: Mesh | None, rules: ShardingRules) -> Params:
    """Laid out as what trains is, so that a donated buffer fits the new value."""
    return tree if mesh is None else lax.with_sharding_constraint(tree, param_shardings(trained_shapes(spec), mesh, rules))


def _arrange(state: TrainState, optimizer: Optimizer, shardings: Any, mesh: Any, place: Callable[..., Any]) -> TrainState:
    """The state with parameters and moments placed alike, and its scalars on every device."""
    everywhere = replicated(mesh)
    opt_state = optax.tree.map_params(
        optimizer.transform, place, state.opt_state, shardings, transform_non_params=lambda x: place(x, everywhere)
    )
    return TrainState(jax.tree.map(place, state.params, shardings), opt_state, place(state.step, everywhere))


def state_shardings(spec: ModelSpec, optimizer: Optimizer, mesh: Mesh, rules: ShardingRules) -> Any:
    """A TrainState of shardings, those that init_state gives. Named at the jit's exit: a constraint inside comes back spelled
    otherwise where a mesh axis has size 1, and neither the next update nor the sampler would know its compiled program again."""
    infos = trained_shapes(spec)
    shardings = param_shardings(infos, mesh, rules)
    shapes = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, jnp.float32), infos, is_leaf=lambda x: hasattr(x, "axes"))
    state = jax.eval_shape(lambda p: TrainState(p, optimizer.transform.init(p), jnp.zeros((), jnp.int32)), shapes)
    return _arrange(state, optimizer, shardings, mesh, lambda _, sharding: sharding)


def in_shardings(mesh: Mesh | None, rules: ShardingRules, temperature: bool = True, base: bool = False) -> Any:
    """Parameters, and a frozen base, lie as they come; rows as the rules say; the temperature everywhere."""
    if mesh is None:
        return None
    batch = NamedSharding(mesh, PartitionSpec(None, rules.batch))
    return (None, batch, *[replicated(mesh)] * temperature, *[None] * base)
