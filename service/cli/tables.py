"""Tables that fit the terminal: columns give way by weight, long texts are cut.

Owns the widths. Output that goes to a file or a pipe is never cut.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

GAP = 2  # spaces between two columns
CUT_MIN = 8  # characters that a cut text keeps
CLEAR = "\033[H\033[2J"


class Column(NamedTuple):
    """One column. `weight` 0 = always shown; of the others the highest gives way first. A text of a
    `flexible` column may be cut; numbers are on the right."""

    name: str
    weight: int = 0
    flexible: bool = False
    right: bool = False


def width() -> int:
    """Columns of the terminal; 0 = no terminal, nothing has to fit."""
    return shutil.get_terminal_size((0, 0)).columns


def fitted(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], nothing: str) -> list[str]:
    """Rows under a header, as wide as the terminal at most, or `nothing` if there are none. Columns
    that are empty in all rows are left out, unless their weight is 0."""
    if not rows:
        return [nothing]
    texts = [{one.name: _cell(row.get(one.name)) for one in columns} for row in rows]
    shown = [one for one in columns if not one.weight or any(t[one.name] != "-" for t in texts)]
    sizes = {one.name: max(len(one.name), *(len(t[one.name]) for t in texts)) for one in shown}
    if wide := width():
        shown = _reduced(shown, sizes, wide)
    lines = [_line(shown, sizes, {one.name: one.name for one in shown})]
    return lines + [_line(shown, sizes, text) for text in texts]


def table_lines(rows: Sequence[Mapping[str, Any]], nothing: str) -> list[str]:
    """Rows with every field as a column that is never cut, or `nothing` if there are none."""
    names = dict.fromkeys(name for row in rows for name in row)
    return fitted([Column(name) for name in names], rows, nothing)


def _cell(value: object) -> str:
    """One value of a table; "-" where there is none."""
    if value is None or value == "":
        return "-"
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return text if text.isprintable() else ascii(text)  # it must not break the table


def _reduced(shown: list[Column], sizes: dict[str, int], wide: int) -> list[Column]:
    """The columns that fit; `sizes` of flexible ones become smaller."""

    def excess() -> int:
        return sum(sizes[one.name] for one in shown) + GAP * (len(shown) - 1) - wide

    while excess() > 0:
        flexible = [one.name for one in shown if one.flexible and sizes[one.name] > CUT_MIN]
        room = sum(sizes[name] - CUT_MIN for name in flexible)
        leaving = max(shown, key=lambda one: one.weight)
        if room >= excess() or (flexible and not leaving.weight):
            longest = max(flexible, key=lambda name: sizes[name])
            sizes[longest] -= 1
        elif leaving.weight:
            shown = [one for one in shown if one is not leaving]
        else:
            break
    return shown


def _line(shown: Sequence[Column], sizes: Mapping[str, int], texts: Mapping[str, str]) -> str:
    parts: list[str] = []
    for one in shown:
        size, text = sizes[one.name], texts[one.name]
        text = text if len(text) <= size else text[: size - 1] + "…"
        parts.append(text.rjust(size) if one.right else text.ljust(size))
    return (" " * GAP).join(parts).rstrip()


def watch(lines: Callable[[], Iterable[str]], seconds: float, count: int = 0) -> None:
    """Prints `lines` again and again, `count` times (0 = until Ctrl-C), on a cleared terminal."""
    shown = 0
    while True:
        text = "\n".join(lines())
        print(CLEAR + text if sys.stdout.isatty() else text, flush=True)
        shown += 1
        if shown == count:
            return
        time.sleep(seconds)
