"""Messages of the grammar link, between the engine and the process that computes masks.

The engine sends Setup, then any number of requests, for many matchers at a time; a matcher has one
request at most without an answer. The process answers Begin and Accept with Allowed or Broken, and
Follow with Followed. Tokens are i32, little-endian.
"""

from __future__ import annotations

from batchengine.core import Constraint
from batchengine.wire.frames import Frame, LinkSchema, Message

VERSION = 2


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
    """Engine -> process: the answer has the payload's tokens besides."""

    matcher: int


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


class Follow(Message, tag=8, frozen=True):
    """Engine -> process: the masks behind each token of a draft, which is the payload. It is no
    part of the answer."""

    matcher: int


class Followed(Message, tag=9, frozen=True):
    """Process -> engine: the payload has the masks behind leading tokens of a draft, those which
    the grammar allows and for which there was time, one after another. can_follow: further drafts
    may have some."""

    matcher: int
    can_follow: bool


GrammarMessage = Setup | Started | Begin | Accept | Close | Allowed | Broken | Follow | Followed
GrammarFrame = Frame[GrammarMessage]
GRAMMAR_LINK = LinkSchema[GrammarMessage](
    VERSION, Setup, Started, Begin, Accept, Close, Allowed, Broken, Follow, Followed
)
