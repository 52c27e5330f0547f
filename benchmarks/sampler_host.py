"""Host time a dispatch at Qwen3-8B's shapes, with the device part replaced by its modelled time.

    python benchmarks/sampler_host.py [--slots=256] [--completions=8192] [--steps=64] [--chips=4] [--json] [--sampler.KEY=VALUE]

The real scheduler runs with 36 layers and a vocabulary of 151,936, and reads reports one dispatch late, as on a pod. Decode,
admission, moves and the keeping of heads are stand-ins: compiled programs that take and give back trees of the real structure and
touch only the slots' bookkeeping; prefill's hands out keys and values made once. Widths are cut to nothing (no program reads
them), so that the state fits here. All wall time is counted as the host's, the stand-ins' own included: an upper bound for this
processor. Modelled device time of a dispatch: steps x (bytes of the weights + bytes of the keys and values filled on average)
over 0.8 of the chips' memory bandwidth (v5p: 2765 GB/s a chip as published).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import jax
import jax.numpy as jnp
import numpy as np
from _sampler import (
    ROLE,
    Engine,
    ModelSpec,
    Request,
    SamplerConfig,
    Sampling,
    UserError,
    apply_overrides,
    header,
    heavy_tail,
    product_parameters,
    random_ids,
    say,
    split_overrides,
)

from coevo_jax.models.forward import init_params
from coevo_jax.sampler.decode import Plan
from coevo_jax.sampler.kv import bytes_per_token
from coevo_jax.sampler.state import FULL, LENGTH, RUNNING, Report

QWEN3_8B = ModelSpec("qwen3", vocab_size=151_936, hidden_size=4096, layers=36, heads=32, kv_heads=8, head_dim=128, mlp_size=12288,
                     rope_theta=1e6, norm_eps=1e-6, qk_norm="head", max_position=40_960)  # fmt: skip
BANDWIDTH = 2765e9  # bytes/s of a v5p chip
REACHED = 0.8  # of it
REAL = ("weights", "state", "store", "nothing", "collect")  # programs that run as they are


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--completions", type=int, default=8192)
    parser.add_argument("--group", type=int, default=8, help="completions a prompt")
    parser.add_argument("--steps", type=int, default=64, help="decode steps a dispatch")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--max_new", type=int, default=2048, help="longest completion; lengths are a heavy tail from 64 up to it")
    parser.add_argument("--chips", type=int, default=4, help="v5p chips that hold one copy of the model and the slots")
    parser.add_argument("--json", action="store_true")
    args, extra = parser.parse_known_args(argv)
    for name in ("slots", "completions", "group", "steps", "prompt", "max_new", "chips"):
        least = 65 if name == "max_new" else 1
        if getattr(args, name) < least:
            raise UserError(f"--{name}={getattr(args, name)}", where="command line", expected=f"at least {least}")
    return args, split_overrides(extra)


# ---- stand-ins ---------------------------------------------------------------------------------------------------------


def decode_rows(rows: Any, steps: jax.Array, leave_at: jax.Array, capacity: Any) -> tuple[Any, jax.Array, jax.Array]:
    """Rows after the steps that a decode program would do when no stop id is drawn: rows, steps done, active row-steps.

    It ends when at most max(leave_at, 0) slots are active, that is after as many steps as the slot that many places from the
    longest still has to go. capacity: positions of each slot.
    """
    left = jnp.where(rows.active, jnp.minimum(rows.max_new - rows.drawn, capacity - rows.length), 0)
    slots = left.shape[0]
    place = jnp.clip(jnp.maximum(leave_at, 0), 0, slots)
    until = jnp.concatenate([-jnp.sort(-left), jnp.zeros(1, left.dtype)])[place]
    done = jnp.minimum(steps, until)
    grown = jnp.minimum(left, done)
    ends = rows.active & (left <= done) & (done > 0)
    changed = dataclasses.replace(
        rows,
        active=rows.active & ~ends,
        finish=jnp.where(ends, jnp.where(rows.drawn + grown >= rows.max_new, LENGTH, FULL), rows.finish).astype(jnp.int32),
        length=rows.length + grown,
        drawn=rows.drawn + grown,
    )
    return changed, done, jnp.sum(grown)


def decode_stand_in(
    weights: Any, state: Any, store: Any, mask: Any, steps: jax.Array, leave_at: jax.Array, *, plan: Plan
) -> tuple[Any, Report]:
    rows, done, used = decode_rows(state.rows, steps, leave_at, plan.capacity)
    copies = {name: jnp.copy(getattr(rows, name)) for name in ("active", "finish", "drawn", "length", "last")}
    return dataclasses.replace(state, rows=rows), Report(**copies, steps=done, row_steps=used)


def admit_stand_in(state: Any, prompts: Any, store: Any, admission: Any) -> Any:
    slots = state.rows.active.shape[0]
    target = jnp.where(jnp.arange(slots) < admission.count, admission.slot, slots)  # beyond the last slot: dropped
    rows = jax.tree.map(lambda old, new: old.at[target].set(new, mode="drop"), state.rows, admission.rows)
    return dataclasses.replace(state, rows=rows)


def move_stand_in(state: Any, source: jax.Array, target: jax.Array) -> Any:
    rows = jax.tree.map(lambda x: x.at[target].set(x[source]), state.rows)
    rows = dataclasses.replace(rows, active=rows.active.at[target].set(True), finish=rows.finish.at[target].set(RUNNING))
    return dataclasses.replace(state, rows=rows)


def keep_stand_in(store: Any, *_: Any) -> Any:
    return store


STAND_INS = {"decode": decode_stand_in, "admit": admit_stand_in, "move": move_stand_in, "keep": keep_stand_in}
KNOWN = (*REAL, "prefill", *STAND_INS)


class StandIns:
    """Takes the place of an engine's Programs: the same keys, programs that cost the device nothing."""

    def __init__(self) -> None:
        self.built: dict[Any, Any] = {}
        self.sealed = self.planning = False
        self.calls: dict[str, int] = dict.fromkeys(KNOWN, 0)

    def get(self, key: Any, function: Any, args: tuple[Any, ...], **options: Any) -> Any:
        if key[0] not in KNOWN:
            raise UserError(f"no stand-in for the engine's program {key[0]!r}", where="benchmarks/sampler_host.py",
                            expected=", ".join(KNOWN))  # fmt: skip
        if key not in self.built:
            if self.sealed:
                raise RuntimeError(f"program {key} was not built by warm-up: its compile would count as host time")
            self.built[key] = self._build(key[0], function, args, options)
        if self.planning:
            shapes = jax.eval_shape(self._function(key[0], function), *args)
            return lambda *_: shapes
        self.calls[key[0]] += 1
        return self.built[key]

    def _function(self, name: str, function: Any) -> Any:
        plan = {"plan": function.keywords["plan"]} if name == "decode" else {}
        return functools.partial(STAND_INS.get(name, function), **plan)

    @contextlib.contextmanager
    def ahead(self, progress: Any = None) -> Iterator[None]:
        """Inside, nothing runs: programs give the shapes of their results."""
        self.planning = True
        yield
        self.planning = False

    def _build(self, name: str, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if name == "prefill":
            kept = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, *args))
            return lambda *_: jax.tree.map(lambda leaf: leaf, kept)  # a buffer of its own, as the engine tells them apart
        # without keep_unused the runtime would drop the weights from the call, and with them their cost on the host
        return jax.jit(self._function(name, function), keep_unused=True, **options).lower(*args).compile()


