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
from urllib.parse import unquote

from batchengine import errors
from batchengine.core import BatchEngineError
from batchengine.markup import FIELDS_END, FIELDS_NAME, QUOTE
from service.protocols.markup.rules import (
    EXACT,
    LOOKS_AROUND,
    PATTERN,
    Rules,
    json_rule,
    literal,
    schema_at,
    schema_of,
    slashed,
)
from service.protocols.strict_json import list_of, object_of

DEPTH_MAX = 32  # of schemas in a schema; values below have no rules of their own
COUNT_MAX = 512  # items of a list, or characters of a text, that a rule counts
NAME_CHARS_MAX = 64  # of a tool, in an error
_ANY_TEXT = r"(.|\n)*"
_BARE_KEY = re.compile(r'[^\s,:{}\[\]<"]([^,:{}\[\]<\n]*[^\s,:{}\[\]<])?')
_ANY_KEY = r"/[\w$@.-]{1,128}/"
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_SCALARS = ("integer", "number", "boolean", "null")
_KINDS: dict[str, type] = {
    **{"string": str, "boolean": bool, "null": type(None), "array": list, "object": dict}
}
_UNSAID = (
    *("format", "uniqueItems", "contains", "prefixItems", "minProperties", "maxProperties"),
    *("patternProperties", "propertyNames", "not", "if", "dependentRequired", "dependentSchemas"),
    "dependencies",
)
_UNSAID_OF_CONSTANTS = ("not", "if", "pattern", "multipleOf", "properties", "required", "items")
# keywords that say nothing of a value
_NOTES = (
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$comment", "$defs", "definitions", "$schema", "$id", "$anchor"),
)
# ECMA-262's classes, without brackets; those of the library have all of Unicode
_CLASSES = {
    "d": "0-9",
    "w": "A-Za-z0-9_",
    "s": r"\t\n\x0b\x0c\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff",
}
_CLASS = re.compile(r"\\(.)|([\[\]])|([&~])", re.DOTALL)
_LEAST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_GREATEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")


class _NoValue(Exception):
    """No value is as a schema says."""


