"""Qwen3-8B's decode and prefill compiled for pod slices that nobody owns: memory, copies, collectives, slots, rooflines.

    python benchmarks/pod_sampler.py [--topology=v5e:4x4] [--layers=36] [--classes=3] [--tries=3] [--json]

Nothing is run: the compiler's own account of each program (coevo_jax.aot) and arithmetic on published figures of the chips. The
programs are the engine's: one dispatch of decode, and the largest packed prefill, which goes on from shared heads, for prompts of
2,048 and completions of 16,384 tokens; tensor parallel over the 4 chips of a host, hosts data parallel. Needs the extra `tpu`.

Slots: what the weights (decode's copy by layers and prefill's stacked one), the store of shared heads, one prefill's results and
RESERVE for temporaries leave free is cut into length classes; then each program must fit beside the rest. `rows` are those that
run on average when the scheduler's rules are played on a stated distribution of lengths under a queue that never empties; a pager
that wastes nothing would run `ideal` of them. Roofline of a step: bytes of the weights, of the tiles filled and of the staging
window over the published bandwidth, or the products over the published peak, whichever is longer; logits, the draw and the flush
are left out, and collectives are given apart. A figure that was compiled before is taken from --cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import re
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import jax
from _sampler import Engine, ModelSpec, SamplerConfig, UserError, header, product_parameters, say, user_cache
from sampler_host import QWEN3_8B

from coevo_jax import aot
from coevo_jax.plan.lengths import Classes, Lengths, Use, best_classes, lognormal_lengths, use_of
from coevo_jax.plan.programs import device_bytes
from coevo_jax.sampler import ahead
from coevo_jax.sampler.kv import bytes_per_token
from coevo_jax.sampler.prefill import BLOCK, Variant

MAX_PROMPT, MAX_NEW, STEPS, TENSOR, LAG, HEADS = 2048, 16384, 64, 4, 1, 8
LONGEST = MAX_PROMPT + MAX_NEW
STOP_IDS = (151_645, 151_643)
TILE = 512  # positions the decode kernel reads at once
HEADROOM = 0.03  # of what the compiler lets a program use: left free
RESERVE = int(2.5 * aot.GIB)  # for temporaries of decode (windows apart), or temporaries and results of prefill
MOST_CLASSES = 6  # of the table against the pager
MIB = 2**20


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", action="append", help=f"may be given again; default {' '.join(aot.TOPOLOGIES)}")
    parser.add_argument("--layers", type=int, default=QWEN3_8B.layers, help="fewer compile sooner; slots stay those of all")
    parser.add_argument("--classes", type=int, default=3, help="length classes that are compiled")
    parser.add_argument("--programs", default="decode,prefill")
    parser.add_argument("--tries", type=int, default=3, help="a compile that fails inside libtpu is tried again")
    parser.add_argument("--prefill_tokens", type=int, default=8192, help="of one prefill, which each host computes whole")
    parser.add_argument("--rows", type=int, default=20_000, help="rows of the distribution of lengths")
    parser.add_argument("--seed", type=int, default=0, help="of that distribution")
    parser.add_argument("--cache", type=pathlib.Path, default=user_cache() / "pod_sampler.json", help="keeps compiled figures")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    args.topology = args.topology or list(aot.TOPOLOGIES)
    args.programs = args.programs.split(",")
    if not set(args.programs) <= {"prefill", "decode"}:
        raise UserError(f"--programs={','.join(args.programs)}", where="command line", expected="prefill, decode or both")
    for name in ("layers", "classes", "tries", "rows"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}={getattr(args, name)}", where="command line", expected="at least 1")
    return args


# ---- sizes -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes on a device at full depth."""

    weights: int  # as decode takes them
    table: int  # of these the embedding, of which a step reads a few rows
    layers: int  # of these the layers, which prefill has stacked a second time
    position: int  # keys and values of one position

    @staticmethod
    def of(mesh: Any, spec: ModelSpec) -> Sizes:
        split = ahead.split_weights(spec, mesh)
        position = 2 * spec.layers * spec.kv_heads * spec.head_dim * 2 // TENSOR
        return Sizes(device_bytes(split), device_bytes(split["embed"]), device_bytes(split["layers"]), position)