# ---- the run -----------------------------------------------------------------------------------------------------------


def narrow(spec: ModelSpec) -> ModelSpec:
    """The same layers and vocabulary with the least widths."""
    return dataclasses.replace(spec, hidden_size=2, heads=1, kv_heads=1, head_dim=2, mlp_size=2)


def modelled_seconds(spec: ModelSpec, slots: int, filled: float, steps: float, chips: int) -> float:
    """Device seconds of a dispatch by the roofline: every step reads the weights (bfloat16) and `filled` positions a slot."""
    weights = 2 * product_parameters(spec)
    kv = slots * filled * bytes_per_token(spec, "bfloat16")
    return steps * (weights + kv) / (REACHED * BANDWIDTH * chips)


def requests_for(args: argparse.Namespace, vocab: int) -> tuple[list[Request], np.ndarray]:
    """Groups of equal length limits, from a stated seed; a prompt has one limit, as in training its samples would."""
    count = -(-args.completions // args.group)
    lengths = heavy_tail(count, seed=0, low=64, high=args.max_new)
    rng = np.random.default_rng(0)
    limits = [Sampling(max_new_tokens=int(n), min_new_tokens=int(n)) for n in lengths]
    requests = [Request(random_ids(rng, args.prompt, vocab), args.group, ROLE, 0, i, limit) for i, limit in enumerate(limits)]
    return requests, np.repeat(lengths, args.group)


def benchmark(args: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    spec = narrow(QWEN3_8B)
    cfg = apply_overrides(
        SamplerConfig(
            slots=args.slots, max_prompt=args.prompt, max_new=args.max_new, steps_per_dispatch=args.steps, kv_dtype="bfloat16",
            prefill_tokens=max(8192, args.prompt), read_lag=1,
        ),
        overrides,
    )  # fmt: skip
    header(model="Qwen3-8B's layers and vocabulary", config=repr(cfg))
    engine = Engine(spec, cfg, (0,), seed=0)
    stand_ins = StandIns()
    engine.programs = stand_ins  # type: ignore[assignment]
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), init_params(jax.random.key(0), spec))
    requests, lengths = requests_for(args, spec.vocab_size)
    engine.warmup(params, next_token=False)
    engine.generate(params, requests[: max(1, args.slots // args.group)])
    engine.stats.reset()
    stand_ins.calls = dict.fromkeys(KNOWN, 0)
    start = time.perf_counter()
    engine.generate(params, requests)
    seconds, stats = time.perf_counter() - start, engine.stats
    steps = stats.slot_steps / cfg.slots / stats.dispatches
    # a row-step of a sequence of n tokens reads prompt + what it has drawn: over the run, n/2 on average weighted by n
    filled = args.prompt + float((lengths.astype(np.float64) ** 2).sum() / (2 * lengths.sum()))
    device = modelled_seconds(QWEN3_8B, cfg.slots, filled * stats.occupancy, steps, args.chips)
    host = seconds / stats.dispatches
    return {
        "host_ms": 1e3 * host,
        "device_ms": 1e3 * device,
        "share": host / device,
        "dispatches": stats.dispatches,
        "completions": int(lengths.size),
        "steps_a_dispatch": steps,
        "occupancy": stats.occupancy,
        "mean_length": float(lengths.mean()),
        "filled": filled,
        "programs_called": stand_ins.calls,
        "chips": args.chips,
        "slots": cfg.slots,
    }


def main(argv: list[str]) -> int:
    try:
        args, overrides = parse(argv)
        found = benchmark(args, overrides)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    say(f"{found['completions']} completions of mean length {found['mean_length']:.0f}, {found['dispatches']} dispatches "
        f"of {found['steps_a_dispatch']:.1f} steps, occupancy {found['occupancy']:.3f}")  # fmt: skip
    say(f"programs called: {found['programs_called']}")
    say(f"host {found['host_ms']:.2f} ms a dispatch, modelled device {found['device_ms']:.1f} ms ({found['chips']} v5p chips, "
        f"{found['filled']:.0f} positions filled on average): {100 * found['share']:.2f} %")  # fmt: skip
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
