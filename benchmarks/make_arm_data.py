"""Write the bundled data of Rubric-ARM: labelled pairs (data.pairs=demo) and demonstrations (arm.demonstrations=demo).

    python benchmarks/make_arm_data.py                 # a second; writes into coevo_jax/data

Made by this program from the sentences below, which we wrote: a request asks for a few words on a topic under one or two
constraints that Python checks; the preferred answer keeps all of them, the other breaks at least one, repeats itself or strays to
another topic. So the labels are true by construction and the texts are plain and alike: enough to teach two formats and to count
with, no measure of taste. Requests of the two files differ.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
import re
import sys
from typing import Any

REPO = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

DATA = REPO / "coevo_jax" / "data"
PAIRS, DEMONSTRATIONS = 160, 96
TOPICS: dict[str, tuple[str, ...]] = {
    "bees": (
        "Bees carry pollen from flower to flower.",
        "A hive works like one large family.",
        "Honey keeps for many years.",
        "A bee dances to show the way.",
    ),
    "rain": (
        "Rain fills the rivers again.",
        "Drops grow inside a cold cloud.",
        "Fields turn green after a shower.",
        "The smell of wet earth is hard to forget.",
    ),
    "bread": (
        "Bread needs flour, yeast and time.",
        "The crust turns brown in the oven.",
        "Warm dough rises faster.",
        "A loaf is best on its first day.",
    ),
    "trains": (
        "Trains run on two rails of steel.",
        "One train can replace hundreds of cars.",
        "The timetable ties towns together.",
        "A window seat makes the hours short.",
    ),
    "the moon": (
        "The moon shows us one face.",
        "Its light is borrowed from the sun.",
        "The tides follow it twice a day.",
        "People have walked on its dust.",
    ),
    "cats": (
        "Cats sleep for most of the day.",
        "Their whiskers measure narrow gaps.",
        "A cat lands on its feet.",
        "They greet friends with a slow blink.",
    ),
    "libraries": (
        "A library lends books to everyone.",
        "It is a quiet place to think.",
        "Old maps rest in its drawers.",
        "Children hear their first stories there.",
    ),
    "mountains": (
        "Mountains rise where plates collide.",
        "The air grows thin near the top.",
        "Snow stays there through summer.",
        "Goats climb where we can't.",
    ),
    "tea": (
        "Tea leaves open in hot water.",
        "A green leaf wants cooler water.",
        "One plant gives many kinds of tea.",
        "Guests are welcomed with a cup.",
    ),
    "bicycles": (
        "A bicycle turns effort into speed.",
        "Its chain needs a drop of oil.",
        "Good brakes matter more than gears.",
        "Cities grow calmer with more riders.",
    ),
    "owls": (
        "Owls fly without a sound.",
        "Their ears sit at different heights.",
        "They swallow a mouse whole.",
        "An owl can turn its head far back.",
    ),
    "clocks": (
        "A clock counts equal steps.",
        "The first ones had no hands.",
        "A pendulum keeps a steady beat.",
        "Atoms now keep the best time.",
    ),
    "rivers": (
        "Rivers carve valleys over ages.",
        "They carry sand down to the sea.",
        "Towns began along their banks.",
        "A river never looks the same twice.",
    ),
    "music": (
        "Music moves feet before minds.",
        "A scale is a ladder of notes.",
        "Silence shapes a melody too.",
        "Old songs carry old news.",
    ),
    "gardens": (
        "Gardens reward a patient hand.",
        "Worms loosen the heavy soil.",
        "Herbs like a sunny corner.",
        "A small fence keeps rabbits out.",
    ),
    "snow": (
        "Snow is made of tiny crystals.",
        "Fresh snow swallows sound.",
        "It keeps seeds warm below.",
        "No two flakes match exactly.",
    ),
    "chess": (
        "Chess is a war without blood.",
        "The queen moves the farthest.",
        "Good players see patterns.",
        "A pawn may become a queen.",
    ),
    "whales": (
        "Whales sing across whole oceans.",
        "They breathe through the top of the head.",
        "A calf drinks rich milk.",
        "Some of them live for two centuries.",
    ),
    "bridges": (
        "Bridges carry roads over gaps.",
        "An arch pushes its load aside.",
        "Cables hold the longest ones.",
        "Every bridge moves a little in the wind.",
    ),
    "soup": (
        "Soup makes little go far.",
        "Bones give it depth.",
        "Salt belongs in near the end.",
        "It tastes better the next day.",
    ),
    "letters": (
        "Letters wait until we are ready.",
        "A stamp pays for the whole journey.",
        "Handwriting tells of a mood.",
        "Some are kept for a lifetime.",
    ),
    "forests": (
        "Forests cool the land around them.",
        "Roots share news through fungi.",
        "Dead wood feeds new life.",
        "A path there softens every step.",
    ),
    "shoes": (
        "Shoes shape the way we walk.",
        "Leather learns the form of a foot.",
        "Wet shoes dry best with paper inside.",
        "A worn heel tells of a habit.",
    ),
    "stars": (
        "Stars are suns far away.",
        "Their light is older than we are.",
        "Sailors steered by them.",
        "The brightest ones live the shortest.",
    ),
}
WORDS = ("today", "quietly", "friend", "simply", "morning", "garden", "together", "often")
NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four"}


def sentences(text: str) -> list[str]:
    """The sentences of an answer; numbers of a list are none."""
    return [s for s in re.split(r"(?<=[.!?])\s+", re.sub(r"^\d\. ", "", text, flags=re.MULTILINE)) if s.strip()]


def has(text: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None


@dataclasses.dataclass(frozen=True)
class Constraint:
    """Something that a request may ask for and Python can check."""

    kind: str
    n: int = 0
    word: str = ""

    @property
    def request(self) -> str:
        return {
            "count": f"Use exactly {NUMBERS.get(self.n, '')} sentence{'s' * (self.n > 1)}.",
            "word": f'Use the word "{self.word}".',
            "avoid": f'Do not use the word "{self.word}".',
            "question": "End with a question.",
            "list": "Write a numbered list.",
            "capitals": "Write in capital letters only.",
            "begin": f'Begin with the word "{self.word}".',
        }[self.kind]

    @property
    def rule(self) -> str:
        return {
            "count": f"The response has exactly {NUMBERS.get(self.n, '')} sentence{'s' * (self.n > 1)}.",
            "word": f'The response uses the word "{self.word}".',
            "avoid": f'The response does not use the word "{self.word}".',
            "question": "The response ends with a question.",
            "list": "The response is a numbered list.",
            "capitals": "The response is in capital letters only.",
            "begin": f'The response begins with the word "{self.word}".',
        }[self.kind]

    def check(self, text: str) -> bool:
        if self.kind == "count":
            return len(sentences(text)) == self.n
        if self.kind in ("word", "avoid"):
            return has(text, self.word) == (self.kind == "word")
        if self.kind == "question":
            return text.rstrip().endswith("?")
        if self.kind == "list":
            return all(re.match(r"\d\. ", line) for line in text.splitlines())
        return text == text.upper() if self.kind == "capitals" else text.lower().startswith(self.word.lower())

    def reason(self, text: str) -> str:
        """What is to be said of a text."""
        n, met = len(sentences(text)), self.check(text)
        return {
            "count": f"it has {NUMBERS.get(n, str(n))}" + ("" if met else f", not {NUMBERS.get(self.n, '')}"),
            "word": f"the word {'is there' if met else 'is missing'}",
            "avoid": f"the word {'never comes up' if met else 'comes up'}",
            "question": f"its end is {'a question' if met else 'no question'}",
            "list": f"its lines {'are numbered' if met else 'have no numbers'}",
            "capitals": f"{'every letter is' if met else 'small letters are in it, not only'} a capital",
            "begin": f"it {'opens that way' if met else 'opens with another word'}",
        }[self.kind]


def constraints(rng: random.Random, topic: str) -> list[Constraint]:
    """One or two that go together."""
    word = rng.choice(WORDS)
    common = [w for s in TOPICS[topic] for w in re.findall(r"[a-z]{4,}", s)]
    pool = [
        Constraint("count", n=rng.choice([1, 2, 3])),
        Constraint("word", word=word),
        Constraint("avoid", word=rng.choice(common)),
        Constraint("question"),
        Constraint("list"),
        Constraint("capitals"),
        Constraint("begin", word="Well"),
    ]
    chosen = rng.sample(pool, rng.choice([1, 2, 2]))
    kinds = {c.kind for c in chosen}
    return chosen if not kinds >= {"list", "begin"} and not kinds >= {"list", "question"} else chosen[:1]


def compose(rng: random.Random, topic: str, wanted: list[Constraint], broken: set[str], fault: str) -> str:
    """An answer that keeps `wanted` but for the kinds in `broken`. fault: '' | 'stray' | 'repeat'."""
    by_kind = {c.kind: c for c in wanted if c.kind not in broken}
    n = by_kind["count"].n if "count" in by_kind else rng.choice([2, 3])
    if "count" in broken:
        n = rng.choice([k for k in (1, 2, 3, 4) if k != next(c.n for c in wanted if c.kind == "count")])
    avoid = [c.word for c in wanted if c.kind == "avoid"]
    facts = list(TOPICS[rng.choice([t for t in TOPICS if t != topic])] if fault == "stray" else TOPICS[topic])
    kept = [f for f in facts if not any(has(f, w) for w in avoid)]
    if "avoid" in broken:
        kept = [f for f in TOPICS[topic] if has(f, avoid[0])] + kept
    else:
        rng.shuffle(kept)
    body = (kept * 4)[:n]
    if fault == "repeat":
        body = [body[0]] * max(n, 2)
    if "word" in by_kind:
        body[0] = f"{by_kind['word'].word.capitalize()}: {body[0][0].lower()}{body[0][1:]}"
    if "begin" in by_kind:
        body[0] = f"Well, {body[0][0].lower()}{body[0][1:]}"
    if "question" in by_kind:
        body[-1] = body[-1][:-1] + ", don't you think?"
    text = "\n".join(f"{i}. {s}" for i, s in enumerate(body, 1)) if "list" in by_kind else " ".join(body)
    return text.upper() if "capitals" in by_kind else text


def on_topic(topic: str, text: str) -> bool:
    plain = text.lower()
    return any(s[:-1].lower()[4:] in plain for s in TOPICS[topic])


def repeats(text: str) -> bool:
    found = [re.sub(r"\W", "", s.lower()) for s in sentences(text)]
    return len(set(found)) < len(found)


PRINCIPLES = {
    "topic": ("The response stays with what was asked about.", "it keeps to the topic", "it talks of something else"),
    "repeat": ("The response does not repeat itself.", "each sentence is new", "the same sentence comes twice"),
}


def make(rng: random.Random) -> dict[str, Any] | None:
    """A record, or None where its answers don't come out as they should."""
    topic = rng.choice(list(TOPICS))
    wanted = constraints(rng, topic)
    lead = rng.choice(["Tell me something about {}.", "Write a few words on {}.", "Say what is worth knowing about {}."])
    prompt = " ".join([lead.format(topic), *(c.request for c in wanted)])
    fault = rng.choice(["", "", "stray", "repeat"])
    broken = {c.kind for c in rng.sample(wanted, rng.randint(0 if fault else 1, len(wanted)))}
    chosen, rejected = compose(rng, topic, wanted, set(), ""), compose(rng, topic, wanted, broken, fault)
    checks = {"topic": lambda t: on_topic(topic, t), "repeat": lambda t: not repeats(t)}
    good = all(c.check(chosen) for c in wanted) and all(check(chosen) for check in checks.values())
    bad = sum(not c.check(rejected) for c in wanted) + sum(not check(rejected) for check in checks.values())
    if not good or not bad or chosen == rejected:
        return None
    rules = [{"text": c.rule, "tag": "Hard Rule", "chosen": c.reason(chosen), "rejected": c.reason(rejected)} for c in wanted]
    for name, (rule, met, missed) in PRINCIPLES.items():
        said = {side: met if checks[name](text) else missed for side, text in (("chosen", chosen), ("rejected", rejected))}
        rules.append({"text": rule, "tag": "Principle", **said})
    gate = next((i for i, c in enumerate(wanted, 1) if not c.check(rejected)), 1)
    check = {
        "chosen": f"it meets the rule, {rules[gate - 1]['chosen']}",
        "rejected": f"it {'meets' if wanted[gate - 1].check(rejected) else 'misses'} the rule, {rules[gate - 1]['rejected']}",
    }
    breaks = [i for i, rule in enumerate(rules, 1) if rule["chosen"] != rule["rejected"]]
    why = f"Response {{chosen}} meets every item, Response {{rejected}} misses {' and '.join(map(str, breaks))}"
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "rules": rules, "gate": gate, "check": check, "why": why}


def main() -> None:
    rng, found = random.Random(20261130), dict[str, dict[str, Any]]()
    while len(found) < PAIRS + DEMONSTRATIONS:
        if (record := make(rng)) is not None:
            found.setdefault(record["prompt"], record)
    records = list(found.values())
    pairs = [
        {"id": f"arm-pair-{i:03d}", **{name: record[name] for name in ("prompt", "chosen", "rejected")}}
        for i, record in enumerate(records[:PAIRS])
    ]
    shown = [{"id": f"arm-demo-{i:03d}", **record} for i, record in enumerate(records[PAIRS:])]
    for path, rows in ((DATA / "demo_pairs.jsonl", pairs), (DATA / "warmup" / "arm.jsonl", shown)):
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        print(f"{len(rows)} records in {path}")


if __name__ == "__main__":
    main()
