"""Make the small world's assets again: tokenizer, prompts, chat demonstrations and the trained model.

    python benchmarks/train_tiny.py                 # about 5 minutes on 2 CPU cores; writes into the package
    python benchmarks/train_tiny.py --steps=200 --out=/tmp/tiny

The model learns from demonstrations that are half wrong on purpose, so that at temperature 1 it writes a valid rubric about half
the time, names what the question asks for in about half of its criteria, and meets about half of a question's requirements:
both roles of a run have something to learn and groups whose members differ. Same seed, same bytes (on the same machine and JAX).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import random
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

REPO = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from coevo_jax.judges import world  # noqa: E402
from coevo_jax.models.forward import forward, init_params, unembed  # noqa: E402
from coevo_jax.models.spec import ModelSpec, spec_from_hf  # noqa: E402
from coevo_jax.text.chat import ChatTokenizer  # noqa: E402
from coevo_jax.text.prompts import render_prompt  # noqa: E402

STEPS = flags.DEFINE_integer("steps", 2000, "optimizer steps")
OUT = flags.DEFINE_string("out", "", "another root than the package's own folders")
SEED = flags.DEFINE_integer("seed", 0, "of demonstrations, start and order")

EXAMPLES = 24_000  # demonstrations of each sort, clean and broken, walked in a shuffled order as often as the steps need
CLEAN_SHARE = 0.6  # of the steps
PROMPTS = 400
CHATS = 240
PAIRS = 200
ROW, ROWS = 128, 20  # tokens of a packed row, rows of a step

# ------------------------------------------------------------------------------------------------ tokenizer

SPECIAL = ["<unk>", "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
JSON = [
    ' {"criteria": [',  # with the space that the normaliser puts in front of every text
    '{"criteria": [',
    '{"criterion": "',
    '", "weight":',
    ', "scoring_levels": {"1.0": "yes", "0.0": "no"}}',
    '"}',
    ", ",
    "]}",
]
PHRASE_HEADS = sorted({text.split()[0] for _, text, _ in world.KINDS.values()} | {u.split()[0] for u in world.USELESS})
TEMPLATE_WORDS = ["rubric", "for", "question", "answer", "good", "system"]
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['content'] -%}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def vocabulary() -> list[str]:
    """Every token, specials first. A word carries the space before it; a criterion's first word follows a quote instead."""
    inner = [w for _, text, _ in world.KINDS.values() for w in text.split()[1:] if "{" not in w]
    inner += [w for text in world.RUBRIC_ONLY.values() for w in text.split()[1:] if "{" not in w]
    inner += [w for text in world.USELESS for w in text.split()[1:]]
    clauses = [w for clause, _, _ in world.KINDS.values() for w in clause.split() if "{" not in w]
    numbers = [str(n) for n in range(1, 10)] + [f"{n / 10:.1f}" for n in range(1, 11)]
    spaced = [*world.WORDS, *clauses, *inner, *numbers, *TEMPLATE_WORDS]
    found = SPECIAL + JSON + ["\n"] + PHRASE_HEADS + [" " + w for w in spaced]
    return list(dict.fromkeys(found))


def save_tokenizer(folder: pathlib.Path, tokens: list[str] | None = None, json_pieces: Sequence[str] = JSON) -> None:
    """tokenizer.json (whole words by a regular expression) and tokenizer_config.json with the chat template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens = tokens or vocabulary()
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    starts = normalizers.Replace(Regex("\\n(?=[A-Za-z0-9])"), "\n ")  # a word has its space after a line break too
    tokenizer.normalizer = normalizers.Sequence([starts, normalizers.Prepend(" ")])
    pieces = [re.escape(t) for t in sorted(json_pieces, key=len, reverse=True)] + [
        r" ?[0-9]+(?:\.[0-9]+)?",
        r" ?[A-Za-z]+",
        r"\n",
        r" ?[^ ]",
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(pieces)), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0), decoders.Replace("\n ", "\n")])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "pad_token": "<|pad|>",
        "eos_token": "<|end|>",
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", config)


def hf_config() -> dict[str, Any]:
    """config.json of the model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary()),
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 192,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": SPECIAL.index("<|end|>"),
        "pad_token_id": SPECIAL.index("<|pad|>"),
        "torch_dtype": "float32",
    }


# ------------------------------------------------------------------------------------------------ demonstrations

