"""What is made durable, and when: turns, tokens, and the order "durable first, then told".

Owns the group commits of the ledger. Anonymous requests are not written: nobody could name them
to resume them. Named sessions: the turn row (prompt, parameters, seed) is durable before the
first token goes out, later tokens follow in batches, the final event waits for its own commit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from batchengine.core import BatchEngineError, DoneEvent, ErrorEvent
from batchengine.engine.turn import Turn
from batchengine.session import Session
from kv_store.errors import LedgerError, StoreError
from kv_store.store import Store

log = logging.getLogger("batchengine.journal")

TICK_S = 0.02  # one group commit for everything that happened in it


class Journal:
    """The ledger as the engine uses it. All methods run on the loop and never block."""

    def __init__(self, store: Store, on_fatal: Callable[[BaseException], None]) -> None:
        self._store = store
        self._ledger = store.ledger
        self._on_fatal = on_fatal
        self._kick = asyncio.Event()
        self._now = asyncio.Event()
        self._turns: dict[Turn, None] = {}  # named turns with tokens the ledger lacks
        self._dirty = False
        self._stopping = False
        self.commits = 0

    # ---------------------------------------------------------------------------- asked for

    def begin(self, turn: Turn, start: int) -> None:
        """Record a turn whose prompt differs from the ledger's timeline from `start` on."""
        session, request = turn.session, turn.generation.request
        ledger, name = self._ledger, session.name.decode()
        if session.logged < 0:
            self._watch(ledger.open_session(name, session.tenant, session.ledger_epoch))
            session.logged = 0
        start = min(start, session.logged)
        if session.logged > start:
            self._watch(ledger.truncate_tokens(name, session.ledger_epoch, start))
        if len(session.tokens) > start:
            self._watch(
                ledger.append_tokens(name, session.ledger_epoch, start, session.tokens[start:])
            )
        session.logged = len(session.tokens)
        turn.turn_id = request.request_id
        self._watch(
            ledger.append_turn(
                name,
                session.ledger_epoch,
                turn.turn_id,
                start,
                len(session.tokens),
                msgspec.json.encode(request.sampling).decode(),
                request.sampling.seed & ((1 << 64) - 1),
            )
        )
        self._turns[turn] = None
        self._after(self._ledger.commit(), lambda error: self._begun(turn, error))

    def note(self) -> None:
        """Something was computed or published: commit within a tick."""
        self._dirty = True
        self._kick.set()

    def end(self, turn: Turn, event: DoneEvent | ErrorEvent) -> None:
        """The turn is over: its last tokens and its end become durable, then the event goes out."""
        session = turn.session
        self._append(turn)
        self._turns.pop(turn, None)
        reason = event.finish_reason if isinstance(event, DoneEvent) else event.error.api_code
        status = "done" if isinstance(event, DoneEvent) else "failed"
        self._watch(
            self._ledger.finish_turn(
                session.name.decode(), session.ledger_epoch, turn.turn_id, status, reason
            )
        )
        self._dirty = False
        self._after(self._ledger.commit(), lambda error: self._ended(turn, event, error))

    async def run(self) -> None:
        """One group commit per tick in which something happened."""
        while not self._stopping:
            await self._kick.wait()
            self._kick.clear()
            await asyncio.sleep(TICK_S)
            self.flush()

    def flush(self) -> None:
        """Give the ledger everything it lacks and start its commit."""
        for turn in self._turns:
            self._append(turn)
        if self._dirty:
            self._dirty = False
            self.commits += 1
            self._watch(self._ledger.commit())

    # ------------------------------------------------------------------------------- inner

    def _append(self, turn: Turn) -> None:
        session = turn.session
        if session.logged < len(session.tokens):
            self._watch(
                self._ledger.append_tokens(
                    session.name.decode(),
                    session.ledger_epoch,
                    session.logged,
                    session.tokens[session.logged :],
                )
            )
            session.logged = len(session.tokens)

    def _begun(self, turn: Turn, error: BaseException | None) -> None:
        if error is None:
            turn.generation.release()
        else:
            turn.generation.fail(_not_durable(error))
            turn.generation.cancel()

    def _ended(
        self, turn: Turn, event: DoneEvent | ErrorEvent, error: BaseException | None
    ) -> None:
        turn.generation.end(event if error is None else ErrorEvent(_not_durable(error)))

    def _after(self, future: Future[int], then: Callable[[BaseException | None], None]) -> None:
        loop = asyncio.get_running_loop()

        def done(finished: Future[int]) -> None:
            error = finished.exception()
            loop.call_soon_threadsafe(then, error)

        future.add_done_callback(done)
        self._watch(future)

    def _watch(self, future: Future[int]) -> None:
        """Nothing the ledger refuses may stay unseen."""
        loop = asyncio.get_running_loop()

        def done(finished: Future[int]) -> None:
            error = finished.exception()
            if error is not None:
                loop.call_soon_threadsafe(self._failed, error)

        future.add_done_callback(done)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, LedgerError):
            self._on_fatal(error)
        elif isinstance(error, StoreError):
            log.error("the ledger refused a record: %s", error)
        else:
            log.error("the ledger failed: %r", error)

    async def load(self, session: Session) -> None:
        """Bring a named session back from the ledger: its tokens, if it was there before."""
        try:
            record = await asyncio.wrap_future(self._ledger.load_session(session.name.decode()))
        except StoreError as error:
            raise BatchEngineError(
                "BE2401",
                "this session's history is damaged",
                why=str(error),
                fix="use another session id; other sessions are not affected",
                api_code="session_damaged",
            ) from error
        if record is not None:
            session.tokens = list(record.tokens)
            session.logged = len(record.tokens)
            session.ledger_epoch = record.info.epoch


def _not_durable(error: BaseException) -> BatchEngineError:
    return BatchEngineError(
        "BE2402",
        "the turn could not be made durable",
        why=str(error),
        fix="free space where the store lies, or look into the daemon's log; then send it again",
        http_status=503,
        api_code="durability_unavailable",
    )