class FieldRules:
    """Rules of the calls of one grammar."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._count = 0
        self._shared: dict[str, str] = {}
        self._root: dict[str, Any] = {}  # the schema of the tool
        self._tool = ""
        self._anchors: dict[str, object] | None = None  # schemas by their names in the root
        self._references: dict[str, str] = {}
        self._empty: set[str] = set()  # references to what no value is

    def call(self, tool: dict[str, Any]) -> str:
        """A call behind its mark. Raises GRAMMAR_REFUSED."""
        function = tool["function"]
        self._root, self._tool = schema_of(tool), function["name"]
        self._anchors, self._references, self._empty = None, {}, set()
        if not function.get("parameters") or function.get("strict") or "properties" in self._root:
            self._root.setdefault("additionalProperties", False)
        try:
            if PATTERN in tool:
                fields = self._object(self._root, 0, is_whole=True)
            else:
                fields = self._value(self._root, 0)
        except _NoValue:
            raise self._refused("no value is as it says") from None
        end = self._rules.marker(FIELDS_END)
        return f"{literal(FIELDS_NAME + self._tool)} {fields} {end}"

    def _refused(self, why: str) -> BatchEngineError:
        why = f"the schema of the tool {self._tool[:NAME_CHARS_MAX]!r}: {why}"
        return errors.GRAMMAR_REFUSED(why=why, param=self._rules.param)

    def _add(self, body: str) -> str:
        self._count += 1
        return self._rules.add(f"field{self._count}", body)

    def _lose(self, schema: Mapping[str, Any], names: Sequence[str]) -> None:
        for name in names:
            if name in schema:
                self._rules.lose(name)

    def _value(self, given: object, depth: int) -> str:
        """A value that a schema allows. Raises _NoValue."""
        if given is False:
            raise _NoValue
        if not isinstance(given, dict) or depth > DEPTH_MAX:
            return self._any()
        schema = cast("dict[str, Any]", given)
        if isinstance(schema.get("$ref"), str):
            return self._reference(schema, depth)
        if isinstance(schema.get("allOf"), list):
            return self._value(self._all_of(schema), depth + 1)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                rest = {name: one for name, one in schema.items() if name != key}
                made = [self._joined(rest, one) for one in schema[key]]
                if key == "oneOf" and _may_overlap(made):
                    self._rules.lose(key)
                return self._choices(made, depth + 1)
        if "const" in schema or isinstance(schema.get("enum"), list):
            return self._constants(schema)
        kind: object = schema.get("type")
        if isinstance(kind, list):
            kinds = _listed_kinds(cast(object, kind))
            return self._choices([{**schema, "type": one} for one in kinds], depth + 1)
        return self._of_kind(schema, kind, depth)

    def _choices(self, schemas: Sequence[object], depth: int) -> str:
        """A value that one of several schemas allows."""
        made = [self._tried(one, depth) for one in schemas]
        found = [one for one in made if one is not None]
        if not found:
            raise _NoValue
        return self._either(found)

    def _tried(self, schema: object, depth: int) -> str | None:
        """As `_value`; None, and no rules, where no value is as the schema says."""
        tables, lines = (self._shared, self._references), self._rules.lines
        sizes, count = [len(table) for table in tables], len(lines)
        try:
            return self._value(schema, depth)
        except _NoValue:
            del lines[count:]
            for table, size in zip(tables, sizes, strict=True):
                while len(table) > size:
                    table.popitem()
            return None

    def _constants(self, schema: dict[str, Any]) -> str:
        """One of the values that a schema lists, which has to be as the rest of it says."""
        listed = list_of(schema.get("enum"))
        if "const" in schema:
            known = {json.dumps(one, sort_keys=True) for one in listed}
            is_listed = json.dumps(schema["const"], sort_keys=True) in known
            listed = [schema["const"]] if is_listed or "enum" not in schema else []
        self._lose(schema, _UNSAID_OF_CONSTANTS)
        found = [self._constant(one) for one in listed if _fits(one, schema)]
        if not found:
            raise _NoValue
        return self._either(found)

    def _of_kind(self, schema: dict[str, Any], kind: object, depth: int) -> str:
        self._lose(schema, _UNSAID)
        if kind == "string":
            return self._text(schema)
        if kind in _SCALARS:
            if _excludes_all(schema):
                raise _NoValue
            bounds = {name: schema[name] for name in _BOUNDS if name in schema}
            return self._add(json_rule({"type": kind, **bounds}, EXACT, self._tool))
        if kind == "object" or (kind is None and "properties" in schema):
            return self._object(schema, depth)
        if kind == "array" or (kind is None and "items" in schema):
            return self._list(schema, depth)
        unsaid = (*_BOUNDS, "pattern", "minLength", "maxLength", "minItems", "maxItems", "required")
        self._lose(schema, unsaid if kind is None else ("type",))
        return self._any()

    def _either(self, choices: Sequence[str]) -> str:
        return self._add(" | ".join(choices)) if len(choices) > 1 else "".join(choices)

    def _all_of(self, schema: dict[str, Any]) -> object:
        made: object = {name: one for name, one in schema.items() if name != "allOf"}
        for one in cast("list[object]", schema["allOf"]):
            found = one
            for _ in range(DEPTH_MAX):
                part = object_of(found)
                if not isinstance(part.get("$ref"), str):
                    break
                found = self._joined(self._target(part["$ref"]), _beside_reference(part))
            made = self._joined(made, found)
        return made

    def _joined(self, one: object, two: object) -> object:
        """A schema that says what two say."""
        if one is False or two is False:
            return False
        if not isinstance(one, dict) or not isinstance(two, dict):
            return cast(object, one if isinstance(one, dict) else two)
        made = dict(cast("dict[str, Any]", one))
        for name, value in cast("dict[str, Any]", two).items():
            if name not in made or name in _NOTES:
                made[name] = value
            elif json.dumps(made[name]) != json.dumps(value):
                both = _both(name, made[name], value)
                if both is None:
                    self._rules.lose(name)
                    both = value
                made[name] = both
        return made

    def _reference(self, schema: dict[str, Any], depth: int) -> str:
        """A rule for each part of the schema that others refer to, and what they say beside it; a
        part may refer to itself."""
        beside = _beside_reference(schema)
        key = json.dumps([schema["$ref"], beside], sort_keys=True)
        if key in self._empty:
            raise _NoValue
        known = self._references.get(key)
        if known is None:
            self._count += 1
            known = self._references[key] = f"shared{self._count}"
            target = self._target(schema["$ref"])
            try:
                made = self._value(self._joined(target, beside) if beside else target, depth + 1)
            except _NoValue:
                self._empty.add(key)
                raise
            self._rules.add(known, made)
        return known

    def _target(self, reference: str) -> object:
        """The part of the tool's schema of this name; any value where there is none."""
        place = unquote(reference.removeprefix("#"))
        found: object = None
        if not reference.startswith("#"):
            pass
        elif not place or place.startswith("/"):
            found = schema_at(self._root, place)
        else:
            if self._anchors is None:
                self._anchors = _anchors(self._root)
            found = self._anchors.get(place)
        if found is None:
            self._rules.lose("$ref")
            return True
        return found

    def _constant(self, value: object) -> str:
        """A value as templates write it. Some write `null` as `None`: rules do not."""
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
        given = schema.get("pattern")
        if not isinstance(given, str | None):
            raise self._refused(f"'pattern' must be text, not {json.dumps(given)}")
        mark, pattern = self._rules.marker(QUOTE), _found(given, is_whole=is_whole)
        least, most = self._counts(schema, "minLength", "maxLength")
        if pattern is None and "pattern" in schema:
            self._rules.lose("pattern")
        if pattern is not None and (least or most is not None):
            self._rules.lose("minLength" if least else "maxLength")
        elif max(least, most or 0) > COUNT_MAX:
            self._rules.lose("maxLength" if (most or 0) > COUNT_MAX else "minLength")
        elif least or most is not None:
            pattern = rf"(.|\n){{{least},{'' if most is None else most}}}"
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
        if given is not None and not is_whole:  # what is wrong in it is said of the tool
            checked = {"type": "string", "pattern": _with_classes(given)}
            self._rules.add(f"// TEXT{self._count}", json_rule(checked, EXACT, self._tool))
        return f"{mark} {self._rules.add(f'TEXT{self._count}', f'/{slashed(pattern)}/')}{end}"

    def _counts(self, schema: Mapping[str, Any], low: str, high: str) -> tuple[int, int | None]:
        for name in (low, high):
            if schema.get(name) is not None and _count(schema[name]) is None:
                why = f"'{name}' must be a whole number from 0 on, not {json.dumps(schema[name])}"
                raise self._refused(why)
        least, most = _count(schema.get(low)) or 0, _count(schema.get(high))
        if most is not None and least > most:
            raise _NoValue
        return least, most

    def _object(self, schema: Mapping[str, Any], depth: int, *, is_whole: bool = False) -> str:
        """Fields between braces. is_whole: of a tool whose only text must match a pattern."""
        fields = dict(object_of(schema.get("properties")))
        needed = [one for one in list_of(schema.get("required")) if isinstance(one, str)]
        if not fields and not needed:
            others: object = schema.get("additionalProperties", True)
            return '"{}"' if others is False else self._any_fields(others, depth)
        for name in needed:
            fields.setdefault(name, True)
        parts: list[tuple[str, bool]] = []
        for key, one in _in_order(fields):
            if is_whole:
                made = self._text(cast("dict[str, Any]", one), is_whole=True)
            else:
                made = self._tried(one, depth + 1)
            if made is None and key in needed:
                raise _NoValue
            if made is None:  # no value may be given
                continue
            parts.append((f"{self._key(key)} {made}", key in needed))
        return self._add(f'"{{" {self._rules.listed(parts, ",")} "}}"')

    def _list(self, schema: Mapping[str, Any], depth: int) -> str:
        items = schema.get("items", True)
        if isinstance(items, list):
            self._rules.lose("items")
        least, most = self._counts(schema, "minItems", "maxItems")
        if least > COUNT_MAX:
            self._rules.lose("minItems")
            least = 0
        if most is not None and most > COUNT_MAX:
            self._rules.lose("maxItems")
            most = None
        one = None if most == 0 else self._tried(cast(object, items), depth + 1)
        if one is None and least:
            raise _NoValue
        if one is None:
            return '"[]"'
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
        value = self._tried(schema, depth + 1)
        if value is None:
            return '"{}"'
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


