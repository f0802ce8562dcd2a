"""The grammar process: `python -m batchengine.grammar.process PARENT`.

Owns the matchers of all constrained turns, and threads that compute: llguidance gives up the
interpreter's lock while it does. A link to the engine is on file descriptor 0. Requests are taken
fairly between tenants, of which none has all threads. The process holds no secrets, opens no files
once it is confined, and may be killed at any moment.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import NoReturn

from batchengine.child import guard
from batchengine.child.limits import Memory, confine
from batchengine.core import BatchEngineError, Constraint
from batchengine.fair_queue import FairQueue
from batchengine.text.grammar import GrammarCompiler, GrammarMatcher, refusal
from batchengine.text.vocab import Tokenizer
from batchengine.wire.frames import BlockingLink
from batchengine.wire.grammar import (
    GRAMMAR_LINK,
    Accept,
    Allowed,
    Begin,
    Broken,
    Close,
    Follow,
    Followed,
    GrammarMessage,
    Setup,
    Started,
)

NICE = 5  # above lanes, which wait for masks; one that compiles leaves them a quarter of a core
FOLLOW_S_MAX = 0.01  # for the masks behind a draft: a worker waits 20 ms for all
STACK_BYTES = 1 << 30  # as in a text process: what passes its check does not end this one


@dataclass(slots=True)
class _Turn:
    """A matcher, None until its grammar is compiled; `tokens` are those of the answer.

    follower: another matcher of the grammar, behind the first `n_followed` of these tokens, which
    computes the masks behind drafts: they use up the limits of a matcher.
    """

    tenant: str
    constraint: Constraint
    matcher: GrammarMatcher | None = None
    tokens: list[int] = field(default_factory=list[int])
    can_follow: bool = True
    follower: GrammarMatcher | None = None
    n_followed: int = 0


@dataclass(slots=True)
class _Job:
    turn: _Turn
    request: Begin | Accept | Follow
    tokens: list[int]


class GrammarProcess:
    """Answers the frames of one link until the engine goes away."""

    def __init__(self, link: BlockingLink[GrammarMessage]) -> None:
        self._link = link
        self._turns: dict[int, _Turn] = {}
        self._queue = FairQueue[_Job]()
        self._running: Counter[str] = Counter()  # requests by tenant
        self._threads = 1
        self._changed = threading.Condition()
        self._sending = threading.Lock()

    def serve(self) -> None:
        """Handles Setup, then requests; returns when the link ends."""
        memory = Memory()
        first = self._link.receive()
        if first is None or not isinstance(first.message, Setup):
            return
        setup = first.message
        self._threads = setup.threads
        os.nice(NICE)  # of this thread and those that it starts
        compiler = GrammarCompiler(Tokenizer(setup.vocabulary))
        compiler.prepare()
        threading.stack_size(STACK_BYTES)
        for _ in range(setup.threads):
            threading.Thread(target=self._compute, args=(compiler,), daemon=True).start()
        confine(memory.address_bytes() + setup.memory_bytes)
        self._send(Started())
        while (frame := self._link.receive()) is not None:
            self._take(frame.message, bytes(frame.payload))

    def _take(self, message: GrammarMessage, payload: bytes) -> None:
        match message:
            case Begin(number, tenant, constraint):
                turn = self._turns[number] = _Turn(tenant, constraint)
                self._push(_Job(turn, message, array("i", payload).tolist()), len(constraint.text))
            case Accept(number) | Follow(number):
                if (turn := self._turns.get(number)) is not None:
                    self._push(_Job(turn, message, array("i", payload).tolist()), 0)
            case Close(number):
                self._turns.pop(number, None)
            case _:
                raise ConnectionError("a message that only this side sends")

    def _push(self, job: _Job, n_bytes: int) -> None:
        with self._changed:
            self._queue.push(job.turn.tenant, 1024 + n_bytes, job)
            self._changed.notify()

    def _compute(self, compiler: GrammarCompiler) -> None:
        """Answer requests, on a thread of its own."""
        while True:
            with self._changed:
                while (job := self._queue.pop(self._may_run)) is None:
                    self._changed.wait()
                self._running[job.turn.tenant] += 1
            with contextlib.suppress(ConnectionError):  # the engine has gone
                self._send(*_answer(compiler, job))
            with self._changed:
                self._running[job.turn.tenant] -= 1
                self._changed.notify()

    def _may_run(self, tenant: str) -> bool:
        return self._running[tenant] < max(1, self._threads - 1)

    def _send(self, message: GrammarMessage, payload: bytes = b"") -> None:
        with self._sending:
            self._link.send(GRAMMAR_LINK.encode(message, payload))


def _answer(compiler: GrammarCompiler, job: _Job) -> tuple[Allowed | Followed | Broken, bytes]:
    turn, number = job.turn, job.request.matcher
    if isinstance(job.request, Follow):
        masks = b"".join(_masks_behind(compiler, turn, job.tokens))
        return Followed(number, turn.can_follow), masks
    started = time.perf_counter_ns()
    turn.tokens += job.tokens
    try:
        if isinstance(job.request, Begin):
            turn.matcher = compiler.matcher(job.request.constraint)
        if turn.matcher is None:
            return Broken(number, "its grammar did not compile"), b""
        turn.matcher.accept(job.tokens, again=isinstance(job.request, Begin))
        mask = turn.matcher.mask()
    except BaseException as error:  # a defect of the library may raise what is no Exception
        turn.matcher = None
        return Broken(number, _why(refusal(error))), b""
    return Allowed(number, len(turn.tokens), (time.perf_counter_ns() - started) // 1000), mask


def _masks_behind(compiler: GrammarCompiler, turn: _Turn, draft: list[int]) -> list[bytes]:
    """The masks behind leading tokens of a draft. After the first failure there are none, as the
    answer does not need them."""
    end_s, matcher = time.perf_counter() + FOLLOW_S_MAX, turn.matcher
    turn.can_follow = turn.can_follow and matcher is not None and not matcher.counts
    if not turn.can_follow:
        return []
    try:
        if turn.follower is None:
            turn.follower = compiler.matcher(turn.constraint)
        turn.follower.accept(turn.tokens[turn.n_followed :], again=True)
        turn.n_followed = len(turn.tokens)
        return turn.follower.follow(draft, lambda: time.perf_counter() < end_s)
    except BaseException:  # as above
        turn.can_follow, turn.follower = False, None
        return []


def _why(error: BatchEngineError) -> str:
    return error.why.encode("utf-8", "replace").decode()


def main(parent: int) -> NoReturn:
    """Serves until the engine goes away, then ends the process."""
    guard.tie_to_parent(parent)
    guard.drop_privileges()
    guard.keep_private()
    with contextlib.suppress(ConnectionError):
        GrammarProcess(BlockingLink(socket.socket(fileno=0), GRAMMAR_LINK)).serve()
    os._exit(0)  # threads may be inside the library


if __name__ == "__main__":
    main(int(sys.argv[1]))
