"""The eight tools of the pocket language: schema, requests, calls, results, closing words."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from pocket import words
from pocket.stories import article, capital


@dataclass(frozen=True)
class Use:
    """One use of a tool, as texts."""

    request: str
    call: str
    result: str
    answer: str


@dataclass(frozen=True)
class Tool:
    """A tool and a source of its uses."""

    name: str
    description: str
    parameters: dict[str, str]
    invent: Callable[[random.Random], tuple[list[str], dict[str, object], str, str]]

    def schema(self) -> dict[str, object]:
        """The tool as an OpenAI function."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": kind} for key, kind in self.parameters.items()},
                    "required": list(self.parameters),
                },
            },
        }

    def use(self, rng: random.Random) -> Use:
        """A request that this tool answers."""
        requests, arguments, result, answer = self.invent(rng)
        call = json.dumps({"name": self.name, "arguments": arguments})
        return Use(rng.choice(requests), f"<tool_call>\n{call}\n</tool_call>", result, answer)


def _weather(rng: random.Random) -> tuple[list[str], dict[str, object], str, str]:
    city = rng.choice(words.CITIES) if rng.random() < 0.8 else capital(invented_word(rng))
    weather, degrees = rng.choice(words.WEATHER), rng.randint(0, 35)
    requests = [
        f"What is the weather in {city}?",
        f"How is the weather in {city} today?",
        f"Check the weather in {city}.",
    ]
    result = json.dumps({"weather": weather, "degrees": degrees})
    return requests, {"city": city}, result, f"It is {weather} in {city}, with {degrees} degrees."


def _timer(rng: random.Random) -> tuple[list[str], dict[str, object], str, str]:
    minutes = rng.randint(1, 90)
    requests = [
        f"Set a timer for {minutes} minutes.",
        f"Start a timer of {minutes} minutes.",
        f"Wake me up in {minutes} minutes.",
    ]
    return requests, {"minutes": minutes}, _OK, f"The timer is set for {minutes} minutes."


def _light(rng: random.Random) -> tuple[list[str], dict[str, object], str, str]:
    room, color = rng.choice(words.ROOMS), rng.choice(words.COLORS)
    requests = [
        f"Make the light in the {room} {color}.",
        f"Set the {room} light to {color}.",
        f"I want {article(color)} light in the {room}.",
    ]
    answer = f"The light in the {room} is now {color}."
    return requests, {"room": room, "color": color}, _OK, answer


def _music(rng: random.Random) -> tuple[list[str], dict[str, object], str, str]:
    genre = rng.choice(words.GENRES)
    requests = [f"Play some {genre} music.", f"I want to hear {genre}.", f"Please play {genre}."]
    return requests, {"genre": genre}, _OK, f"Now playing {genre} music."


def _event(rng: random.Random) -> tuple[list[str], dict[str, object], str, str]:
    day, title = rng.choice(words.DAYS), rng.choice(words.EVENTS)
    if rng.random() < 0.6:
        title += f" with {rng.choice(words.NAMES)}"
    requests = [
        f"Add {title} on {day} to my calendar.",
        f"I have {title} on {day}. Please add it.",
        f"Put {title} in my calendar for {day}.",
    ]
    return requests, {"title": title, "day": day}, _OK, f"I added {title} on {day}."


def _message(rng: random.Random) -> tuple[list[str], dict[str, object], str, str]:
    name = rng.choice(words.NAMES)
    text = rng.choice(
        [
            f"I will be {rng.randint(5, 50)} minutes late",
            f"see you at the {rng.choice(words.PLACES)}",
            f"please buy {rng.choice(words.FOODS)}",
            f"the {rng.choice(words.OBJECTS)} is ready",
            f"meet me on {rng.choice(words.DAYS)}",
        ]
    )
    requests = [f"Tell {name}: {text}.", f"Send a message to {name}: {text}."]
    return requests, {"name": name, "text": text}, _OK, f"I sent the message to {name}."


def _add(rng: random.Random) -> tuple[list[str], dict[str, object], str, str]:
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    requests = [f"Use the tool to add {a} and {b}.", f"Add {a} and {b} with the tool."]
    result = json.dumps({"result": a + b})
    return requests, {"a": a, "b": b}, result, f"The result is {a + b}."


def _find(rng: random.Random) -> tuple[list[str], dict[str, object], str, str]:
    thing = f"{rng.choice(words.COLORS)} {rng.choice(words.OBJECTS)}"
    spot = rng.choice(words.SPOTS)
    requests = [f"Find the {thing}.", f"Search for the {thing}.", f"Please look for the {thing}."]
    return requests, {"object": thing}, json.dumps({"place": spot}), f"The {thing} is {spot}."


_OK = json.dumps({"ok": True})
_TEXT, _WHOLE = "string", "integer"
TOOLS = {
    tool.name: tool
    for tool in (
        Tool("get_weather", "Get the weather in a city.", {"city": _TEXT}, _weather),
        Tool("set_timer", "Start a timer.", {"minutes": _WHOLE}, _timer),
        Tool("set_light", "Set the color of a light.", {"room": _TEXT, "color": _TEXT}, _light),
        Tool("play_music", "Play some music.", {"genre": _TEXT}, _music),
        Tool("add_event", "Add an event to the calendar.", {"title": _TEXT, "day": _TEXT}, _event),
        Tool(
            "send_message",
            "Send a message to a person.",
            {"name": _TEXT, "text": _TEXT},
            _message,
        ),
        Tool("add", "Add two numbers.", {"a": _WHOLE, "b": _WHOLE}, _add),
        Tool("find_object", "Find where an object is.", {"object": _TEXT}, _find),
    )
}

_ONSETS = (*"bcdfghjklmnprstvwz", "br", "cr", "dr", "fl", "gr", "kl", "pl", "sk", "st", "tr")
_NUCLEI = (*"aeiouaeio", "ai", "ee", "oo")
_CODAS = (*"nrxltsmk", "")


def invented_word(rng: random.Random) -> str:
    """A pronounceable word that means nothing; usually several tokens."""
    syllables = rng.choice((1, 2, 2))
    body = "".join(rng.choice(_ONSETS) + rng.choice(_NUCLEI) for _ in range(syllables))
    return body + rng.choice(_CODAS)
