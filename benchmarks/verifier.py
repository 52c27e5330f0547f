"""How cheap DynamicRubric's verifier is: P x K x M yes/no judgements by packed prefill, with and without shared heads.

    python benchmarks/verifier.py [--prompts=1] [--answers=8] [--items=12] [--rubrics=1] [--words=120] [--repeats=2] [--json]

Each judgement is a prompt question | answer | item of the verifier's own template, one next-token distribution, nothing decoded.
shared: what is before the item is prefilled once for each answer. apart: the same engine and programs with
sampler.share_heads=false, so each judgement prefills its whole prompt. Both run in turn over the same judgements, and their
p(yes) must agree. With --rubrics=G the items are those of G rubrics that have half of their items in common, asked once each.
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
from _sampler import SamplerConfig, UserError, apply_overrides, header, model_and_engine, paired_ratio, say, split_overrides
from make_labelled import EMPTY_ITEMS, TOPICS

from coevo_jax.config import JudgeConfig, ModelConfig
from coevo_jax.judges import make_judge
from coevo_jax.judges.criterion_logits import TEMPLATE
from coevo_jax.judges.verifier import Asked, items_of, verify
from coevo_jax.models.load import load_model
from coevo_jax.rubrics import Criterion, Rubric
from coevo_jax.text.chat import ChatTokenizer
from coevo_jax.text.prompts import render_prompt

TOLERANCE = 1e-4  # of p(yes): matrix products of other heights differ by up to 8e-5 on a CPU


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2 or a Hugging Face folder whose tokenizer has yes and no")
    for name, default, text in (
        ("prompts", 1, "P"), ("answers", 8, "K"), ("items", 12, "M of a rubric"), ("rubrics", 1, "G"),
        ("words", 120, "of an answer"), ("repeats", 2, "runs of each, in turn"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--json", action="store_true")
    args, extra = parser.parse_known_args(argv)
    for name in ("prompts", "answers", "items", "rubrics", "words", "repeats"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}={getattr(args, name)}", where="command line", expected="at least 1")
    return args, split_overrides(extra)


def rubrics_of(items: int, rubrics: int) -> list[Rubric]:
    """Rubrics of so many items; the first half of them is the same in all."""
    pool = [*EMPTY_ITEMS, *(f"Does the answer say something about {t.name}?" for t in TOPICS)]
    pool += [f"Is it true that the answer mentions the word {t.word}?" for t in TOPICS]
    pool += [f"Does the answer say that {t.answer.rstrip('.').lower()}?" for t in TOPICS]
    common, own = pool[: items // 2], pool[items // 2 :]
    need = items - len(common)
    if rubrics * need > len(own):
        raise UserError(
            f"{rubrics} rubrics of {items} items", where="command line", expected=f"at most {len(own)} different items"
        )
    return [Rubric(tuple(Criterion(t, 1.0) for t in common + own[g * need : (g + 1) * need])) for g in range(rubrics)]


def work(args: argparse.Namespace) -> list[Asked]:
    """Questions and answers of so many words, made of the labelled set's facts."""
    words = " ".join(fact for topic in TOPICS for fact in topic.facts).split()
    items = items_of(rubrics_of(args.items, args.rubrics))
    asked = []
    for p in range(args.prompts):
        answers = tuple(" ".join(np.roll(words, -(7 * p + 31 * k))[: args.words]) for k in range(args.answers))
        asked.append(Asked(f"Tell me about {TOPICS[p % len(TOPICS)].name}.", items, answers,
                           tuple(p * args.answers + k for k in range(args.answers))))  # fmt: skip
    return asked


def main(argv: list[str]) -> int:
    args, overrides = parse(argv)
    asked = work(args)
    tokenizer = ChatTokenizer.load(load_model(ModelConfig(source=args.model)).folder)
    prompts = [
        render_prompt(TEMPLATE, question=a.question, answer=y, criterion=i) for a in asked for y in a.answers for i in a.items
    ]
    longest = max(len(tokenizer.render_messages(messages, thinking=False)) for messages in prompts)
    base = SamplerConfig(slots=8, max_prompt=longest, max_new=8, prefill_tokens=1024)
    base = apply_overrides(base, overrides)
    judges, engines = {}, {}
    for name, share in (("shared", True), ("apart", False)):
        model, engine = model_and_engine(args.model, dataclasses.replace(base, share_heads=share), (0,))
        judges[name] = make_judge(JudgeConfig(min_yes_no_mass=0.0), engine, model.params, ChatTokenizer.load(model.folder), 0)
        engines[name] = engine
    count = sum(len(a.items) * len(a.answers) for a in asked)
    header(judgements=count, distinct_items=len(asked[0].items), **vars(args))
    found: dict[str, Any] = {name: {"seconds": []} for name in judges}
    tables = {name: verify(judge, asked, 0)[0] for name, judge in judges.items()}  # compiles
    for _ in range(args.repeats):
        for name, judge in judges.items():
            engines[name].stats.reset()
            start = time.perf_counter()
            tables[name], verdicts = verify(judge, asked, 0)
            found[name]["seconds"].append(time.perf_counter() - start)
            failures = sum(v.status != "ok" for v in verdicts)
            found[name] |= {"tokens": engines[name].stats.prefill_tokens, "positions": engines[name].stats.prefill_positions,
                            "failures": failures}  # fmt: skip
            say(f"{name}: {found[name]['seconds'][-1]:.1f} s, {found[name]['tokens']} tokens")
    gap = max(float(np.nanmax(np.abs(a.p_MxN - b.p_MxN))) for a, b in zip(tables["shared"], tables["apart"]))
    if gap > TOLERANCE:
        raise SystemExit(f"error: p(yes) differs by {gap:.2g} with and without shared heads")
    out = found | {
        "judgements": count, "items_written": args.rubrics * args.items, "items_asked": len(asked[0].items),
        "token_ratio": found["apart"]["tokens"] / found["shared"]["tokens"],
        "time_ratio": paired_ratio(found["apart"]["seconds"], found["shared"]["seconds"]),
        "milliseconds_a_judgement": {name: 1000 * min(f["seconds"]) / count for name, f in found.items()}, "largest_p_gap": gap,
    }  # fmt: skip
    say(
        f"tokens {out['token_ratio']:.2f} times fewer, time {out['time_ratio']}; ms a judgement {out['milliseconds_a_judgement']}"
    )
    if args.json:
        print(json.dumps(out))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
