"""llama.cpp's GBNF in the variant of Lark that llguidance reads.

Both write groups, alternatives and repetitions alike, so these stay as they are. Literals, sets of
characters and names of rules are written anew. What remains wrong then, the check of the grammar
finds.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict

ROOT = "root"
_TOKEN = re.compile(
    r"""(?P<skip> (?:\s|\#[^\r\n]*)++ ) | (?P<rule> [\w-]++\s*+::= ) | (?P<name> [\w-]++ )
    | (?P<text> "(?:[^"\\]|\\.)*+" ) | (?P<set> \[(?:[^\]\\]|\\.)*+\] ) | (?P<any> \. )
    | (?P<mark> [()|*+?] | \{\s*\d+\s*(?:,\s*\d*\s*)?\} )""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(
    r"""\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(["\\\[\]nrt]))|([^\\])""",
    re.DOTALL,
)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
_ANY = r"/(.|\n)/"
_EMPTY = '""'

Tokens = list[tuple[str, str]]  # kind and text


def lark_of(source: str) -> str:
    """The grammar in Lark. Raises ValueError, which says what cannot be read."""
    rules: dict[str, Tokens] = {}
    tokens: Tokens = []
    for kind, text in _tokens(source):
        if kind == "rule":
            rules[text.removesuffix("::=").rstrip()] = tokens = []
        elif not rules:
            raise ValueError(f"{text[:40]!r} stands in front of the first rule")
        else:
            tokens.append((kind, text))
    if ROOT not in rules:
        raise ValueError(f"it has no rule {ROOT!r}")
    terminals = _terminals(rules)
    names = {ROOT: "start"}
    for number, name in enumerate(rules):
        readable = re.sub(r"[^a-z0-9]+", "_", f"r{number}_{name.lower()}")
        names.setdefault(name, readable.upper() if name in terminals else readable)
    return "".join(f"{names[name]}: {_body(rules[name], names)}\n" for name in rules)


def _tokens(source: str) -> Tokens:
    found: Tokens = []
    at = 0
    while at < len(source):
        match = _TOKEN.match(source, at)
        if match is None:
            raise ValueError(f"at {source[at : at + 40]!r}")
        if match.lastgroup != "skip":
            found.append((str(match.lastgroup), match[0]))
        at = match.end()
    return found


def _terminals(rules: dict[str, Tokens]) -> set[str]:
    """Rules that refer to no rule but to such ones: each can be one regular expression, which is
    followed faster than rules are."""
    left = {
        name: {text for kind, text in tokens if kind == "name"} for name, tokens in rules.items()
    }
    users = defaultdict[str, list[str]](list)
    for name, used in left.items():
        for one in used:
            users[one].append(name)
    ready = [name for name, used in left.items() if not used and name != ROOT]
    found: set[str] = set()
    while ready:
        found.add(done := ready.pop())
        for user in users[done]:
            left[user].discard(done)
            if not left[user] and user != ROOT:
                ready.append(user)
    return found


def _body(tokens: Tokens, names: dict[str, str]) -> str:
    out: list[str] = []
    before = "|"
    for kind, text in [*tokens, ("mark", "")]:
        if before in ("|", "(") and text in ("|", ")", ""):
            out.append(_EMPTY)
        match kind:
            case "name":
                if text not in names:
                    raise ValueError(f"there is no rule {text[:40]!r}")
                out.append(names[text])
            case "text":
                characters = (character for character, _ in _characters(text[1:-1]))
                out.append(json.dumps("".join(characters), ensure_ascii=False))
            case "set":
                out.append(_set(text[1:-1]))
            case "any":
                out.append(_ANY)
            case _:
                out.append(text)
        before = text if kind == "mark" else kind
    return " ".join(out).rstrip()


def _characters(text: str) -> list[tuple[str, bool]]:
    """Each character, and whether it was escaped."""
    found: list[tuple[str, bool]] = []
    at = 0
    while at < len(text):
        match = _CHARACTER.match(text, at)
        if match is None:
            raise ValueError(f"{text[at : at + 10]!r} is no character")
        *numbers, named, plain = match.groups()
        number = next((int(one, 16) for one in numbers if one), -1)
        if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
            raise ValueError(f"{match[0]} is no character")
        character = chr(number) if number >= 0 else plain or _ESCAPED.get(named, named)
        found.append((character, plain is None))
        at = match.end()
    return found


def _set(text: str) -> str:
    """A set of characters as a regular expression."""
    inverted = text.startswith("^")
    characters = _characters(text[inverted:])
    if not characters:
        raise ValueError("a set has no character")
    last = len(characters) - 1
    parts = [
        "-" if one == ("-", False) and 0 < at < last else rf"\x{{{ord(one[0]):x}}}"
        for at, one in enumerate(characters)
    ]
    return f"/[{'^' * inverted}{''.join(parts)}]/"
