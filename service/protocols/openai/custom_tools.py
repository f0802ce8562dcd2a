"""Custom tools, whose input is text: functions of one text argument, in a chat as in Responses.

Owns the function that stands for such a tool, and the reading of the input from its arguments.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from service.protocols.markup.rules import PATTERN
from service.protocols.openai.input_formats import pattern_of
from service.protocols.strict_json import object_of

Fields = dict[str, Any]
CUSTOM_ARGUMENT = "input"  # of the function that stands for a custom tool
UNENFORCED = "tools.format"  # name of a format that changes nothing but the description

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HEAD_CHARS_MAX = 256  # white space included
_UNIT = re.compile(
    r'[^"\\]+|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4})?|\\u.{4}|\\[^u]', re.DOTALL
)
_ESCAPE, _PAIR = len(r"\u0000"), len(r"\ud800\udc00")


def function_of(tool: Fields, name: str, left_out: list[str]) -> Fields:
    """A function of one text. A grammar of it stands in the description, and holds for calls that
    are forced or strict; of one that cannot hold UNENFORCED is added to `left_out`."""
    argument: Fields = {"type": "string"}
    described, form = tool.get("description"), object_of(tool.get("format"))
    pattern = pattern_of(form)
    if pattern is None:
        left_out.append(UNENFORCED)
    elif pattern:
        note = f"The input follows this grammar ({form['syntax']}):\n{form['definition']}"
        described = f"{described}\n\n{note}" if isinstance(described, str) else note
    parameters = {
        "type": "object",
        "properties": {CUSTOM_ARGUMENT: argument},
        "required": [CUSTOM_ARGUMENT],
        "additionalProperties": False,
    }
    function: Fields = {"name": name, "parameters": parameters}
    if isinstance(described, str):
        function["description"] = described
    if tool.get("strict") is True:
        function["strict"] = True
    made: Fields = {"type": "function", "function": function}
    return made | {PATTERN: pattern} if pattern else made


def call_arguments(given: str) -> str:
    """The arguments of the function that stands for a custom tool, of this input."""
    return msgspec.json.encode({CUSTOM_ARGUMENT: given}).decode()


def custom_input(arguments: str) -> str:
    """The input of a custom tool from those arguments."""
    reader = CustomInput()
    return reader.push(arguments) + reader.flush()


class CustomInput:
    """The input of one call of a custom tool, as its arguments grow.

    Arguments that were cut give the input up to there; those that are no such object are the input
    themselves.
    """

    def __init__(self) -> None:
        self._is_text = False  # whether the input has begun
        self._rest: list[str] = []  # arguments that were not read yet
        self._chars = 0  # of them

    def push(self, arguments: str) -> str:
        """The input that these further arguments complete; "" = none yet."""
        if not self._is_text and self._chars > _HEAD_CHARS_MAX:
            self._rest.append(arguments)
            return ""
        text, at = "".join(self._rest) + arguments, 0
        if not self._is_text and (head := _HEAD.match(text)):
            self._is_text, at = True, head.end()
        made: list[str] = []
        while self._is_text and (unit := _UNIT.match(text, at)):
            if _is_half(unit[0]) and len(text) - at < _PAIR:
                break
            made.append(_unescaped(unit[0]))
            at = unit.end()
        self._rest, self._chars = [text[at:]], len(text) - at
        return "".join(made)

    def flush(self) -> str:
        """The input that is known at the end alone."""
        if self._is_text:
            return ""
        arguments = "".join(self._rest)
        try:
            found = msgspec.json.decode(arguments, type=dict[str, object]).get(CUSTOM_ARGUMENT)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
            is_begun = '{"input":"'.startswith("".join(arguments.split()))
            return "" if is_begun else arguments
        return found if isinstance(found, str) else arguments


def _is_half(unit: str) -> bool:
    """Whether an escape is the first of two that make one character."""
    return len(unit) == _ESCAPE and unit[2:4].lower() in ("d8", "d9", "da", "db")


def _unescaped(unit: str) -> str:
    """The text of plain characters, or of one escape; what is none stays as it was written."""
    if unit[0] != "\\":
        return unit
    try:
        text: str = json.loads(f'"{unit}"')
    except ValueError:
        return unit
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
