"""Signatures of thinking blocks, which clients send back with the block and never read.

One of a block whose text the client did not want holds that text: the next prompt has it again,
and with it the KV that the session has of it. It proves nothing: a client may change its own
history.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import Any

SHOWN = "batchengine"  # of a block whose text is in it; SDKs insist on some text
HIDDEN = "batchengine."
UNPACKED_MIN = 4096  # bytes of text that a signature may hold, and
UNPACKED_MAX = 16  # for each packed one: bounds the memory that a body costs


class HiddenReasoning:
    """The text of one block as it grows, compressed."""

    def __init__(self) -> None:
        self._packer = zlib.compressobj(1)
        self._packed: list[bytes] = []

    def push(self, text: str) -> None:
        self._packed.append(self._packer.compress(text.encode()))

    def signature(self) -> str:
        """The signature of the whole text; ends it."""
        packed = b"".join(self._packed) + self._packer.flush()
        return HIDDEN + base64.b64encode(packed).decode()


def reasoning_of(block: dict[str, Any]) -> str:
    """The text of a thinking block that came back; "" for a hidden one of another server."""
    text, signature = block.get("thinking"), block.get("signature")
    if isinstance(text, str) and text:
        return text
    if not isinstance(signature, str) or not signature.startswith(HIDDEN):
        return ""
    try:
        packed = base64.b64decode(signature[len(HIDDEN) :], validate=True)
        unpacker = zlib.decompressobj()
        found = unpacker.decompress(packed, UNPACKED_MIN + UNPACKED_MAX * len(packed))
        return found.decode() if unpacker.eof else ""
    except (binascii.Error, zlib.error, UnicodeDecodeError):
        return ""
