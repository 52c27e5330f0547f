"""Make the small world's assets for DynamicRubric again: a model that reads answers and writes weighted items, rankings, chat.

    python benchmarks/train_tiny_dynamic.py          # about 10 minutes on 2 CPU cores; writes into the package
    python benchmarks/train_tiny_dynamic.py --steps=200 --out=/tmp/tiny

The model ('tiny_dynamic') answers the small world's questions as 'tiny' does. Asked for items it names, in half of them, what the
shown answers differ in; the rest are requirements at random, wrong words and empty phrases, and a quarter of its rubrics is
broken: both rewards have something to improve. Same seed, same bytes (on the same machine and JAX).
"""

from __future__ import annotations

import json
import pathlib
import random
import sys
from typing import Any

import jax
import numpy as np
from absl import app

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import train_tiny as base

from coevo_jax.judges import world
from coevo_jax.models.spec import spec_from_hf
from coevo_jax.rubrics.weighted_items import write_rubric
from coevo_jax.text.candidates import generator_messages
from coevo_jax.text.chat import ChatTokenizer

FOLDER = world.MODEL_FOLDER.parent / "dynamic"
K = 4  # answers in sight
ANCHORS = 4  # ranked answers of a question
SHAPE = (10, 256)  # rows and tokens of a step
EXAMPLES = 24_000
RANKINGS, CHATS = 300, 160
INVALID_SHARE = 0.25
INFORMED = 0.5  # chance that an item is one of those the shown answers differ in
JSON = [' {"items": [', '{"items": [', '{"item": "', '", "weight":', "}", ", ", "]}"]
# For a judge that reads p(yes) and p(no), of which "no" is there: no demonstration has it, and its embedding is zeros.
VERDICTS = [" yes"]
TEMPLATES = {"sighted": "world_dynamic", "blind": "world_dynamic_blind"}


def vocabulary() -> list[str]:
    """Every trained token: those of 'tiny' with the JSON of weighted items."""
    words = [token for token in base.vocabulary() if token not in base.JSON and not token.strip().startswith("0.")]
    words = [token for token in words if token != " 1.0"]
    return list(dict.fromkeys([*words, *JSON, " items", " for"]))


def hf_config() -> dict[str, Any]:
    return base.hf_config() | {"vocab_size": len(vocabulary() + VERDICTS), "num_hidden_layers": 4}


def met(prop: world.Property, answer: str) -> bool:
    """A verifier's yes."""
    return world.check(prop, answer) > 0.99


def demo_items(rng: random.Random, question: str, candidates: list[str], informed: float, relevance: float) -> list[str]:
    """Criteria of a rubric: at chance `informed` a requirement that some candidates meet and others don't, else of any sort."""
    n = rng.choice([2, 2, 3, 3, 4])
    wanted = list(world.read_question(question))
    split = [p for p in wanted if 0 < sum(met(p, answer) for answer in candidates) < len(candidates)]
    found: list[str] = []
    while len(found) < n:
        left = [p.criterion for p in split if p.criterion not in found]
        text = rng.choice(left) if left and rng.random() < informed else base.demo_criteria(rng, question, 1, relevance)[0]
        if text not in found:
            found.append(text)
    rng.shuffle(found)
    return found


def demo_rubric(rng: random.Random, question: str, candidates: list[str], clean: bool) -> str:
    """A rubric as demonstrated; broken in one of four ways at chance INVALID_SHARE unless `clean`."""
    items = demo_items(rng, question, candidates, *((1.0, 0.9) if clean else (INFORMED, 0.5)))
    broken = "" if clean or rng.random() >= INVALID_SHARE else rng.choice(["end", "single", "duplicate", "weight"])
    if broken == "single":
        items = items[:1]
    elif broken == "duplicate":
        items = [items[0]] * 2
    weights = [rng.randint(1, 5) for _ in items]
    if broken == "weight":
        weights[-1] = rng.randint(6, 9)
    text = write_rubric(list(zip(items, weights)))
    return text.removesuffix("]}") if broken == "end" else text


