"""Reference pages of docs/, made from the code that they describe.

`python -m tools.make_docs` writes them; with `--check` it only names those that are out of date.
Settings come from the dataclasses of `batchengine.config.settings` and the comments beside their
fields, errors from the catalogue, metrics from the registry, routes from the application's rows.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, cast

import msgspec

from batchengine import errors
from batchengine.config import settings
from batchengine.metrics import Metrics
from service.http.answers import ANSWER_HEADERS, STATUS
from service.http.app import ROUTES
from service.http.routes.route import Route
from service.protocols.carriers import REQUEST_HEADERS
from service.protocols.schema import Extension

DOCS = Path(__file__).resolve().parents[1] / "docs"
NOTE = "<!-- Made by tools/make_docs.py (make docs); edit the code that it names. -->\n"
_COMMENT = re.compile(r"^    (\w+):[^#]*?(?:  # (.*))?$")
_SECTION = re.compile(r"^(\[.*?\][^:]*): (.*)", re.DOTALL)
_MODULE = re.compile(
    r"\s*\((?:see\s+)?`(?:batchengine|kv_store|service)[.\w]*`\)"
    r"|(?:;\s*|\s*)(?:see\s+)?`(?:batchengine|kv_store|service)[.\w]*`"
)

AREAS = {
    "11": "Configuration and command line",
    "12": "Engine",
    "13": "Model file",
    "15": "Text",
    "16": "Store",
    "17": "HTTP",
    "21": "Frames between processes",
    "22": "Worker",
    "23": "Computation",
    "24": "Sessions",
    "25": "Links between daemons",
    "30": "Moves",
}


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# ---- configuration ----


def configuration() -> str:
    parts = [
        "# Configuration",
        NOTE,
        "`batchengine serve --config FILE` reads a TOML file. Without one, every key has the"
        " default below, and options of `serve` replace single keys. An unknown key, a wrong type"
        " or a value outside its bounds is refused with the line and the nearest key; `batchengine"
        " check --config FILE` says so without starting. Relative paths are taken from the file's"
        " folder; 0 and empty text mean that a value is derived from the machine or the model."
        ' Sizes (`..._bytes`) may be text with a unit: `"16GB"`, `"512MiB"`.',
        "## Top level",
        _paragraphs(inspect.getdoc(settings.Config) or ""),
        _keys(settings.Config, sections=False),
    ]
    for kind in _sections():
        found = _SECTION.match(inspect.getdoc(kind) or "")
        title, text = (found[1], found[2]) if found else (kind.__name__, "")
        parts += [f"## `{title}`", _paragraphs(text[:1].upper() + text[1:]), _keys(kind)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _sections() -> Iterator[type]:
    kinds = [kind for _, kind in inspect.getmembers(settings, dataclasses.is_dataclass)]
    written = [k for k in kinds if k.__module__ == settings.__name__ and k is not settings.Config]
    yield from sorted(written, key=lambda kind: inspect.getsourcelines(kind)[1])


def _paragraphs(text: str) -> str:
    return _MODULE.sub("", text).strip()


def _keys(kind: Any, *, sections: bool = True) -> str:
    comments = _comments(kind)
    rows: list[tuple[str, ...]] = []
    for one in dataclasses.fields(kind):
        default = _default(one)
        if dataclasses.is_dataclass(default) or _is_nested(default):
            continue
        if one.name == "name" and kind is not settings.LaneConfig:  # the table's own name
            continue
        name = str(one.metadata.get("toml", one.name))
        note = comments.get(one.name, "")
        if note.startswith("TOML: "):
            continue
        rows.append((f"`{name}`", _shown(default), _bounds(one.metadata), note))
    return table(("key", "default", "values", "meaning"), rows) if rows else ""


def _default(one: dataclasses.Field[Any]) -> object:
    if one.default is not dataclasses.MISSING:
        return one.default
    if one.default_factory is not dataclasses.MISSING:
        return one.default_factory()
    return dataclasses.MISSING


def _is_nested(value: object) -> bool:
    return isinstance(value, tuple) and any(map(dataclasses.is_dataclass, cast("Any", value)))


def _shown(value: object) -> str:
    if value is dataclasses.MISSING:
        return "by class"
    if value is None:
        return ""
    if isinstance(value, Enum):
        return f"`{value.value}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return "`[" + ", ".join(f'"{item}"' for item in cast("tuple[object, ...]", value)) + "]`"
    if isinstance(value, int | float):
        return f"{value:,}"
    return f'`"{value}"`'


def _bounds(metadata: Any) -> str:
    if "choices" in metadata:
        return ", ".join(f"`{choice}`" for choice in metadata["choices"])
    if "low" in metadata:
        return f"{metadata['low']:,} to {metadata['high']:,}"
    return "a path" if metadata.get("path") else ""


def _comments(kind: type) -> dict[str, str]:
    """The comment behind each field."""
    found: dict[str, str] = {}
    for line in inspect.getsource(kind).splitlines():
        if (match := _COMMENT.match(line)) and match[2]:
            found[match[1]] = match[2]
    return found


# ---- errors ----


def troubleshooting() -> str:
    names = {
        value.code: name
        for name, value in vars(errors).items()
        if isinstance(value, errors.Problem)
    }
    rows = [value for value in vars(errors).values() if isinstance(value, errors.Problem)]
    parts = [
        "# Troubleshooting by error code",
        NOTE,
        "Every error of the daemon, its commands and its HTTP answers has a code, says what"
        " happened and why, and how to mend it. Words in braces are filled in. HTTP answers carry"
        " the code as `batchengine_code`; `code` is the word that clients compare. A status is that"
        " of an HTTP answer. Where several faults share a code, the table has what they are about,"
        " and the message has the rest.",
    ]
    for area, title in AREAS.items():
        chosen = sorted((row for row in rows if row.code[2:4] == area), key=lambda row: row.code)
        if not chosen:
            continue
        lines = [_problem(row, names[row.code]) for row in chosen]
        head = ("code", "status", "`code` field", "what and why", "fix")
        parts += [f"## {title}", table(head, [tuple(map(_no_markup, line)) for line in lines])]
    known = {row.code[2:4] for row in rows}
    assert known <= set(AREAS), f"areas without a title: {known - set(AREAS)}"
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _problem(row: errors.Problem, name: str) -> tuple[str, ...]:
    what, fix = _text(row.what, row.why), "" if row.fix == "{fix}" else row.fix
    what = name.lower().replace("_", " ") if what == "{what}" else what
    return f"**{row.code}**", str(STATUS[row.kind]), f"`{row.name}`", what, fix


def _text(what: str, why: str) -> str:
    why = "" if why == "{why}" else why
    return f"{what}: {why}" if why else what


def _no_markup(text: str) -> str:
    return text.replace("<", "&lt;") if not text.startswith("`") else text


# ---- metrics ----


def metrics() -> str:
    rows: list[tuple[str, ...]] = []
    for family in Metrics().registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        rows.append((f"`{name}`", family.type, family.documentation))
    intro = (
        "`GET /metrics` answers in the text format of Prometheus. Times are seconds. Labels are"
        " classes, lanes, routes, tiers and outcomes, and at most 64 names that clients"
        " choose, those of ignored fields."
    )
    return f"# Metrics\n\n{NOTE}\n{intro}\n\n" + table(("name", "type", "meaning"), sorted(rows))


# ---- routes ----


def api() -> str:
    intro = (
        "Every route that the daemon has. `GET /openapi.json` has the same as an OpenAPI 3.1"
        " document, with the schema of every body. Fields that a body may have and that are not"
        " listed are ignored and counted, or refused with `?strict=1`."
    )
    parts = ["# HTTP API", NOTE, intro]
    tags = dict.fromkeys(route.tag for route in ROUTES)
    for tag in tags:
        rows = [_route(route) for route in ROUTES if route.tag == tag]
        parts += [f"## {tag.capitalize()}", table(("route", "what it does"), rows)]
    parts += [
        "## Headers of requests",
        "Where several headers say the same, the first one that is set counts; fields of the body"
        " come before headers.",
        table(("header", "meaning"), [(_codes(names), text) for names, text in REQUEST_HEADERS]),
        "## Headers of answers",
        table(
            ("header", "meaning"), [(_codes([one]), text) for one, text in ANSWER_HEADERS.items()]
        ),
        "## Object `batchengine` of bodies",
        _fields(Extension),
    ]
    bodies = {route.body: route.path for route in ROUTES if route.body is not None}
    for body, _ in sorted(bodies.items(), key=lambda pair: pair[0].__name__):
        paths = [f"`{route.path}`" for route in ROUTES if route.body is body]
        parts += [f"## Body `{body.__name__}`", "Of " + ", ".join(paths) + ".", _fields(body)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _route(route: Route) -> tuple[str, str]:
    query = "".join(f" `{name}`: {text}" for name, text in route.query)
    path = re.sub(r"\{(\w+)(?::[^{}]*)?\}", r"{\1}", route.path)
    return f"`{route.method} {path}`", route.summary + query


def _fields(body: type[msgspec.Struct]) -> str:
    schemas = msgspec.json.schema_components([body], ref_template="{name}")[1]
    schema = schemas[body.__name__]
    required = set(schema.get("required", ()))
    rows = [
        (
            f"`{name}`",
            _type(value, schemas),
            "required" if name in required else value.get("description", ""),
        )
        for name, value in schema["properties"].items()
    ]
    return table(("field", "value", ""), rows)


def _type(schema: Any, schemas: Any) -> str:
    if "$ref" in schema:
        name = schema["$ref"]
        inner = schemas.get(name, {}).get("properties")
        return f"object with {', '.join(f'`{key}`' for key in inner)}" if inner else "object"
    if "anyOf" in schema:
        kinds = [_type(one, schemas) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        most = f", at most {schema['maxItems']:,}" if "maxItems" in schema else ""
        return f"list of {_type(schema.get('items', {}), schemas)}{most}"
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    bounds = "" if low is None and high is None else f" {_number(low)} … {_number(high)}"
    if "maxLength" in schema:
        bounds = f", at most {schema['maxLength']:,} characters"
    return f"{kind}{bounds}"


def _number(value: Any) -> str:
    return "" if value is None else f"{value:,}"


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "troubleshooting.md": troubleshooting,
    "metrics.md": metrics,
    "api.md": api,
}


def outdated() -> list[str]:
    """Pages that differ from the code, or are missing."""
    return [name for name, make in PAGES.items() if _read(DOCS / name) != make()]


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def main(argv: list[str]) -> int:
    if argv == ["--check"]:
        names = outdated()
        for name in names:
            print(f"docs/{name} is out of date: run make docs")
        return 1 if names else 0
    for name, make in PAGES.items():
        (DOCS / name).write_text(make())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