def _both(name: str, one: object, two: object) -> object:
    """The value of a keyword that says what two of its values say; None where there is none."""
    if name == "properties" and isinstance(one, dict) and isinstance(two, dict):
        left, right = cast("dict[str, object]", one), cast("dict[str, object]", two)
        differ = (key for key in left if key in right and left[key] != right[key])
        return left | right | {key: {"allOf": [left[key], right[key]]} for key in differ}
    if name in ("required", "allOf", "enum") and isinstance(one, list) and isinstance(two, list):
        ones, twos = cast("list[object]", one), cast("list[object]", two)
        known = {json.dumps(part, sort_keys=True) for part in ones}
        is_known = [json.dumps(part, sort_keys=True) in known for part in twos]
        if name == "enum":
            return [part for part, known in zip(twos, is_known, strict=True) if known]
        return [*ones, *(part for part, known in zip(twos, is_known, strict=True) if not known)]
    one = cast(object, one)
    if name == "type":
        ones, twos = _listed_kinds(one), _listed_kinds(two)
        made = [kind for kind in ones if _is_among(kind, twos)]
        made += [kind for kind in twos if kind not in ones and _is_among(kind, ones)]
        return made[0] if len(made) == 1 else made
    if name in ("items", "additionalProperties"):
        return False if one is False or two is False else {"allOf": [one, two]}
    if _is_number(one) and _is_number(two) and name in (*_LEAST, *_GREATEST):
        left, right = cast(float, one), cast(float, two)
        return min(left, right) if name in _LEAST else max(left, right)
    return None


