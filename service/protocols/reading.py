"""The reading of a request's body, from bytes to prompt tokens, in a text process.

Bodies are hostile and large: parsing, checking and tokenising them may take seconds, and hold the
interpreter's lock. `read` runs in a process of `batchengine.text.pool`; the daemon keeps the bytes
as they came, and gets a `Reading`, which is small but for the token ids.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any, cast

import msgspec

from batchengine import errors
from batchengine.core import CONSTRAINT_CHARS_MAX, Constraint
from service.protocols import carriers, requests, strict_json
from service.protocols.conversation import MEDIA_PARTS
from service.protocols.llama import texts
from service.protocols.markup.history import MissingNames
from service.protocols.markup.parser import parser_of
from service.protocols.output import CALL_PREFIXES, call_id_of, calls_of
from service.protocols.protocol import PastAnswer, PromptEncoder, PromptLimits, Protocol
from service.protocols.requests import Prompt
from service.protocols.responses import past_items
from service.protocols.responses.formatter import TURN_PREFIX
from service.protocols.schema import Common
from service.protocols.table import BY_NAME

TASKS = {**texts.TASKS, "input-items": past_items.page}
IGNORED_MAX = 64  # names of ignored fields that the daemon takes of one body
READER = "service.protocols.reading:read"  # as the engine passes it to its text processes
NO_PROMPT = Prompt([], 0, -1, "")


class Question(msgspec.Struct, array_like=True, frozen=True):
    """The facts of the daemon that decide how a body is read."""

    protocol: str
    limits: PromptLimits
    strict: bool = False  # refuse unknown fields
    task: str = ""  # one of TASKS instead of a generation
    answers: list[PastAnswer] | None = None  # to what an earlier `Reading` asked for


class Reading(msgspec.Struct, array_like=True, frozen=True):
    """A body that was read: its fields, the first names of ignored ones, and its prompts.

    Of `fields.metadata` it has what names a session: the rest may be as large as a body. `turns`:
    the body refers to these turns and was not read; it is asked again with their answers.
    `has_results`: of their calls, so they need not be stored responses.
    """

    fields: Common
    ignored: list[str] = []
    prompt: Prompt = NO_PROMPT
    constraint_digest: bytes = b""
    turns: list[str] = []
    has_results: bool = False


encode = msgspec.msgpack.Encoder().encode
_decode_question = msgspec.msgpack.Decoder(Question).decode
decode_reading = msgspec.msgpack.Decoder(Reading).decode


def read(text: PromptEncoder, question: bytes, data: bytes) -> bytes:
    """A `Reading` of the body `data`, as msgpack, or the answer of a task, as JSON; raises
    BatchEngineError 400."""
    asked = _decode_question(question)
    _check_size(data, asked.limits.context_tokens)
    if asked.task:
        return TASKS[asked.task](text, asked.limits, data)
    protocol: Protocol[Any] = BY_NAME[asked.protocol]  # Any: each row has its own body
    body, ignored = protocol.parse(data)
    protocol.check(body)
    common, limits = protocol.common(body), asked.limits
    common = msgspec.structs.replace(common, metadata=carriers.naming(common.metadata))
    if turns := protocol.turns(body):
        if asked.answers is None:
            return encode(Reading(common, turns=turns))
        body = protocol.resolved(body, asked.answers)
    if common.batchengine is not None and common.batchengine.append is not None:
        limits = msgspec.structs.replace(limits, append=common.batchengine.append)
    limits = msgspec.structs.replace(limits, called=_called(asked.answers or ()))
    try:
        prompt = protocol.read_prompt(body, text, limits)
    except MissingNames as missing:
        turns = [turn.removeprefix(TURN_PREFIX) for turn in missing.turns]
        if turns and asked.answers is None:
            return encode(Reading(common, turns=turns, has_results=True))
        why = (
            "this model's chat template wants the name of the tool in front of its result, and no"
            f" answer is known that has the call {missing.call[:64]!r}: send the call_id of the"
            f" answer{', or the field `name`' if limits.append else ''}"
        )
        param = None if limits.append else "previous_response_id"
        raise errors.NOT_APPENDABLE(why=why, param=param) from None
    if limits.append and not prompt.append:
        raise errors.NOT_APPENDABLE(why="only messages can be appended, no plain text")
    ignored += prompt.unread
    if ignored and asked.strict:
        raise errors.UNKNOWN_FIELDS(names=", ".join(ignored[:8]), param=ignored[0])
    constraint = prompt.constraint
    if constraint is not None and len(constraint.text) > CONSTRAINT_CHARS_MAX:
        why = f"it has {len(constraint.text)} characters, and {CONSTRAINT_CHARS_MAX} are allowed"
        raise errors.GRAMMAR_REFUSED(why=why, param=prompt.constraint_param)
    prompt = dataclasses.replace(prompt, unread=(), digest=_digest(body))
    digest = b"" if constraint is None else _digest_of(constraint)
    return encode(Reading(common, ignored[:IGNORED_MAX], prompt, digest))


def _called(answers: Iterable[PastAnswer]) -> dict[str, str]:
    """The names of tools by the ids of their calls."""
    found: dict[str, str] = {}
    for answer in answers:
        parser = parser_of(answer.output)
        for call in calls_of([*parser.push(answer.text), *parser.flush()]):
            for prefix in CALL_PREFIXES:
                found[call_id_of(TURN_PREFIX + answer.turn, call.call, prefix)] = call.name
    return found


def _check_size(data: bytes, context_tokens: int) -> None:
    """Raises 413 for a body with more than a prompt of this context needs. Images and files do not
    count: those in results of tools are left out of the prompt, and others are refused."""
    bytes_max = requests.body_bytes_max(context_tokens)
    if len(data) <= bytes_max:
        return
    body = strict_json.parse_object(data)
    media = _media_bytes(body.get("messages")) + _media_bytes(body.get("input"))
    if len(data) - media > bytes_max:
        raise errors.TEXT_OF_BODY_TOO_LARGE(bytes_max=bytes_max, context=context_tokens)


def _media_bytes(value: object) -> int:
    """The bytes of images and files in the content of messages, or in the output of tools."""
    if isinstance(value, list):
        return sum(map(_media_bytes, cast("list[object]", value)))
    if not isinstance(value, dict):
        return 0
    part = cast("dict[str, object]", value)
    if part.get("type") in MEDIA_PARTS:
        return len(msgspec.json.encode(part))
    return _media_bytes(part.get("content")) + _media_bytes(part.get("output"))


def _digest_of(constraint: Constraint) -> bytes:
    return hashlib.sha256(f"{constraint.kind} {constraint.text}".encode()).digest()


def _digest(body: msgspec.Struct) -> str:
    """A digest of a body without its fields about streaming."""
    values = msgspec.structs.asdict(body) | {"stream": None, "stream_options": None}
    return hashlib.sha256(msgspec.json.encode(values)).hexdigest()
