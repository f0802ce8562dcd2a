"""Rules of calls as Python writes them, NAME(KEY=VALUE, ...), whose values follow JSON Schemas.

Keys stand in the order of the schema. Texts stand as the templates write them, constants are
Python's; lists and objects, and what has more than one type or a schema that says more than its
type, are JSON, which the parser reads too. A call of a tool whose schema says more of all its
arguments is none of these rules. So nothing that a schema says is lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from service.protocols.markup.python_calls import PYTHON_KEY
from service.protocols.markup.rules import EXACT, OF_ARGUMENTS, Rules, json_rule, literal, schema_of
from service.protocols.markup.values import NAME_CHARS_MAX
from service.protocols.strict_json import list_of, object_of

_NAME = re.compile(r"[\w.:/-]+")
_NOTES = frozenset(("type", "title", "description", "default", "examples", "enum", "const"))
_SHARED = ("#/$defs/", "#/definitions/")


def python_call(rules: Rules, number: int, tool: dict[str, Any]) -> str:
    """A call; "" where the parser would not read the name of the tool or of a parameter, and where
    the schema says what these rules do not."""
    schema, name = schema_of(tool), tool["function"]["name"]
    fields = object_of(schema.get("properties"))
    if not _NAME.fullmatch(name) or not all(map(_is_key, fields)):
        return ""
    is_open = schema.get("additionalProperties") is not False
    if not fields and tool["function"].get("parameters") and is_open:
        return ""  # any arguments
    needed = list_of(schema.get("required"))
    if not OF_ARGUMENTS.issuperset(schema) or not all(map(_is_shared, _references(fields))):
        return ""
    if any(not isinstance(key, str) or fields.get(key, False) is False for key in needed):
        return ""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    keywords = [
        (
            rules.add(
                f"keyword{number}x{slot}",
                f"{literal(f'{key}=')} {_value(rules, f'{number}x{slot}', given, shared, name)}",
            ),
            key in needed,
        )
        for slot, (key, given) in enumerate(fields.items())
        if given is not False
    ]
    return f"{literal(f'{name}(')} {rules.listed(keywords, ', ')} {literal(')')}"


def _references(schema: object) -> Iterator[object]:
    """What the parts of a schema refer to."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            found = cast("dict[str, object]", part)
            yield from (found[key] for key in ("$ref", "$dynamicRef") if key in found)
            parts += found.values()
        elif isinstance(part, list):
            parts += cast("list[object]", part)


def _is_shared(reference: object) -> bool:
    """Whether a schema of one argument may refer to it."""
    return isinstance(reference, str) and reference.startswith(_SHARED)


def _is_key(key: str) -> bool:
    is_read = all(PYTHON_KEY.fullmatch(char) for char in key) and key == key.strip()
    return is_read and 0 < len(key) <= NAME_CHARS_MAX


def _value(rules: Rules, place: str, given: object, shared: dict[str, Any], tool: str) -> str:
    """A value that a schema allows."""
    schema = object_of(given)
    kind = schema.get("type")
    says_more = any(key not in _NOTES for key in schema)
    has_options = "const" in schema or "enum" in schema
    if not says_more and (options := _texts(schema)):
        return rules.add(f"value{place}", " | ".join(literal(_text(rules, one)) for one in options))
    if has_options or says_more:
        return rules.add(f"value{place}", json_rule(schema | shared, EXACT, tool))
    if kind == "string":
        return _any_text(rules)
    if kind == "boolean":
        return rules.add(f"value{place}", '"True" | "False"')
    if kind == "null":
        return literal("None")
    return rules.add(f"value{place}", json_rule(schema | shared, EXACT, tool))


def _texts(schema: dict[str, Any]) -> list[str]:
    """The texts that a schema lists, if it lists nothing else and allows no less of them."""
    if schema.get("type", "string") != "string" or ("const" in schema and "enum" in schema):
        return []
    options = [schema["const"]] if "const" in schema else list_of(schema.get("enum"))
    texts = [one for one in options if isinstance(one, str)]
    return texts if len(texts) == len(options) else []


def _text(rules: Rules, text: str) -> str:
    """A text between quotes."""
    texts = rules.markup.texts
    made = text.replace("\\", "\\\\").replace(texts.quote, f"\\{texts.quote}")
    if not texts.in_lines:
        made = made.replace("\n", "\\n").replace("\r", "\\r")
    return f"{texts.quote}{made}{texts.quote}"


def _any_text(rules: Rules) -> str:
    """A rule of any text between quotes, which all tools share."""
    quote, ends = rules.markup.texts.quote, "" if rules.markup.texts.in_lines else r"\n\r"
    body = rf"{quote}([^{quote}\\{ends}]|\\[\\{quote}nrt])*{quote}"
    name = "QUOTED"
    if not any(line.startswith(f"{name}: ") for line in rules.lines):
        rules.add(name, f"/{body}/")
    return name
