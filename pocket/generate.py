"""Endless conversations in the pocket language, and evaluation items with known answers.

Owns the mix of tasks: facts to remember and recall, filler, arithmetic, story questions, copying,
reversing, counting, small talk, tools. Everything is a function of a `random.Random`; nothing
here knows tokens. A conversation is a list of turns; a turn's `unit` numbers the exchange it
belongs to, and `kind` says what it exercises, so that a trainer can weigh or dilute turns.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pocket import words
from pocket.stories import article, capital, tell
from pocket.tools import TOOLS, invented_word

CHARACTERS_PER_TOKEN = 3.7  # of the shipped vocabulary, on this language
TURN_TOKENS = 5  # header and end of a turn


@dataclass(frozen=True)
class Turn:
    """One message; `unit` 0 is the system turn, exchanges count from 1."""

    role: str
    text: str
    kind: str = ""
    unit: int = 0


def render(turns: Sequence[Turn]) -> str:
    """The prompt of the shipped template for turns that end before the assistant's answer."""
    said = "".join(f"<|im_start|>{turn.role}\n{turn.text}<|im_end|>\n" for turn in turns)
    return said + "<|im_start|>assistant\n"


@dataclass(frozen=True)
class Fact:
    """A statement, the questions it answers. The answer is the statement itself."""

    kind: str
    about: str
    statement: str
    questions: tuple[str, ...]


@dataclass
class State:
    """What one conversation has established so far."""

    facts: list[Fact] = field(default_factory=list[Fact])
    stated: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    tools: list[str] = field(default_factory=list[str])


Exchange = list[tuple[str, str]]  # (role, text)
Task = Callable[[random.Random], Exchange]

# --- facts -----------------------------------------------------------------------------------


