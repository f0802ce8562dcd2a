"""The engine's side of constrained decoding: a matcher per turn, and the process that computes.

Owns the process, starts it with the first matcher, and replaces one that ends or hangs: it gets
every grammar again, with the tokens of its answer so far. A grammar that ends the process twice
fails its turn.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchengine import errors
from batchengine.child.command import python_command
from batchengine.child.process import ChildProcess
from batchengine.core import BatchEngineError, Constraint
from batchengine.wire.connection import FrameProtocol
from batchengine.wire.grammar import (
    GRAMMAR_LINK,
    Accept,
    Allowed,
    Begin,
    Broken,
    Close,
    Follow,
    Followed,
    GrammarFrame,
    GrammarMessage,
    Setup,
    Started,
)

log = logging.getLogger("batchengine.grammar")

STRIKES_MAX = 2  # ends of the process while it computed for one matcher
LINGER_S = 1.0  # between the end of the link and the end of the process
BACKOFF_S = 0.5  # before another attempt to start the process


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Bounds of the grammar process; a request of it takes milliseconds as a rule."""

    request_s: float = 5.0  # without any answer
    waits: int = 6  # so many times that for one request, while others are answered
    start_s: float = 30.0
    threads: int = 4
    memory_bytes: int = 2 << 30  # of all matchers
    slow_us: int = 5000  # a request that takes longer makes its turn wait for the next mask


Masked = Callable[[Sequence[bytes]], None]  # is called with masks


@dataclass(slots=True)
class _Draft:
    """Tokens that may come next, and what is called with the masks behind them."""

    tokens: array[int]
    to: Masked
    is_sent: bool = False


class Matcher:
    """The grammar of one turn. `mask` says which tokens may come after those that were accepted;
    None: not known yet. `on_change` is called when that, or `error`, has changed. may_follow:
    drafts are followed; not if the process cannot, and not any more once it has ended with a
    request of this matcher."""

    def __init__(
        self, owner: Grammars, number: int, tenant: str, constraint: Constraint, tokens: array[int]
    ) -> None:
        self.mask: bytes | None = None
        self.error: BatchEngineError | None = None
        self.is_slow = False  # the last request took long
        self.on_change: Callable[[], None] = lambda: None
        self.number, self.tenant, self.constraint, self.tokens = number, tenant, constraint, tokens
        self.strikes = 0
        self.may_follow = True
        self._owner = owner
        self._n_sent: int | None = None  # tokens that the process has; None: no grammar yet
        self._wants: Masked | None = None
        self._draft: _Draft | None = None

    def __repr__(self) -> str:
        return f"<Matcher {self.number} {self.constraint.kind} tokens={len(self.tokens)}>"

    def accept(self, tokens: Sequence[int]) -> None:
        """Add tokens of the answer."""
        self.tokens.extend(tokens)
        self.mask = self._wants = self._draft = None
        self._owner.advance(self)

    def give(self, to: Masked) -> None:
        """Call `to` with the mask, now or once it is known; an earlier `to` is forgotten."""
        if self.mask is not None:
            to([self.mask])
        else:
            self._wants = to

    def follow(self, draft: Sequence[int], to: Masked) -> None:
        """Call `to` with a mask behind each token of a draft, once they are known; those behind a
        token that the grammar does not allow are empty. It is not called if tokens are accepted
        before that, or if the process ends. An earlier draft is forgotten."""
        self._draft = _Draft(array("i", draft), to)
        self._owner.advance(self)

    def next_request(self) -> tuple[Begin | Accept | Follow, bytes] | None:
        """What the process is asked next, with its payload; None = nothing."""
        n_sent, draft = self._n_sent, self._draft
        if n_sent is None:
            self._n_sent = len(self.tokens)
            begin = Begin(self.number, self.tenant, self.constraint)
            return begin, self.tokens.tobytes()
        if n_sent < len(self.tokens):
            self._n_sent = len(self.tokens)
            return Accept(self.number), self.tokens[n_sent:].tobytes()
        if draft is None or draft.is_sent:
            return None
        draft.is_sent = True
        return Follow(self.number), draft.tokens.tobytes()

    def process_ended(self, *, asked: bool) -> None:
        """The process has nothing of this matcher any more. asked: it had a request of it."""
        self._n_sent = self._draft = None
        self.may_follow = self.may_follow and not asked

    def followed(self, masks: bytes, *, can_follow: bool) -> None:
        """Take the masks behind a draft, one after another, unless it was forgotten."""
        draft, mask = self._draft, self.mask
        self.may_follow = self.may_follow and can_follow
        if draft is None or not draft.is_sent or not mask:
            return
        self._draft = None
        firsts = [index * len(mask) for index in range(len(draft.tokens))]
        draft.to([masks[first : first + len(mask)] for first in firsts])

    def found(self, mask: bytes) -> None:
        """Take the mask of the process."""
        self.mask, self.strikes = mask, 0
        wants, self._wants = self._wants, None
        if wants is not None:
            wants([mask])
        self.on_change()

    def fail(self, error: BatchEngineError) -> None:
        """Give up; later calls do nothing."""
        if self.error is None:
            self.error = error
            self.on_change()

    def close(self) -> None:
        """Forget the grammar. Idempotent."""
        self.on_change = lambda: None
        self._owner.forget(self)


