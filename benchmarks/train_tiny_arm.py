"""Make the small world's second model again, which writes numbered lists and judges pairs (Rubric-ARM), and its demonstrations.

    python benchmarks/train_tiny_arm.py                 # about 6 minutes on 2 CPU cores; writes into the package
    python benchmarks/train_tiny_arm.py --steps=200 --out=/tmp/tiny

Questions, answers and true quality are those of benchmarks/train_tiny.py. As there, demonstrations are broken on purpose in the
last part of training: lists without a tag or of few relevant items, judgements that misread an answer, name the wrong winner or
leave a section out. Generator, judge and policy then all have something to learn. Same seed, same bytes (on the same machine).
"""

from __future__ import annotations

import json
import pathlib
import random
import re
import sys
from typing import Any

import jax
from absl import app, flags

REPO = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]

import train_tiny as base  # noqa: E402

from coevo_jax.judges import comparison, world  # noqa: E402
from coevo_jax.models.spec import spec_from_hf  # noqa: E402
from coevo_jax.rubrics import Criterion, Rubric, numbered_list  # noqa: E402
from coevo_jax.text.chat import ChatTokenizer  # noqa: E402
from coevo_jax.text.prompts import render_prompt  # noqa: E402

FOLDER = pathlib.Path("judges") / "tiny_world" / "model_arm"
DEMONSTRATIONS = 160
EXAMPLES = 12_000
SHAPE = (7, 288)  # rows of a step, tokens of a row
MEETS, MISSES, MORE = "it meets this", "it misses this", "it weighs more"
DECISIVE = (f" {MEETS}", f" {MISSES}", " Winner: Response A", " Winner: Response B")  # few tokens, and what is to be learned
WEIGHT = 8  # of them in the loss

# ------------------------------------------------------------------------------------------------ tokenizer

PIECES = [
    *(" ## Compliance check", "## Compliance check", "## Analysis of A", "## Analysis of B", "## Final judgement"),
    *(" Gatekeeper: criterion", " Gatekeeper: none", " A:", " B:", " Justification:", " Winner: Response A"),
    *(" Winner: Response B", " [Hard Rule]", " [Principle]", " The response", f" {MEETS}", f" {MISSES}", f" {MORE}"),
    *(f" {n}." for n in range(1, 8)),
]  # longer than a word


def vocabulary() -> list[str]:
    """Every token, specials first; a word carries the space before it."""
    texts = [text for _, text, _ in world.KINDS.values()] + list(world.RUBRIC_ONLY.values()) + list(world.USELESS)
    texts += [clause for clause, _, _ in world.KINDS.values()]
    words = [word for text in texts for word in text.split() if "{" not in word]
    words += [
        *world.WORDS,
        *(str(n) for n in range(1, 10)),
        "in",
        "rules",
        "for",
        "judge",
        "question",
        "answer",
        "A",
        "B",
        "system",
    ]
    return list(dict.fromkeys(base.SPECIAL + PIECES + ["\n"] + [" " + word for word in words]))


