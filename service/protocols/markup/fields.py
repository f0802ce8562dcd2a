"""Rules of calls whose arguments are fields (`batchengine.markup`), which follow JSON Schemas.

Keys stand in the order in which templates write them. An object has the properties of its schema
and no others; one without properties has any. What is not said of a value of this notation is
named by `Rules.lose`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from batchengine.markup import FIELDS_END, FIELDS_NAME, QUOTE
from service.protocols.markup.rules import (
    EXACT,
    LOOKS_AROUND,
    PATTERN,
    Rules,
    json_rule,
    literal,
    schema_of,
    slashed,
)

DEPTH_MAX = 32  # of schemas in a schema; values below have no rules of their own
COUNT_MAX = 512  # items of a list, or characters of a text, that a rule counts
_ANY_TEXT = r"(.|\n)*"
_BARE_KEY = re.compile(r'[^\s,:{}\[\]<"]([^,:{}\[\]<\n]*[^\s,:{}\[\]<])?')
_ANY_KEY = r"/[\w$@.-]{1,128}/"
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_SCALARS = ("integer", "number", "boolean", "null")
_UNSAID = (
    *("format", "uniqueItems", "contains", "prefixItems", "minProperties", "maxProperties"),
    *("patternProperties", "propertyNames", "not", "if", "dependentRequired", "dependentSchemas"),
)


class FieldRules:
    """Rules of the calls of one grammar."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._count = 0
        self._shared: dict[str, str] = {}
        self._root: dict[str, Any] = {}  # the schema of the tool
        self._tool = ""
        self._references: dict[str, str] = {}

    def call(self, tool: dict[str, Any]) -> str:
        """A call behind its mark."""
        self._root, self._tool = schema_of(tool), tool["function"]["name"]
        self._references = {}
        fields = self._object(self._root, 0, is_whole=PATTERN in tool)
        end = self._rules.marker(FIELDS_END)
        return f"{literal(FIELDS_NAME + self._tool)} {fields} {end}"

    def _add(self, body: str) -> str:
        self._count += 1
        return self._rules.add(f"field{self._count}", body)

    def _value(self, given: object, depth: int) -> str:
        """A value that a schema allows."""
        if not isinstance(given, dict) or depth > DEPTH_MAX:
            return self._any()
        schema = cast("dict[str, Any]", given)
        if isinstance(schema.get("$ref"), str):
            return self._reference(schema["$ref"], depth)
        if "const" in schema:
            return self._constant(schema["const"])
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return self._either([self._constant(one) for one in schema["enum"]])
        if isinstance(schema.get("allOf"), list):
            return self._value(self._all_of(schema), depth + 1)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                rest = {name: one for name, one in schema.items() if name != key}
                made = [_joined(rest, one) for one in schema[key] if one is not False]
                if key == "oneOf" and _may_overlap(made):
                    self._rules.lose(key)
                return self._either([self._value(one, depth + 1) for one in made])
        kind: object = schema.get("type")
        if isinstance(kind, list):
            kinds = cast("list[object]", kind)
            return self._either([self._value({**schema, "type": one}, depth + 1) for one in kinds])
        return self._of_kind(schema, kind, depth)

    def _of_kind(self, schema: dict[str, Any], kind: object, depth: int) -> str:
        for name in _UNSAID:
            if name in schema:
                self._rules.lose(name)
        if kind == "string":
            return self._text(schema)
        if kind in _SCALARS:
            bounds = {name: schema[name] for name in _BOUNDS if name in schema}
            return self._add(json_rule({"type": kind, **bounds}, EXACT, self._tool))
        if kind == "object" or (kind is None and "properties" in schema):
            return self._object(schema, depth)
        if kind == "array" or (kind is None and "items" in schema):
            return self._list(schema, depth)
        return self._any()

    def _either(self, choices: Sequence[str]) -> str:
        return self._add(" | ".join(choices)) if len(choices) > 1 else "".join(choices)

    def _all_of(self, schema: dict[str, Any]) -> dict[str, Any]:
        made = {name: one for name, one in schema.items() if name != "allOf"}
        for one in cast("list[object]", schema["allOf"]):
            found = cast("dict[str, Any]", one) if isinstance(one, dict) else {}
            for _ in range(DEPTH_MAX):
                if not isinstance(found.get("$ref"), str):
                    break
                target = self._target(found["$ref"])
                found = cast("dict[str, Any]", target) if isinstance(target, dict) else {}
            made = _joined(made, found)
        return made

    def _reference(self, reference: str, depth: int) -> str:
        """A rule for each part of the schema that others refer to; a part may refer to itself."""
        known = self._references.get(reference)
        if known is None:
            self._count += 1
            known = self._references[reference] = f"shared{self._count}"
            self._rules.add(known, self._value(self._target(reference), depth + 1))
        return known

    def _target(self, reference: str) -> object:
        """The part of the tool's schema of this name; any value where there is none."""
        found: object = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            found = cast("dict[str, object]", found).get(name) if isinstance(found, dict) else None
        if not reference.startswith("#") or found is None:
            self._rules.lose("$ref")
            return True
        return found

    def _constant(self, value: object) -> str:
        """A value as templates write it."""
        mark = self._rules.marker(QUOTE)
        if isinstance(value, str):
            return f"{mark} {literal(value)} {mark}" if value else f"{mark} {mark}"
        if isinstance(value, list):
            listed = [self._constant(one) for one in cast("list[object]", value)]
            return " ".join(['"["', ' "," '.join(listed), '"]"'])
        if isinstance(value, dict):
            pairs = _in_order(cast("dict[str, object]", value))
            parts = [f"{self._key(key)} {self._constant(one)}" for key, one in pairs]
            return " ".join(['"{"', ' "," '.join(parts), '"}"'])
        return literal(json.dumps(value))

    def _key(self, key: str) -> str:
        if _BARE_KEY.fullmatch(key):
            return literal(f"{key}:")
        return f'{self._constant(key)} ":"'

    def _text(self, schema: Mapping[str, Any], *, is_whole: bool = False) -> str:
        """A text between marks. is_whole: its pattern is of all of it."""
        mark, pattern = self._rules.marker(QUOTE), _found(schema.get("pattern"), is_whole=is_whole)
        least, most = (_count(schema.get(name)) for name in ("minLength", "maxLength"))
        if pattern is None and "pattern" in schema:
            self._rules.lose("pattern")
        if pattern is not None and (least is not None or most is not None):
            self._rules.lose("minLength" if least is not None else "maxLength")
        elif max(least or 0, most or 0) > COUNT_MAX:
            self._rules.lose("maxLength" if (most or 0) > COUNT_MAX else "minLength")
        elif least or most is not None:
            pattern = rf"(.|\n){{{least or 0},{'' if most is None else most}}}"
        if pattern is not None and not is_whole and self._rules.control_id(QUOTE) is None:
            self._rules.lose("pattern" if "pattern" in schema else "maxLength")
            pattern = None  # a terminal that any text may end would go over the mark
        if pattern is None:
            return f"{mark} {self._once('quoted', lambda: self._rules.up_to('quoted', QUOTE))}"
        if self._rules.control_id(QUOTE) is None:  # the end belongs to the terminal
            pattern, end = pattern + re.escape(QUOTE), ""
        else:
            end = f" {mark}"
        self._count += 1
        return f"{mark} {self._rules.add(f'TEXT{self._count}', f'/{slashed(pattern)}/')}{end}"

    def _object(self, schema: Mapping[str, Any], depth: int, *, is_whole: bool = False) -> str:
        """Fields between braces. is_whole: of a tool whose only text must match a pattern."""
        given, listed = schema.get("properties"), schema.get("required")
        fields = dict(cast("dict[str, Any]", given)) if isinstance(given, dict) else {}
        needed = [one for one in cast("list[object]", listed or ()) if isinstance(one, str)]
        if not fields and not needed:
            others: object = schema.get("additionalProperties", depth > 0)
            return '"{}"' if others is False else self._any_fields(others, depth)
        for name in needed:
            fields.setdefault(name, True)
        parts: list[tuple[str, bool]] = []
        for key, one in _in_order(fields):
            if one is False and key not in needed:  # no value may be given
                continue
            if is_whole:
                made = self._text(cast("dict[str, Any]", one), is_whole=True)
            else:
                made = self._value(one, depth + 1)
            parts.append((f"{self._key(key)} {made}", key in needed))
        return self._add(f'"{{" {self._listed(parts)} "}}"')

    def _listed(self, parts: Sequence[tuple[str, bool]]) -> str:
        """Parts in their order with commas between them, of which some are needed."""
        rests = [""]  # what stands behind the last part, the one before it, ...
        for part, is_needed in reversed(parts):
            body = f'("," {part}){"" if is_needed else "?"} {rests[-1]}'
            rests.append(self._add(body))
        rests.reverse()
        firsts: list[str] = []
        for (part, is_needed), rest in zip(parts, rests[1:], strict=True):
            firsts.append(f"{part} {rest}")
            if is_needed:
                return f"({' | '.join(firsts)})"
        return f"({' | '.join(firsts)})?"

    def _list(self, schema: Mapping[str, Any], depth: int) -> str:
        items = schema.get("items", True)
        least, most = _count(schema.get("minItems")) or 0, _count(schema.get("maxItems"))
        if least > COUNT_MAX:
            self._rules.lose("minItems")
            least = 0
        if most is not None and most > COUNT_MAX:
            self._rules.lose("maxItems")
            most = None
        if items is False or most == 0:
            return '"[]"'
        one = self._value(items, depth + 1)
        bounds = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        more = f'("," {one}){bounds if least > 1 or most is not None else "*"}' if most != 1 else ""
        return self._add(f'"[" ({one} {more}){"" if least else "?"} "]"')

    def _any(self) -> str:
        """Any value."""

        def make() -> str:
            scalar = json_rule({"type": ["number", "boolean", "null"]}, EXACT)
            self._shared["any"] = "any_value"  # lists and fields have such values
            listed = '"[" (any_value ("," any_value)*)? "]"'
            fields = self._any_fields(True, 0)
            scalars = self._rules.add("any_scalar", scalar)
            return self._rules.add(
                "any_value", f"{self._text({})} | {scalars} | {listed} | {fields}"
            )

        return self._once("any", make)

    def _any_fields(self, schema: object, depth: int) -> str:
        """Fields of any names, whose values a schema allows."""
        value = self._value(schema, depth + 1)
        key = self._once("key", lambda: self._rules.add("ANY_KEY", _ANY_KEY))
        return self._add(f'"{{" ({key} ":" {value} ("," {key} ":" {value})*)? "}}"')

    def _once(self, name: str, make: Any) -> str:
        """A rule that all tools share."""
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]


