"""What the sampler's benchmarks share: workload, engine, workers in processes, the machine's rate of products.

Axes: B slots, D model, H heads, K kv heads, d head width, F inner width, V vocabulary.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

REPO = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent), str(REPO)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from _results import machine  # noqa: E402
from jax import lax  # noqa: E402

from coevo_jax.config import ModelConfig, SamplerConfig, Sampling  # noqa: E402
from coevo_jax.config.override import apply_overrides  # noqa: E402
from coevo_jax.errors import UserError  # noqa: E402
from coevo_jax.models.files import user_cache  # noqa: E402
from coevo_jax.models.load import LoadedModel, load_model  # noqa: E402
from coevo_jax.models.spec import ModelSpec  # noqa: E402
from coevo_jax.sampler import Engine, Request  # noqa: E402
from coevo_jax.sampler.programs import cpu_options  # noqa: E402

ROLE = "benchmark"
DEMO_PROMPTS = REPO / "coevo_jax" / "data" / "demo_prompts.jsonl"


def say(text: str) -> None:
    print(text, flush=True)


def header(**more: Any) -> None:
    """Machine and versions, and what else a figure depends on."""
    facts = {"machine": machine(), "python": sys.version.split()[0], "jax": jax.__version__, "numpy": np.__version__} | more
    say("\n".join(f"{name}: {value}" for name, value in facts.items()))


# ---- workload ----------------------------------------------------------------------------------------------------------


def workload(path: str = "", count: int = 16) -> tuple[list[str], str]:
    """Prompts and where they come from: `path`, else the shared workload (COEVO_SHARED moves its folder), else demo prompts."""
    shared = pathlib.Path(os.environ.get("COEVO_SHARED", REPO.parent / "shared")) / "peers" / "workload.jsonl"
    if path and not pathlib.Path(path).is_file():
        raise UserError("the workload is not there", where=path, expected='a file with one {"prompt": ...} a line')
    file = pathlib.Path(path) if path else shared if shared.is_file() else DEMO_PROMPTS
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if file == DEMO_PROMPTS:
        step = max(1, len(rows) // count)
        return [row["prompt"] for row in rows[::step][:count]], f"{count} of the bundled demo prompts (no {shared})"
    return [row["prompt"] for row in rows[:count]], str(file)


def sampler_config(slots: int, longest: int, max_new: int, overrides: Sequence[str] = ()) -> SamplerConfig:
    """`overrides`: 'steps_per_dispatch=16' and so on, over the config's own defaults."""
    return apply_overrides(SamplerConfig(slots=slots, max_prompt=longest, max_new=max_new), overrides)


def split_overrides(extra: Sequence[str]) -> list[str]:
    """The KEY=VALUE of each --sampler.KEY=VALUE; UserError for anything else."""
    for text in extra:
        if not text.startswith("--sampler.") or "=" not in text:
            raise UserError(f"unknown argument {text!r}", where="command line", expected="--sampler.KEY=VALUE, or see --help")
    return [text.removeprefix("--sampler.") for text in extra]


def keep_programs() -> None:
    """Compiled programs are kept over runs, apart by processor."""
    jax.config.update("jax_compilation_cache_dir", str(user_cache() / "compiled" / machine().replace(" ", "_").replace("/", "_")))


def model_and_engine(source: str, cfg: SamplerConfig, stop_ids: Sequence[int], seed: int = 0) -> tuple[LoadedModel, Engine]:
    """A model in float32 and an engine for it, with kept programs."""
    keep_programs()
    model = load_model(ModelConfig(source=source))
    return model, Engine(model.spec, cfg, tuple(stop_ids), seed=seed)


def requests_of(prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, update: int = 0) -> list[Request]:
    """`update` names the run, so that each draws noise of its own."""
    return [Request(np.asarray(ids, np.int32), n, ROLE, update, i, sampling) for i, ids in enumerate(prompts)]


