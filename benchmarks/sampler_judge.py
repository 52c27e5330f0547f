"""What sharing the common beginning of prompts is worth to a judge that reads next-token probabilities.

    python benchmarks/sampler_judge.py [--what=both|answers|criteria] [--repeats=3] [--rows=1] [--json] [--sampler.KEY=VALUE ...]

answers: 8 answers under one rubric, head 350 tokens, tails 190. criteria: 5 criteria x 8 rubrics on one answer, head 600, 40
tails of 100. Each is run with sampler.share_heads on and off, in turn; off is also run with rows no wider than one prompt, and
the faster of the two counts. Arithmetic gain: n(h + t) / (h + nt) tokens; `share_of_gain` is the measured ratio over it. Keys
and values that are stored: tokens fed x bytes a token.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import numpy as np
from _sampler import (
    Engine,
    SamplerConfig,
    UserError,
    apply_overrides,
    header,
    load_model,
    model_and_engine,
    paired_ratio,
    random_ids,
    say,
    split_overrides,
)

from coevo_jax.sampler.state import kv_bytes_per_token

FORMS = [[70], [71]]  # two answers that a judge tells apart, say yes and no
SWITCH = "share_heads"


@dataclasses.dataclass(frozen=True)
class Workload:
    """`tails` prompts of head + tail tokens that begin with the same `head` tokens, dealt to `rows` rows with a head each."""

    head: int
    tail: int
    tails: int
    rows: int = 1

    @property
    def gain(self) -> float:
        return self.tails * (self.head + self.tail) / (self.head + self.tails * self.tail)

    @property
    def once(self) -> int:
        """Tokens with the head stored once."""
        return self.head + self.tails * self.tail

    @property
    def width(self) -> int:
        """Positions of a row that holds a head and its part of the tails."""
        return self.head + -(-self.tails // self.rows) * self.tail

    def prompts(self, vocab: int, seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        head = random_ids(rng, self.head, vocab)
        return [np.concatenate([head, random_ids(rng, self.tail, vocab)]) for _ in range(self.tails)]


WORKLOADS = {"answers": Workload(350, 190, 8), "criteria": Workload(600, 100, 40)}


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny (seconds) or a Hugging Face folder")
    parser.add_argument("--what", choices=("both", *WORKLOADS), default="both")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turn, with prompts of their own")
    parser.add_argument("--rows", type=int, default=1, help="rows over which the tails of one head are dealt")
    parser.add_argument("--json", action="store_true")
    args, extra = parser.parse_known_args(argv)
    if args.repeats < 1 or args.rows < 1:
        raise UserError(f"--repeats={args.repeats} --rows={args.rows}", where="command line", expected="at least 1 each")
    return args, split_overrides(extra)


def with_sharing(cfg: SamplerConfig, on: bool) -> SamplerConfig:
    """The config with shared heads on or off; UserError where the engine has no such switch."""
    if SWITCH not in {field.name for field in dataclasses.fields(cfg)}:
        raise UserError("this engine can't turn the sharing of heads off", where=f"sampler.{SWITCH}",
                        expected="a SamplerConfig with that switch: without it there is nothing to compare")  # fmt: skip
    changes: dict[str, Any] = {SWITCH: on}
    return dataclasses.replace(cfg, **changes)


def engines_for(model: str, work: Workload, overrides: list[str]) -> dict[str, tuple[Any, Engine]]:
    """Shared; not shared, same shapes; not shared, rows as narrow as a prompt with the same token budget."""
    wide = SamplerConfig(slots=8, max_prompt=work.width, max_new=8, prefill_tokens=max(2048, work.width))
    wide = apply_overrides(wide, overrides)
    narrow = dataclasses.replace(wide, max_prompt=work.head + work.tail)
    configs = {"shared": with_sharing(wide, True), "repeated": with_sharing(wide, False), "narrow": with_sharing(narrow, False)}
    return {name: model_and_engine(model, cfg, (0,)) for name, cfg in configs.items()}


def timed(held: tuple[Any, Engine], prompts: list[np.ndarray]) -> tuple[float, int, np.ndarray]:
    """Seconds, tokens fed, probabilities."""
    model, engine = held
    engine.stats.reset()
    start = time.perf_counter()
    probs = engine.next_token_probs(model.params, prompts, FORMS)
    return time.perf_counter() - start, engine.stats.prefill_tokens, probs


def benchmark(args: argparse.Namespace, overrides: list[str], name: str) -> dict[str, Any]:
    work = dataclasses.replace(WORKLOADS[name], rows=args.rows)
    engines = engines_for(args.model, work, overrides)
    spec = engines["shared"][0].spec
    say(f"{name}: {work.tails} prompts, head {work.head}, tails {work.tail}; {engines['shared'][1].cfg}")
    for label, held in engines.items():
        begin = time.perf_counter()
        held[1].warmup(held[0].params)
        timed(held, work.prompts(spec.vocab_size, 0))
        say(f"  {label}: ready in {time.perf_counter() - begin:.0f} s")
    seconds: dict[str, list[float]] = {label: [] for label in engines}
    fed: dict[str, int] = {}
    gap = 0.0
    for repeat in range(1, args.repeats + 1):
        prompts, probs = work.prompts(spec.vocab_size, repeat), {}
        for label, held in engines.items():
            took, fed[label], probs[label] = timed(held, prompts)
            seconds[label].append(took)
            say(f"  {repeat}/{args.repeats} {label}: {took:.2f} s, {fed[label]} tokens fed")
        gap = max(gap, *(float(np.abs(np.log(probs["shared"]) - np.log(p)).max()) for p in probs.values()))
    ratios = {label: paired_ratio(seconds[label], seconds["shared"]) for label in ("repeated", "narrow")}
    ratio = min(ratios.values(), key=lambda r: r["median"])
    a_token = kv_bytes_per_token(spec, engines["shared"][0].params["embed"].dtype.itemsize)
    return {
        "ratio": ratio["median"],
        "ratios": ratios,
        "gain": work.gain,
        "share_of_gain": ratio["median"] / work.gain,
        "seconds": seconds,
        "kv_bytes": {"shared": fed["shared"] * a_token, "repeated": fed["repeated"] * a_token, "once": work.once * a_token},
        "stored_once": fed["shared"] == work.once,
        "largest_log_prob_difference": gap,
    }


def main(argv: list[str]) -> int:
    try:
        args, overrides = parse(argv)
        with_sharing(apply_overrides(SamplerConfig(), overrides), True)
        header(model=f"{args.model} ({load_model(args.model).params['embed'].dtype})")
        found = {name: benchmark(args, overrides, name) for name in WORKLOADS if args.what in ("both", name)}
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, f in found.items():
        stored = f["kv_bytes"]
        sizes = ", ".join(f"{what} {size / 1e6:.1f}" for what, size in stored.items())
        say(f"{name}: {f['ratio']:.2f}x without sharing, arithmetic gain {f['gain']:.2f}x, share {f['share_of_gain']:.3f}")
        say(f"  MB of keys and values: {sizes}; log-probs differ by at most {f['largest_log_prob_difference']:.1e}")
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