def _listed_kinds(kind: object) -> list[object]:
    return cast("list[object]", kind) if isinstance(kind, list) else [kind]


def _is_among(kind: object, kinds: Sequence[object]) -> bool:
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _beside_reference(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in schema.items() if name != "$ref" and name not in _NOTES}


def _anchors(root: dict[str, Any]) -> dict[str, object]:
    """Schemas by the names that they have."""
    found: dict[str, object] = {}
    left: list[object] = [root]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            part = cast("dict[str, object]", one)
            named = (part.get("$anchor"), part.get("$dynamicAnchor"))
            found.update({name: part for name in named if isinstance(name, str)})
            left += part.values()
        elif isinstance(one, list):
            left += cast("list[object]", one)
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fits(value: object, schema: Mapping[str, Any]) -> bool:
    """Whether a value is of the type and within the bounds of a schema."""
    if not any(_is_of(value, kind) for kind in _listed_kinds(schema.get("type"))):
        return False
    low, high = "minimum", "maximum"
    if isinstance(value, str):
        value, low, high = len(value), "minLength", "maxLength"
    elif isinstance(value, list):
        value, low, high = len(cast("list[object]", value)), "minItems", "maxItems"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return True
    within = {name: schema[name] for name in _BOUNDS if name in schema} if low == "minimum" else {}
    within |= {name: schema[name] for name in (low, high) if name in schema}
    return all(
        not _is_number(bound)
        or not (
            (name == low and value < bound)
            or (name == high and value > bound)
            or (name == "exclusiveMinimum" and value <= bound)
            or (name == "exclusiveMaximum" and value >= bound)
        )
        for name, bound in within.items()
    )


def _is_of(value: object, kind: object) -> bool:
    """Whether a value is of a type, if that is one."""
    if kind in ("integer", "number"):
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return _is_number(value) and (kind == "number" or is_whole)
    return not isinstance(kind, str) or isinstance(value, _KINDS.get(kind, object))


def _excludes_all(schema: Mapping[str, Any]) -> bool:
    """Whether no number is within the bounds of a schema."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if schema.get("type") not in ("integer", "number"):
        return False
    return _is_number(low) and _is_number(high) and cast(float, low) > cast(float, high)


def _may_overlap(choices: Sequence[object]) -> bool:
    """Whether a value may be one of several choices, as far as their types tell."""
    parts = list(map(object_of, choices))
    kinds = [str(one.get("type", one.get("const"))).replace("integer", "number") for one in parts]
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
    pattern = _with_classes(pattern)
    body, begins = pattern.removeprefix("^"), pattern.startswith("^")
    ends = body.endswith("$") and (len(body) - len(body[:-1].rstrip("\\"))) % 2 == 1
    body = body[:-1] if ends else body
    plain = re.sub(r"\\.|\[(\\.|\[[^\]]*\]|[^\]\\])*\]", "x", body, flags=re.DOTALL)
    if "^" in plain or "$" in plain or ((begins or ends) and "|" in _outside(plain)):
        return None
    return ("" if begins else _ANY_TEXT) + f"({body})" + ("" if ends else _ANY_TEXT)


def _with_classes(pattern: str) -> str:
    """A pattern with the classes of ECMA-262, in which brackets and signs have no more meaning."""
    is_inside = False

    def written(found: re.Match[str]) -> str:
        nonlocal is_inside
        escaped, bracket, sign = found.groups()
        if escaped is not None and escaped.lower() in _CLASSES:
            members = _CLASSES[escaped.lower()]
            if escaped.isupper():
                return f"[^{members}]"
            return members if is_inside else f"[{members}]"
        if bracket == "]" or (bracket == "[" and not is_inside):
            is_inside = bracket == "["
            return found[0]
        return "\\" + found[0] if is_inside and (bracket or sign) else found[0]

    return _CLASS.sub(written, pattern)


def _outside(pattern: str) -> str:
    """What of a pattern without escapes stands outside of parentheses."""
    while (shorter := re.sub(r"\([^()]*\)", "", pattern)) != pattern:
        pattern = shorter
    return pattern