def engine_for(spec: ModelSpec, mesh: Any, classes: Classes, prefill_tokens: int) -> Engine:
    """The engine for the whole slice; `classes` are those of a host."""
    hosts = mesh.shape["data"]
    whole = tuple((n * hosts, s) for n, s in classes)
    cfg = SamplerConfig(slots=sum(n for n, _ in whole), length_classes=whole, max_prompt=MAX_PROMPT, max_new=MAX_NEW, heads=HEADS,
                        steps_per_dispatch=STEPS, read_lag=LAG, kv_dtype="bfloat16", attention="pallas",
                        prefill_tokens=prefill_tokens)  # fmt: skip
    return Engine(spec, cfg, STOP_IDS, mesh=mesh)


# ---- compiling ---------------------------------------------------------------------------------------------------------


def compiled(program: ahead.Program, mesh: Any, args: argparse.Namespace, what: str) -> dict[str, Any]:
    """aot.figures of a program, and what became of each try."""
    out: dict[str, Any] = {"program": what, "tries": 0, "errors": []}
    start, before = time.perf_counter(), _written(args.cache)
    for _ in range(args.tries):
        out["tries"] += 1
        try:
            found = aot.figures(program.function, program.args, mesh, cache=args.cache, copies_from=MIB, donate=program.donate,
                                out_shardings=program.out_shardings)  # fmt: skip
        except jax.errors.JaxRuntimeError as error:
            out["errors"].append(str(error)[:300])
            say(f"  {what}: try {out['tries']} failed after {time.perf_counter() - start:.0f} s: {str(error)[:160]}")
            continue
        out |= found
        break
    out |= {"seconds": time.perf_counter() - start, "cached": "memory" in out and _written(args.cache) == before}
    return out


def _written(cache: pathlib.Path) -> int:
    return cache.stat().st_mtime_ns if cache.exists() else 0


def traffic(found: dict[str, Any]) -> dict[str, Any]:
    """Collectives by kind as (count, bytes): those in loops, of a step of decode or a call of prefill, and those that cross hosts
    anywhere (or might: their groups are not known)."""
    inside: dict[str, tuple[int, int]] = {}
    crossing: dict[str, tuple[int, int]] = {}
    for c in found["collectives"]:
        for where, counts in ((inside, c["loops"]["bodies"]), (crossing, c["crosses_hosts"] is not False)):
            if counts:
                count, size = where.get(c["kind"], (0, 0))
                where[c["kind"]] = (count + c["loops"]["runs"], size + c["loops"]["runs"] * c["bytes"])
    return {"kinds": inside, "bytes": sum(size for _, size in inside.values()), "crossing": crossing}


def copies(found: dict[str, Any], spec: ModelSpec, classes: Classes) -> dict[str, Any]:
    """Of the loop's body: the largest copy that stays in HBM, the largest move into fast memory, and those of the cache."""
    K, d = spec.kv_heads // TENSOR, spec.head_dim
    ends = "|".join(f"{d},{s}|{s},{d}" for _, s in classes)
    cache = [c for c in found["copies"] if re.search(rf",{K},(?:{ends})\]", c["shape"])]
    largest = {}
    for name, fast in (("hbm", False), ("vmem", True)):
        some = [c for c in found["copies"] if c["in_vmem"] is fast]
        top = max(some, key=lambda c: c["bytes"], default=None)
        largest[name] = top and {"shape": top["shape"].split("{")[0], "bytes": top["bytes"], "opcode": top["opcode"]}
    return {**largest, "of_cache": len(cache)}


# ---- one topology ------------------------------------------------------------------------------------------------------


