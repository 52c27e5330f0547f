"""Make the bundled labelled rankings ('labelled') and the warm-up data of the weighted-item rubrics ('dynamic') again.

    python benchmarks/make_labelled.py              # a second; writes into coevo_jax/data

What the ranking means: the answers were written by this script from hand-written facts, not judged by people. The best answer
is right and keeps every constraint of its prompt; the second is right and breaks the form that was asked for; the third keeps the
form and says something false; the fourth is about something else or evades. So the order is "content before form", which is one
convention of many, and holds by construction. Lengths vary on purpose, so that no order of lengths gives the ranking away
(tests/test_data_labelled.py holds both). Same seed, same bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import random
from typing import Any

DATA = pathlib.Path(__file__).resolve().parent.parent / "coevo_jax" / "data"
SEED = 20


@dataclasses.dataclass(frozen=True)
class Topic:
    """Facts of a topic: true sentences, a false one, a question with its short answer, and a word that every fact could hold."""

    name: str
    word: str
    facts: tuple[str, str, str]  # the first holds `word`
    false: str
    question: str
    answer: str
    wrong: str  # a short answer that is false


TOPICS = (
    Topic(
        "honey bees",
        "hive",
        (
            "Honey bees live together in a hive.",
            "They visit flowers to gather nectar.",
            "One queen lays the eggs of the whole colony.",
        ),
        "Honey bees make their honey out of sand.",
        "What do honey bees make from nectar?",
        "They turn nectar into honey.",
        "They turn nectar into silk.",
    ),
    Topic(
        "the Moon",
        "orbit",
        (
            "The Moon moves around the Earth in an orbit of about a month.",
            "It shines because it reflects sunlight.",
            "Its pull raises the tides of the sea.",
        ),
        "The Moon is a small star that burns gas.",
        "Why does the Moon shine?",
        "It reflects the light of the Sun.",
        "It burns with a light of its own.",
    ),
    Topic(
        "bread",
        "dough",
        (
            "Bread begins as a dough of flour and water.",
            "Yeast makes it rise by giving off gas.",
            "The heat of the oven turns its outside brown.",
        ),
        "Bread rises because salt turns into steam.",
        "What makes bread rise?",
        "Yeast gives off gas that lifts the dough.",
        "Salt swells up and lifts the dough.",
    ),
    Topic(
        "rainbows",
        "light",
        (
            "A rainbow shows when light passes through drops of water.",
            "The drops bend each colour by a different amount.",
            "You see it with the Sun at your back.",
        ),
        "A rainbow is made of coloured dust in the air.",
        "Where must the Sun be when you see a rainbow?",
        "The Sun must be behind you.",
        "The Sun must stand right in front of you.",
    ),
    Topic(
        "the heart",
        "blood",
        (
            "The heart pumps blood through the body.",
            "It has four chambers with valves between them.",
            "It beats faster when you run.",
        ),
        "The heart stores the food that you eat.",
        "How many chambers does the human heart have?",
        "It has four chambers.",
        "It has nine chambers.",
    ),
    Topic(
        "volcanoes",
        "rock",
        (
            "A volcano is an opening where molten rock reaches the surface.",
            "Its ash can travel for many kilometres.",
            "Many of them lie where plates of the crust meet.",
        ),
        "Volcanoes are fed by fires that people light.",
        "What is molten rock called once it flows on the surface?",
        "It is called lava.",
        "It is called coral.",
    ),
    Topic(
        "penguins",
        "swim",
        (
            "Penguins swim very well but cannot fly.",
            "Most of them live in the southern half of the world.",
            "They eat fish and krill.",
        ),
        "Penguins fly across the ocean every winter.",
        "Can penguins fly?",
        "No, they swim instead.",
        "Yes, they fly for thousands of kilometres.",
    ),
    Topic(
        "bicycles",
        "pedals",
        (
            "A rider turns the pedals to move a bicycle.",
            "A chain carries the force to the rear wheel.",
            "Brakes press on the rims or on a disc.",
        ),
        "A bicycle needs petrol to move.",
        "Which part carries the force from the pedals to the wheel?",
        "The chain carries it.",
        "The bell carries it.",
    ),
    Topic(
        "glaciers",
        "ice",
        (
            "A glacier is a mass of ice that flows slowly.",
            "It forms where more snow falls than melts.",
            "It carves valleys as it moves.",
        ),
        "Glaciers are made of frozen milk.",
        "What is a glacier made of?",
        "It is made of packed snow that became ice.",
        "It is made of white stone.",
    ),
    Topic(
        "the alphabet",
        "letters",
        (
            "The English alphabet has twenty-six letters.",
            "Five of them are always counted as vowels.",
            "It came from the Latin alphabet.",
        ),
        "The English alphabet has forty vowels.",
        "How many letters does the English alphabet have?",
        "It has twenty-six letters.",
        "It has thirty-one letters.",
    ),
    Topic(
        "trees",
        "leaves",
        (
            "Trees make their food in their leaves.",
            "Their roots take water from the soil.",
            "A ring in the trunk stands for about one year.",
        ),
        "Trees drink through their bark at night only.",
        "What do the rings of a trunk tell?",
        "They tell the age of the tree.",
        "They tell how many birds lived there.",
    ),
    Topic(
        "whales",
        "air",
        (
            "Whales breathe air through a blowhole.",
            "They feed their young with milk.",
            "The blue whale is the largest animal known.",
        ),
        "Whales are fish that lay their eggs on land.",
        "Are whales fish or mammals?",
        "Whales are mammals.",
        "Whales are fish.",
    ),
    Topic(
        "magnets",
        "iron",
        ("A magnet pulls on things made of iron.", "Like poles push each other away.", "A compass needle is a small magnet."),
        "Magnets work only when they are wet.",
        "What do two north poles of magnets do?",
        "They push each other away.",
        "They melt together.",
    ),
    Topic(
        "the Sun",
        "star",
        (
            "The Sun is the star at the middle of our solar system.",
            "Its heat comes from hydrogen that fuses to helium.",
            "Its light needs about eight minutes to reach us.",
        ),
        "The Sun goes around the Earth once a week.",
        "What is the Sun?",
        "The Sun is a star.",
        "The Sun is a planet made of iron.",
    ),
    Topic(
        "salt",
        "sea",
        ("Much salt is won from the sea.", "It keeps food from spoiling.", "Its crystals have the shape of cubes."),
        "Salt is a kind of sugar that grows on trees.",
        "What shape do crystals of table salt have?",
        "They have the shape of cubes.",
        "They have the shape of rings.",
    ),
    Topic(
        "spiders",
        "legs",
        ("A spider has eight legs.", "Many spiders catch their prey in webs.", "They are not insects but arachnids."),
        "Spiders have wings that they fold away.",
        "How many legs does a spider have?",
        "A spider has eight legs.",
        "A spider has six legs.",
    ),
    Topic(
        "paper",
        "wood",
        (
            "Most paper is made from the fibres of wood.",
            "The fibres are mixed with water and pressed flat.",
            "Used paper can be made into new paper.",
        ),
        "Paper is cut from the shells of eggs.",
        "What is most paper made from?",
        "It is made from wood fibres.",
        "It is made from the wool of sheep.",
    ),
    Topic(
        "clouds",
        "water",
        ("Clouds are made of tiny drops of water or ice.", "They form when moist air cools.", "Thick ones look grey from below."),
        "Clouds are smoke that factories left behind.",
        "What are clouds made of?",
        "They are made of tiny drops of water or ice.",
        "They are made of cotton fibres.",
    ),
    Topic(
        "chess",
        "king",
        ("In chess you win by trapping the king.", "Each side begins with sixteen pieces.", "The board has sixty-four squares."),
        "A game of chess needs four dice.",
        "How many squares does a chess board have?",
        "It has sixty-four squares.",
        "It has one hundred and twenty squares.",
    ),
    Topic(
        "deserts",
        "rain",
        (
            "A desert is a place with very little rain.",
            "Some deserts are cold, not hot.",
            "Plants there store water in thick stems.",
        ),
        "Every desert is covered with deep lakes.",
        "What do all deserts lack?",
        "They lack rain.",
        "They lack sunlight.",
    ),
    Topic(
        "trains",
        "rails",
        ("Trains run on rails of steel.", "Many are driven by electric motors.", "They need a long way to stop."),
        "Trains steer with a wheel like that of a car.",
        "What do trains run on?",
        "They run on steel rails.",
        "They run on wooden skis.",
    ),
    Topic(
        "eyes",
        "lens",
        ("The eye bends light with a lens.", "The pupil grows wide in the dark.", "The retina sends its picture to the brain."),
        "The eye sees by sending out rays of its own.",
        "What happens to the pupil in the dark?",
        "It grows wider.",
        "It closes for good.",
    ),
)

# Topics of the warm-up alone: no prompt of theirs is in the labelled set.
WARMUP_TOPICS = (
    Topic(
        "cheese",
        "milk",
        ("Cheese is made from milk.", "Rennet makes the milk thick.", "Some kinds ripen for years."),
        "Cheese is dug out of mines.",
        "What is cheese made from?",
        "It is made from milk.",
        "It is made from clay.",
    ),
    Topic(
        "tides",
        "moon",
        ("The tides follow the moon.", "Most coasts have two high tides a day.", "They differ from place to place."),
        "Tides come from ships that sail past.",
        "What causes the tides?",
        "The pull of the Moon does.",
        "The wind of ships does.",
    ),
    Topic(
        "owls",
        "night",
        ("Most owls hunt at night.", "Their feathers make little noise.", "They can turn their heads very far."),
        "Owls sleep under water.",
        "When do most owls hunt?",
        "They hunt at night.",
        "They hunt at noon.",
    ),
    Topic(
        "maps",
        "scale",
        ("A map has a scale.", "North is often at the top.", "Contour lines show how steep the land is."),
        "Maps are drawn by clouds.",
        "What does a map's scale tell?",
        "It tells how far apart places are.",
        "It tells the price of land.",
    ),
    Topic(
        "soap",
        "water",
        ("Soap helps water to carry grease away.", "It is made from fat and lye.", "Its bubbles show many colours."),
        "Soap is frozen starlight.",
        "What does soap help water to do?",
        "It helps water carry grease away.",
        "It helps water burn.",
    ),
    Topic(
        "bridges",
        "load",
        ("A bridge carries its load to the ground.", "Arches push to their sides.", "Cables hold a hanging bridge."),
        "Bridges float on air.",
        "What does a bridge carry to the ground?",
        "It carries its load.",
        "It carries sunlight.",
    ),
    Topic(
        "kites",
        "wind",
        ("A kite needs wind to fly.", "Its tail keeps it steady.", "A line ties it to the hand."),
        "Kites are birds made of lead.",
        "What does a kite need to fly?",
        "It needs wind.",
        "It needs petrol.",
    ),
    Topic(
        "sleep",
        "rest",
        ("Sleep gives the body rest.", "Dreams come in some of its phases.", "Children need more of it than adults."),
        "Sleep was invented last year.",
        "Who needs more sleep, children or adults?",
        "Children do.",
        "Adults do.",
    ),
)

EVASIONS = (
    "I am not sure what you mean. Could you ask something else?",
    "That is a very interesting topic, and there are many books about it in every library that you could read one day.",
    "As with so many things, it depends.",
)
SHAPES = ("sentences", "list", "short")


def prompt_of(topic: Topic, shape: str) -> str:
    """What is asked: a shape is a form of its own."""
    if shape == "sentences":
        return f"Explain {topic.name} in exactly two sentences. Use the word '{topic.word}'."
    if shape == "list":
        return f"Give three facts about {topic.name}. Put each on a line of its own that begins with a dash."
    return f"{topic.question} Answer in one sentence of at most ten words."


def answers_of(rng: random.Random, topic: Topic, other: Topic, shape: str) -> list[str]:
    """Four answers, best first."""
    a, b, c = topic.facts
    off = " ".join(other.facts[: rng.randint(1, 3)]) if rng.random() < 0.6 else rng.choice(EVASIONS)
    if shape == "sentences":
        broken = " ".join(topic.facts) if rng.random() < 0.5 else a
        return [f"{a} {rng.choice((b, c))}", broken, f"{a} {topic.false}", off]
    if shape == "list":
        facts = [a, b, c]
        rng.shuffle(facts)
        wrong = [topic.false, *facts[:2]]
        rng.shuffle(wrong)
        broken = " ".join(facts[: rng.randint(2, 3)])
        return ["\n".join(f"- {f}" for f in facts), broken, "\n".join(f"- {f}" for f in wrong), off]
    return [topic.answer, f"{topic.answer} {rng.choice((a, b, c))} {rng.choice(('Ask me more!', b, c))}", topic.wrong, off]


def rankings(seed: int) -> list[dict[str, Any]]:
    """Records {id, prompt, answers, scores}; the answers stand in a shuffled order, 4 is the best score and 1 the worst."""
    rng, rows = random.Random(f"labelled {seed}"), list[dict[str, Any]]()
    for topic in TOPICS:
        for shape in SHAPES:
            other = rng.choice([t for t in TOPICS if t is not topic])
            ranked = list(zip(answers_of(rng, topic, other, shape), (4, 3, 2, 1)))
            rng.shuffle(ranked)
            rows.append({"id": f"labelled-{len(rows):03d}", "prompt": prompt_of(topic, shape),
                         "answers": [text for text, _ in ranked], "scores": [score for _, score in ranked]})  # fmt: skip
    return rows


# ------------------------------------------------------------------------------------------------ warm-up


def items_of(topic: Topic, shape: str) -> list[tuple[str, int]]:
    """Items that tell this prompt's answers apart, with the weights of 'content before form'."""
    about = (f"Is the answer about {topic.name}?", 5)
    if shape == "sentences":
        return [about, ("Is everything that the answer says true?", 4), ("Does the answer have exactly two sentences?", 2),
                (f"Does the answer use the word {topic.word}?", 2)]  # fmt: skip
    if shape == "list":
        return [about, ("Is every fact in the answer true?", 4), ("Does every line begin with a dash?", 2),
                ("Does the answer give three facts?", 2)]  # fmt: skip
    return [(f"Does the answer say that {topic.answer[0].lower() + topic.answer[1:].rstrip('.')}?", 5),
            ("Does the answer avoid false claims?", 3), ("Is the answer a single sentence?", 2),
            ("Does the answer have at most ten words?", 1)]  # fmt: skip


