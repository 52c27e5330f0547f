"""What the tests of coevo_jax.learn share: a tiny model, samples, and the losses again in NumPy float64, sample by sample."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np

from coevo_jax.config import Experiment, LossConfig, MeshConfig, OptimizerConfig, UpdateConfig
from coevo_jax.learn.losses import Loss, policy_loss
from coevo_jax.learn.packing import Sample, TokenBatch, pack
from coevo_jax.learn.update import init_state, make_optimizer, make_update, rows_devices
from coevo_jax.mesh import make_mesh, param_shardings
from coevo_jax.models.forward import param_shapes
from coevo_jax.models.spec import ModelSpec

SPEC = ModelSpec("llama", vocab_size=48, hidden_size=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp_size=32, tied=True)
PLAIN = LossConfig(kl_weight=0.0, tis_cap=0.0)


def experiment(loss: LossConfig = PLAIN, **update: object) -> Experiment:
    """A large eps makes Adam's first steps smooth in the gradient, so that rounding stays rounding."""
    sizes = {"pack_length": 32, "max_segments": 3, "rows_per_micro": 2, "logprob_chunk": 8, "remat": "none"}
    return Experiment(
        loss=loss, optimizer=OptimizerConfig(lr=1e-2, eps=1e-3), update=UpdateConfig(**{**sizes, **update})
    )  # fmt: skip


def some_samples(n: int = 9, seed: int = 0, group: int = 3) -> list[Sample]:
    """Samples of uneven lengths; sampler log-probs near those of a random model, a few truncated."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(n):
        length = int(rng.integers(1, 14))
        logp = rng.normal(-3.9, 0.5, length).astype(np.float32)
        prompt, completion = rng.integers(1, 48, rng.integers(1, 8)), rng.integers(1, 48, length)
        out.append(Sample(prompt, completion, logp, float(rng.normal()), i // group, i % group, truncated=i % 4 == 1))
    return out


def params_on(mesh: object = None, dtype: object = np.float32) -> dict:
    """Random parameters from NumPy: eager JAX would compile a program for every shape."""
    rng = np.random.default_rng(0)
    infos, treedef = jax.tree.flatten(param_shapes(SPEC), is_leaf=lambda x: hasattr(x, "axes"))
    leaves = [rng.normal(0, i.fan_in**-0.5, i.shape) if i.fan_in > 0 else np.ones(i.shape) for i in infos]
    params = jax.tree.unflatten(treedef, [x.astype(dtype) for x in leaves])
    return jax.device_put(params, jax.devices()[0] if mesh is None else param_shardings(param_shapes(SPEC), mesh))


def mesh_of(data: int, fsdp: int = 1, tensor: int = 1) -> object:
    return make_mesh(MeshConfig(data, fsdp, tensor), jax.devices()[: data * fsdp * tensor])


@functools.cache
def compiled(cfg: Experiment, mesh: object, loss: Loss, structure: object, shapes: tuple, dtype: object) -> jax.stages.Compiled:
    """The program of one update. It refuses arguments laid out otherwise, so a second call shows that nothing recompiles."""
    optimizer = make_optimizer(cfg.optimizer)
    batch = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*s) for s in shapes])
    state = init_state(params_on(mesh, dtype), optimizer)
    return make_update(SPEC, optimizer, loss, cfg, mesh).lower(state, batch, 1.0).compile()


def program(cfg: Experiment, batch: TokenBatch, mesh: object = None, loss: Loss = policy_loss, dtype: object = np.float32):
    leaves, structure = jax.tree.flatten(batch)
    return compiled(cfg, mesh, loss, structure, tuple((x.shape, x.dtype) for x in leaves), np.dtype(dtype))


def train(
    cfg: Experiment, samples: list[Sample] | TokenBatch, steps: int = 1, mesh: object = None, loss: Loss = policy_loss,
    params: dict | None = None, rows: int = 0,
) -> tuple[dict, dict[str, float]]:  # fmt: skip
    """(parameters, metrics of the last step) after `steps` updates on one batch."""
    batch = pack(samples, cfg.update, devices=rows_devices(mesh), rows=rows) if isinstance(samples, list) else samples
    params = params_on(mesh) if params is None else params
    state = init_state(params, make_optimizer(cfg.optimizer))
    update = program(cfg, batch, mesh, loss, params["embed"].dtype)
    for _ in range(steps):
        state, metrics = update(state, batch, 1.0)
    return jax.device_get(state.params), {name: float(x) for name, x in metrics.items()}


def assert_close(a: object, b: object, tolerance: float = 1e-5) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------------- the losses in NumPy


@dataclasses.dataclass
class Tokens:
    """One sample's per-token values; `row`: the packed row that it lies in."""

    logp: np.ndarray
    old: np.ndarray | None
    sampler: np.ndarray
    ref: np.ndarray
    entropy: np.ndarray
    advantage: float
    truncated: bool
    row: int


def reference_loss(samples: list[Tokens], cfg: LossConfig) -> tuple[float, dict[str, float]]:
    """Loss and token means of a whole batch, from the definitions."""
    samples = [s for s in samples if not (cfg.mask_truncated and s.truncated)]
    per_sample, means, peaks = [], {}, {}
    for s in samples:
        old = s.logp if s.old is None else s.old
        log_ratio = s.logp - old
        if cfg.ratio == "sequence":
            log_ratio = np.full_like(log_ratio, log_ratio.sum() / len(log_ratio))
        ratio = np.exp(log_ratio)
        inside = np.minimum(np.maximum(ratio, 1 - cfg.clip_low), 1 + cfg.clip_high)
        surrogate = np.minimum(ratio * s.advantage, inside * s.advantage)
        raw = np.exp(old - s.sampler)
        weight = np.minimum(raw, cfg.tis_cap) if cfg.tis_cap > 0 else np.ones_like(raw)
        d = s.logp - s.ref
        kl = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[cfg.kl_estimator]
        per_sample.append(-surrogate * weight + cfg.kl_weight * kl - cfg.entropy_weight * s.entropy)
        values = {"kl": kl, "entropy": s.entropy, "ratio/mean": ratio, "importance_weight/mean": weight}
        values |= {"clip_fraction/low": (inside > ratio) & (s.advantage < 0)}
        values |= {"clip_fraction/high": (inside < ratio) & (s.advantage > 0), "logp_gap/mean": abs(old - s.sampler)}
        for name, x in values.items():
            means.setdefault(name, []).append(np.asarray(x, np.float64))
        for name, x in {"ratio/max": ratio, "importance_weight/max": weight, "logp_gap/max": abs(old - s.sampler)}.items():
            peaks[name] = max(peaks.get(name, 0.0), float(x.max()))
    metrics = {name: float(np.concatenate(x).mean()) for name, x in means.items()} | peaks
    return _aggregated(per_sample, [s.row for s in samples], cfg), metrics


def _aggregated(per_sample: list[np.ndarray], rows: list[int], cfg: LossConfig) -> float:
    if cfg.aggregation == "token":
        return float(np.concatenate(per_sample).mean())
    if cfg.aggregation == "sequence":
        return float(np.mean([x.mean() for x in per_sample]))
    if cfg.aggregation == "constant":
        return float(sum(x.sum() for x in per_sample) / (len(per_sample) * cfg.constant_length))
    by_row = [np.concatenate([x for x, r in zip(per_sample, rows) if r == row]) for row in sorted(set(rows))]
    return float(np.mean([x.mean() for x in by_row]))