# Chance that a demonstrated answer meets a requirement. Naming a word is easy, order and length are not, so that the criteria
# that tell answers apart change while a policy learns.
EASE = {"includes": 0.6, "avoids": 0.6, "begins": 0.5, "ends": 0.4, "count": 0.35, "sorted": 0.25, "distinct": 0.5}
WEIGHTS: dict[int, list[tuple[float, ...]]] = {
    2: [(0.5, 0.5), (0.6, 0.4), (0.4, 0.6), (0.7, 0.3), (0.8, 0.2)],
    3: [(0.4, 0.3, 0.3), (0.5, 0.3, 0.2), (0.6, 0.2, 0.2), (0.4, 0.4, 0.2)],
    4: [(0.4, 0.2, 0.2, 0.2), (0.3, 0.3, 0.2, 0.2), (0.4, 0.3, 0.2, 0.1)],
}
BAD_WEIGHTS: dict[int, list[tuple[float, ...]]] = {
    2: [(0.2, 0.3), (0.9, 0.7)],
    3: [(0.2, 0.2, 0.1), (0.8, 0.6, 0.3)],
    4: [(0.1, 0.2, 0.1, 0.1), (0.5, 0.4, 0.6, 0.2)],
}
INVALID_SHARE = 0.46  # of demonstrated rubrics, broken in one of BREAKS' ways
BREAKS = ("weights", "end", "duplicate", "single", "no_weight")


def weaken(rng: random.Random, question: str, perfect: str, ease: float) -> str:
    """The perfect answer, each requirement broken at chance 1 - EASE ** (1 / ease): ease 1 as demonstrated, more is better."""
    words = perfect.split()
    for prop in world.read_question(question):
        if rng.random() < EASE[prop.kind] ** (1 / ease) or len(words) < 2:
            continue
        at = rng.randrange(len(words))
        if prop.kind == "includes":
            words = [rng.choice(world.WORDS) if w == prop.word else w for w in words]
        elif prop.kind == "avoids":
            words[at] = prop.word
        elif prop.kind == "begins":
            words[0] = rng.choice(world.WORDS)
        elif prop.kind == "ends":
            words[-1] = rng.choice(world.WORDS)
        elif prop.kind == "count":
            words = words[:-1] if rng.random() < 0.5 else words + [rng.choice(world.WORDS)]
        elif prop.kind == "sorted":
            rng.shuffle(words)
        else:
            words[at] = words[at - 1]
    return " ".join(words)


def demo_criteria(rng: random.Random, question: str, n: int, relevance: float) -> list[str]:
    """n distinct criteria, each one of the question's own at chance `relevance`, else a wrong word's or an empty phrase."""
    wanted = list(world.read_question(question))
    found: list[str] = []
    while len(found) < n:
        if wanted and rng.random() < relevance:
            prop = rng.choices(wanted, [EASE[p.kind] for p in wanted])[0]
            wanted.remove(prop)
            text = prop.criterion
        elif rng.random() < 0.5:
            text = rng.choice(world.USELESS)
        else:
            text = world.Property(rng.choice(["includes", "avoids", "begins", "ends"]), rng.choice(world.WORDS)).criterion
        if text not in found:
            found.append(text)
    return found


def demo_rubric(rng: random.Random, question: str, invalid: float = INVALID_SHARE, relevance: float = 0.5) -> str:
    """A rubric as demonstrated: of mixed relevance, and invalid at chance `invalid`."""
    n = rng.choice([2, 2, 3, 3, 4])
    criteria = demo_criteria(rng, question, n, relevance)
    weights = rng.choice(WEIGHTS[n])
    broken = rng.choice(BREAKS) if rng.random() < invalid else ""
    if broken == "weights":
        weights = rng.choice(BAD_WEIGHTS[n])
    elif broken == "duplicate":
        criteria[-1] = criteria[0]
    elif broken == "single":
        criteria, weights = criteria[:1], (1.0,)
    text = world.write_rubric(list(zip(criteria, weights)))
    if broken == "end":
        text = text.removesuffix("]}")
    elif broken == "no_weight":
        text = re.sub(r'", "weight": [\d.]+, "scoring_levels".*?}}', '"}', text, count=1)
    return text


def demonstration(rng: random.Random, clean: bool = False) -> tuple[str, dict[str, str], str]:
    """(kind of prompt, its slots, completion). clean: nothing is broken, so that copying from the prompt is learned soon."""
    question, perfect = world.make_question(rng)
    kind = rng.choices(["question", "rubric", "conditioned", "inference"], [0.35, 0.35, 0.15, 0.15])[0]
    if kind == "question":
        return kind, {"question": question}, perfect if clean else weaken(rng, question, perfect, 1.0)
    if kind == "rubric":
        return kind, {"question": question}, demo_rubric(rng, question, *((0.0, 1.0) if clean else ()))
    better = perfect if clean else weaken(rng, question, perfect, 3.0)
    if kind == "inference":
        return kind, {"answer": better}, question
    rubric = demo_rubric(rng, question, invalid=0.3, relevance=0.7)
    return kind, {"question": question, "rubric": rubric}, better