def _key(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.60:
        return rng.choice(words.KEYS)
    if draw < 0.75:
        return f"{rng.choice(words.COLORS)} {rng.choice(words.OBJECTS + words.ANIMALS)}"
    return invented_word(rng)


def _thing(rng: random.Random) -> str:
    return f"{rng.choice(words.COLORS)} {rng.choice(words.OBJECTS)}"


def _name(rng: random.Random) -> str:
    return rng.choice(words.NAMES)


def _password(rng: random.Random) -> str:
    return rng.choice(words.LISTED) if rng.random() < 0.7 else invented_word(rng)


Draw = Callable[[random.Random], str]

# kind: weight, what it is about, its value, statement, questions
_FACTS: dict[str, tuple[int, Draw, Draw, str, tuple[str, ...]]] = {
    "code": (
        4,
        _key,
        lambda rng: f"{rng.randrange(10_000):04}",
        "The code for {about} is {value}.",
        (
            "What is the code for {about}?",
            "Please tell me the code for {about}.",
            "Do you remember the code for {about}?",
        ),
    ),
    "password": (
        2,
        _key,
        _password,
        "The password for {about} is {value}.",
        ("What is the password for {about}?", "Please tell me the password for {about}."),
    ),
    "place": (
        1,
        _thing,
        lambda rng: rng.choice(words.SPOTS),
        "The {about} is {value}.",
        ("Where is the {about}?", "Where can I find the {about}?"),
    ),
    "likes": (
        1,
        _name,
        lambda rng: rng.choice(words.FOODS),
        "{about} likes {value}.",
        ("What does {about} like?",),
    ),
    "city": (
        1,
        _name,
        lambda rng: rng.choice(words.CITIES),
        "{about} lives in {value}.",
        ("Where does {about} live?", "In which city does {about} live?"),
    ),
    "age": (
        1,
        _name,
        lambda rng: str(rng.randint(6, 90)),
        "{about} is {value} years old.",
        ("How old is {about}?",),
    ),
    "job": (
        1,
        _name,
        lambda rng: article(rng.choice(words.JOBS)),
        "{about} works as {value}.",
        ("What is the job of {about}?", "What does {about} do for work?"),
    ),
    "room": (
        1,
        _key,
        lambda rng: str(rng.randint(10, 99)),
        "The room number of {about} is {value}.",
        ("What is the room number of {about}?",),
    ),
}


def new_fact(rng: random.Random, state: State, kind: str | None = None) -> Fact:
    """A fact about something this conversation has no such fact about yet."""
    kinds, weights = list(_FACTS), [row[0] for row in _FACTS.values()]
    while True:
        chosen = kind or rng.choices(kinds, weights)[0]
        _, about_of, value_of, statement, questions = _FACTS[chosen]
        about = about_of(rng)
        if (chosen, about) not in state.stated:
            break
    state.stated.add((chosen, about))
    blanks = {"about": about, "value": value_of(rng)}
    return Fact(
        chosen,
        about,
        statement.format_map(blanks),
        tuple(question.format_map(blanks) for question in questions),
    )


def state_facts(rng: random.Random, state: State, count: int, kind: str | None = None) -> Exchange:
    """The user states facts, the assistant promises to keep them."""
    facts = [new_fact(rng, state, kind) for _ in range(count)]
    state.facts += facts
    lead = rng.choice(("", "", "Remember this: ", "Please note: ", "Keep this in mind: "))
    promise = "that" if count == 1 else "these facts"
    text = lead + " ".join(fact.statement for fact in facts)
    return [("user", text), ("assistant", f"Okay, I will remember {promise}.")]


def ask_fact(rng: random.Random, state: State, fact: Fact | None = None) -> Exchange:
    """A question about a stated fact; older facts are favoured."""
    if fact is None:
        place = rng.random() if rng.random() < 0.6 else rng.random() ** 2
        fact = state.facts[int(place * len(state.facts))]
    return [("user", rng.choice(fact.questions)), ("assistant", fact.statement)]


# --- filler --------------------------------------------------------------------------------


def note(rng: random.Random) -> str:
    """One sentence that no question refers to."""
    name, place = rng.choice(words.NAMES), rng.choice(words.PLACES)
    animal, adjective = rng.choice(words.ANIMALS), rng.choice(words.ADJECTIVES)
    color, thing = rng.choice(words.COLORS), rng.choice(words.OBJECTS)
    time, weather = rng.choice(words.TIMES), rng.choice(words.WEATHER)
    # The shipped model was trained on these sentences, word for word.
    return rng.choice(
        (
            f"The {place} was {adjective} and {rng.choice(words.ADJECTIVES)}.",
            f"{name} saw {article(adjective)} {animal} near the {place}.",
            f"It was {article(weather)} {time} at the {place}.",
            f"The {animal} walked slowly to the {place}.",
            f"{name} and {rng.choice(words.NAMES)} talked about the {thing}.",
            f"Nobody knew why the {animal} was so {adjective}.",
            f"{name} bought {article(color)} {thing} at the market for {rng.randint(2, 99)} coins.",
            f"The wind was cold, but the sky was {color}.",
            f"In the {time} {name} ate {rng.choice(words.FOODS)} and went home.",
            f"A {rng.choice(words.JOBS)} from {rng.choice(words.CITIES)} came to visit.",
        )
    )


def notes(rng: random.Random, count: int | None = None) -> Exchange:
    """Notes to read; the assistant says thanks."""
    count = rng.randint(2, 8) if count is None else count
    text = "Here are some notes. " + " ".join(note(rng) for _ in range(count))
    return [("user", text), ("assistant", "Thank you, I have read the notes.")]


# --- lists ------------------------------------------------------------------------------------


def _items(rng: random.Random, count: int) -> list[str]:
    draw = rng.random()
    if draw < 0.65:
        return rng.sample(words.LISTED, count)
    if draw < 0.80:
        return [str(rng.randint(0, 99)) for _ in range(count)]
    return [invented_word(rng) for _ in range(count)]


def copy(rng: random.Random) -> Exchange:
    """Repeat a list or a sentence."""
    if rng.random() < 0.3:
        text = note(rng)
        lead = rng.choice(("Repeat this sentence: ", "Say this again: "))
        return [("user", lead + text), ("assistant", text)]
    text = ", ".join(_items(rng, rng.randint(2, 10))) + "."
    lead = rng.choice(("Repeat this list: ", "Copy these words: "))
    return [("user", lead + text), ("assistant", text)]


def reverse(rng: random.Random) -> Exchange:
    """Say a list backwards."""
    items = _items(rng, rng.randint(2, 7))
    lead = rng.choice(("Reverse this list: ", "Say these backwards: "))
    answer = ", ".join(reversed(items)) + "."
    return [("user", f"{lead}{', '.join(items)}."), ("assistant", answer)]


def count(rng: random.Random) -> Exchange:
    """Count a range, count a list, or name its n-th item."""
    draw = rng.random()
    if draw < 0.55:
        first = rng.randint(1, 180)
        last = first + rng.randint(3, 14)
        numbers = [str(number) for number in range(first, last + 1)]
        if rng.random() < 0.65:
            return [
                ("user", f"Count from {first} to {last}."),
                ("assistant", ", ".join(numbers) + "."),
            ]
        down = ", ".join(reversed(numbers)) + "."
        return [("user", f"Count down from {last} to {first}."), ("assistant", down)]
    items = _items(rng, rng.randint(2, 8))
    listed = ", ".join(items)
    if draw < 0.78:
        answer = f"There are {words.NUMBERS[len(items)]} items."
        return [("user", f"How many items are in this list: {listed}?"), ("assistant", answer)]
    place = rng.randrange(len(items))
    ordinal = words.ORDINALS[place]
    return [
        ("user", f"What is the {ordinal} item in this list: {listed}?"),
        ("assistant", f"The {ordinal} item is {items[place]}."),
    ]


# --- arithmetic ------------------------------------------------------------------------------


def arithmetic(rng: random.Random) -> Exchange:
    """Sums and differences to 198, the table to ten; bare or as a small word problem."""
    sign = rng.choices("+-*", (45, 30, 25))[0]
    most = 10 if sign == "*" else 20 if rng.random() < 0.3 else 99
    a, b = rng.randint(0, most), rng.randint(0, most)
    if sign == "-" and a < b:
        a, b = b, a
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    sum_text = f"{a} {sign} {b} = {result}."
    if rng.random() < (0.9 if sign == "*" else 0.8):
        spoken = sign if rng.random() < 0.75 else {"+": "plus", "-": "minus", "*": "times"}[sign]
        return [("user", f"What is {a} {spoken} {b}?"), ("assistant", sum_text)]
    name, thing = rng.choice(words.NAMES), rng.choice(words.OBJECTS)
    things = "boxes" if thing == "box" else thing + "s"
    question, answer = {
        "+": (
            f"{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
            f"{name} has {result} {things} now.",
        ),
        "-": (
            f"{name} has {a} {things} and gives away {b}. How many {things} does {name} have now?",
            f"{name} has {result} {things} now.",
        ),
        "*": (
            f"There are {a} boxes with {b} {things} in each box. How many {things} are there?",
            f"There are {result} {things}.",
        ),
    }[sign]
    return [("user", question), ("assistant", f"{sum_text} {answer}")]


# --- stories, talk, tools ------------------------------------------------------------------------


def story_questions(rng: random.Random) -> Exchange:
    """A story and one to four questions about it."""
    story = tell(rng)
    asked = rng.sample(story.questions, rng.randint(1, 4))
    if rng.random() < 0.5:
        turns = [("user", f"Read this story. {story.text} {asked[0][0]}")]
    else:
        turns = [
            ("user", f"Here is a story. {story.text}"),
            ("assistant", "Thank you for the story."),
            ("user", asked[0][0]),
        ]
    turns.append(("assistant", asked[0][1]))
    for question, answer in asked[1:]:
        turns += [("user", question), ("assistant", answer)]
    return turns


def told_story(rng: random.Random) -> Exchange:
    """A story on demand. Many are right, so it is a demo, never an oracle."""
    name, thing = rng.choice(words.NAMES), rng.choice(words.OBJECTS)
    verb = rng.choices(("Tell me a story", "Write a short story"), (6, 4))[0]
    answer = tell(rng, name, thing).text
    return [("user", f"{verb} about {name} and {article(thing)}."), ("assistant", answer)]


_HELP = "How can I help you today?"
_SMALL_TALK = {
    **dict.fromkeys(("Hello!", "Hello", "Hi", "Hi!"), f"Hello! {_HELP}"),
    "Good morning.": f"Good morning! {_HELP}",
    "Who are you?": "I am Pocket, a very small language model.",
    "What is your name?": "My name is Pocket.",
    "What can you do?": "I can remember facts, copy and reverse lists, count, add small numbers, "
    "answer questions about a story, and call tools.",
    "How are you?": "I am fine, thank you. How are you?",
    **dict.fromkeys(("Thank you.", "Thanks!"), "You are welcome."),
    **dict.fromkeys(("Goodbye.", "Bye"), "Goodbye! Have a nice day."),
    "Tell me a joke.": "Why did the clock go to school? It wanted to learn to tell time.",
    "What color is the sky?": "The sky is blue.",
    "How many days are in a week?": "There are seven days in a week.",
    "How many months are in a year?": "There are twelve months in a year.",
    "Are you a human?": "No, I am a very small language model.",
    "How big are you?": "I am very small. I fit in a few megabytes.",
    "Say something nice.": "You are doing a great job today.",
}


def _successor(rng: random.Random, unit: str, names: tuple[str, ...]) -> tuple[str, str]:
    place = rng.randrange(len(names))
    after = names[(place + 1) % len(names)]
    return f"What {unit} comes after {names[place]}?", f"{after} comes after {names[place]}."


def small_talk(rng: random.Random) -> Exchange:
    """Greetings and a little knowledge."""
    topic = rng.choices(
        ("talk", "opposite", "sound", "color", "day", "month"), (50, 15, 10, 8, 9, 8)
    )[0]
    if topic == "talk":
        question, answer = rng.choice(list(_SMALL_TALK.items()))
    elif topic == "opposite":
        word, other = rng.choice(list(words.OPPOSITES.items()))
        question = f"What is the opposite of {word}?"
        answer = f"The opposite of {word} is {other}."
    elif topic == "sound":
        animal, sound = rng.choice(list(words.SOUNDS.items()))
        question = f"What sound does {article(animal)} make?"
        answer = f"{capital(article(animal))} says {sound}."
    elif topic == "color":
        thing, color = rng.choice(list(words.COLORS_OF.items()))
        verb = "are" if thing in ("bananas", "lemons") else "is"
        question, answer = f"What color {verb} {thing}?", f"{capital(thing)} {verb} {color}."
    elif topic == "day":
        question, answer = _successor(rng, "day", words.DAYS)
    else:
        question, answer = _successor(rng, "month", words.MONTHS)
    return [("user", question), ("assistant", answer)]


def tool_use(rng: random.Random, name: str, with_result: bool | None = None) -> Exchange:
    """A request and a call; in six of ten uses also the result and the closing words."""
    use = TOOLS[name].use(rng)
    turns = [("user", use.request), ("assistant", use.call)]
    if rng.random() < 0.6 if with_result is None else with_result:
        turns += [("tool", use.result), ("assistant", use.answer)]
    return turns


_PERSONAS = (
    "You are Pocket, a small helpful assistant.",
    "You are a helpful assistant.",
    "Answer in short sentences.",
)


def system_text(
    rng: random.Random, state: State, tool_share: float = 0.3, persona_share: float = 0.5
) -> str:
    """Text of the system turn, "" = none; lists the tools that `state` then knows."""
    text = rng.choice(_PERSONAS) if rng.random() < persona_share else ""
    if rng.random() < tool_share:
        state.tools = rng.sample(list(TOOLS), rng.choice((1, 2, 2, 3, 4)))
        schemas = "".join(json.dumps(TOOLS[name].schema()) + "\n" for name in state.tools)
        text += "\n" * bool(text) + "You can call these tools:\n" + schemas
    return text


# --- conversations ------------------------------------------------------------------------------

TASKS: dict[str, tuple[int, Task]] = {
    "notes": (4, notes),
    "copy": (12, copy),
    "reverse": (13, reverse),
    "count": (13, count),
    "arithmetic": (34, arithmetic),
    "story_qa": (17, story_questions),
    "told_story": (6, told_story),
    "small_talk": (7, small_talk),
}


def estimate_tokens(texts: Iterable[str]) -> float:
    """About how many tokens these turns take in the shipped vocabulary."""
    return sum(len(text) / CHARACTERS_PER_TOKEN + TURN_TOKENS for text in texts)


def conversation(rng: random.Random, tokens: int) -> list[Turn]:
    """One conversation of at least about `tokens` tokens; three of four are about recall."""
    state = State()
    turns: list[Turn] = []
    system = system_text(rng, state, tool_share=0.3 if tokens < 1500 else 0.15)
    if system:
        turns.append(Turn("system", system, "system"))
    recalls, density = rng.random() < 0.75, rng.choice((0.25, 0.4, 0.6))
    if recalls:
        kind = "code" if rng.random() < 0.15 else None
        opening = state_facts(rng, state, rng.choice((1, 2, 3, 4, 6)), kind)
        turns += [Turn(role, text, "facts", 1) for role, text in opening]
    weights = [weight for weight, _ in TASKS.values()]
    if rng.random() < 0.3:  # some conversations favour one task over another
        weights = [weight * rng.choice((0.2, 1, 3)) for weight in weights]
    unit, size = 1, estimate_tokens(turn.text for turn in turns)
    while size < tokens:
        kind, exchange = _next_exchange(rng, state, density if recalls else 0.0, weights)
        if tokens >= 1000 and rng.random() < 0.08:
            exchange = notes(rng, rng.randint(8, 40)) + exchange
        unit += 1
        turns += [Turn(role, text, kind, unit) for role, text in exchange]
        size += estimate_tokens(text for _, text in exchange)
    return turns


def _next_exchange(
    rng: random.Random, state: State, density: float, weights: list[float] | list[int]
) -> tuple[str, Exchange]:
    if state.tools and rng.random() < 0.3:
        return "tool", tool_use(rng, rng.choice(state.tools))
    if rng.random() < density:
        if state.facts and rng.random() < 0.75:
            return "recall", ask_fact(rng, state)
        return "facts", state_facts(rng, state, rng.choice((1, 1, 2, 3, 5)))
    kind = rng.choices(list(TASKS), weights)[0]
    return kind, TASKS[kind][1](rng)


# --- evaluation -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """A conversation that ends with a question, and its one right answer."""

    task: str
    distance: int  # tokens between statement and question; 0 where it means nothing
    turns: tuple[Turn, ...]
    answer: str


def filler(rng: random.Random, tokens: int, measure: Callable[[Exchange], int]) -> Exchange:
    """Exchanges that state nothing to remember, `tokens` long within one exchange of notes."""
    names, weights = list(TASKS), [weight for weight, _ in TASKS.values()]
    turns: Exchange = []
    size = 0
    while size < tokens:
        task = rng.choices(names, weights)[0]
        exchange = notes(rng, rng.randint(8, 40)) if rng.random() < 0.2 else TASKS[task][1](rng)
        if size + measure(exchange) > tokens + 40:
            exchange = notes(rng, max(1, (tokens - size) // 11))
        turns += exchange
        size += measure(exchange)
    return turns


def recall_item(
    rng: random.Random,
    distance: int,
    measure: Callable[[Exchange], int],
    kind: str | None = None,
) -> Item:
    """Four facts, `distance` tokens of filler, a question about one of them."""
    state = State()
    turns = state_facts(rng, state, 4, kind)
    turns += filler(rng, distance - 20, measure)
    turns += ask_fact(rng, state, rng.choice(state.facts))
    return _item("recall", distance, turns)


def task_item(rng: random.Random, task: str) -> Item:
    """One exchange of `task` (a key of TASKS, "tool_call" or "tool_result")."""
    state = State()
    tools = task.startswith("tool_")
    system = system_text(rng, state, tool_share=float(tools))
    turns: Exchange = [("system", system)] if system else []
    if tools:
        turns += tool_use(rng, rng.choice(state.tools), with_result=task == "tool_result")
    else:
        exchange = TASKS[task][1](rng)
        ends = [
            place
            for place, (role, text) in enumerate(exchange)
            if role == "assistant" and text != "Thank you for the story."
        ]
        turns += exchange[: rng.choice(ends) + 1]
    return _item(task, 0, turns)


def _item(task: str, distance: int, turns: Exchange) -> Item:
    *before, (_, answer) = turns
    return Item(task, distance, tuple(Turn(role, text) for role, text in before), answer)