def _in_order(fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Fields in the order of `dictsort`, in which templates write them."""
    return sorted(fields.items(), key=lambda item: item[0].lower())


def _joined(left: dict[str, Any], right: object) -> dict[str, Any]:
    """A schema that says what two say."""
    if not isinstance(right, dict):
        return left
    made = left | cast("dict[str, Any]", right)
    for name in ("properties", "required"):
        one, two = left.get(name), cast("dict[str, Any]", right).get(name)
        if isinstance(one, dict) and isinstance(two, dict):
            made[name] = one | two
        elif isinstance(one, list) and isinstance(two, list):
            made[name] = [*one, *two]
    return made


def _may_overlap(choices: Sequence[dict[str, Any]]) -> bool:
    """Whether a value may be one of several choices, as far as their types tell."""
    kinds = [str(one.get("type", one.get("const"))).replace("integer", "number") for one in choices]
    return len(set(kinds)) < len(kinds)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _found(pattern: object, *, is_whole: bool) -> str | None:
    """A regular expression of the whole texts in which `pattern` is found; None where none can be
    made of it."""
    if not isinstance(pattern, str) or LOOKS_AROUND.search(pattern):
        return None
    if is_whole:
        return pattern[1:-1]
    body, begins = pattern.removeprefix("^"), pattern.startswith("^")
    ends = body.endswith("$") and (len(body) - len(body[:-1].rstrip("\\"))) % 2 == 1
    body = body[:-1] if ends else body
    plain = re.sub(r"\\.|\[(\\.|[^\]\\])*\]", "x", body, flags=re.DOTALL)
    if "^" in plain or "$" in plain or ((begins or ends) and "|" in _outside(plain)):
        return None
    return ("" if begins else _ANY_TEXT) + f"({body})" + ("" if ends else _ANY_TEXT)


def _outside(pattern: str) -> str:
    """What of a pattern without escapes stands outside of parentheses."""
    while (shorter := re.sub(r"\([^()]*\)", "", pattern)) != pattern:
        pattern = shorter
    return pattern
