"""Migration: moves a session from one lane to another between two of its tokens.

Owns the protocol and its one commit point. Until P5 the source owns the session, and every failure
leaves the session there unchanged; from P5 on the destination owns it. Sealed pages are passed by
reference; rows of open pages are imported, and each is verified.

    P0  accepted: the destination is up
    P1  the destination reserves a seat and slots, and faults sealed pages in; the source decodes
    P2  the source stops the session at a token boundary
    P3  the destination copies the session's open rows
    P4  the destination has verified them
    P5  the ledger has the new owner (of an anonymous session: the memory)
    P6  the session runs on the destination
    P7  the source's slots are given back: its next frame poisons them, and they are free
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.lane.transfer import Frozen
from batchengine.engine.placement.move_report import MoveCause, MoveOutcome, MoveReport
from batchengine.engine.state import EngineState
from batchengine.engine.turns.journal import Journal
from batchengine.engine.turns.turn import Turn
from batchengine.kv import RowImport
from batchengine.session import NOT_LOGGED, Session, State
from batchengine.session_kv import PendingRows, page_start
from batchengine.wire.lane import FromArena
from kv_store.errors import StoreError

ANSWER_S = 5.0  # timeout of one frame in P1, before the session is frozen
COPIES_MAX = 3  # in P1: one is behind by a row more if the source ended a step meanwhile
IMPORT_S = 10.0  # timeout of the import, during which the session is frozen
FIRST_COMMIT_S = 5.0  # how long a report waits for the destination's first token
RECOMPUTE_MAX = 16  # unverified rows; with more, the session stays
CLOSED = "it was dropped, or its request ended"


OnPoint = Callable[[str], Awaitable[None] | None]


def pass_point(point: str) -> None:
    """Do nothing at a point of the protocol."""


class Abort(Exception):
    """The session stays on its lane; the text is the reason."""


class Migration:
    """One migration under way: the seats and slots it holds on both lanes, for `undo`."""

    def __init__(self, session: Session, source: LaneLoop, to: LaneLoop) -> None:
        self.session = session
        self.source = source
        self.to = to
        self.epoch = session.next_epoch()
        self.row_import: RowImport | None = None
        self.frozen: Frozen | None = None
        self.expects = False  # the destination keeps a seat
        self.arrival: asyncio.Future[float] | None = None  # ms of the destination's first commit
        self.is_owned = False  # P5 is durable, or its result is not known

    @property
    def turn(self) -> Turn | None:
        return self.source.seats.turn_of(self.session)

    def release_seats(self) -> None:
        """Release the seats that were kept for the session on both lanes."""
        if self.expects:
            self.expects = False
            self.to.seats.expected -= 1
        if self.frozen is not None and self.frozen.seated:
            self.source.seats.expected -= 1

    def undo(self) -> None:
        """Free slots and seats, and continue on the source."""
        if self.row_import is not None:
            self.to.kv.importing.abandon(self.row_import)
        self.release_seats()
        if self.frozen is not None and self.session.state is State.FROZEN:
            self.source.thaw(self.session, self.frozen)


class Migrator:
    """Moves sessions between lanes; moves of one session follow one another."""

    def __init__(self, state: EngineState, journal: Journal, on_point: OnPoint) -> None:
        """`on_point` is called, and awaited, at each point of the protocol: "P0", "P1"..."""
        self._state = state
        self._journal = journal
        self._on_point = on_point
        self._stopping = False

    def __repr__(self) -> str:
        return f"<Migrator moving={len(self._state.moves)}>"

    async def settle(self, timeout_s: float) -> None:
        """Start no more moves; wait for those under way, of which those before P5 abort."""
        self._stopping = True
        if self._state.moves:
            await asyncio.wait(list(self._state.moves.values()), timeout=timeout_s)

    async def move(self, session: Session, to: LaneLoop, cause: MoveCause) -> MoveReport:
        """Move the session to lane `to`; if that fails, it stays unchanged. Returns a report."""
        started_ms = self._state.now_ms()
        await self._state.moved(session)
        source = self._state.home.get(session.key)
        report = MoveReport(
            session.session_id,
            "none" if source is None else source.lane.name,
            to.lane.name,
            cause,
            tokens=len(session.tokens),
        )
        if source is to:
            return replace(report, outcome=MoveOutcome.ALREADY)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._state.moves[session.key] = ended
        move: Migration | None = None
        try:
            report, move = await self._move(session, source, to, report)
        except Abort as abort:
            report = replace(report, outcome=MoveOutcome.STAYED, why=str(abort))
        finally:
            del self._state.moves[session.key]
            ended.set_result(None)
        gap_ms = 0.0 if move is None else await self._gap_ms(move)
        total_ms = round(self._state.now_ms() - started_ms, 3)
        return replace(report, gap_ms=gap_ms, total_ms=total_ms)

    # ------------------------------------------------------------------------------ protocol

    async def _move(
        self, session: Session, source: LaneLoop | None, to: LaneLoop, report: MoveReport
    ) -> tuple[MoveReport, Migration | None]:
        await self._at("P0")
        self._check(session, to)
        if source is not None and source.up and session.kv.n_held:
            raise Abort(
                f"peers hold {session.kv.n_held} of its pages for lane {source.lane.name} alone"
            )
        if source is None:  # the session has never computed and has no KV
            self._state.home[session.key] = to
            to.kv.slots.enter(session)
            return report, None
        move = Migration(session, source, to)
        try:
            row_import = await self._prepare(move)
            frozen = await self._freeze(move)
            await self._copy(move, row_import, frozen)
            await self._commit(move, frozen.turn)
        except BaseException:
            if not move.is_owned:
                move.undo()
            raise
        return await self._finish(move, row_import, frozen, report), move

    def _check(self, session: Session, to: LaneLoop) -> None:
        """Raise Abort for reasons to stay that can arise at any time before P5."""
        if self._stopping or to.stopping:
            raise Abort("the daemon is shutting down")
        if not to.up:
            raise Abort(f"lane {to.lane.name} is {'drained' if to.draining else 'down'}")
        home = self._state.home.get(session.key)
        leaves = home is not None and not home.up and home.outage.may_be_the_lane
        if session.suspect and not leaves:
            raise Abort("it was in a step that killed a worker, and proves itself where it is")
        if session.state is State.CLOSED:
            raise Abort(CLOSED)
        if (turn := self._state.turn_of(session)) is not None and turn.shared_with:
            raise Abort(f"peer {turn.shared_with} computes its turn too")
        named = self._state.sessions.get((session.tenant, session.session_id)) is session
        if named and session.logged == NOT_LOGGED:  # its epoch is not known yet
            raise Abort("it is being read from the ledger")

    async def _prepare(self, move: Migration) -> RowImport:
        """P1: reserve seat and slots, fault pages in; the source still computes."""
        session, to, turn = move.session, move.to, move.turn
        if turn is not None and session.state is State.RUNNING and not turn.paused:
            if to.seats.free > 0:
                move.expects = True
                to.seats.expected += 1
            elif not move.source.outage.failed_starts and turn.rank >= max(
                (other.rank for other in to.running.values()), default=0
            ):
                raise Abort(
                    f"no room: all {to.config.entries_max} seats of lane {to.lane.name} are taken"
                    " by sessions as urgent"
                )
        n_pages = max(len(session.kv.open), len(session.kv.pending)) + (turn is not None)
        row_import = move.row_import = to.kv.importing.prepare(
            session, move.epoch, n_pages, warm=True
        )
        if row_import is None:
            raise Abort(
                f"no room: {n_pages} open pages are needed on lane {to.lane.name}, and it has"
                f" {to.kv.slots.available} slots to give"
            )
        await self._touch(to, session.kv.codes[session.kv.n_held : session.kv.first_open])
        if move.source.kv.slots.is_relabeling(session):
            # The client has just cut the history: rows can be verified once the worker has
            # relabeled them with the new epoch. No further cut happens before the move has ended.
            await self._touch(move.source, ())
        await self._copy_ahead(move, row_import)
        await self._at("P1")
        self._check(session, to)
        return row_import

    async def _touch(self, loop: LaneLoop, sealed: Sequence[int]) -> None:
        """Wait until the lane has answered a new frame that faults these pages in, or stores the
        rows of open ones, or its worker died, which `_check` finds later. Raises Abort after
        ANSWER_S."""
        touched = loop.kv.touches.touch(sealed)
        loop.wake()
        await asyncio.wait([touched], timeout=ANSWER_S)
        if not touched.done():
            touched.cancel()
            raise Abort(f"lane {loop.lane.name} is busy with a long step, or does not answer")

    async def _copy_ahead(self, move: Migration, row_import: RowImport) -> None:
        """Copy the open rows of a session that decodes, until at most the row is missing that the
        step in flight computes."""
        session = move.session
        for _ in range(COPIES_MAX):
            decodes = session.state is State.RUNNING and session.to_compute <= RECOMPUTE_MAX
            if not decodes or session.kv.pending:
                return
            self._check(session, move.to)
            await self._store_rows(move)
            sources = move.source.kv.importing.sources(session)
            await self._answered(move, self._import(move, row_import, sources), ANSWER_S)
            if session.frontier <= _reach(session, row_import):
                return

    async def _save_state(self, move: Migration) -> None:
        """Have the source save the recurrent state at the frontier, with which the destination goes
        on. Raises Abort if it cannot: all tokens would be computed again."""
        session, source = move.session, move.source
        live = session.kv.state
        if live is None or live.position != session.frontier or not source.up:
            return
        source.kv.states.save(session)
        if source.kv.states.is_saving(session):
            await self._touch(source, ())
        self._check(session, move.to)
        if source.up and not source.kv.states.is_saved(session, session.frontier):
            raise Abort("its recurrent state could not be saved; it is good where it is")

    async def _store_rows(self, move: Migration) -> None:
        """Have the source store rows that its worker has not stored yet."""
        if move.source.config.kind == "cuda" and move.source.up:
            await self._touch(move.source, [slot.code for slot in move.session.kv.open])

    def _import(
        self, move: Migration, row_import: RowImport, rows: list[PendingRows]
    ) -> asyncio.Future[bool]:
        """Have the destination copy rows; returns a future for `_answered`."""
        imported = row_import.imported = asyncio.get_running_loop().create_future()
        if not move.to.kv.importing.import_rows(row_import, rows):
            name = move.to.lane.name
            raise Abort(f"no room: lane {name} has no slots for {len(rows)} open pages")
        move.to.wake()
        return imported

    async def _answered(
        self, move: Migration, imported: asyncio.Future[bool], timeout_s: float
    ) -> None:
        """Wait for the answer to an import. Raises Abort if the destination dies or hangs."""
        await asyncio.wait([imported], timeout=timeout_s)
        if not imported.done() or not imported.result():
            raise Abort(f"lane {move.to.lane.name} died, or does not answer")

    async def _freeze(self, move: Migration) -> Frozen:
        """P2: freeze the session once its last token on the source is committed and emitted."""
        session, source = move.session, move.source
        frozen = move.frozen = await source.freeze(session)
        if frozen is None:
            raise Abort("it ended meanwhile")
        if session.kv.parked is not None:
            source.kv.slots.vacate(session)
        await self._at("P2")
        return frozen

    async def _copy(self, move: Migration, row_import: RowImport, frozen: Frozen) -> None:
        """P3 and P4: copy open rows to the destination, which verifies each of them."""
        session, source, to = move.session, move.source, move.to
        self._check(session, to)
        await self._save_state(move)
        pending_rows = source.kv.importing.sources(session)
        rows = [pending for pending in pending_rows if isinstance(pending.source, FromArena)]
        imported = None
        lacks_rows = not _has_enough(session, row_import, rows) or source.kv.states.is_used
        if frozen.turn is None or lacks_rows:
            await self._store_rows(move)
            self._check(session, to)
            imported = self._import(move, row_import, rows)
        await self._at("P3")
        if imported is not None:
            await self._answered(move, imported, IMPORT_S)
        await self._at("P4")
        self._check(session, to)
        if row_import.fallen is not None or (row_import.over and rows):
            raise Abort(f"lane {to.lane.name} died")
        if session.state is not State.FROZEN:
            raise Abort(CLOSED)
        missing = session.frontier - _reach(session, row_import)
        most = 0 if source.kv.states.is_used else RECOMPUTE_MAX
        if missing > most and source.up:
            raise Abort(f"{missing} of its rows could not be proven; they are good where they are")
        if frozen.audits != to.kv.disputes.audits:
            raise Abort("an audit invalidated its open rows")
        turn = frozen.turn
        if turn is not None and turn.generation.is_over:
            raise Abort("its request was cancelled")

    async def _commit(self, move: Migration, turn: Turn | None) -> None:
        """P5: make the destination the owner of the session, durably if it has a name."""
        session, to = move.session, move.to
        if session.logged != NOT_LOGGED:
            move.is_owned = True  # until the result is known, neither lane may compute
            try:
                await self._journal.hand_over(session, turn, move.epoch, to.lane)
            except StoreError as error:
                move.is_owned = False
                raise Abort(f"the ledger refused: {error}") from error
        move.is_owned = True
        session.epoch = move.epoch
        await self._at("P5")

    async def _finish(
        self, move: Migration, row_import: RowImport, frozen: Frozen, report: MoveReport
    ) -> MoveReport:
        """P6 and P7: install the session on the destination, and free the source's slots."""
        session, source, to = move.session, move.source, move.to
        if session.state is not State.FROZEN:  # the session was dropped meanwhile
            move.undo()
            raise Abort(CLOSED)
        before = session.frontier
        left = source.kv.detach(session)
        tails = session.kv.take_pending(lambda o: not isinstance(o.source, FromArena))
        rows_copied = to.kv.importing.rows_imported
        to.kv.importing.install(row_import)
        to.kv.importing.bring(session, tails)
        self._state.home[session.key] = to
        # Its turn may not be in a lane's loop while its pages load.
        if frozen.turn is not None or self._state.turn_of(session) is not None:
            source.assigned -= 1
            to.assigned += 1
        move.release_seats()
        report = replace(
            report,
            tokens=len(session.tokens),
            pages_shared=len(session.kv.sealed) + sum(o in tails for o in session.kv.pending),
            pages_copied=len(row_import.pending_rows),
            rows_copied=to.kv.importing.rows_imported - rows_copied,
            rows_recomputed=max(0, before - session.frontier) if not session.kv.pending else 0,
        )
        if frozen.turn is not None and frozen.seated:
            move.arrival = to.seats.first_commit(session)
        to.thaw(session, frozen)
        await self._at("P6")
        source.kv.slots.release(left)
        source.wake()
        await self._at("P7")
        return report

    async def _gap_ms(self, move: Migration) -> float:
        """Return ms from the last commit on the source to the first on the destination, or 0."""
        arrival, frozen = move.arrival, move.frozen
        if arrival is None or frozen is None:
            return 0.0
        await asyncio.wait([arrival], timeout=FIRST_COMMIT_S)
        if not arrival.done():
            move.to.seats.forget_arrival(move.session)
        return 0.0 if arrival.cancelled() else max(0.0, arrival.result() - frozen.last_ms)

    async def _at(self, point: str) -> None:
        if (waited := self._on_point(point)) is not None:
            await waited


def _has_enough(session: Session, row_import: RowImport, rows: list[PendingRows]) -> bool:
    """Whether the rows that were copied while the session decoded lack few of what it has now.

    `rows` are its open rows. Slots that it gave up meanwhile, for a page that became invalid, held
    other rows than it has now; those of a worker that has died are not computed again.
    """
    there = {pending.page: pending.source for pending in rows}
    copied = [one for one in row_import.pending_rows if one.page >= session.kv.first_open]
    return (
        row_import.imported is not None
        and row_import.is_complete
        and not session.kv.pending
        and all(there.get(one.page) == one.source for one in copied)
        and session.frontier - _reach(session, row_import) <= RECOMPUTE_MAX
    )


def _reach(session: Session, row_import: RowImport) -> int:
    """Return the number of leading tokens whose KV the destination has."""
    reach = session.kv.sealed_tokens
    for pending, rows in zip(row_import.pending_rows, row_import.rows, strict=True):
        if page_start(pending.page) == reach:
            reach += rows
    return reach
