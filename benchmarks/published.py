"""The cost model against published figures of others: the same model, slice and batch through our own programs, and the error.

    python benchmarks/published.py --json          # minutes a program the first time; needs libtpu, no TPU
    python benchmarks/published.py --only=decode-8

Nothing is run. Each program is compiled for the slice that the figure was measured on, its time is modelled by coevo_jax/cost as
it is for our own plans, and set against the published time. No constant of the model was chosen for these figures. What differs
from the published program is said with each: they are other people's programs, so an error holds the model's and the programs'
difference. Compiled programs are kept (--cache).

Axes: B rows, T tokens of a row, M micro-batches.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from coevo_jax import aot
from coevo_jax.config import Experiment, LossConfig, MeshConfig, ModelConfig, OptimizerConfig, SamplerConfig, UpdateConfig
from coevo_jax.cost import Cost, Network, decode_kernels, mfu, product_parameters, program_cost, useful_update_flops
from coevo_jax.errors import UserError
from coevo_jax.learn.losses import sft_loss
from coevo_jax.learn.packing import TokenBatch
from coevo_jax.learn.update import Optimizer, TrainState, make_optimizer, make_update
from coevo_jax.mesh import AXES, DECODE_RULES, RULES, param_shardings, replicated
from coevo_jax.models.forward import param_shapes
from coevo_jax.models.quantize import Int8Weight, quantized_infos
from coevo_jax.models.spec import ModelSpec
from coevo_jax.sampler import ahead
from coevo_jax.sampler.engine import Engine

STEPS = 64  # of a dispatch of decode
# As the published programs were compiled (MaxText: DISABLE_COLLECTIVE_MATMUL) or written (explicit collectives): no product is
# cut into a loop of permutes.
OPTIONS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}
SHALLOW = (2, 4)  # depths from which a program with unrolled layers is continued on a line
LLAMA_8B = ModelSpec("llama", vocab_size=128_256, hidden_size=4096, layers=32, heads=32, kv_heads=8, head_dim=128, mlp_size=14336,
                     rope_theta=5e5)  # fmt: skip
LLAMA_70B = dataclasses.replace(LLAMA_8B, hidden_size=8192, layers=80, heads=64, mlp_size=28672)
MISTRAL_7B = dataclasses.replace(LLAMA_8B, vocab_size=32_000)


def maxtext(scale: int) -> ModelSpec:
    """MaxText's model of `global_parameter_scale`: get_individual_scales of its pyconfig.py over its configs/base.yml."""
    base, rest = divmod(scale.bit_length() - 1, 3)
    heads = 16 * 2 ** (base + (rest > 0))
    return ModelSpec("llama", vocab_size=32_000, hidden_size=2048 * 2 ** (base + (rest > 1)), layers=16 * 2**base, heads=heads,
                     kv_heads=heads, head_dim=128, mlp_size=7168 * 2 ** (base + (rest > 0)))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Update:
    """A measured training step. rows: of a chip; micro: micro-batches they are cut into. seconds, or TFLOP/s a chip as MaxText
    counts them: 6 x parameters of products x tokens + 12 x layers x heads x head_dim x T^2 x rows (tflops)."""

    name: str
    topology: str
    spec: ModelSpec
    rows: int
    length: int
    source: str
    differs: str
    seconds: float = 0.0
    tflops: float = 0.0
    micro: int = 1
    remat: str = "full"
    shallow: bool = False  # at two depths: what the whole keeps would not fit

    @property
    def published(self) -> float:
        """Seconds of a step."""
        if self.seconds:
            return self.seconds
        s, tokens = self.spec, self.rows * self.length
        attention = 12 * s.layers * s.heads * s.head_dim * self.length
        return tokens * (6 * product_parameters(s) + attention) / (self.tflops * 1e12)


@dataclasses.dataclass(frozen=True)
class Decode:
    """Measured decoding: batch rows over data x tensor chips, `filled` positions each; tokens/s of one row."""

    name: str
    topology: str
    spec: ModelSpec
    batch: int
    tensor: int
    filled: int
    tokens_per_second: float
    source: str
    differs: str

    @property
    def published(self) -> float:
        """Seconds of a step."""
        return 1 / self.tokens_per_second


