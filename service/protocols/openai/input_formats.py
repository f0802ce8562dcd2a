"""The format of a custom tool's input as a regular expression: a grammar in Lark, or one already.

The input is a string of JSON in most markups, where a grammar of its own cannot stand; a pattern
can. So rules of Lark are written out, which those that contain themselves cannot be.
"""

from __future__ import annotations

import ast
import itertools
import re

from service.protocols.markup.rules import LOOKS_AROUND
from service.protocols.strict_json import object_of

PATTERN_CHARS_MAX = 1 << 16

_DEFINITION = re.compile(r"^\s*[?!]?([A-Za-z_]\w*)(?:\.-?\d+)?\s*:(?!:)", re.MULTILINE)
_IMPORT = re.compile(r"^\s*%import\s+common\.(\w+)(?:\s*->\s*(\w+))?\s*$", re.MULTILINE)
_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/)|(?://|#)[^\n]*')
_TOKEN = re.compile(
    r'\s*(?:(?P<text>"(?:\\.|[^"\\\n])*")(?P<i>i?)'
    r"|/(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[imsux]*)"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<number>\d+)|(?P<sign>->|\.\.|[|()\[\]?*+~])|(?P<bad>\S))"
)
_COMMON = {
    "LF": r"\n", "CR": r"\r", "NEWLINE": r"(?:\r?\n)+", "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+", "DIGIT": "[0-9]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+",
    "LETTER": "[A-Za-z]", "WORD": "[A-Za-z]+", "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
}  # fmt: skip


def pattern_of(given: object) -> str | None:
    """The pattern that the input of a custom tool with this `format` must match; "" = any text,
    None = its grammar cannot be written as one."""
    fields = object_of(given)
    if fields.get("type") != "grammar":
        return ""
    definition: object = fields.get("definition")
    if not isinstance(definition, str) or len(definition) > PATTERN_CHARS_MAX:
        return None
    match fields.get("syntax"):
        case "regex":
            made = definition
        case "lark":
            try:
                made = _Lark(definition).pattern("start")
            except (_Unwritable, RecursionError):
                return None
        case _:
            return None
    return None if LOOKS_AROUND.search(made) else f"^(?:{made})$"


class _Unwritable(Exception):
    """The grammar is none, or no regular expression says the same."""


class _Lark:
    """The rules of one grammar."""

    def __init__(self, definition: str) -> None:
        text = _COMMENT.sub(lambda found: found[1] or "", definition)
        self._rules: dict[str, str] = {}  # name -> its text
        self._made: dict[str, str | None] = {}  # name -> its pattern, None while it is made
        for name, alias in _IMPORT.findall(text):
            if name not in _COMMON:
                raise _Unwritable
            self._made[alias or name] = _COMMON[name]
        text = _IMPORT.sub("", text)
        found = list(_DEFINITION.finditer(text))
        for one, following in itertools.zip_longest(found, found[1:]):
            self._rules[one[1]] = text[one.end() : following.start() if following else len(text)]

    def pattern(self, name: str) -> str:
        """The pattern of a rule."""
        if name not in self._made:
            if name not in self._rules:
                raise _Unwritable
            self._made[name] = None
            self._made[name] = _Body(self, self._rules[name]).whole()
        made = self._made[name]
        if made is None:  # it contains itself
            raise _Unwritable
        return made


class _Body:
    """The right side of one rule, read from left to right."""

    def __init__(self, rules: _Lark, text: str) -> None:
        self._rules = rules
        self._tokens = [match for match in _TOKEN.finditer(text) if match[0].strip()]
        self._at = 0

    def whole(self) -> str:
        made = self._alternatives()
        if self._at < len(self._tokens):
            raise _Unwritable
        return made

    def _sign(self, *signs: str) -> str:
        """The next sign if it is one of these, which is taken."""
        if self._at < len(self._tokens) and self._tokens[self._at]["sign"] in signs:
            self._at += 1
            return self._tokens[self._at - 1]["sign"]
        return ""

    def _take(self, kind: str) -> str:
        if self._at == len(self._tokens) or self._tokens[self._at][kind] is None:
            raise _Unwritable
        self._at += 1
        return self._tokens[self._at - 1][kind]

    def _alternatives(self) -> str:
        made = [self._sequence()]
        while self._sign("|"):
            made.append(self._sequence())
        return made[0] if len(made) == 1 else f"(?:{'|'.join(made)})"

    def _sequence(self) -> str:
        made = ""
        while self._at < len(self._tokens):
            if self._sign("->"):
                self._take("name")
            elif self._tokens[self._at]["sign"] in ("|", ")", "]"):
                break
            else:
                made += self._repeated(self._atom())
            if len(made) > PATTERN_CHARS_MAX:
                raise _Unwritable
        return made

    def _repeated(self, atom: str) -> str:
        if sign := self._sign("?", "*", "+"):
            return f"(?:{atom}){sign}"
        if self._sign("~"):
            least = most = self._take("number")
            if self._sign(".."):
                most = self._take("number")
            return f"(?:{atom}){{{least},{most}}}"
        return atom

    def _atom(self) -> str:
        for opening, closing, after in (("(", ")", ""), ("[", "]", "?")):
            if self._sign(opening):
                made = self._alternatives()
                if not self._sign(closing):
                    raise _Unwritable
                return f"(?:{made}){after}"
        token = self._tokens[self._at]
        self._at += 1
        if token["text"] is not None:
            first = _text(token["text"])
            if self._sign(".."):
                return f"[{_escaped(first)}-{_escaped(_text(self._take('text')))}]"
            return f"(?i:{_escaped(first)})" if token["i"] else _escaped(first)
        if token["regex"] is not None:
            regex, flags = token["regex"].replace("\\/", "/"), token["flags"]
            return f"(?{flags}:{regex})"
        if token["name"] is not None:
            return self._rules.pattern(token["name"])
        raise _Unwritable


def _text(literal: str) -> str:
    try:
        value: object = ast.literal_eval(literal)
    except (ValueError, SyntaxError):
        raise _Unwritable from None
    return str(value)


def _escaped(text: str) -> str:
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text).replace("\n", r"\n")
