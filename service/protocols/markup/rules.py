"""Rules of one grammar, in the variant of Lark that llguidance reads, and schemas inside it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from batchengine import errors
from batchengine.core import CONSTRAINT_CHARS_MAX, SCHEMA_LOST, SCHEMA_TOOL
from batchengine.markup import Markup
from service.protocols.strict_json import object_of

ANY = r"/(.|\n)*/"
# As `tojson` of the templates writes it, and never white space without end.
EXACT = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
}
COMPACT = EXACT | {"item_separator": ", ?", "key_separator": ": ?"}

PATTERN = "input_pattern"  # field of a tool beside its function: what its only text must match
# what an empty list of another language became, and the name of a form of schemas
NOT_READ = re.compile(r'"(?:required|properties)": ?null|"\$schema"')
DIALECT = re.compile(
    r"http://json-schema\.org/draft-0[467]/schema#?"
    r"|https://json-schema\.org/draft/20(?:19-09|20-12)/schema#?"
)
INDEX = re.compile(r"0|[1-9][0-9]{0,8}")  # of a list, in a JSON Pointer
LOOKS_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]")


@dataclass(slots=True)
class Rules:
    """Rules of a grammar; `control_id` as in `PromptEncoder`."""

    markup: Markup
    control_id: Callable[[str], int | None]
    lines: list[str] = field(default_factory=list[str])
    param: str = "tools"  # that an error names
    size: int = 0

    def add(self, name: str, body: str) -> str:
        self.size += len(body)
        if self.size > CONSTRAINT_CHARS_MAX:  # before it is too much for memory
            why = f"it becomes a grammar of more than {CONSTRAINT_CHARS_MAX} characters"
            raise errors.GRAMMAR_REFUSED(why=why, param=self.param)
        self.lines.append(f"{name}: {body}")
        return name

    def marker(self, text: str) -> str:
        """A marker as the vocabulary has it: one control token, or text."""
        token = self.control_id(text)
        begun = next((mark for mark in self.markup.inner if text.startswith(mark)), text)
        if token is None and begun != text:  # a mark and text behind it
            return f"{self.marker(begun)} {literal(text.removeprefix(begun))}"
        return literal(text) if token is None else f"<[{token}]>"

    def up_to(self, name: str, marker: str) -> str:
        """A rule of any text up to `marker`, and it."""
        if self.control_id(marker) is not None:
            return self.add(name, f"{ANY} {self.marker(marker)}")
        return self.add(f"{name}[suffix={literal(marker)}]", ANY).partition("[")[0]

    def listed(self, parts: Sequence[tuple[str, bool]], between: str) -> str:
        """Parts in their order with a text between two of them; those that are False may be left
        out."""
        rests = [""]  # what stands behind the last part, the one before it, ...
        for part, is_needed in reversed(parts):
            body = f"({literal(between)} {part}){'' if is_needed else '?'} {rests[-1]}"
            rests.append(self.add(f"rest{len(self.lines)}", body))
        firsts: list[str] = []
        for (part, is_needed), rest in zip(parts, rests[-2::-1], strict=True):
            firsts.append(f"{part} {rest}")
            if is_needed:
                return f"({' | '.join(firsts)})"
        return f"({' | '.join(firsts)})?" if firsts else ""

    def lose(self, keyword: str) -> None:
        """Notes that the rules do not say what a keyword of a schema says."""
        self.add(f'// "{SCHEMA_LOST}"', json.dumps([keyword]))


# What the rules of single arguments say of the schema of all of them, and what says nothing.
OF_ARGUMENTS = frozenset(
    (
        *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
        *("title", "description", "default", "examples", "$schema", "$comment", "deprecated"),
    )
)


def schema_of(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object whatever it says."""
    schema = dict(object_of(tool["function"].get("parameters")))
    schema["type"] = "object"
    if PATTERN in tool:
        fields = {name: {"type": "string", "pattern": tool[PATTERN]} for name in schema["required"]}
        schema["properties"] = fields
    return schema


def schema_at(root: object, pointer: str) -> object:
    """The part of a schema that a JSON Pointer names, as in a reference behind its "#"; None where
    there is none."""
    found = root
    for escaped in pointer.split("/")[1:]:
        part = escaped.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = cast("dict[str, object]", found).get(part)
        elif isinstance(found, list) and INDEX.fullmatch(part):
            listed = cast("list[object]", found)
            found = listed[int(part)] if int(part) < len(listed) else None
        else:
            return None
    return found


def enforceable(schema: str) -> str:
    """A JSON Schema without what cannot be compiled: patterns that no automaton can follow,
    those that look around or back; unknown names of a dialect; and lists that are null.

    Schemas made from JavaScript's validators and Go's structures have them; the rest still holds,
    and SCHEMA_LOST names the patterns.
    """
    looks_around = '"pattern' in schema and LOOKS_AROUND.search(schema)
    if not looks_around and not NOT_READ.search(schema):
        return schema
    return json.dumps(_enforceable(json.loads(schema)), separators=(",", ":"))


def _enforceable(schema: object) -> object:
    if isinstance(schema, list):
        return [_enforceable(one) for one in cast("list[object]", schema)]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, object] = {}
    lost: list[str] = []
    for key, value in cast("dict[str, object]", schema).items():
        if key == "pattern" and isinstance(value, str) and LOOKS_AROUND.search(value):
            lost.append(key)
            continue
        if key in ("required", "properties") and value is None:
            continue
        if key == "$schema" and not (isinstance(value, str) and DIALECT.fullmatch(value)):
            continue
        if key == "patternProperties" and isinstance(value, dict):
            found = cast("dict[str, object]", value)
            value = {name: one for name, one in found.items() if not LOOKS_AROUND.search(name)}
            lost += [key] * (len(value) < len(found))
        made[key] = _enforceable(value)
    return made | ({SCHEMA_LOST: lost} if lost else {})


def json_rule(schema: object, options: dict[str, Any], tool: str = "") -> str:
    """A schema inside a grammar. `tool`: the one whose schema it is, for errors."""
    if isinstance(schema, dict):
        schema = cast("dict[str, Any]", schema) | {"x-guidance": options}
        schema |= {SCHEMA_TOOL: tool} if tool else {}
    return "%json " + enforceable(json.dumps(schema))


def literal(text: str) -> str:
    """A text between quotes, in which Lark's lexer has no U+007F."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def slashed(pattern: str) -> str:
    """A regular expression between slashes."""
    out: list[str] = []
    escaped = False
    for character in pattern:
        if character == "/" and not escaped:
            out.append("\\")
        out.append("\\n" if character == "\n" else character)
        escaped = character == "\\" and not escaped
    return "".join(out)