TRILLIUM = "github.com/AI-Hypercomputer/tpu-recipes training/trillium/{}/README.md (step time in the log it shows)"
MAXTEXT = "github.com/AI-Hypercomputer/maxtext MaxText/configs/{}"
EXAMPLES = "github.com/jax-ml/jax-llm-examples llama3/README.md (data parallelism = 2, tensor parallelism = 8; {})"
KEPT = "theirs keeps q, k, v and attention's output in host memory, ours makes them again"
CASES: tuple[Update | Decode, ...] = (
    Update("llama3.1-8b", "v6e:4x4", LLAMA_8B, 3, 8192, TRILLIUM.format("Llama3.1-8B-MaxText/v6e-16"), KEPT, seconds=3.393),
    Update("mistral-7b", "v6e:2x4", MISTRAL_7B, 6, 8192, TRILLIUM.format("Mistral-7B-MaxText"), KEPT + "; in 3 micro-batches",
           seconds=6.320, micro=3),
    Update("maxtext-16b", "v5e:16x16", maxtext(16), 6, 2048, MAXTEXT.format("v5e/README.md, 16b.sh (120 TFLOP/s a chip, 61.1 %)"),
           "", tflops=120),
    Update("maxtext-32b", "v5p:4x4x4", maxtext(32), 7, 2048, MAXTEXT.format("v5p/README.md, 32b.sh (328 TFLOP/s a chip, 71.5 %)"),
           "theirs cuts 16 x fsdp, 4 x tensor; ours fsdp alone", tflops=328, remat="dots", shallow=True),
    Decode("decode-8", "v5e:4x4", LLAMA_70B, 8, 8, 2048, 84.4, EXAMPLES.format("batch 8"), ""),
    Decode("decode-128", "v5e:4x4", LLAMA_70B, 128, 8, 2048, 50.2, EXAMPLES.format("batch 128"), ""),
)  # fmt: skip


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _is_info(x: Any) -> bool:
    return hasattr(x, "axes")


# ----------------------------------------------------------------------------------------------------------------- programs


def update_program(case: Update, spec: ModelSpec, mesh: Mesh) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Our supervised update on rows of one sequence each, parameters cut over all chips."""
    T, rows = case.length, case.rows * mesh.size // case.micro
    cfg = Experiment(
        policy=ModelConfig(source="none", dtype="bfloat16", param_dtype="float32"),
        loss=LossConfig(kl_weight=0.0), optimizer=OptimizerConfig(weight_decay=0.1), mesh=MeshConfig(data=1, fsdp=mesh.size),
        update=UpdateConfig(pack_length=T, max_segments=1, rows_per_micro=rows, remat=case.remat, logprob_chunk=512,
                            attention="splash"),
    )  # fmt: skip
    optimizer = make_optimizer(cfg.optimizer)
    temperature = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated(mesh))
    batch = _batch(case.micro, rows, T, NamedSharding(mesh, PartitionSpec(None, RULES.batch)))
    update = make_update(spec, optimizer, sft_loss, cfg, mesh)
    return update, (_state(spec, optimizer, mesh), batch, temperature), {"donate": (0,)}


def _state(spec: ModelSpec, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """Parameters and moments in float32, cut as training cuts them."""
    infos = param_shapes(spec)
    shapes = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, jnp.float32), infos, is_leaf=_is_info)
    state = jax.eval_shape(lambda p: TrainState(p, optimizer.transform.init(p), jnp.zeros((), jnp.int32)), shapes)
    shardings, whole = param_shardings(infos, mesh), replicated(mesh)
    moments = optax.tree.map_params(
        optimizer.transform, _placed_one, state.opt_state, shardings, transform_non_params=lambda x: _placed_one(x, whole)
    )
    return TrainState(jax.tree.map(_placed_one, state.params, shardings), moments, _placed_one(state.step, whole))


def _placed_one(x: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _batch(M: int, B: int, T: int, sharding: NamedSharding) -> TokenBatch:
    kinds = {"mask": jnp.bool_, "truncated": jnp.bool_, "advantage": jnp.float32, "sampler_logp": jnp.float32}
    shapes = dict.fromkeys(
        ("tokens", "positions", "segment_ids", "targets", "parent_ids", "mask", "advantage", "sampler_logp"), T
    )
    shapes |= {"truncated": 1, "owner": 1}
    return TokenBatch(**{
        name: jax.ShapeDtypeStruct((M, B, n), kinds.get(name, jnp.int32), sharding=sharding) for name, n in shapes.items()
    })  # fmt: skip


def decode_program(case: Decode, spec: ModelSpec, mesh: Mesh) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A dispatch of our engine with int8 weights, as theirs are."""
    cfg = SamplerConfig(slots=case.batch, max_prompt=case.filled, max_new=512, steps_per_dispatch=STEPS, kv_dtype="bfloat16",
                        attention="pallas", prefill_tokens=8192)  # fmt: skip
    engine = Engine(spec, cfg, (2,), mesh=mesh)
    program = ahead.decode_program(engine)
    options = {"donate": program.donate, "out_shardings": program.out_shardings}
    return program.function, (_int8_weights(spec, mesh), *program.args[1:]), options


