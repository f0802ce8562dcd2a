"""Strict JSON of request bodies: bytes to plain values, or one error that names the fault.

Of an object that was parsed every string is encodable UTF-8 text, every number finite, no key
occurs twice and nothing nests deeper than DEPTH_MAX; `object_of` and `list_of` read values in it.
"""

from __future__ import annotations

import json
import math
from typing import Any, cast

from batchengine import errors
from service.session_ids import printable

DEPTH_MAX = 64  # tool schemas of real agents stay below 20
TOO_DEEP = f"it nests deeper than {DEPTH_MAX} levels"
BYTE_ORDER_MARK = "\ufeff"  # with which some programs begin a text
DIGITS_MAX = 40  # no field of any request holds a longer integer


def parse_object(body: bytes | bytearray) -> dict[str, object]:
    """The JSON object in `body`; raises BatchEngineError 400."""
    try:
        text = body.decode("utf-8").removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        raise errors.INVALID_JSON(why=f"invalid UTF-8 at byte {error.start}") from None
    try:
        value: object = json.loads(
            text,
            object_pairs_hook=_unique_pairs,
            parse_int=_short_int,
        )
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise errors.INVALID_JSON(why=f"{what} at character {error.pos}") from None
    except RecursionError:
        raise errors.INVALID_JSON(why=TOO_DEEP) from None
    if not isinstance(value, dict):
        raise errors.INVALID_JSON(why="the top level must be an object")
    root = cast("dict[str, object]", value)
    _check_tree(root)
    return root


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                name = printable(key)
                raise errors.INVALID_JSON(why=f"the key {name!r} occurs twice", param=name)
            seen.add(key)
    return made


def _short_int(text: str) -> int:
    if len(text) > DIGITS_MAX:
        raise errors.INVALID_JSON(why=f"the number {text[:12]}… has {len(text):,} digits")
    return int(text)


def _check_tree(root: dict[str, object]) -> None:
    """Checks depth, surrogates and finiteness; errors name the top-level key."""
    for name, value in root.items():
        why = _fault(value) if _encodable(name) else "a key holds half a surrogate pair"
        if why:
            raise errors.INVALID_JSON(why=why, param=printable(name))


def _fault(value: object) -> str:
    """What is wrong with a value of the top level, "" = nothing; without recursion."""
    level = [value]
    for _ in range(DEPTH_MAX - 1):
        below: list[object] = []
        for item in level:
            if isinstance(item, str):
                if not _encodable(item):
                    return "a string holds half a surrogate pair"
            elif isinstance(item, float):
                if not math.isfinite(item):  # NaN, Infinity and 1e999 end up here
                    return "a number is not finite"
            elif isinstance(item, dict):
                entries = cast("dict[str, object]", item)
                below.extend(entries.keys())
                below.extend(entries.values())
            elif isinstance(item, list):
                below.extend(cast("list[object]", item))
        if not below:
            return ""
        level = below
    return TOO_DEEP


def object_of(value: object) -> dict[str, Any]:
    """A value that is an object; an empty one in place of any other value."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def list_of(value: object) -> list[Any]:
    """A value that is a list; an empty one in place of any other value."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def _encodable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
