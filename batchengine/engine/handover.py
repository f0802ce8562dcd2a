"""A session moves from one lane to another between two of its tokens.

Owns the protocol and its one commit point. Until P5 the session is the source's, and whatever
happens leaves it there as if nothing had been asked; from P5 on it is the destination's, and
nothing takes it back. Sealed pages go by reference; rows of open pages are adopted, each proven.

    P0  accepted: the destination is up
    P1  it keeps a seat and places, and faults sealed pages in, while the source still decodes
    P2  the source stops the session at a token boundary
    P3  the destination copies its open rows from where they are
    P4  and has proven them
    P5  the ledger names the new owner (a session without a name: memory does)
    P6  it runs on the destination
    P7  the source's places are quarantined
    P8  and free, one generation on
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from batchengine.core import PAGE_TOKENS
from batchengine.engine import refusals
from batchengine.engine.dispatch import Dispatcher
from batchengine.engine.flight import Frozen
from batchengine.engine.journal import INCARNATIONS, Journal
from batchengine.engine.loop import LaneLoop
from batchengine.engine.tables import Tables
from batchengine.engine.turn import Turn
from batchengine.pages import Adoption
from batchengine.router import FAST
from batchengine.session import NOT_LOGGED, Orphan, Session, State
from batchengine.wire import FromArena
from kv_store.errors import StoreError

log = logging.getLogger("batchengine.handover")

ANSWER_S = 5.0  # a lane whose steps take longer is no place to move to;
ADOPT_S = 10.0  # one that stops answering then holds up a frozen session
FIRST_COMMIT_S = 5.0  # how long a report waits for the destination's first token
RECOMPUTE_MAX = 16  # unproven rows that are not worth staying for
CLOSED = "it was dropped, or its request ended"  # reasons to stay that may mean that it is gone
ENDED = "it ended meanwhile"
CANCELLED = "its request was cancelled"


@dataclass(frozen=True, slots=True)
class MoveReport:
    """What a hand-over did. `gap_ms`: last commit on the source to the first on the target; 0 if
    the session had nothing to compute. `result`: "moved", "already there" or "aborted: why"."""

    session_id: str
    source: str
    target: str
    cause: str
    tokens: int = 0
    pages_shared: int = 0
    pages_copied: int = 0
    rows_copied: int = 0
    rows_recomputed: int = 0
    gap_ms: float = 0.0
    total_ms: float = 0.0
    result: str = "moved"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for people and programs."""
        return asdict(self)


class Abort(Exception):
    """The session stays where it is, and why."""


class Move:
    """One hand-over under way: what it holds on either side, to be given back if it fails."""

    def __init__(self, session: Session, source: LaneLoop, to: LaneLoop) -> None:
        self.session = session
        self.source = source
        self.to = to
        self.epoch = session.next_epoch()
        self.adopted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.adoption: Adoption | None = None
        self.frozen: Frozen | None = None
        self.expects = False  # the destination keeps a seat
        self.tails: list[Orphan] = []  # parked rows: they go by reference too
        self.arrival: asyncio.Future[float] | None = None  # the target's first commit, to come
        self.is_owned = False  # P5 is durable, or was asked for and never answered

    def on_adopted(self, complete: bool) -> None:
        if not self.adopted.done():
            self.adopted.set_result(complete)

    @property
    def turn(self) -> Turn | None:
        key = self.session.key
        return self.source.running.get(key) or self.source.waiting.get(key)

    def expect(self) -> None:
        if not self.expects:
            self.expects = True
            self.to.expected += 1

    def release_seats(self) -> None:
        """Seats that were kept for the session on either side."""
        if self.expects:
            self.expects = False
            self.to.expected -= 1
        if self.frozen is not None and self.frozen.seated:
            self.source.expected -= 1

    def undo(self) -> None:
        """As if nothing had been asked."""
        if self.adoption is not None:
            self.to.pages.abandon(self.adoption)
        self.release_seats()
        if self.frozen is not None and self.session.state is State.FROZEN:
            self.source.thaw(self.session, self.frozen)

    def reach(self) -> int:
        """Leading tokens whose KV the destination has."""
        if self.adoption is None:
            raise RuntimeError("nothing was adopted")
        reach = len(self.session.pinned) * PAGE_TOKENS
        for orphan, rows in zip(self.adoption.orphans, self.adoption.rows, strict=True):
            if orphan.page * PAGE_TOKENS == reach:
                reach += rows
        return reach