def prefill(args: argparse.Namespace, mesh: Any, spec: ModelSpec, classes: Classes) -> dict[str, Any]:
    """The largest packed prefill."""
    engine = engine_for(spec, mesh, classes, args.prefill_tokens)
    variant = engine.variants[-1]
    what = f"prefill of {variant.shape[0]} x {variant.shape[1]} tokens, heads of {variant.context}"
    found = compiled(ahead.prefill_program(engine, variant), mesh, args, what)
    if "memory" in found:
        beside = device_bytes(ahead.split_weights(spec, mesh)["layers"]) + state_bytes(engine) + buffer_bytes(args, spec)
        found |= {"traffic": traffic(found), **fits(found, beside, _chip(mesh))}
    return found | {"tokens": math.prod(variant.shape), "roofline": prefill_roofline(variant, mesh)}


def decode(args: argparse.Namespace, mesh: Any, spec: ModelSpec, classes: Classes) -> dict[str, Any]:
    """A dispatch."""
    engine = engine_for(spec, mesh, classes, args.prefill_tokens)
    found = compiled(ahead.decode_program(engine), mesh, args, f"decode of {sum(n for n, _ in classes)} slots a host")
    if "memory" in found:
        m, state = found["memory"], state_bytes(engine)
        beside = device_bytes(ahead.weights(spec, mesh)["layers"]) + device_bytes(ahead.store(engine)) + buffer_bytes(args, spec)
        in_place = m["alias"] >= state and m["outputs"] - m["alias"] < MIB
        found |= {"traffic": traffic(found), "largest": copies(found, spec, classes), **fits(found, beside, _chip(mesh))}
        found |= {"state": state, "in_place": in_place}
    return found


def state_bytes(engine: Engine) -> int:
    return device_bytes(ahead.state(engine))


def buffer_bytes(args: argparse.Namespace, spec: ModelSpec) -> int:
    """Keys and values that one prefill leaves until its rows are admitted."""
    return args.prefill_tokens * bytes_per_token(spec, "bfloat16") // TENSOR


def fits(found: dict[str, Any], beside: int, chip: aot.Chip) -> dict[str, Any]:
    total = found["memory"]["peak"] + beside
    return {"beside": beside, "total": total, "fits": total <= chip.hbm_program}


