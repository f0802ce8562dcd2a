"""The turns of one lane: those with a seat in the batch, and those that wait for one.

Owns both tables, the seats kept for sessions that migrate here, and the rows that the scheduler
plans with; the scheduler decides the order. A table changes only between two steps.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping

from batchengine import errors
from batchengine.config import LaneConfig
from batchengine.core import BatchEngineError, SlaClass
from batchengine.engine.lane.page_count import PinnedPages
from batchengine.engine.lane.tenants import Tenants
from batchengine.engine.turns.turn import Turn, TurnEnd
from batchengine.kv import LaneKv
from batchengine.metrics import Metrics
from batchengine.policy import scheduler
from batchengine.policy.cost import CostModel
from batchengine.policy.rows import RANK, TenantRow, TurnRow
from batchengine.session import Event, Loss, Session
from batchengine.session_kv import pages_for

STALL_S = 0.25  # after which one of several turns that find no slot makes way
STALL_ALONE_S = 5.0  # after which a turn fails for which no other one can make way
RELAPSES_MAX = 8  # after which a turn fails that gets no further, though others make way
CUT_OFF_MS = 250.0  # after which a session whose holder did not answer computes again


class Seats:
    """Turns of one lane by session key."""

    def __init__(
        self,
        kv: LaneKv,
        config: LaneConfig,
        pages_budget: int,
        metrics: Metrics,
        weights: Mapping[str, float],
    ) -> None:
        """`pages_budget`: pages that the sessions with a seat may hold together, if none are kept
        for peers; `weights`: of the tenants' shares."""
        self.running: dict[int, Turn] = {}
        self.waiting: dict[int, Turn] = {}
        self.expected = 0  # seats kept for sessions that migrate to this lane, or may return to it
        self.pages_budget = pages_budget
        self.pages_lent = 0  # of these, kept for sessions of peers now
        self.pages_barred = 0  # of these, for which the disk has no room now
        self.pages_beyond = 0  # that sessions have with peers, or may have in addition
        self.pages_beyond_free = 0  # of these, the ones that no session has yet
        self.pages_beyond_sure = 0  # the same in whole super-pages, less what peers want back
        self.pages_beyond_max = 0  # that sessions could have with peers that keep nothing else
        self.why_none_beyond = ""  # why peers hold no pages of this model; "" = they do, or none is
        self._cut_off: dict[Turn, float] = {}  # until when a turn waits for its holders, in ms
        self.pages_short = asyncio.Event()  # set while running turns find no page
        self.awaits_peers = False  # pages are on their way to peers, or soon will be
        self.arrivals: dict[int, asyncio.Future[float]] = {}  # see `first_commit`
        self._kv = kv
        self._config = config
        self._metrics = metrics
        self._stalled_ms: float | None = None  # since when no running turn could compute
        self._pinned = PinnedPages()
        self._waiting_rows: tuple[TurnRow, ...] | None = None  # None: not up to date
        self._waiting_tenants: set[str] = set()  # of these rows
        self.tenants = Tenants(weights)
        kv.states.paused = lambda: [t.session for t in self.running.values() if t.paused]

    def __repr__(self) -> str:
        return f"<Seats running={len(self.running)} waiting={len(self.waiting)}>"

    def now_ms(self) -> float:
        """Milliseconds of the monotonic clock."""
        return time.monotonic() * 1000.0

    @property
    def turns(self) -> tuple[Turn, ...]:
        return (*self.running.values(), *self.waiting.values())

    def have_urgent(self) -> bool:
        """Whether a turn that is not paused is interactive or standard."""
        return any(turn.rank <= RANK[SlaClass.STANDARD] and not turn.paused for turn in self.turns)

    def owed_to_steps(self, tenant: str) -> float:
        """Time of steps for each time that the lane computes beside them for a tenant: as much, or
        more where the other tenants with turns have more weight together."""
        names = {turn.session.tenant for turn in self.turns if not turn.paused} - {tenant}
        return max(1.0, sum(map(self.tenants.weight, names)) / self.tenants.weight(tenant))

    @property
    def free(self) -> int:
        """Seats that are neither taken by a turn that computes nor kept for a session."""
        seated = sum([not turn.paused for turn in self.running.values()])
        return self._config.entries_max - self.expected - seated

    def queue(self) -> list[Turn]:
        """Return the waiting turns, by class, then by seats per weight of their tenants."""
        seats = Counter((turn.rank, turn.session.tenant) for turn in self.running.values())
        order: dict[Turn, tuple[int, float, float]] = {}
        for turn in sorted(self.waiting.values(), key=lambda turn: turn.deadline_ms):
            tenant = turn.session.tenant
            seats[turn.rank, tenant] += 1
            load = seats[turn.rank, tenant] / self.tenants.weight(tenant)
            order[turn] = turn.rank, load, turn.deadline_ms
        return sorted(order, key=order.__getitem__)

    def holds(self, turn: Turn) -> bool:
        """Whether the turn is on this lane now."""
        key = turn.session.key
        return turn in (self.running.get(key), self.waiting.get(key))

    def turn_of(self, session: Session) -> Turn | None:
        return self.running.get(session.key) or self.waiting.get(session.key)

    # --------------------------------------------------------------------------------- pages

    @property
    def pages_here(self) -> int:
        """Pages of this daemon that the sessions with a seat may hold together now."""
        return max(0, self.pages_budget - self.pages_lent)

    @property
    def pages_now(self) -> int:
        """Pages that they may hold until the disk has room for more."""
        return max(0, self.pages_here - self.pages_barred)

    def pages_needed(self, ahead: int = 0) -> int:
        """Most pages of this daemon that one turn needs for its present work and `ahead` pages
        more, of the turns for which it has room if it keeps none for peers. A turn that needs peers
        counts with what they do not take now, if this daemon has room for that."""
        return self._needed(ahead, 0)

    @property
    def pages_lacking(self) -> int:
        """Pages kept for peers that the present work of a turn needs; at most 0 if none does."""
        return self._needed(0, self.pages_beyond_free) - self.pages_now

    def _needed(self, ahead: int, beyond: int) -> int:
        """`pages_needed`, if peers take `beyond` pages of a turn that the store could hold."""
        needed, room = 0, self.pages_budget - self.pages_barred
        for turn in self.turns:
            n_pages, n_held = pages_for(len(turn.session.tokens) + 1), turn.session.kv.n_held
            n_pages = min(n_pages, turn.pages_max)
            if n_pages <= room:
                n_here = min(n_pages + ahead, turn.pages_max, room) - n_held - beyond
                needed = max(needed, n_here)
            elif (n_here := n_pages - n_held - self.pages_beyond_sure) <= room:
                needed = max(needed, n_here)
        return needed

    def too_large(self, turn: Turn) -> BatchEngineError:
        """Return why a waiting turn cannot run: never here, or not with what peers have now."""
        request_id, budget = turn.generation.request_id, self.pages_budget + self.pages_beyond
        if turn.pages_max > self.pages_budget + self.pages_beyond_max:
            room = f"the store has {budget} in all"
            if self.why_none_beyond:
                room += f", and {self.why_none_beyond}"
            return errors.REQUEST_TOO_LARGE(pages_max=turn.pages_max, room=room)
        return errors.NO_ROOM_AT_PEERS(
            pages_max=turn.pages_max, budget=budget, request_id=request_id
        )

    # -------------------------------------------------------------------------------- changes

    def wait(self, turn: Turn) -> None:
        """Queue the turn for a seat. Its session is IDLE."""
        turn.session.on(Event.START)
        self.waiting[turn.session.key] = turn
        self._waiting_rows = None

    def seat(self, key: int) -> Turn:
        """Give a waiting turn a seat: its slots are protected, its parked rows are fetched."""
        turn = self.waiting.pop(key)
        turn.session.on(Event.ADMIT)
        self.running[key] = turn
        self.forget_row(turn)
        self._kv.slots.protect(turn.session)
        self._kv.slots.unpark(turn.session)
        return turn

    def preempt(self, key: int) -> None:
        """Take the seat of a running turn: it waits, with a new deadline."""
        turn = self.running.pop(key)
        turn.session.on(Event.PREEMPT)
        turn.deadline_ms = self.now_ms() + turn.horizon_ms
        self.waiting[key] = turn
        self.forget_row(turn)
        self._kv.slots.make_reclaimable(turn.session)
        sla_class = turn.generation.request.sla.sla_class.value
        self._metrics.preemptions_total.labels(sla_class).inc()

    def leave(self, turn: Turn) -> None:
        """Remove a turn that is over: its session is idle and its slots are reclaimable."""
        key = turn.session.key
        if self.waiting.pop(key, None) is not None:
            self._waiting_rows = None
        self.running.pop(key, None)
        turn.session.on(Event.FINISH)
        self.forget_arrival(turn.session)
        turn.session.suspect = False
        self._kv.slots.make_reclaimable(turn.session)

    def fail(self, turn: Turn, error: BatchEngineError) -> None:
        """Remove the turn and end it with this error."""
        self.leave(turn)
        turn.finish(TurnEnd(error=error))

    def cancel(self, turn: Turn) -> None:
        """Remove the turn, if it is on this lane, and end it: its stream is not read any more."""
        if self.holds(turn):
            self.leave(turn)
            turn.finish(TurnEnd("cancelled"))

    def take(self, session: Session) -> tuple[Turn | None, bool]:
        """Remove the turn of a session that migrates: (turn or None, whether it had a seat).

        The seat stays reserved, since the session may return.
        """
        turn = self.running.pop(session.key, None)
        if turn is not None:
            self.expected += 1
            return turn, True
        turn = self.waiting.pop(session.key, None)
        if turn is not None:
            self._waiting_rows = None
        return turn, False

    def raise_priority(self, turn: Turn, rank: int, horizon_ms: float, tpot_ms: float) -> None:
        """Give the turn the rank and targets of a request queued behind it, where tighter."""
        turn.rank = min(turn.rank, rank)
        turn.horizon_ms = min(turn.horizon_ms, horizon_ms)
        turn.deadline_ms = min(turn.deadline_ms, self.now_ms() + horizon_ms)
        turn.tpot_ms = min(turn.tpot_ms, tpot_ms)
        self.forget_row(turn)

    # ------------------------------------------------------------------------------- cut off

    def cut_off(self, turn: Turn) -> None:
        """Have a turn whose holder did not answer wait for CUT_OFF_MS, or for `Slots.holders` to
        change: each attempt makes every entry of its step wait."""
        turn.session.kv.cut_off = True
        self._cut_off[turn] = self.now_ms() + CUT_OFF_MS
        self.forget_row(turn)

    def _try_again(self) -> None:
        """Let turns compute whose time of `cut_off` is over."""
        now_ms = self.now_ms()
        for turn, until_ms in list(self._cut_off.items()):
            if until_ms <= now_ms or not turn.session.kv.cut_off:
                del self._cut_off[turn]
                turn.session.kv.cut_off = False
                self.forget_row(turn)

    # ---------------------------------------------------------------------------------- stall

    def end_stall(self) -> None:
        """Reset the time since which no running turn could compute."""
        self._stalled_ms = None

    def check_stall(self) -> None:
        """End the wait of turns that could compute, but find no slot or page, and no seat.

        What a seal in flight or a move of pages returns is waited for. But the store may have no
        room for the full pages in the arena (a full disk, a tiny budget), which the plan does not
        consider, and turns that wait may hold what the first of them needs. So after STALL_S one
        turn makes way, and after STALL_ALONE_S, when none can, the turn fails. Turns that displace
        each other compute in between; the first of them that gets no further fails. A turn that
        has all slots makes no way, as the next one would get no further: it fails, after STALL_S
        if others wait. So does one for which others make way, but newer ones take their slots.
        """
        able = self._able()
        if able and able[0].session.key in self.running:
            self.pages_short.set()
        if not able or self._kv.is_sealing:
            self._stalled_ms = None
            return
        now_ms = self.now_ms()
        since_ms = self._stalled_ms = now_ms if self._stalled_ms is None else self._stalled_ms
        if self.awaits_peers or (self.pages_lent and self.pages_lacking > 0):
            return  # the time counts on: moves may fail one after the other
        stalled_s = (now_ms - since_ms) / 1000
        if (holder := self._only_holder(able)) is not None:
            able = [holder]
            is_futile = holder.note_stall() > 0 or (stalled_s > STALL_S and len(self.turns) > 1)
        else:
            is_futile = able[0].note_stall() > RELAPSES_MAX
        if holder is None and stalled_s > STALL_S and not is_futile and self._make_way(able):
            self._stalled_ms = None
            furthest = max(able, key=lambda turn: turn.session.frontier)
            if furthest.note_way() > RELAPSES_MAX and self.holds(furthest):
                self._refuse(furthest)
        elif stalled_s > STALL_ALONE_S or is_futile:
            self._stalled_ms = None
            self._refuse(able[0])

    def _able(self) -> list[Turn]:
        """The turns that could compute, but found no slot or page; if all that have a seat are
        paused, those that found no seat."""
        able = [
            turn
            for turn in self.running.values()
            if not (
                turn.paused
                or turn.awaits_mask
                or turn.session.kv.pending
                or turn.session.kv.cut_off
                or turn.session.kv.awaits_state
            )
        ]
        if able:
            return able
        if not all(turn.paused for turn in self.running.values()):
            return []
        return [
            turn
            for turn in self.queue()
            if not (turn.paused or turn.session.is_expecting or turn.session.kv.cut_off)
        ]

    def _refuse(self, turn: Turn) -> None:
        self.fail(turn, _no_room(self, turn))

    def _only_holder(self, able: list[Turn]) -> Turn | None:
        """The one of these turns that has every slot of the arena, while no other has a page, and
        no pages after a lost range to give up."""
        holders = [turn for turn in self.turns if turn.session.kv.codes or turn.session.kv.later]
        arena = self._kv.slots.arena
        if len(holders) != 1 or holders[0] not in able or arena is None or arena.n_free:
            return None
        if holders[0].session.kv.later:
            return None
        return holders[0] if len(holders[0].session.kv.open) == arena.n_open else None

    def _make_way(self, able: list[Turn]) -> bool:
        """Have one turn give up its seat or its pages, for the first of those that could compute.

        False: no other one has any. What is dropped is computed again, rather than in the way.
        """
        first = able[0]
        if len(self.running) > (first.session.key in self.running):
            paused = [turn for turn in self.running.values() if turn.paused]
            seats = Counter(turn.session.tenant for turn in self.running.values())
            last = max(
                paused or able,
                key=lambda turn: (turn.rank, seats[turn.session.tenant], turn.deadline_ms),
            )
            self.preempt(last.session.key)
            return True
        if later := [turn for turn in able if turn.session.kv.later]:
            later[0].session.kv.drop_later()
            return True
        slots = self._kv.slots
        for turn in reversed(self.queue()):
            session = turn.session
            if turn is not first and session.kv.codes:
                slots.clear(session)
                session.loss = Loss.EVICTED
            elif turn is first and session.kv.open:
                slots.vacate(session)
            else:
                continue
            slots.changed(session)
            return True
        return False

    # ----------------------------------------------------------------- first step of a session

    def first_commit(self, session: Session) -> asyncio.Future[float]:
        """Return a future for the time (ms) of this lane's first commit of the session.

        It is cancelled if the turn ends, or the session leaves, before that.
        """
        return self.arrivals.setdefault(session.key, asyncio.get_running_loop().create_future())

    def forget_arrival(self, session: Session) -> None:
        """Cancel the session's `first_commit`, if one is awaited."""
        if (arrival := self.arrivals.pop(session.key, None)) is not None:
            arrival.cancel()

    # -------------------------------------------------------------------- the scheduler's rows

    def forget_row(self, turn: Turn) -> None:
        """Discard the cached row of a turn that has changed."""
        turn.cached_row = None
        self._waiting_rows = None

    def match_all_again(self) -> None:
        """Have every turn match its prompt with the store again, after sessions lost open rows."""
        for turn in self.turns:
            turn.needs_match = True
            turn.cached_row = None
        self._waiting_rows = None

    def view(self, cost: CostModel) -> scheduler.LaneView:
        """Return the state of the lane from which the scheduler plans the next step."""
        if self._cut_off:
            self._try_again()
        running = tuple([turn.row(running=True) for turn in self.running.values()])
        held = self._pinned.count(self.running, self.waiting)
        if self._pinned.changed or self._waiting_rows is None:
            evictable = self._pinned.evictable
            self._waiting_rows = tuple(
                t.row(running=False, evictable=evictable(t.session)) for t in self.waiting.values()
            )
            self._waiting_tenants = {row.tenant for row in self._waiting_rows}
        tenants: dict[str, TenantRow] = {}
        if len(self._waiting_tenants.union([row.tenant for row in running])) > 1:
            tenants = self.tenants.rows((*running, *self._waiting_rows), self.now_ms())
        else:
            self.tenants.clear()
        config = self._config
        return scheduler.LaneView(
            tokens_max=config.tokens_per_step,
            entries_max=max(1, config.entries_max - self.expected),
            chunk_tokens_max=config.chunk_tokens_max,
            step_ms_max=config.step_ms_max,
            slots_free=self._kv.slots.available,
            pages_free=max(0, self.pages_here - held) + self.pages_beyond_free,
            pages_budget=self.pages_budget + self.pages_beyond,
            cost=cost.cost,
            scored_cost=cost.scored_cost,
            running=running,
            waiting=self._waiting_rows,
            tenants=tenants,
        )


def _no_room(seats: Seats, turn: Turn) -> BatchEngineError:
    """Why a turn that has begun finds no page; on a full disk that is the disk, else perhaps pages
    for peers."""
    kv, request_id = turn.session.kv, turn.generation.request_id
    needs_peers = kv.n_held > 0 or turn.pages_max > seats.pages_budget
    if seats.pages_barred or not (seats.pages_lent or needs_peers):
        return errors.NO_ROOM(pages=len(kv.codes), request_id=request_id)
    return errors.NO_ROOM_BESIDE_PEERS(
        pages=len(kv.codes),
        held=kv.n_held,
        pages_max=turn.pages_max,
        lent=seats.pages_lent,
        free=seats.pages_beyond_free,
        request_id=request_id,
    )
