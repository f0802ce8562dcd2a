"""The stream of one generation: a bounded buffer of events that ends exactly once.

Owns the event buffer, the text of the stream (whole characters, stop strings held back) and the
times of the request. A full buffer pauses the turn, so a slow reader costs bounded memory. Sends
only tokens that `release` has covered, for durability.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from batchengine.core import (
    BatchEngineError,
    DoneEvent,
    ErrorEvent,
    GenerationEvent,
    GenerationRequest,
    QueuedEvent,
    SkippedEvent,
    TokenEvent,
    TokenLogprob,
    Usage,
    Waiting,
)
from batchengine.engine.turns.resend import SLICE, Resend
from batchengine.engine.turns.scores import PromptEvents
from batchengine.session import Session
from batchengine.text.detokeniser import Detokeniser, StopMatcher

# About 100 KiB of events per stream at most; more tokens than are computed in a pause of 20 ms.
EVENTS_MAX = 256
EVENTS_RESUME = 64
ALL_TOKENS = 1 << 62  # tokens: more than any stream has


@dataclass(slots=True)
class Continuation:
    """A turn of the ledger that a request continues; `turn_id` "" = recorded as a new turn.

    `tokens` are the existing tokens of its answer. Only the last turn of a session can compute
    more tokens, and none if `changed` names what differs from the model that began it.
    """

    turn_id: str
    tokens: list[int]
    is_last: bool
    is_done: bool
    changed: str = ""


class Generation:
    """Async iterator of events: tokens, then exactly one DoneEvent or ErrorEvent.

    Iterate over it, or call `events()` to take all ready events at once.
    """

    def __init__(
        self,
        request: GenerationRequest,
        session_id: str,
        detokeniser: Callable[[], Detokeniser],
        now_ms: float,
        on_cancel: Callable[[Generation], None],
        on_room: Callable[[Generation], None],
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.session_id = session_id
        self.arrived_ms = now_ms
        self.started_ms: float | None = None
        self.first_token_ms: float | None = None
        self.last_token_ms: float | None = None
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.resumed_tokens = 0  # of completion_tokens: computed for an earlier stream
        self.reuse_reason = ""
        self.lane = ""
        self.queued: QueuedEvent | None = None  # the last place that was reported
        self.lane_wait_ms = 0.0  # predicted when its lane was chosen
        self.cancelled = False
        self.finished = False  # the last event is queued; events may be unread
        self.paused_since_ms: float | None = None
        self.computing: Session | None = None  # once its turn has begun
        self.recorded = asyncio.Event()  # its turn can be found, also after a crash; or it is over
        self.resumes: int | None = None  # a resume: tokens that its reader has already
        self.loaded = False  # `SessionRecovery.load` was called for it
        self.continuation: Continuation | None = None
        self.stops = StopMatcher(request.stop, request.sampling.tokens_min)
        self.detokeniser = detokeniser()
        self._new_detokeniser = detokeniser
        self._on_cancel = on_cancel
        self._on_room = on_room
        self._events: deque[GenerationEvent] = deque()
        # Unread tokens of an earlier stream, or of the prompt: before `_events`.
        self._resend: Resend | PromptEvents | None = None
        self._held: deque[TokenEvent] = deque()  # not durable enough yet; see `release`
        self._shown = 0  # tokens pushed, or known to the reader from an earlier stream
        self._durable = 0  # tokens of the completion that may be sent
        self._waiter: asyncio.Future[None] | None = None
        self._is_drained = False

    def __repr__(self) -> str:
        return (
            f"<Generation {self.request_id} session={self.session_id}"
            f" tokens={self.completion_tokens}/{self.request.tokens_max}"
            f" unread={len(self._events)}{' finished' if self.finished else ''}>"
        )

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> GenerationEvent:
        if not (ready := await self._ready()):
            raise StopAsyncIteration
        event = ready.popleft()
        if isinstance(event, DoneEvent | ErrorEvent):
            self._is_drained = True
        self._check_room()
        return event

    async def events(self) -> list[GenerationEvent]:
        """Return every event that is ready, at least one; empty once the last event was taken."""
        if not (ready := await self._ready()):
            return []
        taken = list(ready)
        ready.clear()
        if isinstance(taken[-1], DoneEvent | ErrorEvent):
            self._is_drained = True
        self._check_room()
        return taken

    def cancel(self) -> None:
        """Stop the generation within one step. Idempotent; no further event follows."""
        if self.cancelled:
            return
        self.cancelled = True
        self._is_drained = True
        self.recorded.set()
        self._events.clear()
        self._resend = None
        self._wake()
        if not self.finished:
            self._on_cancel(self)

    # ---------------------------------------------------------------- what the engine calls

    @property
    def is_over(self) -> bool:
        """Whether it needs nothing more: its last event is queued, or its reader has gone."""
        return self.cancelled or self.finished

    @property
    def full(self) -> bool:
        """Whether EVENTS_MAX events or more are unread."""
        return len(self._events) + len(self._held) >= EVENTS_MAX

    def push(self, event: TokenEvent | QueuedEvent | SkippedEvent) -> None:
        """Queue an event for the reader; tokens wait for `release`. Does nothing after the end."""
        if self.finished:
            return
        if isinstance(event, QueuedEvent):
            self.queued = event
        if isinstance(event, TokenEvent):
            self._shown += 1
            if self._shown <= (self.resumes or 0):
                event = SkippedEvent(event.text)
            elif self._shown > self._durable:
                if not self._is_drained:
                    self._held.append(event)
                return
        if self._is_drained:
            return
        self._events.append(event)
        self._wake()

    def release(self, tokens: int = ALL_TOKENS) -> None:
        """Allow the first `tokens` tokens of the completion to be sent: they are durable enough,
        as is the turn."""
        self.recorded.set()
        if tokens <= self._durable:
            return
        self._durable = tokens
        first = self._shown - len(self._held)
        ready = min(tokens - first, len(self._held))
        if ready > 0 and not self._is_drained:
            self._events.extend(self._held.popleft() for _ in range(ready))
            self._wake()

    def end(self, event: DoneEvent | ErrorEvent) -> None:
        """Queue the last event. Later calls do nothing."""
        if self.finished:
            return
        self.finished = True
        if isinstance(event, ErrorEvent):
            self._held.clear()  # tokens that are not durable are never sent
        self.release()
        if not self._is_drained:
            self._events.append(event)
            self._wake()

    def add_token(
        self, token: int, logprob: TokenLogprob | None, top: tuple[TokenLogprob, ...]
    ) -> bool:
        """Queue a committed token with its text; True if it completes a stop string."""
        text, stopped = self.stops.push(self.detokeniser.push(token))
        self.push(TokenEvent(token, text, logprob, top))
        return stopped

    def show_prompt(self, events: PromptEvents) -> None:
        """Give the reader the tokens of the prompt, before any other."""
        if not self._is_drained:
            self._resend = events
            self._wake()

    @property
    def turn_id(self) -> str:
        """Id of the turn in the ledger; valid before the first token."""
        more = self.continuation
        return (more.turn_id if more is not None else "") or self.request.request_id

    @property
    def tpot_ms(self) -> float | None:
        """Mean ms per token of this stream after its first one; None = there was no such token."""
        n = self.completion_tokens - self.resumed_tokens
        if self.first_token_ms is None or self.last_token_ms is None or n < 2:
            return None
        return (self.last_token_ms - self.first_token_ms) / (n - 1)

    def is_superseded(self, waiting: Sequence[Generation]) -> bool:
        """Whether a newer resume is the first of those that wait for the same session."""
        other = waiting[0] if waiting else None
        if self.resumes is None or other is None or other.resumes is None or other.cancelled:
            return False
        return other.arrived_ms > self.arrived_ms

    async def replay(self, tokens: Sequence[int], end_tokens: Collection[int]) -> str:
        """Give the reader tokens of the same turn that were computed for an earlier stream.

        Returns the finish reason if the turn ends among them, else "". Tokens after the end are
        not sent. They are durable already.
        """
        self.recorded.set()
        shown, reason = 0, ""
        while shown < len(tokens) and not reason:
            await asyncio.sleep(0)
            for token in tokens[shown : shown + SLICE]:
                self.completion_tokens += 1
                self.resumed_tokens += 1
                if self.request.ends_at_end_token and token in end_tokens:
                    reason = "stop"
                    break
                shown += 1
                if self.stops.push(self.detokeniser.push(token))[1]:
                    reason = "stop"
                    break
                if self.completion_tokens >= self.request.tokens_max:
                    reason = "length"
                    break
        self._shown += shown
        if not self._is_drained:
            detokeniser, asked = self._new_detokeniser(), self.request
            stops = StopMatcher(asked.stop, asked.sampling.tokens_min)
            self._resend = Resend(tokens[:shown], self.resumes or 0, detokeniser, stops)
            self._wake()
        return reason

    def rest(self, stopped: bool) -> str:
        """Return the text still held back at the end of the stream; "" after a stop string."""
        if stopped:
            return ""
        text, found = self.stops.push(self.detokeniser.flush())
        return text if found else text + self.stops.flush()

    def waiting(self, now_ms: float | None = None) -> Waiting:
        """Return how far the request has come before its first token."""
        n_prompt, session, queued = len(self.request.prompt), self.computing, self.queued
        computed = 0 if session is None else min(session.frontier, n_prompt)
        if self.started_ms is None:
            return Waiting(
                0 if queued is None else queued.position,
                None if queued is None else queued.eta_ms,
                computed,
                n_prompt,
            )
        now_ms = time.monotonic() * 1000.0 if now_ms is None else now_ms
        done, eta_ms = computed - self.cached_tokens, None
        if done > 0 and self.first_token_ms is None:
            eta_ms = (now_ms - self.started_ms) / done * (n_prompt - computed)
        return Waiting(0, eta_ms, computed, n_prompt)

    def usage(self, now_ms: float) -> Usage:
        """Return counts and times so far."""
        started = self.started_ms if self.started_ms is not None else now_ms
        first = self.first_token_ms if self.first_token_ms is not None else now_ms
        return Usage(
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            queue_ms=started - self.arrived_ms,
            ttft_ms=first - self.arrived_ms,
            total_ms=now_ms - self.arrived_ms,
            lane=self.lane,
            session_id=self.session_id,
            reuse_reason=self.reuse_reason,
            resumed_tokens=self.resumed_tokens,
            seed=self.request.sampling.seed,
        )

    def fail(self, error: BatchEngineError) -> None:
        """End with an error event."""
        self.end(ErrorEvent(error))

    def abort(self, error: BatchEngineError) -> None:
        """End with an error event, and cancel the turn. After `cancel` there is no event."""
        self.fail(error)
        self._on_cancel(self)

    # ------------------------------------------------------------------------------- inner

    async def _ready(self) -> deque[GenerationEvent]:
        """Wait for events; return the buffer to take them from, empty after the last event."""
        while True:
            if (resend := self._resend) is not None:
                if self.paused_since_ms is not None:  # the reader is not too slow: it reads this
                    self.paused_since_ms = time.monotonic() * 1000.0
                if await resend.fill() and not self.cancelled:
                    return resend.events
                self._resend = None
            elif self._events or self._is_drained:
                return self._events
            else:
                await self._wait()

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise RuntimeError("a generation has one reader")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check_room(self) -> None:
        if self.paused_since_ms is not None and len(self._events) <= EVENTS_RESUME:
            self._on_room(self)
