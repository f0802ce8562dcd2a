"""Options that many commands take, and answers as lines of a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_LOCKED = 3
EXIT_NO_DAEMON = 4
EXIT_INTERRUPTED = 130

Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON.")]
Debug = Annotated[bool, Parameter(name="--debug", negative=(), help="Tracebacks and debug log.")]
Socket = Annotated[
    str | None,
    Parameter(
        name="--admin-socket",
        env_var="BATCHENGINE_ADMIN_SOCKET",
        help="Admin socket of the daemon; the default is where `serve` puts it.",
    ),
]
ConfigFile = Annotated[
    Path | None, Parameter(name="--config", help="TOML file; options win over it.")
]
SessionId = Annotated[
    str,
    Parameter(help="A session: its id, a unique beginning of it, or the id its client uses."),
]
KeyName = Annotated[
    str | None,
    Parameter(
        name=["--key-name", "--tenant"],
        help="The API key the session belongs to, where ids of several keys look alike.",
    ),
]


SHARED = Path(__file__).resolve().parents[2]  # beside `service`: in a checkout, and in a wheel
POCKET = SHARED / "pocket" / "pocket-q4_0.gguf"


def model_file(given: Path | None) -> Path | None:
    """A model's file; `pocket` is the one of this installation, unless there is such a file."""
    return POCKET if given is not None and str(given) == "pocket" and not given.is_file() else given


def admin_path(given: str | None) -> str:
    """The admin socket to talk to."""
    if given:
        return given
    from batchengine import config as configuration

    return configuration.load(None, {}).server.admin_socket


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def show(value: object, json: bool, lines: Callable[[], Iterable[str]]) -> None:
    """Prints the answer of a command as JSON or as lines, which are made only then."""
    if json:
        print_json(value)
    else:
        print("\n".join(lines()))


def table_lines(rows: Sequence[dict[str, Any]], nothing: str) -> list[str]:
    """Rows as aligned columns under a header; `nothing` if there are none."""
    if not rows:
        return [nothing]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[cell(row.get(name)) for name in columns] for row in rows]
    widths = [max(len(line[i]) for line in [columns, *cells]) for i in range(len(columns))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in [columns, *cells]
    ]


def cell(value: object) -> str:
    """One value of a table; "-" where there is none."""
    if value is None or value == "":
        return "-"
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return text if text.isprintable() else ascii(text)  # it must not break the table
