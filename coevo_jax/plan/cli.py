"""Flags of tpu/plan.py: the config as run.py takes it, the slice, the assumed lengths, and what to do."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from typing import Any

from coevo_jax.config import Experiment, arm
from coevo_jax.config.load import load_config
from coevo_jax.config.override import apply_overrides
from coevo_jax.config.validate import validate
from coevo_jax.errors import UserError

HELP = """What a config needs on a pod slice, phase by phase, and how long a step would take there: compiled, never run.

    python tpu/plan.py --config=configs/evolm/qwen3_8b.py --topology=v5p:2x2x4 [--config.KEY=VALUE ...] [--json]
    python tpu/plan.py --config=... --topology=... --estimate      # by arithmetic alone, in seconds

Needs `pip install -e '.[tpu]'` and no TPU. Models are known by name (Qwen3-8B): no weights are read. Each program of the run
is compiled for the slice; figures are kept in --cache, so that a second plan is quick. Decode, whose layers are unrolled, is
compiled at 2 and 4 layers and taken on a line through them, which the output says; --full compiles all layers (minutes to a
quarter of an hour each). A source such as run:FOLDER has no shapes: name a model in its
place. Exit code 0: every phase fits; 1: one does not; 2: bad input, or a program that does not compile."""


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Flags and the config's overrides."""
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a Python file with get_config()")
    parser.add_argument("--topology", required=True, help="v4:2x2x4, v5e:8x8, v5p:2x2x2, v6e:4x4; '*2' after it: two slices")
    parser.add_argument("--programs", default="", help="only these, by name, with commas; a plan without all may not say 'fits'")
    parser.add_argument("--layers", type=int, default=0, help="cut the models to so many layers (a quick look; not a plan)")
    parser.add_argument("--full", action="store_true", help="compile decode at full depth too")
    parser.add_argument("--estimate", action="store_true", help="no compile: a rough estimate of memory and time, in seconds")
    parser.add_argument("--search", action="store_true", help="meshes, micro-batches, remat and slots: compile the best five")
    parser.add_argument("--scale", default="", help="further slices with commas: cost against size at fixed prompts a chip")
    for name, value in dataclasses.asdict(workload()).items():
        parser.add_argument(f"--lengths.{name}", type=type(value), default=value, help="mean tokens" if name != "seed" else "")
    parser.add_argument("--cache", type=pathlib.Path, default=default_cache(), help="a folder that keeps figures and texts")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    known, rest = parser.parse_known_args(argv)
    overrides = []
    for word in rest:
        if not word.startswith("--config.") or "=" not in word:
            raise UserError(f"unknown flag {word!r}", where="command line", expected="--config.KEY=VALUE, or a flag of --help")
        overrides.append(word.removeprefix("--config."))
    return known, overrides


def workload(args: argparse.Namespace | None = None) -> Any:
    """The assumed lengths."""
    from coevo_jax.plan.step import Workload

    if args is None:
        return Workload()
    return Workload(**{f.name: getattr(args, f"lengths.{f.name}") for f in dataclasses.fields(Workload)})


def default_cache() -> pathlib.Path:
    """In the user's cache folder."""
    from coevo_jax.models.files import user_cache

    return user_cache() / "plan"


def config(args: argparse.Namespace, overrides: list[str]) -> Experiment:
    """The validated experiment."""
    cfg = apply_overrides(load_config(args.config), overrides)
    validate(cfg)
    return cfg


def main(argv: list[str]) -> int:
    """Exit code."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is run here
    try:
        args, overrides = parse(argv)
        return _main(args, config(args, overrides))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _main(args: argparse.Namespace, cfg: Experiment) -> int:
    from coevo_jax import aot
    from coevo_jax.plan import report, search
    from coevo_jax.plan.cast import Slice
    from coevo_jax.plan.compiled import compile_all
    from coevo_jax.plan.estimate import estimate
    from coevo_jax.plan.phases import phases
    from coevo_jax.plan.step import model_step

    aot.require_libtpu()
    if cfg.schedule.mode == arm.MODE:
        return _arm(args, cfg)
    s, work = Slice(cfg, aot.topology(args.topology), args.layers), workload(args)
    s.check()
    if args.estimate:
        print(report.estimate_text(s, estimate(s, work)))
        return 0 if estimate(s, work).may_fit else 1
    if args.search or args.scale:
        given = {"cache": args.cache, "full": args.full, "say": say}
        names = tuple(filter(None, args.scale.split(",")))
        plans = search.search(s, work, **given) if args.search else search.scale(s, names, work, **given)
        print(report.table(plans))
        print(json.dumps({"topology": args.topology, "plans": plans})) if args.json else None
        return 0 if plans and all(p["fits"] for p in plans) else 1
    only = tuple(filter(None, args.programs.split(",")))
    say(f"compiling for {args.topology}; what was compiled before is taken from {args.cache}")
    compiled = compile_all(s, args.cache, full=args.full, only=only, say=say)
    found, step = phases(s, compiled), model_step(s, compiled, work)
    print(report.as_text(s, found, step, work))
    out = report.as_json(s, found, step, work)
    if only or args.layers:  # a part of a plan proves nothing
        out |= {"fits": False, "partial": True}
        say("a part of the plan alone: it does not say that the config fits")
    if args.json:
        print(json.dumps(out))
    return 0 if out["fits"] else 1


def _arm(args: argparse.Namespace, cfg: Experiment) -> int:
    """Rubric-ARM, whose phases are others."""
    from coevo_jax.plan import arm as plan

    if args.search or args.scale or args.programs or args.estimate:
        raise UserError("schedule.mode=rubric_arm has the plain plan alone", where="--search, --scale, --programs, --estimate",
                        expected="none of them")  # fmt: skip
    say(f"compiling for {args.topology}; what was compiled before is taken from {args.cache}")
    text, out = plan.run(args, cfg, workload(args), say)
    print(text)
    if args.layers:
        out |= {"fits": False, "partial": True}
        say("a part of the plan alone: it does not say that the config fits")
    if args.json:
        print(json.dumps(out))
    return 0 if out["fits"] else 1


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