def demonstration(rng: random.Random, clean: bool) -> tuple[list[dict[str, str]], str]:
    """(messages of a prompt, completion)."""
    question, perfect = world.make_question(rng)
    kind = rng.choices(["question", "sighted", "blind"], [0.25, 0.6, 0.15])[0]
    if kind == "question":
        return [{"role": "user", "content": question}], perfect if clean else base.weaken(rng, question, perfect, 1.0)
    candidates = [base.weaken(rng, question, perfect, rng.choice([0.7, 1.0, 1.0, 2.0])) for _ in range(K)]
    return generator_messages(TEMPLATES[kind], question, candidates), demo_rubric(rng, question, candidates, clean)


def make_examples(tokenizer: ChatTokenizer, rng: random.Random, n: int, clean: bool) -> list[base.Example]:
    out = []
    for _ in range(n):
        messages, completion = demonstration(rng, clean)
        prompt = tokenizer.render(messages, thinking=False, system="")
        out.append(base.Example([*prompt, *tokenizer.encode(completion), base.SPECIAL.index("<|end|>")], len(prompt)))
    return out


def ranking_rows(seed: int) -> list[dict[str, Any]]:
    """Ranked answers: a perfect one and weakened ones, all of different true quality, in a shuffled order."""
    rng, rows = random.Random(f"rankings {seed}"), list[dict[str, Any]]()
    while len(rows) < RANKINGS:
        question, perfect = world.make_question(rng)
        found = {1.0: perfect}
        for _ in range(60):
            answer = base.weaken(rng, question, perfect, rng.choice([0.3, 1.0, 2.0]))
            found.setdefault(round(world.true_quality(question, answer), 4), answer)
        if len(found) < ANCHORS:
            continue
        qualities = rng.sample(sorted(found), ANCHORS)
        rows.append({"id": f"tiny-ranking-{len(rows):04d}", "prompt": question, "answers": [found[q] for q in qualities],
                     "scores": qualities})  # fmt: skip
    return rows


def chat_rows(seed: int) -> list[dict[str, Any]]:
    """Rubric examples for a supervised warm-up: valid, and informed by the candidates."""
    rng, rows = random.Random(f"dynamic chat {seed}"), list[dict[str, Any]]()
    for i in range(CHATS):
        question, perfect = world.make_question(rng)
        candidates = [base.weaken(rng, question, perfect, 1.0) for _ in range(K)]
        rows.append({"id": f"tiny-dynamic-{i:04d}", "question": question, "candidates": candidates,
                     "rubric": json.loads(demo_rubric(rng, question, candidates, True))})  # fmt: skip
    return rows


def main(_: list[str]) -> None:
    root = pathlib.Path(base.OUT.value) if base.OUT.value else base.REPO / "coevo_jax"
    folder = root / FOLDER.relative_to(base.REPO / "coevo_jax")
    folder.mkdir(parents=True, exist_ok=True)
    (root / "data" / "warmup").mkdir(parents=True, exist_ok=True)
    base.save_tokenizer(folder, vocabulary() + VERDICTS, JSON)
    base._write_json(folder / "config.json", hf_config())
    base._write_rows(root / "data" / "tiny_rankings.jsonl", ranking_rows(base.SEED.value))
    base._write_rows(root / "data" / "warmup" / "tiny_dynamic.jsonl", chat_rows(base.SEED.value))

    tokenizer = ChatTokenizer.load(str(folder))
    spec = spec_from_hf(hf_config() | {"vocab_size": len(vocabulary())}, str(folder / "config.json"))
    print(f"vocabulary {spec.vocab_size}; making {2 * EXAMPLES} demonstrations", flush=True)
    rng = random.Random(base.SEED.value)
    clean, examples = (make_examples(tokenizer, rng, EXAMPLES, sort) for sort in (True, False))
    params = base.train(spec, clean, examples, base.STEPS.value, base.SEED.value, SHAPE)
    params = jax.device_get(params)
    params["embed"] = np.concatenate([params["embed"], np.zeros((len(VERDICTS), spec.hidden_size), np.float32)])
    base.save_weights(params, spec, folder / "model.safetensors")
    print(f"{sum(f.stat().st_size for f in folder.iterdir()) / 1e6:.2f} MB in {folder}")


if __name__ == "__main__":
    app.run(main)
