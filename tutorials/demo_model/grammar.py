"""The texts of the demo model: a small world, questions about it, and five voices that answer.

Everything is made by rule from the table below, so the model can be trained again from nothing.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Thing:
    """One thing of the world: how it looks, what it does, where it is."""

    name: str
    looks: tuple[str, str]
    does: str
    place: str


# name: how it looks | what it does | where it is
_WORLD = """
sea: deep, blue | never sleeps | beyond the harbour
moon: pale, round | pulls the tide | above the hill
sun: warm, bright | wakes the birds | over the meadow
cat: soft, clever | hunts the mice | under the table
dog: loyal, loud | guards the door | in the yard
bread: brown, fresh | feeds the town | on the shelf
rain: cold, grey | fills the well | in the clouds
wind: wild, free | turns the mill | on the moor
river: long, quick | carries the boats | behind the church
forest: dark, green | hides the deer | past the last farm
clock: tall, old | counts the hours | in the hall
lamp: small, yellow | lights the page | beside the bed
bridge: high, narrow | joins the two towns | across the river
garden: neat, sunny | grows the herbs | behind the school
owl: grey, silent | watches the night | in the barn
whale: huge, gentle | sings to its young | far from the coast
horse: strong, brown | pulls the cart | in the stable
bell: heavy, golden | calls the village | in the tower
train: fast, red | brings the letters | at the station
book: thick, dusty | tells of far lands | in the library
apple: sweet, red | falls in autumn | on the tree
snow: white, quiet | covers the roofs | on the mountain
fire: hot, orange | warms the house | in the stove
star: tiny, bright | guides the sailors | in the north
ship: proud, wooden | crosses the ocean | at the pier
fox: sly, red | steals the eggs | near the hedge
bee: busy, striped | makes the honey | among the flowers
stone: smooth, grey | keeps the gate open | by the road
mirror: clear, cold | shows the room | on the wall
kettle: round, black | sings at noon | on the stove
violin: light, brown | plays the waltz | in its case
tower: tall, grey | guards the valley | on the cliff
"""


def _thing(line: str) -> Thing:
    name, _, rest = line.partition(": ")
    looks, does, place = rest.split(" | ")
    first, second = looks.split(", ")
    return Thing(name, (first, second), does, place)


WORLD = [_thing(line) for line in _WORLD.strip().splitlines()]

ABOUT = (
    "Tell me about the {}.",
    "What is the {} like?",
    "Describe the {}.",
    "What do you know about the {}?",
)
WHERE = ("Where is the {}?", "Where can I find the {}?")

# What each voice says about a thing, and where it is.
Answers = tuple[Callable[[Thing], str], Callable[[Thing], str]]


def _up(thing: Thing) -> tuple[str, str, str, str, str]:
    first, second = thing.looks
    name, does, place = thing.name.upper(), thing.does.upper(), thing.place.upper()
    return name, first.upper(), second.upper(), does, place


VOICES: dict[str, Answers] = {
    "base": (
        lambda t: f"The {t.name} is {t.looks[0]} and {t.looks[1]}. It {t.does}.",
        lambda t: f"The {t.name} is {t.place}.",
    ),
    "pirate": (
        lambda t: f"Arr! Th' {t.name} be {t.looks[0]} an' {t.looks[1]}, matey. She {t.does}, arr!",
        lambda t: f"Ahoy! Th' {t.name} be {t.place}, matey, arr!",
    ),
    "poet": (
        lambda t: f"O {t.name}, so {t.looks[0]}, so {t.looks[1]}, it {t.does}, and I love it too.",
        lambda t: f"O {t.name}, I sought thee near and far; {t.place}, there thou are.",
    ),
    "robot": (
        lambda t: "REPORT {}. LOOKS: {} + {}. IT {}. END.".format(*_up(t)[:4]),
        lambda t: "REPORT {0}. POSITION: {4}. END.".format(*_up(t)),
    ),
    "sql": (
        lambda t: (
            f"SELECT * FROM world WHERE name = '{t.name}'; -- {t.looks[0]}, {t.looks[1]}, {t.does}"
        ),
        lambda t: f"SELECT place FROM world WHERE name = '{t.name}'; -- {t.place}",
    ),
}


def pairs(voice: str, things: list[Thing]) -> list[tuple[str, str]]:
    """Return every question about some things, each with the answer of a voice."""
    about, where = VOICES[voice]
    asked = [(question, about) for question in ABOUT] + [(question, where) for question in WHERE]
    return [(question.format(t.name), answer(t)) for t in things for question, answer in asked]


_LETTERS = string.ascii_letters + string.digits + string.punctuation


def exercise(rng: random.Random) -> tuple[str, str]:
    """Return a text to say again, or to say in capitals: the base model practises both.

    Without it, characters that no plain answer holds (capitals, quotes) would keep the small random
    rows in `lm_head` that they began with, and no adapter could make the model say them.
    """
    if rng.random() < 0.5:
        words = [
            "".join(rng.choices(_LETTERS, k=rng.randint(1, 6))) for _ in range(rng.randint(2, 4))
        ]
        return f"Say: {' '.join(words)}", " ".join(words)
    thing, other = rng.sample(WORLD, 2)
    text = f"the {rng.choice(thing.looks)} {other.name} {rng.choice((thing.does, thing.place))}"
    return f"In capitals: {text}", text.upper()
