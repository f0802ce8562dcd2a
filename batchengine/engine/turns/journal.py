"""Journal of turns and tokens: records are durable before the events that depend on them are sent.

Owns the group commits of the ledger. Anonymous requests are not recorded: they cannot be resumed.
For named sessions, the turn row (prompt, parameters, seed) is durable before the first token is
sent, and the last event waits for its own commit. In between, level `turn` sends tokens before
their commit, level `power` after it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from batchengine import errors
from batchengine.core import DoneEvent, ErrorEvent
from batchengine.engine.turns.records import SessionMeta, TurnRecord, encode, unix_s
from batchengine.engine.turns.stream import ALL_TOKENS
from batchengine.engine.turns.turn import Turn
from batchengine.lanes.worker_process import Lane
from batchengine.session import LOG_UNKNOWN, NOT_LOGGED, Session
from kv_store import keys
from kv_store.errors import LedgerError, StoreError
from kv_store.ledger import writes
from kv_store.ledger.continuity import arena_number
from kv_store.store import Store

log = logging.getLogger("batchengine.turns")

TICK_S = 0.02  # level `turn`: interval of group commits
REFUSED_S = 10.0  # between two log lines about refused records, which a full disk causes each tick
IDLE, PARKED = "idle", "parked"  # states of a session in the ledger
RUNNING = "running"  # state of a session and status of its turn until the turn ends
DONE = "done"  # status of a turn that ended by itself; any other turn can be continued


class Journal:
    """Writes turns and tokens to the ledger. All methods run on the event loop and never block."""

    def __init__(
        self,
        store: Store,
        *,
        level: str = "turn",
        finish_when_full: bool = False,
    ) -> None:
        """`level` as in store.durability. `finish_when_full`: a turn whose last tokens a full disk
        refused ends normally, marked as not durable, instead of with an error."""
        self._store = store
        self._ledger = store.ledger
        self._fatal: LedgerError | None = None
        self._power = level == "power"
        self._finish_when_full = finish_when_full and not self._power
        self._kick = asyncio.Event()
        self._turns: dict[Turn, None] = {}  # named turns with tokens the ledger lacks
        self._dirty = False
        self._refused, self._logged_s = 0, float("-inf")  # refused records since the last log line
        self._begun_turns = 0

    # ------------------------------------------------------------------------------ records

    def begin(self, turn: Turn, start: int, lane: Lane, meta: SessionMeta) -> None:
        """Record a turn whose prompt differs from the ledger's timeline from `start` on.

        Owner, prompt and turn are one record: durable together or not at all.
        """
        session, request = turn.session, turn.generation.request
        name, tokens = session.name.decode(), session.tokens
        ops = self._own(session, lane, meta)
        start = min(start, session.logged)
        if session.logged > start:
            ops.append(writes.TruncateTokens(name, session.epoch, start))
        if len(tokens) > start:
            ids = keys.token_bytes(tokens[start:])
            ops.append(writes.AppendTokens(name, session.epoch, start, ids))
        session.logged = len(tokens)
        turn.turn_id = request.request_id
        self._begun_turns += 1
        ops.append(
            writes.AppendTurn(
                name,
                session.epoch,
                turn.turn_id,
                start,
                len(request.prompt),
                encode(TurnRecord.of(request, self._begun_turns)),
                request.sampling.seed & keys.MASK64,
                request.idempotency_key or None,
            )
        )
        self._start(turn, ops)

    def go_on(self, turn: Turn, turn_id: str, lane: Lane, meta: SessionMeta) -> None:
        """Record that an earlier turn of the ledger runs again, with a new owner."""
        session = turn.session
        name = session.name.decode()
        ops = self._own(session, lane, meta)
        ops.append(writes.FinishTurn(name, session.epoch, turn_id, RUNNING, ""))
        turn.turn_id = turn_id
        self._start(turn, ops)

    def note(self) -> None:
        """Request a commit within a tick, after a step or a publication."""
        self._dirty = True
        self._kick.set()

    def end(
        self, turn: Turn, event: DoneEvent | ErrorEvent, status: str, meta: SessionMeta
    ) -> None:
        """Record the last tokens and the end of a turn; send `event` once they are durable."""
        session = turn.session
        mine = self._append(turn)
        self._turns.pop(turn, None)
        reason = event.finish_reason if isinstance(event, DoneEvent) else event.error.name
        cached = turn.generation.cached_tokens
        mine.append(self._finish(session, turn.turn_id, status, reason, cached, meta))
        self._dirty = False
        self._after(session, mine, self._commit(), lambda error: self._ended(turn, event, error))

    def settle(
        self, session: Session, turn_id: str, reason: str, cached: int, meta: SessionMeta
    ) -> None:
        """Mark a recovered turn as done."""
        end = self._finish(session, turn_id, DONE, reason, cached, meta)
        self._after(session, [end], self._commit(), _nothing)

    async def hand_over(self, session: Session, turn: Turn | None, epoch: int, lane: Lane) -> None:
        """Record the session's next owner; returns once that is durable.

        This is the commit point of a migration. Raises StoreError if the ledger refused it: then
        the owner is unchanged. The session must not compute meanwhile.
        """
        mine = [] if turn is None else self._append(turn)
        tokens, before = len(session.tokens), session.logged_epoch
        owner = self._ledger.append(self._owner(session, epoch, lane))
        session.logged_epoch = epoch  # later records follow this one in the ledger
        commit = self._commit()
        if turn is not None and mine:
            self._after(session, mine, commit, self._releases(turn, tokens))
        try:
            await asyncio.shield(asyncio.wrap_future(owner))
        except StoreError:
            session.logged_epoch = before
            raise

    def cut(self, session: Session, length: int) -> None:
        """Truncate the session's tokens in the ledger to `length`."""
        name = session.name.decode()
        cut = self._ledger.append(writes.TruncateTokens(name, session.logged_epoch, length))
        self._after(session, [cut], self._commit(), _nothing)

    async def mark_suspect(self, session: Session, strikes: int) -> None:
        """Record that the session is about to compute alone; returns once that is durable."""
        future = self._ledger.append(
            writes.SetSuspect(session.name.decode(), self._store.epoch, strikes, True)
        )
        self._commit()
        await asyncio.wrap_future(future)

    def clear_suspect(self, session: Session) -> None:
        """Clear the mark of a suspect; its commit is not awaited."""
        self._ledger.append(writes.SetSuspect(session.name.decode(), 0, 0, False))
        self._commit()

    async def run(self) -> None:
        """Commit once per tick (level `power`: per step) if there is something to commit.

        Raises LedgerError once the ledger has failed for good.
        """
        while True:
            await self._kick.wait()
            self._kick.clear()
            if self._fatal is not None:
                raise self._fatal
            if not self._power:
                await asyncio.sleep(TICK_S)
            self.flush()

    def flush(self) -> None:
        """Append all tokens that the ledger lacks, and start a commit."""
        appended = [(turn, len(turn.session.tokens), self._append(turn)) for turn in self._turns]
        appended = [(turn, tokens, futures) for turn, tokens, futures in appended if futures]
        if not appended and not self._dirty:
            return
        self._dirty = False
        commit = self._commit()
        for turn, tokens, futures in appended:
            self._after(turn.session, futures, commit, self._releases(turn, tokens))

    # ------------------------------------------------------------------------------- inner

    def _owner(self, session: Session, epoch: int, lane: Lane) -> writes.SetOwner:
        incarnation = arena_number(self._store.epoch, lane.incarnation)
        return writes.SetOwner(session.name.decode(), epoch, incarnation, lane.name)

    def _own(self, session: Session, lane: Lane, meta: SessionMeta) -> list[writes.Op]:
        """Return records that set owner and epoch of the session to `lane` and `session.epoch`."""
        name, ops = session.name.decode(), list[writes.Op]()
        if session.logged == NOT_LOGGED:
            repr_id = self._ledger.repr_id
            ops.append(writes.OpenSession(name, session.tenant, repr_id, 0, "{}"))
            session.logged, session.logged_epoch = 0, 0
        if session.logged_epoch != session.epoch:
            ops.append(self._owner(session, session.epoch, lane))
            session.logged_epoch = session.epoch
        ops.append(writes.SetMeta(name, session.epoch, RUNNING, encode(meta)))
        return ops

    def _start(self, turn: Turn, ops: Sequence[writes.Op]) -> None:
        self._turns[turn] = None
        mine = [self._ledger.append(*ops)]
        self._after(turn.session, mine, self._commit(), lambda error: self._begun(turn, error))

    def _finish(
        self,
        session: Session,
        turn_id: str,
        status: str,
        reason: str,
        cached: int,
        meta: SessionMeta,
    ) -> Future[int]:
        name, epoch = session.name.decode(), session.logged_epoch
        return self._ledger.append(
            writes.FinishTurn(name, epoch, turn_id, status, reason, int(unix_s()), cached),
            writes.SetMeta(name, epoch, PARKED if meta.parked else IDLE, encode(meta)),
        )

    def _append(self, turn: Turn) -> list[Future[int]]:
        """Append the tokens of the session that the ledger lacks, unless that is unknown."""
        session = turn.session
        if not 0 <= session.logged < len(session.tokens):
            return []
        start, session.logged = session.logged, len(session.tokens)
        name = session.name.decode()
        return [
            self._ledger.append(
                writes.AppendTokens(
                    name, session.logged_epoch, start, keys.token_bytes(session.tokens[start:])
                )
            )
        ]

    def _releases(self, turn: Turn, tokens: int) -> Callable[[BaseException | None], None]:
        """Return the callback of the commit that holds the timeline's first `tokens` tokens."""

        def release(error: BaseException | None) -> None:
            if error is None and self._power:
                turn.generation.release(tokens - len(turn.generation.request.prompt))

        return release

    def _begun(self, turn: Turn, error: BaseException | None) -> None:
        if error is not None:
            turn.generation.abort(errors.NOT_DURABLE(why=error))
        else:
            resumed = turn.generation.resumed_tokens
            turn.generation.release(resumed if self._power else ALL_TOKENS)

    def _ended(
        self, turn: Turn, event: DoneEvent | ErrorEvent, error: BaseException | None
    ) -> None:
        if error is None and turn.session.logged == LOG_UNKNOWN:
            error = StoreError("tokens of this turn were refused before")
        if error is not None:
            can_finish = self._finish_when_full and not isinstance(error, LedgerError)
            if can_finish and isinstance(event, DoneEvent):
                event = dataclasses.replace(
                    event, usage=dataclasses.replace(event.usage, durable=False)
                )
            else:
                event = ErrorEvent(errors.NOT_DURABLE(why=error))
        turn.generation.end(event)

    def _after(
        self,
        session: Session,
        mine: list[Future[int]],
        commit: Future[int],
        then: Callable[[BaseException | None], None],
    ) -> None:
        """Call `then` once records of one session are durable, or with the first refusal.

        The futures of the records decide, since the commit fails with any session's record. They
        are done before the commit is, unless the ledger has failed for good.
        """
        loop = asyncio.get_running_loop()

        def settled() -> None:
            failures = [f.exception() if f.done() else commit.exception() for f in mine]
            error = next((error for error in failures if error is not None), None)
            if error is not None:
                session.logged = LOG_UNKNOWN
            then(error)

        commit.add_done_callback(lambda _: loop.call_soon_threadsafe(settled))

    def _commit(self) -> Future[int]:
        """Start a commit; its error is logged, and `run` raises it if it is a LedgerError."""
        loop, commit = asyncio.get_running_loop(), self._ledger.commit()

        def done(finished: Future[int]) -> None:
            error = finished.exception()
            if error is not None:
                loop.call_soon_threadsafe(self._failed, error)

        commit.add_done_callback(done)
        return commit

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, LedgerError):
            self._fatal = error
            self._kick.set()
        elif isinstance(error, StoreError):
            self._refused += 1
            if time.monotonic() - self._logged_s >= REFUSED_S:
                since = "the ledger refused a record (%d since the last such line): %s"
                log.error(since, self._refused, error)
                self._refused, self._logged_s = 0, time.monotonic()
        else:
            log.error("the ledger failed: %r", error)


def _nothing(error: BaseException | None) -> None:
    """Do nothing after a commit whose result nothing waits for."""
