"""Migrations that no request asks for: of turns to and from fast lanes, and of idle sessions.

Owns how many begin at a time; `policy.moves` says which.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import NamedTuple

from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.placement.decision_log import DecisionLog
from batchengine.engine.placement.lane_view import LaneViews, scored_ms_of
from batchengine.engine.placement.move_report import MoveCause
from batchengine.engine.placement.session_times import TimesOfSessions
from batchengine.engine.state import EngineState
from batchengine.engine.turns.turn import Turn
from batchengine.policy import moves, router
from batchengine.policy.cost import LoadRow
from batchengine.session import Session

MOVES_MAX = 4  # idle sessions that leave the fast lanes per second; turns that go there at a time
WAITING_MAX = 64  # turns of a queue that are looked at for a promotion


class OwnMove(NamedTuple):
    """A session, the lane it is to go to, and why."""

    session: Session
    to: LaneLoop
    cause: MoveCause


class OwnMoves:
    """The migrations of one engine that are due. Use: `due`, once a second."""

    def __init__(
        self, state: EngineState, lanes: LaneViews, times: TimesOfSessions, log: DecisionLog
    ) -> None:
        self._state, self._lanes, self._times, self._log = state, lanes, times, log
        self._moving: set[int] = set()  # keys of sessions

    def due(self, policy: router.RoutePolicy) -> list[OwnMove]:
        """Return the migrations to begin now, if lanes are of different tiers."""
        lanes = self._state.lanes
        if not any(loop.config.tier == router.FAST for loop in lanes):
            return []
        return self._turns(policy) + self._demotions(policy)

    def _view(self, session: Session, home: LaneLoop, reused: int) -> router.RouteSession:
        note, now_ms = self._times.of(session), self._state.now_ms()
        return router.RouteSession(
            home.lane.name,
            reused,
            max(0, reused - session.kv.sealed_tokens),
            now_ms - max(note.moved_ms, note.refused_ms),
            now_ms - note.urgent_ms,
        )

    # --------------------------------------------------------------------------------- turns

    def _turns(self, policy: router.RoutePolicy) -> list[OwnMove]:
        """Return turns that end earlier on a fast lane, most urgent first, then by what they gain;
        then turns that leave one. One alone while no step of the lane they go to was measured."""
        self._moving &= self._state.moves.keys()
        found: list[tuple[bool, int, float, int, Turn, LaneLoop]] = []
        for index, (turn, home) in enumerate(self._movable()):
            if (move := self._turn_move(turn, home, policy)) is not None:
                leaves, gain_ms = home.config.tier == router.FAST, move.here_ms - move.there_ms
                rank = -turn.rank if leaves else turn.rank
                found.append((leaves, rank, -gain_ms, index, turn, home))
        due: list[OwnMove] = []
        for leaves, *_, turn, home in sorted(found, key=lambda row: row[:4]):
            gain = self._turn_move(turn, home, policy)  # beside those that are chosen already
            to = None if gain is None else self._state.lane(gain.lane)
            if gain is None or to is None:
                continue
            if len(self._moving) >= (MOVES_MAX if to.cost.steps else 1):
                break
            session = turn.session
            self._moving.add(session.key)
            self._lanes.joined(to, session.tenant, turn.rank, session.frontier, session.to_compute)
            if (record := self._log.of_request(turn.generation.request_id)) is not None:
                record.note(
                    f"to {gain.lane} ({gain.reason}): it is predicted to end in"
                    f" {gain.there_ms / 1000:.2f} s there, {gain.here_ms / 1000:.2f} s on"
                    f" {home.lane.name}"
                )
            cause = MoveCause.RELIEF if leaves else MoveCause.FASTER
            due.append(OwnMove(session, to, cause))
        return due

    def _movable(self) -> list[tuple[Turn, LaneLoop]]:
        """Return the turns that may move, and their lanes."""
        return [
            (turn, home)
            for home in self._state.lanes
            if home.up
            for turn in (*home.running.values(), *islice(home.waiting.values(), WAITING_MAX))
            if not (turn.paused or turn.is_away or turn.shared_with or turn.end)
            and not (turn.session.kv.held or turn.session.suspect)
            and turn.session.key not in self._state.moves
            and turn.session.key not in self._moving
        ]

    def _turn_move(
        self, turn: Turn, home: LaneLoop, policy: router.RoutePolicy
    ) -> moves.TurnMove | None:
        session, generation = turn.session, turn.generation
        request = generation.request
        left = max(1, self._lanes.tokens_out(request) - generation.completion_tokens)
        n, frontier = len(session.tokens), session.frontier
        to_compute, seated = max(1, n - frontier), session.key in home.running
        scored_ms = scored_ms_of(home, request, to_compute)
        row = LoadRow(turn.rank, frontier, to_compute, left, seated, scored_ms)
        known = self._lanes.asked(request)
        asked = router.RouteRequest(
            turn.rank,
            n,
            left,
            len(request.prompt) + request.tokens_max,
            known.ttft_ms if generation.first_token_ms is None else math.inf,
            turn.tpot_ms,
            known.ttlt_ms
            if math.isinf(known.ttlt_ms)
            else max(1.0, known.ttlt_ms - (self._state.now_ms() - generation.arrived_ms)),
            router.is_urgent(known, policy),
        )
        session_view = self._view(session, home, min(frontier, n - 1))
        state = router.RouteState(self._lanes.all(session.tenant), policy)
        choose = moves.relief if home.config.tier == router.FAST else moves.promotion
        return choose(asked, session_view, row, state)

    # ----------------------------------------------------------------------------- demotions

    def _demotions(self, policy: router.RoutePolicy) -> list[OwnMove]:
        """Return idle sessions to demote from fast lanes, oldest use first."""
        state, now_ms = router.RouteState(self._lanes.all(), policy), self._state.now_ms()
        found: list[OwnMove] = []
        for session in self._state.sessions.values():
            home = self._state.home.get(session.key)
            if (
                home is None
                or home.config.tier != router.FAST
                or not self._state.is_at_rest(session)
            ):
                continue
            idle_ms = now_ms - self._times.of(session).used_ms
            view = self._view(session, home, 0)
            to = self._state.lane(moves.demotion(view, idle_ms, len(session.tokens), state))
            if to is not None:
                found.append(OwnMove(session, to, MoveCause.IDLE))
                if len(found) >= MOVES_MAX:
                    break
        return found