class Grammars:
    """The matchers of one engine. All methods run on its event loop."""

    def __init__(
        self,
        vocabulary: str,
        limits: GrammarLimits | None = None,
        module: str = "batchengine.grammar.process",
    ) -> None:
        """`module` is that of the process."""
        self._module = module
        self._vocabulary = vocabulary
        self._limits = limits or GrammarLimits()
        self._numbers = itertools.count(1)
        self._matchers: dict[int, Matcher] = {}
        self._asked: dict[int, float] = {}  # matcher -> since when it has no answer
        self._suspects: deque[Matcher] = deque()  # begin again one after the other
        self._begun = 0  # the one of them that has begun
        self._answered = 0.0  # when an answer came last
        self._child: ChildProcess | None = None
        self._protocol: FrameProtocol[GrammarMessage] | None = None
        self._started: asyncio.Future[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()  # of the process; set while there is none
        self._closed = False

    def __repr__(self) -> str:
        return f"<Grammars matchers={len(self._matchers)} asked={len(self._asked)}>"

    @property
    def count(self) -> int:
        """Number of matchers."""
        return len(self._matchers)

    @property
    def pid(self) -> int:
        """Process id, 0 if there is none."""
        return self._child.process.pid if self._child and self._child.is_running else 0

    async def begin(self, constraint: Constraint, tenant: str, tokens: Sequence[int]) -> Matcher:
        """A matcher of a turn whose answer has these tokens, and its first mask.

        Raises GRAMMAR_REFUSED, and GRAMMAR_UNAVAILABLE when the process cannot be started.
        """
        if self._closed:
            raise errors.GRAMMAR_UNAVAILABLE(why="the engine stops")
        number = next(self._numbers)
        matcher = Matcher(self, number, tenant, constraint, array("i", tokens))
        ready = asyncio.Event()
        matcher.on_change = ready.set
        self._matchers[number] = matcher
        try:
            self.advance(matcher)
            if not self._is_up:
                self._start_soon()
            await ready.wait()
        except asyncio.CancelledError:
            matcher.close()
            raise
        if matcher.error is not None:
            matcher.close()
            raise matcher.error
        return matcher

    async def close(self) -> None:
        """End the process; matchers fail. Idempotent."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._fail_all("the engine stops")
        if self._child is not None:
            self._child.kill("was closed")
            await self._ended.wait()

    # ----------------------------------------------------------------------- called by matchers

    def advance(self, matcher: Matcher) -> None:
        """Send the next request of a matcher, if it has none without an answer and the process is
        up; else that follows."""
        if not self._is_up or self._protocol is None or matcher in self._suspects:
            return
        if matcher.error is not None or matcher.number in self._asked:
            return
        if (request := matcher.next_request()) is not None:
            self._asked[matcher.number] = time.monotonic()
            self._protocol.send(GRAMMAR_LINK.encode(*request))
            if self._timer is None:
                self._watch()

    def forget(self, matcher: Matcher) -> None:
        """Close a matcher. Idempotent."""
        if self._matchers.pop(matcher.number, None) is None:
            return
        if matcher in self._suspects:
            self._suspects.remove(matcher)
        if self._is_up and self._protocol is not None:
            self._protocol.send(GRAMMAR_LINK.encode(Close(matcher.number)))
        if self._asked.pop(matcher.number, None) is not None:
            self._next_suspect()

    # -------------------------------------------------------------------------------- the process

    @property
    def _is_up(self) -> bool:
        return self._started is not None and self._started.done()

    def _start_soon(self) -> None:
        if self._starting is None and not self._closed:
            self._starting = asyncio.get_running_loop().create_task(self._start())

    async def _start(self) -> None:
        """Start the process and begin every matcher in it; two failures fail all of them."""
        why = ""
        try:
            for _ in range(2):
                try:
                    await self._spawn()
                except (OSError, TimeoutError) as error:
                    why = f"its process could not be started: {error}"
                    log.warning("no grammar process: %s", why)
                    if self._child is not None:
                        self._child.kill("did not start")
                    await asyncio.sleep(BACKOFF_S)
                    continue
                for matcher in list(self._matchers.values()):
                    if matcher.strikes:
                        self._suspects.append(matcher)
                    else:
                        self.advance(matcher)
                self._next_suspect()
                return
            self._fail_all(why)
        finally:
            self._starting = None

    async def _spawn(self) -> None:
        loop = asyncio.get_running_loop()
        words = python_command(self._module, str(os.getpid()))
        self._child, ours = ChildProcess.start_linked(words, self._on_end)
        child = self._child
        self._ended.clear()

        def on_lost(_: Exception | None) -> None:  # it exits, or it sent a bad frame
            loop.call_later(LINGER_S, child.kill, "closed its link")

        started = loop.create_future()
        protocol = FrameProtocol(GRAMMAR_LINK, self._on_frame, on_lost)
        await loop.create_connection(lambda: protocol, sock=ours)
        limits = self._limits
        protocol.send(
            GRAMMAR_LINK.encode(Setup(self._vocabulary, limits.threads, limits.memory_bytes))
        )
        self._protocol, self._started = protocol, started
        await asyncio.wait_for(asyncio.shield(started), limits.start_s)

    def _on_frame(self, frame: GrammarFrame) -> None:
        self._answered = time.monotonic()
        match frame.message:
            case Started():
                if self._started is not None and not self._started.done():
                    self._started.set_result(None)
                return
            case Allowed(number, n_tokens, elapsed_us):
                self._asked.pop(number, None)
                matcher = self._matchers.get(number)
                if matcher is not None and n_tokens == len(matcher.tokens):
                    matcher.is_slow = elapsed_us > self._limits.slow_us
                    matcher.found(bytes(frame.payload))
                if matcher is not None:
                    self.advance(matcher)
            case Followed(number, can_follow):
                self._asked.pop(number, None)
                if (matcher := self._matchers.get(number)) is not None:
                    matcher.followed(bytes(frame.payload), can_follow=can_follow)
                    self.advance(matcher)
            case Broken(number, why):
                self._asked.pop(number, None)
                if (matcher := self._matchers.get(number)) is not None:
                    matcher.fail(errors.GRAMMAR_REFUSED(why=why))
            case other:
                if self._child is not None:
                    self._child.kill(f"sent {type(other).__name__}")
        self._next_suspect()

    def _next_suspect(self) -> None:
        """Begin the next matcher that may have ended the process, after the one before."""
        if self._suspects and self._begun not in self._asked:
            matcher = self._suspects.popleft()
            self._begun = matcher.number
            self.advance(matcher)

    def _watch(self) -> None:
        """Kill a process that has answered no request for a while, or one of them for long: many
        that take their time may wait behind each other."""
        self._timer = None
        if not self._asked:
            return
        loop, now, limit_s = asyncio.get_running_loop(), time.monotonic(), self._limits.request_s
        oldest = min(self._asked.values())
        oldest_s = now - max(
            oldest, min(self._answered, oldest + (self._limits.waits - 1) * limit_s)
        )
        if oldest_s > limit_s and self._child is not None:
            since = now - limit_s
            self._asked = {number: at for number, at in self._asked.items() if at <= since}
            self._child.kill(f"took longer than {limit_s:.0f} s")
        else:
            self._timer = loop.call_later(max(0.05, limit_s - oldest_s), self._watch)

    def _on_end(self, how: str, _: int) -> None:
        if self._protocol is not None:
            self._protocol.close()
        was_up, self._child, self._protocol = self._is_up, None, None
        self._ended.set()
        if self._started is not None and not self._started.done():
            self._started.set_exception(OSError(how))
            self._started.exception()  # retrieved: its reader may be cancelled
        self._started = None
        if self._closed:
            return
        log.warning("the grammar process %s while it served %d turns", how, len(self._asked))
        asked, self._asked = self._asked, {}
        self._suspects.clear()
        for number, matcher in self._matchers.items():
            matcher.process_ended(asked=number in asked)
        for number in asked:
            matcher = self._matchers.get(number)
            if matcher is None:
                continue
            matcher.strikes += 1
            if matcher.strikes >= STRIKES_MAX:
                matcher.fail(errors.GRAMMAR_REFUSED(why=f"its process {how}"))
                self._matchers.pop(number, None)
        if was_up and self._matchers:
            self._start_soon()

    def _fail_all(self, why: str) -> None:
        for matcher in list(self._matchers.values()):
            matcher.fail(errors.GRAMMAR_UNAVAILABLE(why=why))
        self._matchers.clear()
