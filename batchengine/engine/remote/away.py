"""Turns of this daemon that a peer computes.

A turn goes to a peer and comes back without a pause, since both compute the same tokens: each side
gives the other those that it lacks, and the side that is to stop does so once the other has caught
up. The reader's stream, the ledger, text and the end of the turn stay here. Whatever happens to the
peer, the turn goes on from the tokens that its stream has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from batchengine import errors
from batchengine.core import BatchEngineError, ModelInfo
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.linked.holds import Misfit
from batchengine.engine.linked.holds_taken import TakenHold
from batchengine.engine.linked.pages import LinkedPages
from batchengine.engine.linked.peer_pages import KnownPage, MoveFailed
from batchengine.engine.placement.decision_log import DecisionLog
from batchengine.engine.placement.move_report import MoveCause, MoveOutcome, MoveReport
from batchengine.engine.remote.exchange import Exchange
from batchengine.engine.remote.served import CREDIT_TOKENS
from batchengine.engine.state import EngineState
from batchengine.engine.tasks import Spawn
from batchengine.engine.turns.turn import Turn
from batchengine.peers.features import HOLDS, TURNS
from batchengine.peers.link import PeerLink
from batchengine.peers.peers import PEER_TENANT, Peers
from batchengine.peers.transitions import LinkState
from batchengine.session import Session
from batchengine.session_kv import SELF
from batchengine.wire.lane import SampledRow
from batchengine.wire.peer import (
    TEXT_CHARS_MAX,
    TURN_TOKENS_MAX,
    RunTurn,
    TurnAccepted,
    TurnEnded,
    TurnGo,
    TurnTokens,
)
from kv_store.errors import StoreError
from kv_store.pages.index import PageRef
from kv_store.store import Store

log = logging.getLogger("batchengine.remote")

ANSWER_S = 5.0  # for a peer to say whether it computes a turn
LOOK_S = 0.25  # between two looks while there is no news
NO_TURN = "no turn of it runs, and a peer computes nothing else: ask while an answer streams"
NOT_BEGUN = "its turn waits here, and a peer computes one that has begun: ask again when it has"
LOST_PAGES = "pages that were lost with a peer are computed again: ask again when it has gone on"
LAG_TOKENS = 1  # a side that lacks no more than this has caught up
RACE_MESSAGES = 4  # after which a peer has caught up as far as it ever will
SILENT_S = 2.0  # without tokens of a peer, after which the turn is computed here too


class CameBack(Exception):
    """Why a turn is computed here alone again; "" = it is over, or was to come back."""


class AwayTurn:
    """One turn that a peer computes too, or alone."""

    def __init__(self, link: PeerLink, turn: Turn, lane: LaneLoop) -> None:
        self.number = 0  # of the request to the peer; 0 until it was asked
        self.incarnation = 0  # of the peer that was asked
        self.link = link
        self.turn = turn
        self.lane = lane
        self.state = "copying pages"
        self.hold: TakenHold | None = None
        self.exchange: Exchange | None = None  # set when the peer was asked
        self.allowed = 0  # position before which the peer may send
        self.messages = 0
        self.untried: list[tuple[int, list[SampledRow]]] | None = []  # None: see `AwayTurns.take`
        self.heard = time.monotonic()
        self.why = ""
        self.is_recalled = False
        self.left: tuple[int, float] | None = None  # tokens when the lane stopped, ms of the last
        self.gap_ms: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.is_over = asyncio.Event()
        self.news = asyncio.Event()

    def __repr__(self) -> str:
        return f"<AwayTurn {self.number} {self.link.name} {self.state} {self.turn!r}>"

    @property
    def is_leaving(self) -> bool:
        """Whether the turn has ended, or must come back."""
        return bool(self.why) or self.turn.end is not None or self.turn.differs

    def fail(self, why: str) -> None:
        """Have the turn come back, for the first of all reasons."""
        self.why = self.why or why
        self.news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds. Raises CameBack when the turn has ended or must come
        back."""
        while True:
            if self.is_leaving:
                raise CameBack(self.why)
            if condition():
                return
            self.news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self.news.wait()