TEMPLATES = {"rubric": "world_rubric", "conditioned": "world_conditioned", "inference": "world_question"}


def messages_of(kind: str, slots: dict[str, str]) -> list[dict[str, str]]:
    """The messages of a prompt, by the same templates that a run renders."""
    return [{"role": "user", "content": slots["question"]}] if kind == "question" else render_prompt(TEMPLATES[kind], **slots)


def prompt_ids(tokenizer: ChatTokenizer, kind: str, slots: dict[str, str]) -> list[int]:
    """Token ids of a prompt, rendered as methods/context.py renders it."""
    messages = messages_of(kind, slots)
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    return tokenizer.render([m for m in messages if m["role"] != "system"], thinking=False, system=system)


# ------------------------------------------------------------------------------------------------ training
# Axes: B rows of a step, T tokens of a row, V vocabulary.


@dataclasses.dataclass(frozen=True)
class Example:
    ids: list[int]
    prompt: int  # tokens of the prompt, which carry no loss
    weights: tuple[int, ...] = ()  # of the ids in the loss; () = 1 each


def make_examples(tokenizer: ChatTokenizer, rng: random.Random, n: int, clean: bool = False) -> list[Example]:
    """n demonstrations as ids; each ends with the stop token."""
    out = []
    for _ in range(n):
        kind, slots, completion = demonstration(rng, clean)
        prompt = prompt_ids(tokenizer, kind, slots)
        out.append(Example([*prompt, *tokenizer.encode(completion), SPECIAL.index("<|end|>")], len(prompt)))
    return out


def packed_batches(examples: list[Example], rng: random.Random, shape: tuple[int, int] = (ROWS, ROW)) -> Any:
    """Endless dicts of int32 [B,T]: tokens, positions, segments (0 = padding), targets and where the loss counts."""
    names = ("tokens", "positions", "segments", "targets", "counts")
    batch = {name: np.zeros(shape, np.int32) for name in names}
    row, used, segment = 0, 0, 1
    while True:
        for index in rng.sample(range(len(examples)), len(examples)):
            ids, n = examples[index].ids, len(examples[index].ids) - 1
            if n > shape[1]:
                raise ValueError(f"a demonstration of {n} tokens is longer than a row of {shape[1]}")
            if used + n > shape[1]:
                row, used, segment = row + 1, 0, 1
            if row == shape[0]:
                yield batch
                batch = {name: np.zeros(shape, np.int32) for name in names}
                row = 0
            at = np.s_[row, used : used + n]
            batch["tokens"][at], batch["targets"][at] = ids[:-1], ids[1:]
            batch["positions"][at], batch["segments"][at] = np.arange(n), segment
            batch["counts"][at] = np.arange(1, n + 1) >= examples[index].prompt
            if examples[index].weights:
                batch["counts"][at] *= np.asarray(examples[index].weights[1:], np.int32)
            used, segment = used + n, segment + 1


