"""Small random models of several shapes and the naive counterparts that the sampler's tests hold it against."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from coevo_jax.config import SamplerConfig, Sampling
from coevo_jax.models.forward import forward, init_params, unembed
from coevo_jax.models.spec import ModelSpec, RopeScaling
from coevo_jax.sampler import Completion, Engine, Request
from coevo_jax.sampler.draw import chunk_width
from coevo_jax.sampler.keys import row_key, token_uniforms

SHAPE = {"vocab_size": 96, "hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp_size": 48}
SPECS = {
    "llama": ModelSpec("llama", **SHAPE, tied=True, rope_scaling=RopeScaling("llama3", 4.0, 1.0, 4.0, 32)),
    "qwen2": ModelSpec("qwen2", **SHAPE, qkv_bias=True),
    "qwen3": ModelSpec("qwen3", **SHAPE, qk_norm="head", tied=True),
    "mistral": ModelSpec("mistral", **SHAPE, windows=(6, 6)),
    "olmo3": ModelSpec(
        "olmo3", **SHAPE, qk_norm="full", norm_placement="post", windows=(5, 0), unscaled_rope_in_windows=True,
        rope_scaling=RopeScaling("yarn", 4.0, original_max_position=32, attention_factor=1.1),
    ),
}  # fmt: skip
LLAMA = SPECS["llama"]
CFG = SamplerConfig(slots=4, max_prompt=24, max_new=12, steps_per_dispatch=4, prefill_tokens=64)
STOPS = (3, 7)


def params_of(spec: ModelSpec, seed: int = 0, scale: float = 2.0) -> dict:
    """Random weights; the head is scaled so that distributions are not flat, biases and norms are moved so that they matter."""
    params = init_params(jax.random.key(seed), spec)
    rng = np.random.default_rng(seed)
    shake = {n: jnp.asarray(rng.normal(0, 0.3, w.shape), jnp.float32) for n, w in params["layers"].items() if w.ndim < 4}
    params["layers"] = {n: w + shake[n] if n.endswith(("norm", "bias")) else w for n, w in params["layers"].items()}
    head = "embed" if spec.tied else "unembed"
    return params | {head: params[head] * jnp.float32(scale)}


def prompts_of(count: int, seed: int = 0, low: int = 1, high: int = 20, vocab: int = 96) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(8, vocab, rng.integers(low, high + 1)).astype(np.int32) for _ in range(count)]


def requests_of(prompts: list[np.ndarray], n: int = 2, update: int = 0, role: str = "policy", **sampling) -> list[Request]:
    s = Sampling(**({"max_new_tokens": 12} | sampling))
    return [Request(p, n, role, update, i, s) for i, p in enumerate(prompts)]


def new_engine(spec: ModelSpec = LLAMA, stops: tuple[int, ...] = STOPS, mesh=None, seed: int = 1, **changes) -> Engine:
    return Engine(spec, dataclasses.replace(CFG, **changes), stops, mesh=mesh, seed=seed)


@functools.cache
def engine_of(*args, **kwargs) -> Engine:
    """An engine that tests share, so that its programs are compiled once; nothing but programs and counters outlives a call."""
    return new_engine(*args, **kwargs)


@functools.partial(jax.jit, static_argnums=1)
def _full_logits(params, spec, tokens_1xT):
    T = tokens_1xT.shape[1]
    hidden = forward(params, spec, tokens_1xT, jnp.arange(T, dtype=jnp.int32)[None], jnp.ones((1, T), jnp.int32))
    return unembed(params, spec, hidden)[0]


def full_logits(params: dict, spec: ModelSpec, ids: np.ndarray) -> np.ndarray:
    """Logits [T,V] of the whole sequence by the trainer's forward pass, without a cache."""
    padded = np.zeros((1, 64), np.int32)  # causal: what follows changes nothing, and one length compiles once
    padded[0, : len(ids)] = ids
    return np.asarray(_full_logits(params, spec, jnp.asarray(padded)))[: len(ids)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def trainer_logprobs(params: dict, spec: ModelSpec, prompt: np.ndarray, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """Log-softmax rows [N,V] of the distributions that the completion's tokens come from."""
    logits = full_logits(params, spec, np.concatenate([prompt, tokens]))[len(prompt) - 1 : -1]
    return log_softmax(logits / (temperature or 1.0))


def border_distance(logits: np.ndarray, temperature: float, uniforms: np.ndarray) -> float:
    """How far, in probability, the draw's two uniforms are from the nearest border of the two-level inverse CDF."""
    probs = np.exp(log_softmax(logits / temperature)).reshape(-1, chunk_width(len(logits)))
    chunks = np.cumsum(probs.sum(1))
    chosen = int(np.argmax(chunks > uniforms[0]))
    inside = np.cumsum(probs[chosen]) / probs[chosen].sum()
    return min(np.abs(chunks[:-1] - uniforms[0]).min(initial=1), np.abs(inside[:-1] - uniforms[1]).min(initial=1))


def assert_same_draws(params: dict, engine: Engine, requests: list[Request], a: list, b: list, tolerance: float = 1e-4) -> int:
    """Completions equal, or the first differing token is a near-tie. Returns how many differ."""
    differing = 0
    for r, row_a, row_b in zip(requests, a, b, strict=True):
        for sample, (x, y) in enumerate(zip(row_a, row_b, strict=True)):
            same = np.array_equal(x.tokens, y.tokens)
            n = len(x.tokens) if same else next(i for i, (s, t) in enumerate(zip(x.tokens, y.tokens)) if s != t)
            np.testing.assert_allclose(x.logprobs[:n], y.logprobs[:n], atol=1e-4, rtol=0)
            if not same:
                differing += 1
                ids = np.concatenate([np.asarray(r.prompt, np.int32), x.tokens[:n]])
                logits = full_logits(params, engine.spec, ids)[-1]
                key = row_key(engine.seed, r.role, r.update, r.request, sample)
                u = np.asarray(token_uniforms(jnp.asarray(key)[None], jnp.asarray([n], jnp.int32)))[0]
                gap = border_distance(logits, r.sampling.temperature, u)
                assert gap < tolerance, f"request {r.request} sample {sample} token {n}: not a near-tie ({gap})"
    return differing


def flat(completions: list[list[Completion]]) -> list[Completion]:
    return [c for row in completions for c in row]