class Handover:
    """Moves sessions between lanes; moves of one session follow one another."""

    def __init__(
        self,
        tables: Tables,
        journal: Journal,
        dispatch: Dispatcher,
        next_in_queue: Callable[[Session], None],
    ) -> None:
        self._tables = tables
        self._journal = journal
        self._dispatch = dispatch
        self._next_in_queue = next_in_queue
        self._moving = tables.moving
        self._evacuating: set[LaneLoop] = set()
        self._stopping = False
        self.on_point: Callable[[str], Awaitable[None] | None] = _pass  # tests plant faults here

    def __repr__(self) -> str:
        return f"<Handover moving={len(self._moving)}>"

    def moving(self, session: Session) -> asyncio.Future[None] | None:
        """Resolves when the hand-over that the session is in has ended; None = it is in none."""
        return self._moving.get(session.key)

    async def settle(self, timeout_s: float) -> None:
        """Begin no move any more; wait for those under way, which give up if they still can."""
        self._stopping = True
        if self._moving:
            await asyncio.wait(list(self._moving.values()), timeout=timeout_s)

    async def move(self, session: Session, to: LaneLoop, cause: str) -> MoveReport:
        """Bring the session to another lane; it goes on there, or stays as it was."""
        started_ms = self._tables.now_ms()
        while (earlier := self._moving.get(session.key)) is not None:
            await asyncio.wait([earlier])
        source = self._tables.home.get(session.key)
        where = (session.session_id, "none" if source is None else source.lane.name, to.lane.name)
        if source is to:
            return MoveReport(*where, cause, len(session.tokens), result="already there")
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._moving[session.key] = ended
        held = self._hold(session)
        move: Move | None = None
        try:
            report, move = await self._move(session, source, to, MoveReport(*where, cause))
        except Abort as error:
            log.info("%r stays on %s: %s", session, where[1], error)
            report = MoveReport(*where, cause, len(session.tokens), result=f"aborted: {error}")
        finally:
            del self._moving[session.key]
            ended.set_result(None)
            if held:
                self._next_in_queue(session)
        gap_ms = 0.0 if move is None else await self._gap_ms(move)
        total_ms = round(self._tables.now_ms() - started_ms, 3)
        return replace(report, gap_ms=gap_ms, total_ms=total_ms)

    def _hold(self, session: Session) -> bool:
        """Have requests for an idle session wait for the end of the move."""
        if session.state is not State.IDLE or session.key in self._tables.queues:
            return False
        self._tables.queues[session.key] = deque()
        return True

    # ------------------------------------------------------------------------------ protocol

    async def _move(
        self, session: Session, source: LaneLoop | None, to: LaneLoop, report: MoveReport
    ) -> tuple[MoveReport, Move | None]:
        await self._at("P0")
        self._check(session, to)
        if source is None:  # it never computed: there is nothing to hand over
            self._tables.home[session.key] = to
            to.pages.enter(session)
            return report, None
        move = Move(session, source, to)
        try:
            await self._prepare(move)
            await self._freeze(move)
            await self._copy(move)
            await self._commit(move)
        except BaseException:
            if not move.is_owned:
                move.undo()
            raise
        return await self._finish(move, report), move

    def _check(self, session: Session, to: LaneLoop) -> None:
        """Reasons to stay that may come up at any time before P5."""
        if self._stopping or to.stopping:
            raise Abort("the daemon is shutting down")
        if not to.up or not to.pages.is_attached:
            raise Abort(f"lane {to.lane.name} is {'drained' if to.drained else 'down'}")
        if session.suspect:
            raise Abort("it was in a step that killed a worker, and proves itself where it is")
        if session.state is State.CLOSED:
            raise Abort(CLOSED)
        named = self._tables.named.get((session.tenant, session.session_id)) is session
        if named and session.logged == NOT_LOGGED:  # its epoch is not known yet
            raise Abort("it is being read from the ledger")

    async def _prepare(self, move: Move) -> None:
        """P1: everything that takes time, while the source goes on."""
        session, to, turn = move.session, move.to, move.turn
        if turn is not None and session.state is State.RUNNING and not turn.paused:
            if to.seats_free > 0:
                move.expect()
            elif turn.rank >= max((other.rank for other in to.running.values()), default=0):
                raise Abort(
                    f"no room: all {to.config.entries_max} seats of lane {to.lane.name} are taken"
                    " by sessions as urgent"
                )
        n_pages = max(len(session.places), len(session.orphans)) + (turn is not None)
        move.adoption = to.pages.prepare(session, move.epoch, n_pages, move.on_adopted, warm=True)
        if move.adoption is None:
            raise Abort(
                f"no room: {n_pages} open pages are needed on lane {to.lane.name}, and it has"
                f" {to.pages.places_free} places to give"
            )
        await self._touch(to, session.codes[: len(session.pinned)])
        if move.source.pages.is_retitling(session):
            # The client cut its history just now: rows prove themselves once they are recorded
            # under the epoch of what is left. Nobody cuts again before the move has ended.
            await self._touch(move.source, ())
        await self._at("P1")
        self._check(session, to)

    async def _touch(self, loop: LaneLoop, sealed: Sequence[int]) -> None:
        """Returns once the lane has answered a frame that was yet to be sent, and has faulted
        these pages in; or once its worker died, which is noticed later."""
        touched: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        loop.pages.touch(sealed, lambda: None if touched.done() else touched.set_result(None))
        loop.wake()
        await asyncio.wait([touched], timeout=ANSWER_S)
        if not touched.done():
            touched.cancel()
            raise Abort(f"lane {loop.lane.name} does not answer")

    async def _freeze(self, move: Move) -> None:
        """P2: the last token on the source is committed and was given to its reader."""
        session, source = move.session, move.source
        move.frozen = await source.freeze(session)
        if move.frozen is None:
            raise Abort(ENDED)
        source.pages.pause_adopting(session)
        if session.parked is not None:
            source.pages.send_away(session)
        await self._at("P2")

    async def _copy(self, move: Move) -> None:
        """P3 and P4: open rows to the destination, each of them proven there."""
        session, source, to, adoption = move.session, move.source, move.to, move.adoption
        if adoption is None:
            raise RuntimeError("copy before prepare")
        self._check(session, to)
        orphans = [] if session.distrusted else source.pages.sources(session)
        rows = [orphan for orphan in orphans if isinstance(orphan.source, FromArena)]
        if not to.pages.adopt(adoption, rows):
            raise Abort(f"no room: lane {to.lane.name} has no place for {len(rows)} open pages")
        to.wake()
        await self._at("P3")
        await asyncio.wait([move.adopted], timeout=ADOPT_S)
        if not move.adopted.done() or not move.adopted.result():
            raise Abort(f"lane {to.lane.name} died, or does not answer")
        await self._at("P4")
        self._check(session, to)
        if adoption.fallen is not None or (adoption.over and rows):
            raise Abort(f"lane {to.lane.name} died")
        if session.state is not State.FROZEN:
            raise Abort(CLOSED)
        missing = session.frontier - move.reach()
        if missing > RECOMPUTE_MAX and source.lane.alive and not session.distrusted:
            raise Abort(f"{missing} of its rows could not be proven; they are good where they are")
        turn = None if move.frozen is None else move.frozen.turn
        if turn is not None and (turn.generation.cancelled or turn.generation.finished):
            raise Abort(CANCELLED)

    async def _commit(self, move: Move) -> None:
        """P5: from here on the session is the destination's, whatever happens."""
        session, to = move.session, move.to
        if session.logged != NOT_LOGGED and self._tables.store is not None:
            incarnation = self._tables.store.epoch * INCARNATIONS + to.lane.incarnation
            turn = None if move.frozen is None else move.frozen.turn
            move.is_owned = True  # until we know better, neither lane may compute
            try:
                await self._journal.hand_over(session, turn, move.epoch, to.lane.name, incarnation)
            except StoreError as error:
                move.is_owned = False
                raise Abort(f"the ledger refused: {error}") from error
        move.is_owned = True
        session.epoch = move.epoch
        await self._at("P5")

    async def _finish(self, move: Move, report: MoveReport) -> MoveReport:
        """P6 to P8: nothing here may fail; a lane that dies now is the destination's business."""
        session, source, to, adoption = move.session, move.source, move.to, move.adoption
        frozen = move.frozen
        if frozen is None or adoption is None:
            raise RuntimeError("finish before freeze")
        if session.state is not State.FROZEN:  # dropped meanwhile: there is nothing to bring
            move.undo()
            raise Abort(CLOSED)
        before = session.frontier
        left = source.pages.detach(session)
        tails = [o for o in session.orphans if not isinstance(o.source, FromArena)]
        session.orphans = [o for o in session.orphans if isinstance(o.source, FromArena)]
        rows_copied = to.pages.rows_adopted
        to.pages.install(adoption)
        to.pages.bring(session, tails)
        if session.distrusted:  # since it was frozen
            to.pages.truncate(session, len(session.pinned))
        self._tables.home[session.key] = to
        if frozen.turn is not None or self._has_turn(session):
            source.assigned -= 1
            to.assigned += 1
        move.release_seats()
        report = MoveReport(
            report.session_id,
            report.source,
            report.target,
            report.cause,
            tokens=len(session.tokens),
            pages_shared=len(session.pinned) + sum(o in tails for o in session.orphans),
            pages_copied=len(adoption.orphans),
            rows_copied=to.pages.rows_adopted - rows_copied,
            rows_recomputed=max(0, before - session.frontier) if not session.orphans else 0,
        )
        if frozen.turn is not None and frozen.seated:
            move.arrival = to.first_commit(session)
        to.thaw(session, frozen)
        await self._at("P6")
        source.pages.release(left)
        source.wake()
        await self._at("P7")
        await self._at("P8")
        return report

    async def _gap_ms(self, move: Move) -> float:
        """Last commit on the source to the first on the target, once that is known."""
        arrival, frozen = move.arrival, move.frozen
        if arrival is None or frozen is None:
            return 0.0
        await asyncio.wait([arrival], timeout=FIRST_COMMIT_S)
        if not arrival.done():
            move.to.forget_arrival(move.session)
        return 0.0 if arrival.cancelled() else max(0.0, arrival.result() - frozen.last_ms)

    def _has_turn(self, session: Session) -> bool:
        """A turn whose pages are being loaded: it has a lane, but no place in its loop yet."""
        return any(turn.session is session for turn in self._tables.turns.values())

    async def _at(self, point: str) -> None:
        planted = self.on_point(point)
        if planted is not None:
            await planted

    # ---------------------------------------------------------------------------- evacuation

    def refuge(self, away_from: LaneLoop) -> LaneLoop | None:
        """The live lane with most free seats."""
        able = [
            loop
            for loop in self._tables.loops
            if loop is not away_from and loop.up and loop.pages.is_attached and not loop.stopping
        ]
        best = max(able, key=lambda loop: loop.seats_free, default=None)
        return best if best is not None and best.seats_free > 0 else None

    async def evacuate(self, loop: LaneLoop) -> None:
        """Turns of a lane that is down go on elsewhere, as far as there are seats."""
        if loop in self._evacuating:
            return
        self._evacuating.add(loop)
        try:
            for session in self.evacuees(loop):
                to = self.refuge(loop)
                if (loop.pages.is_attached and not loop.drained) or to is None:
                    return
                await self._dispatch.move(session, to, "evacuation")
        finally:
            self._evacuating.discard(loop)

    def evacuees(self, loop: LaneLoop) -> list[Session]:
        """Sessions with turns on a lane that is down, but for those that may have felled it; or
        on a drained one, once they have given up what it computed."""
        settled = not loop.is_rechecking if loop.drained else not loop.pages.is_attached
        if not settled or loop.stopping or self._stopping:
            return []
        turns = [*loop.running.values(), *loop.waiting.values()]
        return [turn.session for turn in turns if not turn.session.suspect]

    # ------------------------------------------------------------------------- asked by people

    async def relocate(
        self, given: str, to: str | None, tenant: str | None, tier: str
    ) -> dict[str, Any]:
        """Move a session to lane `to`, or to the best other one of `tier`. Raises
        BatchEngineError (404, 409, 400): then nothing has changed."""
        session = self._find(given, tenant)
        home = self._tables.home.get(session.key)
        name = "" if home is None else home.lane.name
        if to is not None:
            loop = self._lane(to)
        else:
            loop = self._dispatch.lane_for(session, tier)
            if loop is None and home is not None:  # asked twice is not asked to go back
                settled = home.config.tier == tier and home.lane.alive and home.pages.is_attached
                loop = home if settled else self.refuge(home)
        if loop is None:
            raise refusals.no_other_lane(name)
        cause = "promotion" if tier == FAST else "demotion"
        # Whoever asks may go away: what was begun is ended all the same.
        work = asyncio.ensure_future(self._dispatch.move(session, loop, cause))
        moved = await asyncio.shield(work)
        if not isinstance(moved, MoveReport):
            raise refusals.not_moved(name, "the log has the details")
        if moved.result.startswith("aborted"):
            why = moved.result.partition(": ")[2]
            raise refusals.not_moved(name, why, may_be_gone=why in (CLOSED, ENDED, CANCELLED))
        return moved.as_dict()

    def _find(self, given: str, tenant: str | None) -> Session:
        """The session in memory of this id, or of this unique prefix of one."""
        live = {s.key: s for s in self._tables.named.values()}
        live.update({t.session.key: t.session for t in self._tables.turns.values()})
        mine = [s for s in live.values() if tenant is None or s.tenant == tenant]
        found = [s for s in mine if s.session_id == given]
        if not found and given:
            found = [s for s in mine if s.session_id.startswith(given)]
        if len(found) != 1:
            raise refusals.no_such_session(given, [s.session_id for s in found])
        return found[0]

    def _lane(self, name: str) -> LaneLoop:
        """A lane by name."""
        for loop in self._tables.loops:
            if loop.lane.name == name:
                return loop
        raise refusals.no_such_lane(name, [loop.lane.name for loop in self._tables.loops])


def _pass(point: str) -> None:
    """No fault is planted."""
