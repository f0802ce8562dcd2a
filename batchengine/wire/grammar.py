"""Messages of the grammar link, between the engine and the process that computes masks.

The engine sends Setup, then any number of requests, for many matchers at a time; a matcher has one
request at most without an answer. The process answers Begin and Accept with Allowed or Broken.
"""

from __future__ import annotations

from batchengine.core import Constraint
from batchengine.wire.frames import Frame, LinkSchema, Message

VERSION = 1


class Setup(Message, tag=1, frozen=True):
    """Engine -> process, first frame: the file with the vocabulary, and the limits."""

    vocabulary: str
    threads: int
    memory_bytes: int


class Started(Message, tag=2, frozen=True):
    """Process -> engine: requests are answered from now on."""


class Begin(Message, tag=3, frozen=True):
    """Engine -> process: compile a grammar; the payload has the tokens of the answer so far."""

    matcher: int
    tenant: str
    constraint: Constraint


class Accept(Message, tag=4, frozen=True):
    """Engine -> process: the answer has another token."""

    matcher: int
    token: int


class Close(Message, tag=5, frozen=True):
    """Engine -> process: forget a matcher. No answer."""

    matcher: int


class Allowed(Message, tag=6, frozen=True):
    """Process -> engine: the payload is the mask after `n_tokens` tokens of the answer.

    `elapsed_us` is the time of the whole request but for its wait.
    """

    matcher: int
    n_tokens: int
    elapsed_us: int


class Broken(Message, tag=7, frozen=True):
    """Process -> engine: the grammar does not compile, or is too complex to go on."""

    matcher: int
    why: str


GrammarMessage = Setup | Started | Begin | Accept | Close | Allowed | Broken
GrammarFrame = Frame[GrammarMessage]
GRAMMAR_LINK = LinkSchema[GrammarMessage](
    VERSION, Setup, Started, Begin, Accept, Close, Allowed, Broken
)