def obstacle(session: Session, turn: Turn | None, moves: bool) -> str:
    """Why a session's turn can go to no peer; "" = it can. `moves`: it changes its lane."""
    if turn is None or turn.end is not None:
        return NO_TURN
    if not turn.reported:
        return NOT_BEGUN
    if turn.shared_with:
        return f"peer {turn.shared_with} computes it too"
    if session.tenant.startswith(PEER_TENANT):
        return f"it is a turn of {session.tenant}"
    if turn.matcher is not None:
        return "its answer follows a grammar, whose masks are computed here"
    if turn.scores is not None:
        return "the log-probabilities of its prompt are computed here"
    if moves:
        return "it moves already"
    if session.kv.later:
        return LOST_PAGES
    if session.kv.n_held:
        names = sorted({segment.peer for segment in session.kv.held} - {SELF})
        return f"peers keep {session.kv.n_held} of its pages: {', '.join(names)}"
    return ""


def link_obstacle(link: PeerLink, is_avoided: bool) -> str:
    """Why a peer takes no turn now; "" = it may."""
    name = link.name
    if link.state is not LinkState.UP:
        return f"the link to {name} is not up: {link.why}"
    if link.is_of_other_model:
        return f"{name} serves another model, and only keeps pages"
    if not link.offers(TURNS) or link.load.leaves:
        return f"{name} takes no turns"
    return f"{name} did not do what it said a moment ago" if is_avoided else ""