def prefill_roofline(variant: Variant, mesh: Any) -> dict[str, float]:
    """Of the model at full depth, Each host computes all rows, so the slice prefills no faster than one host."""
    chip, spec, sizes = _chip(mesh), QWEN3_8B, Sizes.of(mesh, QWEN3_8B)
    tokens = math.prod(variant.shape)
    seen = (min(-(-(variant.longest - 1) // BLOCK), variant.shape[1] // BLOCK - 1) + 1) * BLOCK + variant.context
    products = 2 * tokens * (product_parameters(spec) - spec.vocab_size * spec.hidden_size)
    attention = 4 * tokens * seen * spec.heads * spec.head_dim * spec.layers
    by_flops = (products + attention) / TENSOR / chip.bf16_flops
    by_bytes = sizes.layers / chip.hbm_bandwidth
    return {"flops_ms": 1e3 * by_flops, "bytes_ms": 1e3 * by_bytes, "tokens_per_second": tokens / max(by_flops, by_bytes)}


def decode_roofline(mesh: Any, sizes: Sizes, classes: Classes, rows: float, filled: float) -> dict[str, float]:
    """A step of one host, at full depth. rows: those that run; all slots are computed."""
    chip, slots = _chip(mesh), sum(n for n, _ in classes)
    weights = sizes.weights - sizes.table
    cache = rows * (filled + TILE / 2) * sizes.position
    window = slots * STEPS * sizes.position
    by_bytes = (weights + cache + window) / chip.hbm_bandwidth
    by_flops = 2 * slots * product_parameters(QWEN3_8B) / TENSOR / chip.bf16_flops
    step = max(by_bytes, by_flops)
    return {
        "weights_bytes": weights, "cache_bytes": cache, "window_bytes": window, "bytes": weights + cache + window,
        "bytes_ms": 1e3 * by_bytes, "flops_ms": 1e3 * by_flops, "tokens_per_second_host": rows / step,
        "tokens_per_second_slice": rows / step * mesh.shape["data"],
    }  # fmt: skip


def slots(args: argparse.Namespace, mesh: Any, sizes: Sizes, lengths: Lengths) -> dict[str, Any]:
    """Slots of a host by number of classes, and what a pager would run in the same memory."""
    buffer, store = args.prefill_tokens * sizes.position, HEADS * MAX_PROMPT * sizes.position
    free = int(_chip(mesh).hbm_program * (1 - HEADROOM)) - sizes.weights - sizes.layers - store - buffer - RESERVE
    positions = free // sizes.position
    out: dict[str, Any] = {"positions": positions, "ideal": positions / lengths.filled, "by_classes": []}
    for count in range(1, MOST_CLASSES + 1):
        found = fitted(lengths, positions, count)
        if found is not None:
            classes, use = found
            out["by_classes"].append(
                {"classes": classes, "slots": use.slots, "rows": use.rows, "waiting": use.full, "ratio": out["ideal"] / use.rows}
            )
    return out


def fitted(lengths: Lengths, positions: int, count: int) -> tuple[Classes, Use] | None:
    """Classes whose windows fit too (one of STEPS positions a slot, and a second one while it is written)."""
    first = best_classes(lengths, LONGEST, positions, count, STEPS, LAG)
    found = first and best_classes(lengths, LONGEST, positions - 2 * STEPS * first[1].slots, count, STEPS, LAG)
    if found is None:
        return None
    ((n, shortest), *rest), use = found
    odd = use.slots % TENSOR if rest else 0  # logits are dealt out by rows, where those divide
    classes = ((max(1, n - odd), shortest), *rest)
    return classes, use_of(classes, lengths, STEPS, LAG)


def one(name: str, args: argparse.Namespace, lengths: Lengths) -> dict[str, Any]:
    """Everything about one topology."""
    mesh = aot.mesh_for(aot.topology(name), tensor=TENSOR)
    spec, sizes, chip = dataclasses.replace(QWEN3_8B, layers=args.layers), Sizes.of(mesh, QWEN3_8B), _chip(mesh)
    out: dict[str, Any] = {
        "topology": name, "hosts": mesh.shape["data"], "tensor": TENSOR, "layers": args.layers, "hbm_program": chip.hbm_program,
        "sizes": dataclasses.asdict(sizes), "slots": slots(args, mesh, sizes, lengths),
    }  # fmt: skip
    say(f"\n{name}: {out['hosts']} hosts of {TENSOR} chips, {args.layers} layers")
    chosen = next((r for r in out["slots"]["by_classes"] if len(r["classes"]) == args.classes), None)
    if chosen is None:
        raise UserError(f"{name}: {args.classes} classes do not fit", where="--classes", expected="fewer")
    classes = chosen["classes"]
    out["roofline"] = decode_roofline(mesh, sizes, classes, chosen["rows"], lengths.filled)
    for program, make in (("decode", decode), ("prefill", prefill)):
        if program in args.programs:
            out[program] = make(args, mesh, spec, classes)
    if "memory" in out.get("decode", {}):
        out["roofline"]["ici_ms"] = 1e3 * out["decode"]["traffic"]["bytes"] / chip.ici_link
    show(out)
    return out


# ---- what is printed ---------------------------------------------------------------------------------------------------


def gib(n: float) -> str:
    return f"{n / aot.GIB:.2f}"


def show(out: dict[str, Any]) -> None:
    """One topology, to read."""
    for p in (out[name] for name in ("decode", "prefill") if name in out):
        failed = f"; {len(p['errors'])} of {p['tries']} tries failed: {p['errors'][0]}" if p["errors"] else ""
        if "memory" not in p:
            say(f"  {p['program']}: NOT COMPILED{failed}")
            continue
        m, t = p["memory"], p["traffic"]
        took = "compiled before" if p["cached"] else f"{p['seconds']:.0f} s"
        say(f"  {p['program']}: {took}{failed}")
        say(f"    GiB a device: arguments {gib(m['arguments'])}, results {gib(m['outputs'])} of them in place {gib(m['alias'])}, "
            f"temporaries {gib(m['temporaries'])}, peak {gib(m['peak'])}; with what lies beside ({gib(p['beside'])}): "
            f"{gib(p['total'])} of {gib(out['hbm_program'])}, {'fits' if p['fits'] else 'DOES NOT FIT'}")  # fmt: skip
        say(f"    collectives in loops: {_kinds(t['kinds'])}; across hosts: {_kinds(t['crossing'])}")
        if "in_place" in p:
            top = p["largest"]
            say(f"    state {'donated in place' if p['in_place'] else 'COPIED'}; cache moved in the loop: {top['of_cache']}; "
                f"largest copy in it that stays in HBM: {_top(top['hbm'])}; into fast memory: {_top(top['vmem'])}")  # fmt: skip
    r, s = out["roofline"], out["slots"]
    say(f"  roofline of a step: weights {gib(r['weights_bytes'])} + cache {gib(r['cache_bytes'])} + window "
        f"{gib(r['window_bytes'])} GiB a device = {r['bytes_ms']:.2f} ms; products {r['flops_ms']:.2f} ms; at most "
        f"{r['tokens_per_second_host']:.0f} tokens/s a host, {r['tokens_per_second_slice']:.0f} a slice; collectives over one "
        f"link {r.get('ici_ms', 0):.2f} ms")  # fmt: skip
    if "prefill" in out:
        x = out["prefill"]["roofline"]
        say(f"  roofline of {out['prefill']['program']}: products {x['flops_ms']:.0f} ms, weights {x['bytes_ms']:.1f} ms; "
            f"{x['tokens_per_second']:.0f} tokens/s")  # fmt: skip
    say(f"  {s['positions']} positions a host; a pager would run {s['ideal']:.1f} rows")
    for row in s["by_classes"]:
        named = " + ".join(f"{n} x {size}" for n, size in row["classes"])
        say(f"    {named}: {row['slots']} slots, {row['rows']:.1f} rows run, {row['waiting']:.1f} wait; "
            f"the pager is {row['ratio']:.2f} times better")  # fmt: skip


def _kinds(kinds: dict[str, tuple[int, int]]) -> str:
    return ", ".join(f"{kind} {n} of {size / MIB:.1f} MiB in all" for kind, (n, size) in kinds.items()) or "none"


def _top(copy: dict[str, Any] | None) -> str:
    return f"{copy['opcode']} {copy['shape']} of {copy['bytes'] / MIB:.1f} MiB" if copy else "none of 1 MiB"


def _chip(mesh: Any) -> aot.Chip:
    kind = str(mesh.devices.flat[0].device_kind)
    name = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e"}[kind]
    return aot.CHIPS[name]


def main(argv: list[str]) -> int:
    try:
        args = parse(argv)
        aot.require_libtpu()
        lengths = lognormal_lengths(args.rows, args.seed, MAX_PROMPT, MAX_NEW)
        header(model="Qwen3-8B's shapes, bfloat16", libtpu=aot.versions()["libtpu"], lengths=lengths.text,
               filled=f"{lengths.filled:.0f} positions of a running row on average")  # fmt: skip
        found = [one(name, args, lengths) for name in args.topology]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        for topology in found:
            for program in ("decode", "prefill"):
                for name in ("collectives", "copies"):
                    topology.get(program, {}).pop(name, None)
        print(json.dumps({"lengths": lengths.text, "filled": lengths.filled, "topologies": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
