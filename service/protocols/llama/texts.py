"""Tasks about texts in a text process: tokenize, detokenize and apply-template.

Each takes the bytes of a body and returns the JSON of the answer, so that the daemon handles
neither. The forms are llama-server's. An answer is bounded by ANSWER_BYTES_MAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from batchengine import errors
from service.protocols import schema, strict_json
from service.protocols.openai.chat import CHAT
from service.protocols.protocol import PromptEncoder, PromptLimits

ANSWER_BYTES_MAX = 16 << 20
TOKENS_MAX = 1 << 20  # of one text
PIECES_MAX = 1 << 16  # with their texts, of up to a hundred bytes of JSON each

_encode = msgspec.json.Encoder().encode


class TokenizeRequest(Struct, kw_only=True):
    """`add_special`: with the begin of sequence where the model has one; `parse_special`: control
    tokens written in the text count as such; `with_pieces`: each token with its text."""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Struct, kw_only=True):
    tokens: Annotated[list[int], Meta(max_length=TOKENS_MAX)]


Body = TypeVar("Body", bound=Struct)
Task = Callable[[PromptEncoder, PromptLimits, bytes], bytes]


def apply_template(text: PromptEncoder, limits: PromptLimits, data: bytes) -> bytes:
    """The text of a chat's prompt: the bytes of the tokens that would be computed."""
    body, _ = CHAT.parse(data)
    CHAT.check(body)
    limits = msgspec.structs.replace(
        limits, context_tokens=schema.TOKENS_MAX
    )  # its body is bounded
    (tokens,) = CHAT.read_prompt(body, text, limits).tokens
    return _encode({"prompt": _joined(text, tokens), "tokens": len(tokens)})


def tokenize(text: PromptEncoder, limits: PromptLimits, data: bytes) -> bytes:
    """The tokens of a text."""
    body = _read(TokenizeRequest, data)
    tokens = text.encode(body.content, special=body.parse_special)
    if not body.add_special:
        added = text.encode("", special=False)
        if added and tokens[: len(added)] == added:
            tokens = tokens[len(added) :]
    if not body.with_pieces:
        _check_size(8 * len(tokens))
        return _encode({"tokens": tokens})
    _check_size(ANSWER_BYTES_MAX // PIECES_MAX * len(tokens))
    return _encode({"tokens": [{"id": one, "piece": _piece(text.piece(one))} for one in tokens]})


def detokenize(text: PromptEncoder, limits: PromptLimits, data: bytes) -> bytes:
    """The text of tokens, with the names of control tokens."""
    tokens = _read(DetokenizeRequest, data).tokens
    wrong = next((one for one in tokens if not 0 <= one < limits.vocab_size), None)
    if wrong is not None:
        raise errors.INVALID_FIELD(
            param="tokens",
            what=f"{wrong} is not a token",
            why=f"a token id is a whole number below {limits.vocab_size:,}",
            fix="send ids of POST /tokenize",
        )
    return _encode({"content": _joined(text, tokens)})


TASKS: dict[str, Task] = {
    "apply-template": apply_template,
    "tokenize": tokenize,
    "detokenize": detokenize,
}


def _read(kind: type[Body], data: bytes) -> Body:
    return schema.convert(kind, strict_json.parse_object(data))


def _joined(text: PromptEncoder, tokens: Iterable[int]) -> str:
    """The text of tokens; raises 400 when it is too large."""
    pieces: list[bytes] = []
    size = 0
    for token in tokens:
        piece = text.piece(token)
        size += len(piece)
        _check_size(size)
        pieces.append(piece)
    return b"".join(pieces).decode("utf-8", "replace")


def _piece(data: bytes) -> str | list[int]:
    """Text, or the bytes of a part of a character, as llama-server has it."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _check_size(byte_count: int) -> None:
    if byte_count > ANSWER_BYTES_MAX:
        raise errors.ANSWER_TOO_LARGE(mib=ANSWER_BYTES_MAX >> 20)