def save_tokenizer(folder: pathlib.Path) -> None:
    """tokenizer.json (whole words and PIECES) and tokenizer_config.json, as benchmarks/train_tiny.py has them."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary())}, unk_token="<unk>"))
    starts = normalizers.Replace(Regex("\\n(?=[A-Za-z0-9])"), "\n ")
    tokenizer.normalizer = normalizers.Sequence([starts, normalizers.Prepend(" ")])
    patterns = [re.escape(t) for t in sorted(PIECES, key=len, reverse=True)] + [r" ?[0-9]+", r" ?[A-Za-z]+", r"\n", r" ?[^ ]"]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(patterns)), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0), decoders.Replace("\n ", "\n")])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in base.SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "pad_token": "<|pad|>",
        "eos_token": "<|end|>",
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": base.CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def hf_config() -> dict[str, Any]:
    """config.json of the model: a layer more than the other one, since a judgement compares."""
    own = {"vocab_size": len(vocabulary()), "num_hidden_layers": 4, "num_key_value_heads": 4}
    return base.hf_config() | own


# ------------------------------------------------------------------------------------------------ demonstrations


def make_rubric(rng: random.Random, question: str, relevance: float) -> Rubric:
    """2 to 4 items; what the question asks for is a hard rule, anything else a principle."""
    asked = {prop.criterion for prop in world.read_question(question)}
    texts = base.demo_criteria(rng, question, rng.choice([2, 2, 3, 3, 4]), relevance)
    tags = [numbered_list.HARD if text in asked else numbered_list.PRINCIPLE for text in texts]
    return Rubric(tuple(Criterion(f"The response {x}", numbered_list.WEIGHTS[tag], title=tag) for x, tag in zip(texts, tags)))


def broken_list(rng: random.Random, text: str) -> str:
    """The list with a fault: a tag left out, an item twice, one item alone, or a number left out."""
    lines = text.splitlines()
    how = rng.choice(["tag", "twice", "single", "number"])
    if how == "single":
        return lines[0]
    if how == "tag":
        lines[-1] = lines[-1].rpartition(" [")[0]
    elif how == "twice":
        lines[-1] = f"{len(lines)}. {lines[0].partition('. ')[2]}"
    else:
        lines = [line if i else line.replace("1.", "2.", 1) for i, line in enumerate(lines)]
    return "\n".join(lines)


def judge(rng: random.Random, rubric: Rubric, answers: tuple[str, str], misread: float, wrong: float) -> str:
    """A judgement of two answers. misread: chance that a check is turned round; wrong: that the winner is."""
    met = {
        side: [_meets(c.text, answer) != (rng.random() < misread) for c in rubric.criteria] for side, answer in zip("AB", answers)
    }
    points = {side: sum(c.weight * hit for c, hit in zip(rubric.criteria, hits)) for side, hits in met.items()}
    winner = "A" if points["A"] > points["B"] else "B" if points["A"] < points["B"] else rng.choice("AB")
    winner = "AB".replace(winner, "") if rng.random() < wrong else winner
    gate = next((i for i, c in enumerate(rubric.criteria, 1) if numbered_list.tag(c) == numbered_list.HARD), 0)
    said = {
        side: [explanation(c.text, answer, hit) for c, hit in zip(rubric.criteria, met[side])]
        for side, answer in zip("AB", answers)
    }
    checked = {side: MEETS if gate == 0 or hits[gate - 1] else MISSES for side, hits in met.items()}
    return comparison.write(rubric, gate, said, checked, f"{winner} {MORE}", winner)


def explanation(text: str, answer: str, hit: bool) -> str:
    """What is said of an item: the item, the answer again, so that both stand side by side, and whether they agree."""
    return f"{text.removeprefix('The response ')} in {answer} {MEETS if hit else MISSES}"


def _meets(text: str, answer: str) -> bool:
    prop = world.read_criterion(text)
    return prop is None or world.check(prop, answer) >= 1.0


def broken_judgement(rng: random.Random, text: str) -> str:
    """The judgement with a line left out; never the last one, so that a winner is named."""
    lines = text.splitlines()
    del lines[rng.randrange(len(lines) - 1)]
    return "\n".join(lines)


def two_answers(rng: random.Random, question: str, perfect: str) -> tuple[str, str]:
    """Answers of different ease, in either order."""
    pair = [base.weaken(rng, question, perfect, 4.0), base.weaken(rng, question, perfect, rng.choice([0.4, 0.7, 1.0]))]
    rng.shuffle(pair)
    return pair[0], pair[1]


def demonstration(rng: random.Random, clean: bool) -> tuple[list[dict[str, str]], str]:
    """Messages of a prompt and the completion. clean: nothing is broken."""
    question, perfect = world.make_question(rng)
    kind = rng.choices(["answer", "list", "judgement"], [0.15, 0.2, 0.65])[0]
    if kind == "answer":
        return [{"role": "user", "content": question}], perfect if clean else base.weaken(rng, question, perfect, 1.0)
    rubric = make_rubric(rng, question, 1.0 if clean else 0.5 if kind == "list" else 0.8)
    if kind == "list":
        text = numbered_list.render(rubric)
        return render_prompt("world_rules", question=question), text if clean or rng.random() < 0.6 else broken_list(rng, text)
    answers = two_answers(rng, question, perfect)
    slots = {"question": question, "answer_a": answers[0], "answer_b": answers[1], "rubric": numbered_list.render(rubric)}
    text = judge(rng, rubric, answers, 0.0, 0.0) if clean else judge(rng, rubric, answers, 0.1, 0.2)
    return render_prompt("world_comparison", **slots), text if clean or rng.random() < 0.7 else broken_judgement(rng, text)


def make_examples(tokenizer: ChatTokenizer, rng: random.Random, n: int, clean: bool) -> list[base.Example]:
    """n demonstrations as ids; each ends with the stop token."""
    decisive = {vocabulary().index(token) for token in DECISIVE}
    out = []
    for _ in range(n):
        messages, completion = demonstration(rng, clean)
        prompt = tokenizer.render(messages, thinking=False, system="")
        ids = [*prompt, *tokenizer.encode(completion), base.SPECIAL.index("<|end|>")]
        out.append(base.Example(ids, len(prompt), tuple(WEIGHT if i in decisive else 1 for i in ids)))
    return out


def demonstration_rows(seed: int) -> list[dict[str, Any]]:
    """The warm-up's records in the small world (data/arm.py): a pair, a list and what is said of each answer, nothing broken."""
    rng, rows = random.Random(f"arm {seed}"), list[dict[str, Any]]()
    while len(rows) < DEMONSTRATIONS:
        question, perfect = world.make_question(rng)
        worse = base.weaken(rng, question, perfect, 1.0)
        rubric = make_rubric(rng, question, 1.0)
        checks = [(_meets(c.text, perfect), _meets(c.text, worse)) for c in rubric.criteria]
        if all(a == b for a, b in checks):
            continue  # such a list says nothing of this pair
        rules = [
            {"text": c.text, "tag": c.title,
             **{side: explanation(c.text, answer, hit)
                for side, answer, hit in zip(("chosen", "rejected"), (perfect, worse), hits)}}
            for c, hits in zip(rubric.criteria, checks)
        ]  # fmt: skip
        gate = next((i for i, rule in enumerate(rules, 1) if rule["tag"] == numbered_list.HARD), 0)
        check = {side: MEETS if gate == 0 or checks[gate - 1][i] else MISSES for i, side in enumerate(("chosen", "rejected"))}
        rows.append({"id": f"tiny-arm-{len(rows):04d}", "prompt": question, "chosen": perfect, "rejected": worse,
                     "rules": rules, "gate": gate, "check": check, "why": f"{{chosen}} {MORE}"})  # fmt: skip
    return rows


def main(_: list[str]) -> None:
    root = pathlib.Path(base.OUT.value) if base.OUT.value else REPO / "coevo_jax"
    folder = root / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(hf_config(), indent=1) + "\n")
    rows = demonstration_rows(base.SEED.value)
    target = root / "data" / "warmup" / "tiny_arm.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))

    tokenizer = ChatTokenizer.load(str(folder))
    spec = spec_from_hf(hf_config(), str(folder / "config.json"))
    rng = random.Random(base.SEED.value)
    clean, examples = (make_examples(tokenizer, rng, EXAMPLES, sort) for sort in (True, False))
    longest = max(len(e.ids) for e in clean)
    print(f"vocabulary {spec.vocab_size}; {2 * EXAMPLES} demonstrations of at most {longest} tokens", flush=True)
    params = base.train(spec, clean, examples, base.STEPS.value, base.SEED.value, SHAPE)
    base.save_weights(jax.device_get(params), spec, folder / "model.safetensors")
    print(f"{sum(f.stat().st_size for f in folder.iterdir()) / 1e6:.2f} MB in {folder}")


if __name__ == "__main__":
    flags.FLAGS.set_default("steps", 2500)
    app.run(main)