class AwayTurns:
    """Every turn of this daemon that a peer computes. Use: `relocate`, `expect`; `facts` for
    operators."""

    def __init__(
        self,
        state: EngineState,
        store: Store,
        peers: Peers,
        linked: LinkedPages,
        decisions: DecisionLog,
        info: ModelInfo,
        spawn: Spawn,
    ) -> None:
        self._state = state
        self._store = store
        self._peers = peers
        self._linked = linked
        self._decisions = decisions
        self._info = info
        self._spawn = spawn
        self._runs: list[AwayTurn] = []
        self._last = 0  # highest number that was given: a peer takes them in their order

    def __repr__(self) -> str:
        return f"<AwayTurns {self._runs}>"

    def facts(self, session: Session) -> dict[str, Any]:
        """For operators: the peer that computes the session's turn; {} if none does."""
        run = self._run_of(session)
        if run is None:
            return {}
        name = run.link.name
        lane = {"lane": f"peer:{name}"} if run.turn.is_away else {}
        return {**lane, "remote": {"peer": name, "state": run.state}}

    # ------------------------------------------------------------------------- called by the engine

    def expect(self, turn: Turn, peer: str, refused: Callable[[], object]) -> None:
        """Have a peer compute a turn, as the router has decided, once its first token was computed
        here. If that is refused, `explain` says why, and `refused` is called while it runs."""
        self._spawn(self._send_begun(turn, peer, refused), "turn for a peer")

    async def _send_begun(self, turn: Turn, peer: str, refused: Callable[[], object]) -> None:
        generation = turn.generation
        while not turn.reported or generation.first_token_ms is None:
            if turn.end is not None:
                return
            await asyncio.sleep(LOOK_S)
        if turn.shared_with:
            return
        try:
            await self.relocate(turn.session, peer)
        except BatchEngineError as error:
            if (record := self._decisions.of_request(generation.request_id)) is not None:
                record.note(f"it does not go to {peer}: {error.why or error.what}")
            if turn.end is None:
                refused()

    async def relocate(
        self, session: Session, to: str | None, reason: str = ""
    ) -> MoveReport | None:
        """Have the session's turn computed by peer `to`, or here again if it is away.

        `reason` is for the report. None: `to` is no peer, and the turn computes here. Raises
        BatchEngineError: then nothing has changed.
        """
        run = self._run_of(session)
        is_peer = to in self._peers.links and self._state.lane(to) is None
        if run is not None and to == run.link.name:
            await self._gap(run)
            return self._report(run, f"peer:{to}", f"peer:{to}", MoveOutcome.ALREADY)
        if run is not None:
            run.is_recalled = True
            run.news.set()
            await run.is_over.wait()
            if to in (None, run.lane.lane.name):
                return self._report(run, f"peer:{run.link.name}", run.lane)
        if not to or not is_peer:
            return None
        return replace(await self._send(session, self._peers.links[to]), reason=reason)

    def leave(self) -> None:
        """Have peers compute the turns that run here, as far as they have room for them."""
        for turn in list(self._state.turns.values()):
            if (link := self._best_peer(turn)) is not None:
                self._begin(turn, self._state.home[turn.session.key], link)

    def _best_peer(self, turn: Turn) -> PeerLink | None:
        """The peer with room for a turn that computes least, or None."""
        need = turn.pages_max * self._store.pages.layout.page_bytes
        able = [
            link
            for link in self._peers.links.values()
            if link.load.kv_free_bytes >= need and not self._why_not(turn.session, turn, link)
        ]
        return min(able, key=self._turns_of, default=None)

    def _turns_of(self, link: PeerLink) -> int:
        """Turns that a peer computes, as far as it has said, and those that are on their way."""
        own = sum(run.link is link for run in self._runs)
        return link.load.requests_running + link.load.requests_waiting + own

    async def _send(self, session: Session, link: PeerLink) -> MoveReport:
        turn = self._state.turn_of(session)
        lane = self._state.home.get(session.key)
        why = self._why_not(session, turn, link)
        if why or turn is None or lane is None:
            raise errors.NOT_MOVED(where="where it is", why=why or NO_TURN)
        began_ms = self._state.now_ms()
        run = self._begin(turn, lane, link)
        gap_ms = await self._gap(run)
        total_ms = round(self._state.now_ms() - began_ms, 3)
        return self._report(run, lane, f"peer:{link.name}", gap_ms=gap_ms, total_ms=total_ms)

    def _begin(self, turn: Turn, lane: LaneLoop, link: PeerLink) -> AwayTurn:
        """Have a peer compute a turn, for which `_why_not` has no reason against it."""
        run = AwayTurn(link, turn, lane)
        self._runs.append(run)
        turn.shared_with, turn.differs = link.name, False
        self._spawn(self._follow(run), "turn at a peer")
        return run

    async def _gap(self, run: AwayTurn) -> float:
        """Wait until the peer alone computes. Raises NOT_MOVED if that does not happen."""
        try:
            return await asyncio.shield(run.gap_ms)
        except CameBack as back:
            why = str(back) or "the turn ended before that"
            raise errors.NOT_MOVED(where=f"on lane {run.lane.lane.name}", why=why) from back

    def _why_not(self, session: Session, turn: Turn | None, link: PeerLink) -> str:
        """Why the session's turn cannot go to a peer now; "" = it can."""
        moves = session.key in self._state.moves
        is_avoided = self._linked.taken.is_avoided(link.name)
        return obstacle(session, turn, moves) or link_obstacle(link, is_avoided)

    def _report(
        self,
        run: AwayTurn,
        source: LaneLoop | str,
        target: LaneLoop | str,
        outcome: MoveOutcome = MoveOutcome.MOVED,
        gap_ms: float = 0.0,
        total_ms: float = 0.0,
    ) -> MoveReport:
        """Report a move, also in the session's latest decision."""
        session = run.turn.session
        report = MoveReport(
            session.session_id,
            source if isinstance(source, str) else source.lane.name,
            target if isinstance(target, str) else target.lane.name,
            MoveCause.PROMOTION,
            tokens=len(session.tokens),
            gap_ms=gap_ms,
            total_ms=total_ms,
            outcome=outcome,
        )
        record = self._decisions.latest(session.session_id, session.tenant)
        is_move = outcome is MoveOutcome.MOVED
        if is_move and record is not None:
            record.add_move(report, self._state.now_ms())
        return report

    def _run_of(self, session: Session) -> AwayTurn | None:
        return next((run for run in self._runs if run.turn.session is session), None)

    def _asked(self, number: int) -> AwayTurn | None:
        """The turn that a peer was asked for under this number, if it is not over."""
        return next((run for run in self._runs if run.number == number > 0), None)

    # ------------------------------------------------------------------------------- of the peer

    def take(self, link: PeerLink, message: TurnTokens, payload: bytes) -> None:
        """Take tokens of a turn from the peer that computes it. Raises Misfit.

        They wait in `untried` until the first of them was computed here too, and is the same.
        """
        run = self._asked(message.run)
        if run is None or run.link is not link:
            self._check_late(message.run)
            return
        if (exchange := run.exchange) is None:
            raise Misfit("tokens of a turn that it was not asked to compute")
        turn, was = run.turn, run.turn.session.tokens
        rows = exchange.take(
            message, payload, run.allowed, with_choices=turn.sampling.logprobs >= 0
        )
        if not run.messages:
            self._release_hold(run)
        run.messages += 1
        run.heard = time.monotonic()
        if run.untried is None:
            run.lane.take_tokens(turn, message.first, rows)
        else:
            run.untried.append((message.first, rows))
        if run.left is not None and len(was) > run.left[0] and not run.gap_ms.done():
            run.gap_ms.set_result(self._state.now_ms() - run.left[1])
        self._give(run, exchange)
        run.news.set()

    def end(self, link: PeerLink, number: int, why: str) -> None:
        """A peer computes a turn no more. Raises Misfit."""
        run = self._asked(number)
        if run is None or run.link is not link:
            self._check_late(number)
        else:
            run.fail(f"{link.name}: {why or 'it has ended'}")

    def lost(self, link: PeerLink) -> None:
        """The link to a peer is lost: its turns are computed here again."""
        for run in self._runs:
            if run.link is link:
                run.fail(f"the link to {link.name} is lost")

    def _check_late(self, number: int) -> None:
        """Raise Misfit about a turn that no peer was asked for; of one that is over, all is
        late."""
        if number > self._last:
            raise Misfit(f"turn {number} was not asked for")

    # ---------------------------------------------------------------------------- one turn

    async def _follow(self, run: AwayTurn) -> None:
        """Have a peer compute a turn, until that or the turn ends."""
        try:
            await self._copy_pages(run)
            exchange = await self._ask(run)
            run.state = "racing"
            await run.until(lambda: self._peer_is_level(run, exchange))
            await self._stop_here(run, exchange)
            await run.until(lambda: bool(self._why_back(run, exchange)))
            if not run.is_recalled:
                self._note_return(run, self._why_back(run, exchange))
            self._go_on_here(run)
            await run.until(lambda: self._is_level(run.turn))
        except CameBack as back:
            run.fail(str(back))
        except (BatchEngineError, OSError) as error:
            run.fail(str(error))
        finally:
            self._end(run)

    async def _copy_pages(self, run: AwayTurn) -> None:
        """Give the peer's store the session's sealed pages, as a hold until the peer's first token,
        and the recurrent state behind them.

        What does not get there, or has no room there, is computed again by the peer.
        """
        session, link, states = run.turn.session, run.link, run.lane.kv.states
        room = link.load.hold_bytes_free // self._store.pages.layout.page_bytes
        refs = _useful_pages(run.lane, session, max(0, room))
        if not refs or not link.offers(HOLDS):
            return
        hold = run.hold = self._linked.taken.begin(link.name)
        try:
            await self._linked.pages.reserve(hold, len(refs))
            for page, ref in enumerate(refs):
                if run.is_leaving:
                    return
                known = KnownPage.of(session, page, self._store.pages.digest(ref))
                async with self._linked.pages.room:
                    await self._linked.pages.put(hold, page, known, ref)
            if states.is_used:
                digest = self._store.pages.digest(refs[-1])
                last = KnownPage.of(session, len(refs) - 1, digest)
                key = session.kv.keys[len(refs) - 1]
                await self._linked.states.put(link, last, key, lambda: run.is_leaving)
        except (MoveFailed, BatchEngineError, StoreError, OSError, ValueError) as error:
            log.info("%r: pages are computed again by %s: %s", session, link.name, error)

    async def _ask(self, run: AwayTurn) -> Exchange:
        """Ask the peer to compute the turn, and send it all tokens so far. Raises CameBack."""
        turn, link, session = run.turn, run.link, run.turn.session
        run.state = "asking"
        await run.until(lambda: True)
        request, n_tokens = turn.generation.request, len(session.tokens)
        tokens_max = request.tokens_max - turn.generation.completion_tokens
        self._last += 1
        run.number, run.incarnation = self._last, link.incarnation
        run.exchange = Exchange(run.number, n_tokens, self._info.vocab_size, is_owner=True)
        run.allowed = n_tokens + CREDIT_TOKENS
        tokens_min = max(0, turn.sampling.tokens_min - turn.generation.completion_tokens)
        sampling = msgspec.structs.replace(turn.sampling, tokens_min=tokens_min)
        asked = RunTurn(
            run.number, n_tokens, tokens_max, sampling, request.sla.sla_class, session.salt
        )
        reply = (await link.request(asked, timeout_s=ANSWER_S)).message
        if not isinstance(reply, TurnAccepted) or reply.why:
            why = getattr(reply, "why", "") or f"it answers with {type(reply).__name__}"
            raise CameBack(f"{link.name}: {why}")
        for first in range(0, n_tokens, TURN_TOKENS_MAX):
            await link.room()
            await run.until(lambda: True)
            end = min(n_tokens, first + TURN_TOKENS_MAX)
            run.exchange.send(link, session.tokens[first:end], first)
        return run.exchange

    def _peer_is_level(self, run: AwayTurn, exchange: Exchange) -> bool:
        if run.messages:
            self._give(run, exchange)
        if run.untried is not None:
            if not run.untried or run.untried[0][0] >= len(run.turn.session.tokens):
                return False
            for first, rows in run.untried:
                run.lane.take_tokens(run.turn, first, rows)
            run.untried = None
        lag = len(run.turn.session.tokens) - exchange.came
        return lag <= LAG_TOKENS or run.messages >= RACE_MESSAGES

    async def _stop_here(self, run: AwayTurn, exchange: Exchange) -> None:
        """Leave the turn to the peer, once the step that computes it here has ended."""
        turn, lane = run.turn, run.lane
        turn.is_away = turn.paused = True
        lane.seats.forget_row(turn)
        run.state = "away"
        boundary = asyncio.Event()

        def reached() -> None:
            run.left = len(turn.session.tokens), turn.generation.last_token_ms or 0.0
            boundary.set()
            run.news.set()

        lane.between_steps(reached)
        await run.until(boundary.is_set)
        self._give(run, exchange)

    def _why_back(self, run: AwayTurn, exchange: Exchange) -> str:
        """Why the turn is to be computed here again, or ""; gives the peer what it waits for."""
        self._give(run, exchange)
        if run.is_recalled:
            return "it was called back"
        if run.link.load.leaves:
            return f"{run.link.name} leaves"
        is_silent = exchange.came < run.allowed and time.monotonic() - run.heard > SILENT_S
        return f"no token came from {run.link.name} for {SILENT_S:g} s" if is_silent else ""

    def _note_return(self, run: AwayTurn, why: str) -> None:
        """Say in the log and in `explain` why a turn that has not ended is computed here again."""
        log.info("%r is computed here again: %s", run.turn, why)
        if (record := self._decisions.of_request(run.turn.generation.request_id)) is not None:
            record.note(f"it is computed here again: {why}")

    def _go_on_here(self, run: AwayTurn) -> None:
        """Compute the turn here too, from the pages that it has."""
        turn = run.turn
        turn.is_away, turn.needs_match = False, True
        run.lane.resume(turn)
        run.state = "coming back"

    def _is_level(self, turn: Turn) -> bool:
        return turn.paused or turn.session.to_compute <= LAG_TOKENS + 1

    def _give(self, run: AwayTurn, exchange: Exchange) -> None:
        """Send the peer what it lacks, and let it send more unless the reader is slow."""
        turn, tokens = run.turn, run.turn.session.tokens
        if run.is_leaving:
            return
        with contextlib.suppress(BatchEngineError):  # the link is lost, and `lost` says so
            while (first := exchange.known) < len(tokens):
                part = tokens[first : first + TURN_TOKENS_MAX]
                exchange.send(run.link, part, first)
            allowed = exchange.known + CREDIT_TOKENS  # it sends none before `known`
            if not turn.generation.full and allowed - run.allowed >= CREDIT_TOKENS // 2:
                run.allowed, run.heard = allowed, time.monotonic()
                run.link.send(TurnGo(run.number, allowed))

    def _end(self, run: AwayTurn) -> None:
        """Compute the turn here alone, if it has not ended; the peer stops."""
        turn, link = run.turn, run.link
        if turn.differs:
            log.error("%r: %s computed another token; it gets no turns for now", turn, link.name)
            self._linked.taken.avoid(link.name, lied=True)
            run.fail(f"{link.name} computed another token")
        if turn.is_away and turn.end is None:
            self._go_on_here(run)
        turn.is_away, turn.shared_with = False, ""
        self._runs.remove(run)
        if link.state.is_open and run.number and link.incarnation == run.incarnation:
            with contextlib.suppress(BatchEngineError):
                link.send(TurnEnded(run.number, True, run.why[:TEXT_CHARS_MAX]))
        self._release_hold(run)
        if run.why and turn.end is None and run.left is None:
            log.info("%r does not go to %s: %s", turn, link.name, run.why)
        elif run.why and turn.end is None:
            self._note_return(run, run.why)
        if not run.gap_ms.done():
            run.gap_ms.set_exception(CameBack(run.why))
            run.gap_ms.exception()  # also if no request waits for it
        run.is_over.set()

    def _release_hold(self, run: AwayTurn) -> None:
        """Have the peer unpin the pages of `_copy_pages`: its turn has them, or needs none."""
        hold, run.hold = run.hold, None
        if hold is not None:
            self._linked.taken.trim(hold)


def _useful_pages(lane: LaneLoop, session: Session, n_max: int) -> list[PageRef]:
    """The leading sealed pages that let a peer compute less; of a model with recurrent state up to
    the last one behind which a file has the state."""
    refs = list(session.kv.sealed[:n_max])
    lane.kv.slots.know_keys(session, len(refs))
    if lane.kv.states.is_used:
        refs = refs[: lane.kv.states.resumable(session.kv.keys[: len(refs)])]
    return refs