EMPTY_ITEMS = (
    "Is the answer polite?",
    "Is the answer written in English?",
    "Is the answer easy to read?",
    "Does the answer end well?",
)


def warmup(seed: int) -> list[dict[str, Any]]:
    """Records {id, question, candidates, rubric} that show the form: items of mixed worth, so that training has room above it."""
    rng, rows = random.Random(f"warmup {seed}"), list[dict[str, Any]]()
    for _ in range(6):
        for topic in WARMUP_TOPICS:
            for shape in SHAPES:
                other = rng.choice([t for t in WARMUP_TOPICS if t is not topic])
                candidates = [rng.choice(answers_of(rng, topic, other, shape)) for _ in range(4)]
                good = rng.sample(items_of(topic, shape), rng.randint(1, 3))
                empty = [(text, rng.randint(1, 3)) for text in rng.sample(EMPTY_ITEMS, 3 - len(good) + rng.randint(0, 1))]
                items = rng.sample(good + empty, len(good + empty))
                rubric = {"items": [{"item": text, "weight": weight} for text, weight in items]}
                rows.append({"id": f"dynamic-{len(rows):03d}", "question": prompt_of(topic, shape), "candidates": candidates,
                             "rubric": rubric})  # fmt: skip
    rng.shuffle(rows)
    return rows


def write_rows(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(DATA), help="folder to write into")
    out = pathlib.Path(parser.parse_args().out)
    (out / "warmup").mkdir(parents=True, exist_ok=True)
    write_rows(out / "labelled_rankings.jsonl", rankings(SEED))
    write_rows(out / "warmup" / "dynamic.jsonl", warmup(SEED))


if __name__ == "__main__":
    main()
