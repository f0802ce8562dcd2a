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
from batchengine.session import LOG_UNKNOWN, NOT_LOGGED, Session, common_prefix
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
        mine: list[Future[int]] = []
        if session.logged == NOT_LOGGED:
            mine.append(ledger.open_session(name, session.tenant, session.ledger_epoch))
            session.logged = 0
        start = min(start, session.logged)
        if session.logged > start:
            mine.append(ledger.truncate_tokens(name, session.ledger_epoch, start))
        if len(session.tokens) > start:
            mine.append(
                ledger.append_tokens(name, session.ledger_epoch, start, session.tokens[start:])
            )
        session.logged = len(session.tokens)
        turn.turn_id = request.request_id
        mine.append(
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
        self._commit(session, mine, lambda error: self._begun(turn, error))

    def note(self) -> None:
        """Something was computed or published: commit within a tick."""
        self._dirty = True
        self._kick.set()

    def end(self, turn: Turn, event: DoneEvent | ErrorEvent) -> None:
        """The turn is over: its last tokens and its end become durable, then the event goes out."""
        session = turn.session
        mine = self._append(turn)
        self._turns.pop(turn, None)
        reason = event.finish_reason if isinstance(event, DoneEvent) else event.error.api_code
        status = "done" if isinstance(event, DoneEvent) else "failed"
        mine.append(
            self._ledger.finish_turn(
                session.name.decode(), session.ledger_epoch, turn.turn_id, status, reason
            )
        )
        self._dirty = False
        self._commit(session, mine, lambda error: self._ended(turn, event, error))

    async def run(self) -> None:
        """One group commit per tick in which something happened."""
        while not self._stopping:
            await self._kick.wait()
            self._kick.clear()
            await asyncio.sleep(TICK_S)
            self.flush()

    def flush(self) -> None:
        """Give the ledger everything it lacks and start its commit."""
        appended = [(turn.session, self._append(turn)) for turn in self._turns]
        appended = [(session, futures) for session, futures in appended if futures]
        if not appended and not self._dirty:
            return
        self._dirty = False
        self.commits += 1
        commit = self._ledger.commit()
        self._watch(commit)
        for session, futures in appended:
            self._after(session, futures, commit, lambda _: None)

    # ------------------------------------------------------------------------------- inner

    def _append(self, turn: Turn) -> list[Future[int]]:
        """Give the ledger the tokens it lacks, unless it is unknown which those are."""
        session = turn.session
        if not 0 <= session.logged < len(session.tokens):
            return []
        start, session.logged = session.logged, len(session.tokens)
        name = session.name.decode()
        return [
            self._ledger.append_tokens(name, session.ledger_epoch, start, session.tokens[start:])
        ]

    def _begun(self, turn: Turn, error: BaseException | None) -> None:
        if error is None:
            turn.generation.release()
        else:
            turn.generation.abort(_not_durable(error))

    def _ended(
        self, turn: Turn, event: DoneEvent | ErrorEvent, error: BaseException | None
    ) -> None:
        if error is None and turn.session.logged == LOG_UNKNOWN:
            error = StoreError("tokens of this turn were refused before")
        turn.generation.end(event if error is None else ErrorEvent(_not_durable(error)))

    def _commit(
        self,
        session: Session,
        mine: list[Future[int]],
        then: Callable[[BaseException | None], None],
    ) -> None:
        commit = self._ledger.commit()
        self._watch(commit)
        self._after(session, mine, commit, then)

    def _after(
        self,
        session: Session,
        mine: list[Future[int]],
        commit: Future[int],
        then: Callable[[BaseException | None], None],
    ) -> None:
        """Call `then` once records of one session are durable, or with the first refusal.

        Their own futures decide: the commit fails with anybody's record. They settle before it,
        unless the ledger has ended for good.
        """
        loop = asyncio.get_running_loop()

        def told() -> None:
            errors = [f.exception() if f.done() else commit.exception() for f in mine]
            error = next((error for error in errors if error is not None), None)
            if error is not None:
                session.logged = LOG_UNKNOWN
            then(error)

        commit.add_done_callback(lambda _: loop.call_soon_threadsafe(told))

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
        """What the ledger has of a named session; its tokens too, if none are in memory."""
        name = session.name.decode()
        try:
            record = await asyncio.wrap_future(self._ledger.load_session(name))
        except StoreError as error:
            raise BatchEngineError(
                "BE2401",
                "this session's history is damaged",
                why=str(error),
                fix="use another session id; other sessions are not affected",
                api_code="session_damaged",
            ) from error
        if record is None:
            session.logged = NOT_LOGGED
            return
        session.ledger_epoch = record.info.epoch
        if not session.tokens:
            session.tokens = list(record.tokens)
        known = common_prefix(session.tokens, record.tokens)
        session.logged = known
        if known < len(record.tokens):
            cut = self._ledger.truncate_tokens(name, session.ledger_epoch, known)
            self._commit(session, [cut], lambda _: None)


def _not_durable(error: BaseException) -> BatchEngineError:
    return BatchEngineError(
        "BE2402",
        "the turn could not be made durable",
        why=str(error),
        fix="free space where the store lies, or look into the daemon's log; then send it again",
        http_status=503,
        api_code="durability_unavailable",
    )
