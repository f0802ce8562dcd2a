"""A timeline as the messages that it was rendered from, as far as control tokens show them.

Reads tokens; changes nothing. A template that marks messages otherwise gives none: then the whole
text is the answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

SLICE = 4096  # tokens between two chances for other tasks
HEADER_TOKENS_MAX = 16  # from the mark of a message to the end of its role
HEADER = re.compile(rb"\s*([a-z_]{1,16})\s*\n")


async def messages_of(
    tokens: Sequence[int],
    marks: Collection[int],
    control: Collection[int],
    piece: Callable[[int], bytes],
) -> list[dict[str, Any]]:
    """Role and content of each message; `marks` begin one, tokens of `control` show nothing.

    Text between the end of a message and the next one is its own: an answer need not end there.
    """
    found: list[dict[str, Any]] = []
    role, text, has_ended = "", bytearray(), False
    header: list[int] | None = None  # tokens since a mark, until the role is known
    for at, token in enumerate(tokens):
        if at % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        if token in marks:
            text += _shown(header, control, piece)
            header = []
        elif header is not None:
            header.append(token)
            is_over = token in control
            head = b"".join(map(piece, header[:-1] if is_over else header))
            named = HEADER.match(head + b"\n" if is_over else head)
            if named is not None:
                _close(found, role, text)
                text = bytearray(b"" if is_over else head[named.end() :])
                role, header, has_ended = named[1].decode(), None, False
            elif len(header) >= HEADER_TOKENS_MAX:  # no header: a model wrote the mark
                text += _shown(header, control, piece)
                header = None
        elif token in control:
            has_ended = True
        else:
            text += piece(token)
    text += _shown(header, control, piece)
    _close(found, role, text, is_last=not has_ended)
    return found


def _shown(
    header: list[int] | None, control: Collection[int], piece: Callable[[int], bytes]
) -> bytes:
    """The text of tokens behind a mark that began no message."""
    return b"".join(piece(token) for token in header or () if token not in control)


def _close(
    found: list[dict[str, Any]], role: str, text: bytearray, *, is_last: bool = False
) -> None:
    """Adds a message; the last one only if it has begun, since prompts end with an empty one."""
    content = bytes(text).decode("utf-8", "replace").strip()
    if role and (content or not is_last):
        found.append({"role": role, "content": content})


async def text_of(tokens: Sequence[int], piece: Callable[[int], bytes]) -> str:
    """The text of all tokens."""
    parts: list[bytes] = []
    for start in range(0, len(tokens), SLICE):
        parts.append(b"".join(map(piece, tokens[start : start + SLICE])))
        await asyncio.sleep(0)
    return b"".join(parts).decode("utf-8", "replace")
