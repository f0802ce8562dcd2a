"""TOML text to dataclasses: types, bounds, and errors that name the file, the key and the line.

Owns the reading of one table into one dataclass. Refuses half-valid input: an unknown key, a
wrong type or a number out of bounds is an error with its fix. No setting is named here.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from batchengine import errors
from batchengine.core import BatchEngineError, SlaClass

SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([KMGTkmgt]?)((i?)[Bb])?\s*")
Table = dict[str, Any]  # parsed TOML: values have no type yet
_T = typing.TypeVar("_T")
KINDS: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}


UNREADABLE_FIX = "name a TOML file that this user can read"
TOML_FIX = (
    "correct that line: tables are written [name] or [[lane]], each table once, keys name = value"
)


@dataclass(frozen=True, slots=True)
class Source:
    """The parsed file and its text, for line numbers in errors."""

    path: str
    text: str
    tree: Table

    @staticmethod
    def read(path: str | None, fix: str = UNREADABLE_FIX) -> Source:
        """The file at `path`; `fix`: what to do about one that cannot be read."""
        if path is None:
            return Source("", "", {})
        try:
            text = Path(path).read_bytes().decode("utf-8-sig")  # some editors begin with a mark
            return Source(path, text, tomllib.loads(text))
        except OSError as error:
            why = (error.strerror or "").lower()
            raise errors.CONFIG_UNREADABLE(path=path, why=why, fix=fix) from None
        except UnicodeDecodeError as error:
            why, fix = f"byte {error.start} is not UTF-8", "save it as UTF-8 text"
            raise errors.CONFIG_NOT_TOML(path=path, why=why, fix=fix) from None
        except tomllib.TOMLDecodeError as error:
            raise errors.CONFIG_NOT_TOML(path=path, why=_toml_reason(error), fix=TOML_FIX) from None

    def error(
        self, row: errors.Problem, dotted: str, problem: str, *, fix: str = ""
    ) -> BatchEngineError:
        """`KEY PROBLEM in FILE line N`, with the fix after it."""
        return row(what=f"{_shown(dotted)} {problem}{self.where(dotted)}.", fix=fix)

    def contradiction(self, dotted: str, problem: str, *, fix: str = "") -> BatchEngineError:
        """A value that does not go with another value, or with the machine."""
        return self.error(errors.CONFIG_CONTRADICTION, dotted, problem, fix=fix)

    def unknown(self, dotted: str, known: list[str]) -> BatchEngineError:
        """An unknown key, with the nearest known key when there is one."""
        parent, _, key = _shown(dotted).rpartition(".")
        near = difflib.get_close_matches(key, known, 1, 0.5)
        prefix = parent + "." if parent else ""
        hint = f"Did you mean {prefix}{near[0]}?" if near else f"Known: {', '.join(known)}"
        return errors.CONFIG_UNKNOWN_KEY(key=_shown(dotted), where=self.where(dotted), hint=hint)

    def where(self, dotted: str) -> str:
        """` in FILE line N`, or nothing when the value did not come from the file."""
        line = _line_of(self.text, dotted)
        return f" in {self.path} line {line}" if line else ""

    def file_path(self, value: str, dotted: str) -> str:
        """`~` expanded; a relative path from the file is taken from the file's folder."""
        expanded = Path(value).expanduser()
        if self.path and not expanded.is_absolute() and _line_of(self.text, dotted):
            expanded = Path(self.path).resolve().parent / expanded
        return str(expanded)


def _toml_reason(error: ValueError) -> str:
    """A parser's message; keys as they are written in the file, and not as a Python tuple."""
    names = re.compile(r"\(('[^()]*?')(?:, ('[^()]*?'))*,?\)")
    plain = names.sub(lambda m: ".".join(re.findall(r"'([^']*)'", m[0])), str(error))
    return plain[:1].lower() + plain[1:]


def _shown(dotted: str) -> str:
    """lane.0.threads is written lane.threads in messages."""
    return re.sub(r"^lane\.\d+", "lane", dotted)


def _line_of(text: str, dotted: str) -> int:
    """Line of a dotted key in TOML text; 0 when it is not there. Reads headers and bare keys."""
    table: list[str] = []
    arrays: dict[str, int] = {}
    parent_line = 0
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*(\[\[?)\s*([^\]]+?)\s*\]", line)
        pair = re.match(r"\s*([\w.\"'-]+)\s*=", line)
        if header:
            name = re.sub(r"[\"'\s]", "", header[2])
            if header[1] == "[[":
                arrays[name] = arrays.get(name, -1) + 1
                name = f"{name}.{arrays[name]}"
            table, here = name.split("."), name
        elif pair:
            here = ".".join([*table, re.sub(r"[\"']", "", pair[1])])
        else:
            continue
        if here == dotted:
            return number
        if dotted.startswith(here + ".") or here.startswith(dotted + "."):
            parent_line = parent_line or number
    return parent_line


