"""Messages of the text link, between the engine and one text process.

The engine sends Open, then one request at a time; the process answers each with Done or Refused,
and reports a Phase before work that a template or a text may make long.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from batchengine import errors
from batchengine.core import BatchEngineError
from batchengine.errors import Problem
from batchengine.wire.frames import Frame, LinkSchema, Message

VERSION = 2
BYTES_PER_CPU_S = 1 << 20  # a long text gets a second more for each so many bytes
# phases
TEMPLATE, TOKENIZER, GRAMMAR = "the chat template", "the tokenizer", "the grammar"


class Open(Message, tag=1, frozen=True):
    """Engine -> process, first frame: the vocabulary, the template and the limits.

    `template` None = the one of the vocabulary's file. `today` (ISO 8601) is the date that
    templates see.
    """

    vocabulary: str
    template: str | None
    today: str
    cpu_s: int
    memory_bytes: int
    output_chars_max: int


class Encode(Message, tag=2, frozen=True):
    """Engine -> process: tokens of the UTF-8 payload; `special` = control tokens count."""

    special: bool


class EncodeChat(Message, tag=3, frozen=True):
    """Engine -> process: tokens of a chat; the payload is msgpack [messages, tools, kwargs]."""


class Read(Message, tag=4, frozen=True):
    """Engine -> process: the payload, a request's body, goes to the process's reader."""

    question: bytes


class Phase(Message, tag=5, frozen=True):
    """Process -> engine: what runs from now on, for the error if it never ends."""

    name: str


class Done(Message, tag=6, frozen=True):
    """Process -> engine: the payload is the result. `is_last` = the process ends after this."""

    is_last: bool


class Refused(Message, tag=7, frozen=True):
    """Process -> engine: the request is refused; the fields of a BatchEngineError."""

    code: str
    what: str
    why: str
    fix: str
    param: str | None
    retry_ms: int | None
    details: dict[str, int | str]
    is_last: bool

    @classmethod
    def of(cls, error: BatchEngineError, is_last: bool) -> Refused:
        """The message that carries `error`."""
        return cls(
            error.code, error.what, error.why, error.fix, error.param, error.retry_ms,
            error.details, is_last,
        )  # fmt: skip


class Check(Message, tag=8, frozen=True):
    """Engine -> process: whether an answer can be constrained to the payload, a
    `core.Constraint` as msgpack. The result is a list of what it does not enforce."""


TextMessage = Open | Encode | EncodeChat | Read | Check | Phase | Done | Refused
TextRequest = Encode | EncodeChat | Read | Check
TextFrame = Frame[TextMessage]
TEXT_LINK = LinkSchema[TextMessage](
    VERSION, Open, Encode, EncodeChat, Read, Check, Phase, Done, Refused
)


def problem_of(phase: str) -> Problem:
    """What it is called that a process broke a limit in this phase."""
    rows = {TEMPLATE: errors.TEMPLATE_STOPPED, GRAMMAR: errors.GRAMMAR_REFUSED}
    return rows.get(phase, errors.TEXT_UNUSABLE)


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    return array("i", tokens).tobytes()


def token_ids(data: bytes) -> list[int]:
    """The inverse of `token_bytes`."""
    return array("i", data).tolist()
