"""From the trainer's weights to the sampler's on 8 devices; training with rows over every device; the frozen copy in bfloat16."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learn_support import SPEC, assert_close, experiment, params_on, some_samples

from coevo_jax.config import MeshConfig
from coevo_jax.config.override import apply_overrides
from coevo_jax.config.validate import validate
from coevo_jax.errors import UserError
from coevo_jax.learn.losses import policy_loss
from coevo_jax.learn.packing import pack
from coevo_jax.learn.publish import cast_matrices, make_publish, same_places
from coevo_jax.learn.update import init_state, make_logprobs, make_optimizer, make_update, rows_devices
from coevo_jax.mesh import CONTEXT_RULES, DECODE_RULES, FSDP_RULES, RULES, make_mesh, param_shardings, train_rules
from coevo_jax.models.forward import param_shapes
from coevo_jax.models.tables import over_head

LAYOUTS = [
    MeshConfig(1, -1, 2, "tensor"),
    MeshConfig(1, -1, 2, "fsdp"),
    MeshConfig(2, -1, 1, "fsdp"),
    MeshConfig(2, -1, 2, "context"),
]


def placed(mesh, rules):
    return jax.device_put(params_on(), param_shardings(param_shapes(SPEC), mesh, rules))


@pytest.mark.parametrize("cfg", LAYOUTS[:2], ids=lambda c: c.train)
def test_published_weights_are_the_trainers_cast_and_lie_where_decoding_wants_them(cfg):
    mesh = make_mesh(cfg)
    publish = make_publish(SPEC, "bfloat16", train_rules(cfg), mesh)
    out = publish(placed(mesh, train_rules(cfg)))
    wanted = param_shardings(param_shapes(SPEC), mesh, DECODE_RULES)
    for got, lies, full in zip(*map(jax.tree.leaves, (out, wanted, params_on())), strict=True):
        assert got.sharding == lies
        np.testing.assert_array_equal(np.asarray(got), np.asarray(full).astype(jnp.bfloat16))
    assert out["layers"]["gate"].sharding.shard_shape(out["layers"]["gate"].shape)[2] == SPEC.mlp_size // 2  # over tensor
    assert not same_places(SPEC, train_rules(cfg), mesh) and same_places(SPEC, RULES, None)


def step(cfg, mesh, samples=9):
    rules = train_rules(cfg.mesh)
    batch = pack(some_samples(samples), cfg.update, devices=rows_devices(mesh, rules))
    params = params_on() if mesh is None else placed(mesh, rules)
    optimizer = make_optimizer(cfg.optimizer)
    state = init_state(params, optimizer)
    laid = jax.tree.map(lambda x: x.sharding, state)
    update = make_update(SPEC, optimizer, policy_loss, cfg, mesh)
    state, metrics = update(state, batch, 1.0)
    assert mesh is None or jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, state, laid))  # the next one compiles nothing
    logp = make_logprobs(SPEC, cfg, mesh)(state.params, batch, 1.0)
    return jax.device_get(state.params), {name: float(x) for name, x in metrics.items()}, float(np.abs(np.asarray(logp)).sum())


@pytest.mark.parametrize(
    "mesh_cfg", [LAYOUTS[1], pytest.param(LAYOUTS[2], marks=pytest.mark.slow), LAYOUTS[3]], ids=["1x4x2", "2x4x1", "context"]
)
def test_rows_over_every_device_change_an_update_by_rounding_alone(mesh_cfg):
    """Parameters, metrics and log-probs afterwards; attention is kept for the gradient, which changes nothing either."""
    whole = step(experiment(rows_per_micro=8), None)
    cfg = dataclasses.replace(experiment(rows_per_micro=8, remat="attention"), mesh=mesh_cfg)
    mesh = make_mesh(mesh_cfg)
    assert rows_devices(mesh, FSDP_RULES) == 8 and rows_devices(mesh, RULES) == 8 // mesh_cfg.tensor
    assert rows_devices(mesh, CONTEXT_RULES) == 8 // mesh_cfg.tensor
    params, metrics, logp = step(cfg, mesh)
    assert_close(params, whole[0])
    assert_close(metrics, whole[1])
    assert abs(logp - whole[2]) < 1e-3 * abs(whole[2])


def test_an_axis_of_one_device_does_not_cut_the_vocabulary():
    """Then each device has all of it, and update.vocab_tile holds as on a single one."""
    told = []

    def run(head, hidden, targets, vocab):
        told.append(vocab)
        return targets

    head = {"embed": jax.ShapeDtypeStruct((SPEC.vocab_size, SPEC.hidden_size), jnp.float32)}
    rows = jax.ShapeDtypeStruct((8, 4, SPEC.hidden_size), jnp.float32), jax.ShapeDtypeStruct((8, 4), jnp.int32)
    for cfg in (LAYOUTS[2], LAYOUTS[1]):
        mesh, rules = make_mesh(cfg), train_rules(cfg)
        jax.eval_shape(lambda head, hidden, targets: over_head(run, head, hidden, mesh, rules, (targets,)), head, *rows)  # noqa: B023
    assert told == [(), ("tensor",)]


@pytest.mark.slow
def test_chips_that_share_a_rows_time_by_the_kernel():
    """Rows of ten blocks over two chips: their positions are dealt out and come back in their order."""
    plain = experiment(rows_per_micro=4, pack_length=1280, max_segments=128)
    whole = step(plain, None, samples=300)
    update = dataclasses.replace(plain.update, attention="splash_interpret", remat="attention+qkv+residual+gate+up")
    cfg = dataclasses.replace(plain, mesh=LAYOUTS[3], update=update)
    params, metrics, logp = step(cfg, make_mesh(cfg.mesh), samples=300)
    assert_close(params, whole[0])
    assert_close(metrics, whole[1])
    assert abs(logp - whole[2]) < 1e-3 * abs(whole[2])


def test_log_probs_under_the_frozen_copy_are_bit_for_bit_those_of_the_whole():
    cfg = experiment()
    cfg = dataclasses.replace(cfg, policy=dataclasses.replace(cfg.policy, dtype="bfloat16"))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: x * rng.uniform(0.9, 1.1, x.shape).astype(np.float32), params_on())  # norms not at one
    frozen = cast_matrices(params, "bfloat16")
    assert frozen["layers"]["q"].dtype == jnp.bfloat16 and frozen["layers"]["attn_norm"].dtype == jnp.float32
    logprobs, batch = make_logprobs(SPEC, cfg), pack(some_samples(), cfg.update)
    np.testing.assert_array_equal(logprobs(params, batch, 1.0), logprobs(frozen, batch, 1.0))


def test_one_axis_of_a_mesh_takes_the_rest():
    assert dict(make_mesh(MeshConfig(1, -1, 2)).shape) == {"data": 1, "fsdp": 4, "tensor": 2}
    with pytest.raises(UserError, match="takes the rest"):
        validate(apply_overrides(experiment(), ["mesh.fsdp=-1"]))
    with pytest.raises(UserError, match=r"mesh\.train"):
        validate(apply_overrides(experiment(), ["mesh.train=fdsp"]))
    along = ["mesh.train=context", "mesh.tensor=2", "update.attention=splash", "policy.source=none"]
    with pytest.raises(UserError, match=r"pack_length=384 can't be dealt") as caught:
        validate(apply_overrides(experiment(), [*along, "update.pack_length=384"]))
    assert "512" in str(caught.value)