def put(source: Source, tree: Table, dotted: str, value: object) -> None:
    """Set one override; "lane.x" sets it on the only lane."""
    *parents, last = dotted.split(".")
    node = tree
    for name in parents:
        child = node.setdefault(name, [{}] if name == "lane" else {})
        if isinstance(child, list):
            lanes = cast("list[Table]", child)
            if len(lanes) != 1:
                raise source.contradiction(
                    dotted,
                    f"is ambiguous: the file has {len(lanes)} lanes",
                )
            child = lanes[0]
        if not isinstance(child, dict):
            raise source.error(errors.CONFIG_TYPE, name, "must be a table")
        node = cast("Table", child)
    node[last] = value


def table(source: Source, value: object, dotted: str) -> Table:
    if not isinstance(value, dict):
        raise source.error(errors.CONFIG_TYPE, dotted, f"must be a table, not {_kind(value)}")
    return cast("Table", value)


def build(source: Source, cls: type[_T], value: object, dotted: str, base: _T | None = None) -> _T:
    """A dataclass from a table; missing keys come from `base` or the field defaults."""
    given_table = table(source, value, dotted)
    hints = typing.get_type_hints(cls)
    fields = {f.metadata.get("toml", f.name): f for f in dataclasses.fields(cast("Any", cls))}
    if base is not None:
        fields.pop("name", None)  # the table's own name is not a key in it
    given: Table = {}
    for key, item in given_table.items():
        path = f"{dotted}.{key}" if dotted else key
        if key not in fields:
            raise source.unknown(path, list(fields))
        spec = fields[key]
        metadata = dict(spec.metadata)
        inner = getattr(base, spec.name, None) if base is not None else None
        given[spec.name] = value_of(source, hints[spec.name], item, path, metadata, inner)
    return dataclasses.replace(cast("Any", base), **given) if base is not None else cls(**given)


def value_of(
    source: Source, kind: Any, value: Any, dotted: str, rule: Table, base: object = None
) -> Any:
    """One value of the declared type, checked against its bounds or choices."""
    if dataclasses.is_dataclass(kind):
        return build(source, cast("type[Any]", kind), value, dotted, base)
    if isinstance(kind, types.UnionType):  # X | None: TOML has no null
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise source.error(errors.CONFIG_TYPE, dotted, f"must be a list, not {_kind(value)}")
        inner = typing.get_args(kind)[0]
        items = enumerate(cast("list[object]", value))
        if dataclasses.is_dataclass(inner):  # [[lane]]: each is a table of its own
            return tuple(
                build(source, cast("type[Any]", inner), v, f"{dotted}.{i}") for i, v in items
            )
        return tuple(value_of(source, inner, item, dotted, rule) for _, item in items)
    if kind is SlaClass:
        rule = {"choices": tuple(c.value for c in SlaClass)}
    wanted = str if kind is SlaClass else kind
    if rule.get("size") and isinstance(value, str):
        value = _size_of(source, value, dotted)
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted and not (wanted is str and isinstance(value, str)):
        given = value if wanted is int and isinstance(value, float) else _kind(value)
        raise source.error(errors.CONFIG_TYPE, dotted, f"must be {KINDS[wanted]}, not {given}")
    _check_rule(source, value, dotted, rule)
    if rule.get("path") and value:
        return source.file_path(value, dotted)
    return SlaClass(value) if kind is SlaClass else value


def _size_of(source: Source, text: str, dotted: str) -> int:
    """Bytes of a text such as "10GB", "512 MiB" or "1.5T"; a unit without B counts by 1,024."""
    found = SIZE.fullmatch(text)
    if found is None:
        raise source.error(
            errors.CONFIG_TYPE,
            dotted,
            f"= {text[:40]!r} is no size",
            fix='a whole number of bytes, or text with a unit: "10GB", "512MiB"',
        )
    base = 1000 if found[3] and not found[4] else 1024
    return round(float(found[1]) * base ** " KMGT".index(found[2].upper() or " "))


def _check_rule(source: Source, value: Any, dotted: str, rule: Table) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = rule.get("low", 0), rule.get("high", 1 << 31)
        if rule.get("zero") and value == 0:
            return
        if not low <= value <= high:  # also refuses NaN
            raise source.error(
                errors.CONFIG_BOUNDS,
                dotted,
                f"= {value} is out of bounds",
                fix=f"{low:,} to {high:,}" + (", or 0 = derived" if rule.get("zero") else ""),
            )
    choices = cast("tuple[str, ...]", rule.get("choices", ()))
    if choices and value not in choices:
        near = difflib.get_close_matches(str(value), choices, 1)
        fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(choices)}"
        raise source.error(errors.CONFIG_CHOICE, dotted, f"= {value!r} is not known", fix=fix)
    if isinstance(value, str) and "\0" in value:
        raise source.error(errors.CONFIG_CHOICE, dotted, "holds a zero byte")


def _kind(value: object) -> str:
    return KINDS.get(type(value), type(value).__name__)
