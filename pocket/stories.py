"""Small stories with questions that the text answers in its own words.

A story is a plot: lines with named blanks, and the questions each line allows. Blanks are filled
once, so that every answer follows from the text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from pocket import words


def article(word: str) -> str:
    """The word with "a" or "an" before it."""
    return ("an " if word[0] in "aeiou" else "a ") + word


def capital(text: str) -> str:
    """The text with its first letter upper case."""
    return text[:1].upper() + text[1:]


@dataclass(frozen=True)
class Line:
    """One sentence and the questions it answers."""

    text: str
    questions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Story:
    """A filled plot."""

    sentences: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """The sentences, joined."""
        return " ".join(self.sentences)


_OPENING = Line(
    "One {weather} {time}, {name} went to the {place}.",
    (
        ("Where did {name} go?", "{name} went to the {place}."),
        ("What was the weather like?", "It was {weather}."),
        ("When did the story happen?", "It happened on {a_weather} {time}."),
    ),
)
_COLOR = ("What color was the {thing}?", "The {thing} was {color}.")

_SEARCH = (
    Line(
        "{She} was looking for {a_color} {thing}.",
        (("What was {name} looking for?", "{name} was looking for {a_color} {thing}."), _COLOR),
    ),
    Line(
        "On the way {she} met {an_adjective} {animal} named {friend}.",
        (
            ("Who did {name} meet?", "{name} met {an_adjective} {animal} named {friend}."),
            ("What was the name of the {animal}?", "The {animal} was named {friend}."),
        ),
    ),
    Line('"Look {spot}," said the {animal}.'),
    Line(
        "{name} found the {thing} {spot}.",
        (("Where did {name} find the {thing}?", "{name} found the {thing} {spot}."),),
    ),
)
_GIFT = (
    Line(
        "{She} wanted to give {a_color} {thing} to {her} friend {friend}.",
        (
            ("Who is the friend of {name}?", "The friend of {name} is {friend}."),
            (
                "What did {name} want to give to {friend}?",
                "{name} wanted to give {a_color} {thing} to {friend}.",
            ),
            _COLOR,
        ),
    ),
    Line(
        "But {an_adjective} {animal} took the {thing} and ran to the {other_place}.",
        (
            ("Who took the {thing}?", "The {animal} took the {thing}."),
            ("Where did the {animal} run?", "The {animal} ran to the {other_place}."),
        ),
    ),
    Line(
        "{name} gave the {animal} some {food}, and the {animal} gave the {thing} back.",
        (("What did {name} give the {animal}?", "{name} gave the {animal} some {food}."),),
    ),
    Line("{friend} was very happy with the {thing}."),
)
_HELP = (
    Line(
        "{She} saw {an_adjective} {animal} who had lost {a_color} {thing}.",
        (
            ("What did {name} see?", "{name} saw {an_adjective} {animal}."),
            ("What had the {animal} lost?", "The {animal} had lost {a_color} {thing}."),
            _COLOR,
        ),
    ),
    Line(
        "{name} called {friend}, and they searched together.",
        (("Who did {name} call?", "{name} called {friend}."),),
    ),
    Line(
        "{friend} found the {thing} {spot} in the {other_place}.",
        (
            ("Who found the {thing}?", "{friend} found the {thing}."),
            ("Where was the {thing}?", "The {thing} was {spot} in the {other_place}."),
        ),
    ),
    Line(
        "The {animal} thanked them and gave them some {food}.",
        (("What did the {animal} give them?", "The {animal} gave them some {food}."),),
    ),
)
_PLOTS = (_SEARCH, _GIFT, _HELP)
_ENDINGS = (
    "Then they all went home before dark.",
    "{name} smiled and went home.",
    "It was a good {time}.",
)


def tell(rng: random.Random, name: str | None = None, thing: str | None = None) -> Story:
    """A story; hero and thing may be given."""
    name = name or rng.choice(words.NAMES)
    she = "she" if name in words.WOMEN else "he"
    place, other_place = rng.sample(words.PLACES, 2)
    color, adjective = rng.choice(words.COLORS), rng.choice(words.ADJECTIVES)
    weather = rng.choice(words.WEATHER)
    blanks = {
        "name": name,
        "she": she,
        "She": capital(she),
        "her": "her" if she == "she" else "his",
        "friend": rng.choice([other for other in words.NAMES if other != name]),
        "place": place,
        "other_place": other_place,
        "color": color,
        "a_color": article(color),
        "an_adjective": article(adjective),
        "thing": thing or rng.choice(words.OBJECTS),
        "animal": rng.choice(words.ANIMALS),
        "weather": weather,
        "a_weather": article(weather),
        "time": rng.choice(words.TIMES),
        "spot": rng.choice(words.SPOTS),
        "food": rng.choice(words.FOODS),
    }
    lines = (_OPENING, *rng.choice(_PLOTS), Line(rng.choice(_ENDINGS)))
    return Story(
        tuple(line.text.format_map(blanks) for line in lines),
        tuple(
            (question.format_map(blanks), answer.format_map(blanks))
            for line in lines
            for question, answer in line.questions
        ),
    )