def random_ids(rng: np.random.Generator, length: int, vocab: int) -> np.ndarray:
    """Ids without the first ones, where special tokens lie."""
    return rng.integers(min(64, vocab // 2), vocab, length).astype(np.int32)


# ---- arithmetic --------------------------------------------------------------------------------------------------------


def paired_ratio(ours: Sequence[float], peer: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest of the ratios of runs that were neighbours in time."""
    if not ours or len(ours) != len(peer):
        raise ValueError(f"{len(ours)} runs against {len(peer)}: nothing to pair")
    ratios = [a / b for a, b in zip(ours, peer)]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def product_parameters(spec: ModelSpec) -> int:
    """N: weights that take part in a matrix product for every token; the head counts once, the embedding look-up never."""
    D, d = spec.hidden_size, spec.head_dim
    layer = 2 * D * spec.heads * d + 2 * D * spec.kv_heads * d + 3 * D * spec.mlp_size
    return spec.layers * layer + D * spec.vocab_size


def roofline_share(tokens_per_second: float, parameters: int, rate: float) -> float:
    """Useful tokens/s x 2N over the rate of matrix products (floating-point operations/s)."""
    return tokens_per_second * 2 * parameters / rate


def heavy_tail(count: int, seed: int, low: int = 8, high: int = 1024, exponent: float = 1.0) -> np.ndarray:
    """Lengths [count] int32 of a Pareto law cut to low..high: P(length > x) falls as x^-exponent. Inverse CDF."""
    u = np.random.default_rng(seed).random(count)
    a, b = (low - 0.5) ** -exponent, (high + 0.5) ** -exponent
    return np.clip(np.rint((a - u * (a - b)) ** (-1 / exponent)), low, high).astype(np.int32)


def steps_without_refill(lengths: Sequence[int] | np.ndarray, slots: int) -> int:
    """Decode steps of batches of `slots` in the order given, each until its longest row ends."""
    return sum(max(int(n) for n in lengths[i : i + slots]) for i in range(0, len(lengths), slots))


def steps_with_refill(lengths: Sequence[int] | np.ndarray, slots: int) -> int:
    """Decode steps when a free slot takes the next length of the order given at once."""
    free_at = [0] * slots
    for n in lengths:
        first = min(range(slots), key=free_at.__getitem__)
        free_at[first] += int(n)
    return max(free_at)


# ---- the machine's rate of matrix products -----------------------------------------------------------------------------


class ProductChain:
    """Matrix products of one decode step and nothing else: float32 [B, in] x [in, out] with every weight shape of the model, its
    layers one after the other with weights of their own (so caches are as cold as in decode), then the vocabulary head.

    Each product takes the one before it, so that none can be left out; what joins them is linear and small.
    """

    def __init__(self, spec: ModelSpec, slots: int):
        self.parameters, self.flops = product_parameters(spec), 2.0 * product_parameters(spec) * slots
        D, F, q, kv = spec.hidden_size, spec.mlp_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        shapes = {"q": (D, q), "k": (D, kv), "v": (D, kv), "o": (q, D), "gate": (D, F), "up": (D, F), "down": (F, D)}
        rng = np.random.default_rng(0)

        def weight(shape: tuple[int, int]) -> jax.Array:
            return jnp.asarray(rng.standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5))

        layers = [{name: weight(shape) for name, shape in shapes.items()} for _ in range(spec.layers)]
        self.weights = (layers, weight((D, spec.vocab_size)).T)
        self.x_BxD = jnp.asarray(rng.standard_normal((slots, D), np.float32))
        self.program = jax.jit(_chain).lower(self.weights, self.x_BxD, np.int32(1)).compile(cpu_options())

    def measure(self, seconds: float) -> float:
        """Floating-point operations a second over about `seconds`."""
        self._time(1)  # pages and caches
        steps = max(2, int(seconds / self._time(2) * 2))
        return self.flops * steps / self._time(steps)

    def _time(self, steps: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(self.program(self.weights, self.x_BxD, np.int32(steps)))
        return time.perf_counter() - start


def _chain(weights: Any, x_BxD: jax.Array, steps: jax.Array) -> jax.Array:
    layers, head = weights

    def step(_: jax.Array, x: jax.Array) -> jax.Array:
        for w in layers:
            q, k, v = (jnp.dot(x, w[name]) for name in ("q", "k", "v"))
            x = jnp.dot(q, w["o"]) + jnp.mean(k + v, axis=1, keepdims=True)
            x = jnp.dot((jnp.dot(x, w["gate"]) + jnp.dot(x, w["up"])) * jnp.float32(0.7), w["down"])
        # Whole: a slice of it could be computed alone. The head stands on the left, where Eigen is faster with it.
        logits = lax.optimization_barrier(jnp.einsum("VD,BD->VB", head, x))
        return x + jnp.float32(1e-6) * logits[: x.shape[1]].T

    return lax.fori_loop(0, steps, step, x_BxD)


# ---- workers -----------------------------------------------------------------------------------------------------------


class Worker:
    """A process that answers one JSON line with one JSON line (benchmarks/peers/protocol.py). Its stderr goes to a file."""

    def __init__(self, name: str, command: Sequence[str]):
        self.name = name
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed by stop()
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # a peer must not see our packages
        self.process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=env
        )

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The answer. RuntimeError with the worker's own words when it failed or ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended: told below
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"worker {self.name} ended (exit code {self.process.wait()}):\n{self._tail()}")
        answer = json.loads(line)
        if not answer.pop("ok"):
            raise RuntimeError(f"worker {self.name} failed at {command!r}:\n{answer['error']}")
        return answer

    def _tail(self) -> str:
        self.log.seek(0)
        return self.log.read()[-3000:]

    def stop(self) -> None:
        """End the process; safe to call twice."""
        if self.process.poll() is None:
            try:
                assert self.process.stdin is not None
                self.process.stdin.close()
                self.process.wait(timeout=20)
            except (OSError, subprocess.TimeoutExpired):
                self.process.kill()
                self.process.wait()
        self.log.close()