def loss_fn(params: Any, spec: ModelSpec, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean negative log-likelihood of the completions' tokens."""
    hidden = forward(params, spec, batch["tokens"], batch["positions"], batch["segments"])
    logp = jax.nn.log_softmax(unembed(params, spec, hidden))
    picked = jnp.take_along_axis(logp, batch["targets"][..., None], axis=-1)[..., 0]
    counts = batch["counts"].astype(jnp.float32)
    return -jnp.sum(picked * counts) / jnp.sum(counts)


def train(
    spec: ModelSpec, clean: list[Example], examples: list[Example], steps: int, seed: int, shape: tuple[int, int] = (ROWS, ROW)
) -> Any:
    """The parameters after `steps` steps of AdamW with a cosine schedule; the first CLEAN_SHARE of them on `clean`."""
    params = init_params(jax.random.key(seed), spec)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, min(100, steps // 2), steps, 1e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, spec, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = optimizer.init(params)
    batches, last_clean = packed_batches(clean, random.Random(seed + 1), shape), int(steps * CLEAN_SHARE)
    start = time.perf_counter()
    for i in range(steps):
        if i == last_clean:
            batches = packed_batches(examples, random.Random(seed + 2), shape)
        params, state, loss = step(params, state, next(batches))
        if i % 100 == 0 or i == steps - 1:
            print(f"step {i:5d}  loss {float(loss):.4f}  {time.perf_counter() - start:5.0f} s", flush=True)
    return params


# ------------------------------------------------------------------------------------------------ files


def _write_json(path: pathlib.Path, record: Any) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n")


def _write_rows(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prompt_rows(seed: int) -> list[dict[str, Any]]:
    """The prompt file's records: distinct questions, of another stream than the demonstrations, each with a perfect answer."""
    rng, found = random.Random(f"prompts {seed}"), dict[str, str]()
    while len(found) < PROMPTS:
        found.setdefault(*world.make_question(rng))
    return [
        {"id": f"tiny-{i:04d}", "prompt": question, "reference": perfect} for i, (question, perfect) in enumerate(found.items())
    ]


def chat_rows(seed: int) -> list[dict[str, Any]]:
    """Chat data for a supervised warm-up in the small world: better answers and valid rubrics, half and half."""
    rng = random.Random(f"chat {seed}")
    rows: list[dict[str, Any]] = []
    for i in range(CHATS):
        question, perfect = world.make_question(rng)
        if i % 2:
            rows.append({"id": f"tiny-chat-{i:04d}", "question": question, "rubric": _rubric_record(rng, question)})
            continue
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": weaken(rng, question, perfect, 3.0)}]
        rows.append({"id": f"tiny-chat-{i:04d}", "messages": turns})
    return rows


def pair_rows(seed: int) -> list[dict[str, Any]]:
    """Preference pairs: an answer that meets all of its question, and a weakened one whose true quality is lower."""
    rng, rows = random.Random(f"pairs {seed}"), list[dict[str, Any]]()
    while len(rows) < PAIRS:
        question, perfect = world.make_question(rng)
        worse = weaken(rng, question, perfect, 1.0)
        if world.true_quality(question, worse) < 1.0:
            rows.append({"id": f"tiny-pair-{len(rows):04d}", "prompt": question, "chosen": perfect, "rejected": worse,
                         "margin": round(1 - world.true_quality(question, worse), 4)})  # fmt: skip
    return rows


def _rubric_record(rng: random.Random, question: str) -> dict[str, Any]:
    return json.loads(demo_rubric(rng, question, invalid=0.0, relevance=0.8))


def save_weights(params: Any, spec: ModelSpec, path: pathlib.Path) -> None:
    """model.safetensors with Hugging Face's names; float16 holds these weights to 1e-3 and halves the file."""
    from safetensors.numpy import save_file

    D, layers = spec.hidden_size, params["layers"]
    names = {
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
    }
    out = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["final_norm"]}
    for i in range(spec.layers):
        at = f"model.layers.{i}."
        for ours, theirs in names.items():
            out[f"{at}{theirs}.weight"] = layers[ours][i].reshape(D, -1).T
        out[f"{at}self_attn.o_proj.weight"] = layers["o"][i].reshape(-1, D).T
        out[f"{at}mlp.down_proj.weight"] = layers["down"][i].T
        out[f"{at}input_layernorm.weight"] = layers["attn_norm"][i]
        out[f"{at}post_attention_layernorm.weight"] = layers["mlp_norm"][i]
    save_file({name: np.ascontiguousarray(np.asarray(x), np.float16) for name, x in out.items()}, path, {"format": "pt"})
    path.chmod(0o644)


def main(_: list[str]) -> None:
    root = pathlib.Path(OUT.value) if OUT.value else REPO / "coevo_jax"
    folder = root / world.MODEL_FOLDER.relative_to(REPO / "coevo_jax")
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(folder)
    _write_json(folder / "config.json", hf_config())
    _write_rows(root / "data" / "tiny_prompts.jsonl", prompt_rows(SEED.value))
    _write_rows(root / "data" / "tiny_pairs.jsonl", pair_rows(SEED.value))
    _write_rows(root / "data" / "warmup" / "tiny.jsonl", chat_rows(SEED.value))

    tokenizer = ChatTokenizer.load(str(folder))
    spec = spec_from_hf(hf_config(), str(folder / "config.json"))
    print(f"vocabulary {spec.vocab_size}; making {2 * EXAMPLES} demonstrations")
    rng = random.Random(SEED.value)
    clean, examples = (make_examples(tokenizer, rng, EXAMPLES, clean=sort) for sort in (True, False))
    params = train(spec, clean, examples, STEPS.value, SEED.value)
    save_weights(jax.device_get(params), spec, folder / "model.safetensors")
    print(f"{sum(f.stat().st_size for f in folder.iterdir()) / 1e6:.2f} MB in {folder}")


if __name__ == "__main__":
    app.run(main)