def _int8_weights(spec: ModelSpec, mesh: Mesh) -> dict[str, Any]:
    """int8 matrices and float32 scales cut over `tensor`, a tree a layer, as decode takes them."""
    infos = quantized_infos(param_shapes(spec), jnp.bfloat16)

    def placed(info: Any, sharding: Any, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(info.shape, dtype, sharding=sharding)

    def leaf(w: Any, at: Any) -> Any:
        if not isinstance(w, Int8Weight):
            return placed(w, at, jnp.bfloat16)
        return Int8Weight(placed(w.values, at.values, jnp.int8), placed(w.scale, at.scale, jnp.float32), w.dtype)

    def layer(w: Any) -> Any:
        return _placed_one(jax.ShapeDtypeStruct(w.shape[1:], w.dtype), NamedSharding(mesh, PartitionSpec(*w.sharding.spec[1:])))

    weight = lambda x: isinstance(x, Int8Weight) or _is_info(x)  # noqa: E731
    stacked = jax.tree.map(leaf, infos, param_shardings(infos, mesh, DECODE_RULES), is_leaf=weight)
    return {**stacked, "layers": tuple(jax.tree.map(layer, stacked["layers"]) for _ in range(spec.layers))}


def mesh_of(case: Update | Decode) -> tuple[aot.Topology, Mesh]:
    topology = aot.topology(case.topology)
    n = len(topology.devices)
    sizes = (1, n, 1) if isinstance(case, Update) else (n // case.tensor, 1, case.tensor)
    return topology, Mesh(np.asarray(topology.devices, dtype=object).reshape(sizes), AXES)


# ------------------------------------------------------------------------------------------------------------------- models


def modelled(case: Update | Decode, cache: pathlib.Path) -> dict[str, Any]:
    """Cost of the program at full depth: compiled so, or on the line through two small depths."""
    depth, shallow = case.spec.layers, isinstance(case, Decode) or case.shallow
    found = [cost_at(case, n, cache) for n in (SHALLOW if shallow else (depth,))]
    if not shallow:
        return found[0]
    (a, x), (b, y) = zip(SHALLOW, found, strict=True)
    return _line(x, y, (depth - a) / (b - a))


def _line(x: Any, y: Any, at: float) -> Any:
    if isinstance(x, dict):
        return {key: _line(x.get(key, 0.0), value, at) for key, value in y.items()}
    return x + (y - x) * at if isinstance(y, int | float) else y


def cost_at(case: Update | Decode, layers: int, cache: pathlib.Path) -> dict[str, Any]:
    """Cost of one step at a depth."""
    topology, mesh = mesh_of(case)
    spec = dataclasses.replace(case.spec, layers=layers)
    say(f"  {case.name}: {layers} layers for {case.topology}")
    fn, args, options = (update_program if isinstance(case, Update) else decode_program)(case, spec, mesh)  # type: ignore[arg-type]
    text = compiled_text(fn, args, options, case.topology, cache)
    trips = [case.micro] if isinstance(case, Update) else [STEPS]
    kernels = decode_kernels(case.filled) if isinstance(case, Decode) else None
    cost = program_cost(text, topology.chip, aot.hosts_of(mesh), network=Network.of(topology.devices, topology.chip), trips=trips,
                        kernels=kernels)  # fmt: skip
    return per_step(cost, STEPS if isinstance(case, Decode) else 1)


def compiled_text(fn: Any, args: Any, options: dict[str, Any], topology: str, cache: pathlib.Path) -> str:
    """The compiled program's text, kept in a packed file named by a hash of all that decides what is compiled."""
    lowered = aot.lower_for(fn, args, **options).as_text()
    key = hashlib.sha256(json.dumps([aot.versions(), topology, OPTIONS, lowered]).encode()).hexdigest()
    kept = cache / f"{key}.hlo.gz"
    if not kept.exists():
        text = aot.compile_for(fn, args, options=OPTIONS, **options).as_text()
        cache.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(".part")
        part.write_bytes(gzip.compress(text.encode(), 3))
        part.replace(kept)
    return gzip.decompress(kept.read_bytes()).decode()


def per_step(cost: Cost, steps: int) -> dict[str, Any]:
    if cost.unknown_loops:
        raise RuntimeError(f"{cost.unknown_loops} loops of unknown length")
    sums = ("flops", "bytes", "collective_seconds", "exposed_seconds", "compute_seconds", "seconds")
    by = {kind: row["seconds"] / steps for kind, row in cost.by_category.items()}
    return {name: getattr(cost, name) / steps for name in sums} | {"by_category": by}


def row(case: Update | Decode, cache: pathlib.Path) -> dict[str, Any]:
    """A published figure, the model's and the error of the model's time."""
    found, chip = modelled(case, cache), aot.parse_name(case.topology)[0]
    error = found["seconds"] / case.published - 1
    out = {"name": case.name, "topology": case.topology, "published_seconds": case.published, "seconds": found["seconds"],
           "error": error, "source": case.source, "differs": case.differs, "cost": found}  # fmt: skip
    if isinstance(case, Update):
        useful = useful_update_flops(case.spec, [case.length] * case.rows)  # of a chip
        out |= {"mfu": mfu(useful, found["seconds"], 1, chip.bf16_flops),
                "published_mfu": mfu(useful, case.published, 1, chip.bf16_flops)}  # fmt: skip
    return out


def show(found: dict[str, Any]) -> None:
    cost = found["cost"]
    print(f"{found['name']} on {found['topology']}: published {found['published_seconds'] * 1e3:.1f} ms a step, model "
          f"{found['seconds'] * 1e3:.1f} ms, error {found['error']:+.1%}")  # fmt: skip
    if "mfu" in found:
        print(f"  MFU (6N + causal attention): published {found['published_mfu']:.1%}, model {found['mfu']:.1%}")
    parts = ", ".join(f"{kind} {seconds * 1e3:.1f}" for kind, seconds in sorted(cost["by_category"].items()))
    print(f"  of it, ms: {parts}; collectives {cost['collective_seconds'] * 1e3:.1f}, "
          f"{cost['exposed_seconds'] * 1e3:.1f} of them not overlapped")  # fmt: skip
    print(f"  {found['source']}{'; ' + found['differs'] if found['differs'] else ''}", flush=True)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    names = [case.name for case in CASES]
    parser.add_argument("--only", default="", help="names with commas, of " + ", ".join(names))
    parser.add_argument("--cache", type=pathlib.Path, default=pathlib.Path.home() / ".cache/coevo-jax/published")
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    args = parser.parse_args(argv)
    for name in filter(None, args.only.split(",")):
        if name not in names:
            raise UserError(f"no published figure is called {name!r}", where="--only", expected=", ".join(names))
    args.cases = [case for case in CASES if not args.only or case.name in args.only.split(",")]
    return args


def main(argv: list[str]) -> int:
    try:
        args = parse(argv)
        aot.require_libtpu()
        found = []
        for case in args.cases:
            found.append(row(case, args.cache))
            show(found[-1])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"versions": aot.versions(), "figures": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
