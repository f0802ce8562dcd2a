"""Scheduler: chooses the tokens of a lane's next step, by one pure function from view to plan.

Owns every scheduling rule; `prefill_budget` has the arithmetic of rule 3, `shares` that of rule 7.
Reads no clocks, queues, pages or workers: the engine builds a frozen `LaneView`, calls `plan`, and
carries out the plan. Equal views give equal plans; the order in which rows are listed changes only
the order of the batch.

Work is tokens still to compute. There are no phases: a decode is an entry of one token.

Rules, in the order in which they are applied
 1. A suspect runs alone: its solo steps alternate with steps of all other sessions.
 2. Every running decode is in the step, unless rule 5 takes its seat or it gets no page.
 3. What time and tokens remain go to longer work, most urgent first: by class, inside a class
    by deadline. Prefill may take as long as the decodes of the step (`prefill_share`); when its
    own deadline would be missed, up to the tightest TPOT slack; never less than
    `chunk_tokens_min`. So a decode waits for at most one chunk, sized to its own target.
 4. Sessions are admitted when they get their first tokens, not before.
 5. A seat is taken from a less urgent session (later class, past `quantum_urgent_ms`), which
    keeps its KV and joins the queue again with a new deadline. Paused sessions are preempted first.
 6. Aging. The *late* session of the earliest deadline, whatever its class, is served before rule 3:
    it may take a seat of its own or a less urgent class after `quantum_ms`, and of any class while
    its class and those below hold fewer than `aged_seats`. A late running prefill likewise gets
    the first tokens of every step. Tenants take turns at it, whatever their deadlines; a seat
    that was given away while the session was late is taken at once; while a tenant with fewer
    seats in the class waits, a session takes seats of its own tenant only; and while the prompt
    of another tenant of the class is next by rule 7, none.
 7. Shares. Inside a class, tokens of rule 3 go to the tenant that has used least time per weight,
    and seats to the tenant that holds least; deadlines order the sessions of one tenant. A
    session may take a seat of a tenant that still holds more per weight after that; and, where
    seats do not divide evenly, of one that holds more and has used more, after
    `quantum_urgent_ms`. Targets bind no other tenant of the class: a TPOT target does not take its
    prefill below `prefill_share`, a deadline does not take its decodes below theirs. A tenant that
    has used less than all that decode beside it may prefill for that time more, as far as targets
    of its own and of more urgent classes permit. With one tenant this rule is empty.

Theorem (aging). Let a session join with deadline D = join + horizon, and let A sessions wait
with an earlier deadline at time D. It computes its first token before

    D + (A + 1) * (5 * quantum_ms + 2 * longest step)

whatever arrives later, provided every preemption returns a slot and pages can be reserved.
Proof. Horizons are positive, so a turn that joins after D has a later deadline: A only shrinks. Let
w be the late session of earliest deadline. (a) While its class and those below hold at least
`aged_seats`, one of those rows runs; only more urgent sessions can be seated before w (inside
its class w is first, those below come after it), so after one quantum every such row may be
displaced by w, or has left. (b) When they hold fewer, free seats go to w first, and any row
past its quantum may be displaced. A seat can pass to a session other than w only by rule 5,
which strictly lowers the class of its holder: at most three times, so after four quanta w has a
seat. Steps end before plans are made, and rule 1 doubles their number. w then leaves the queue
with at least one token computed, and the argument repeats for the A - 1 that are left.

With K tenants the bound is D + K * (A + 1) * (5 * quantum_ms + 2 * longest step), plus the time
that the others are owed (each `CREDIT_MS` per weight at most), where A counts sessions of the same
tenant: a queue of another tenant adds nothing. Proof. Tenants take turns at rule 6, so at most
K - 1 others precede each session of w's tenant; w gives way to prompts of a tenant that is owed
time, until they have taken it. While w's tenant has seats in w's class, w is the first of its
sessions to be seated there, so after one quantum w may take one, or none is left. With none left
no tenant of the class holds less. Every row that rule 6 names then was seated before D, and is past
its quantum, or after D, and may be displaced at once, or belongs to a tenant of the class that has
used less. Rule 7 passes seats inside one class, so the number of seats per class in (a) and (b)
does not change by it.

Theorem (shares). Two tenants of one class and weight that both have sessions waiting all the time
hold equal seats, but for one, and use equal time, so of equal work compute equal tokens, but for
two steps and `quantum_urgent_ms` of one seat. Proof. Rule 7 takes seats until no tenant would hold
more after the exchange. The seat that is left over, and every chunk, goes to the tenant that has
used less; a chunk is at most one step, a seat is held for the quantum.

Preemptions. No turn loses a seat without having computed in it and held it for
`quantum_urgent_ms` (`quantum_ms` when rule 6 takes it); slow readers, shortage of pages and
seats beyond a tenant's share excepted. So a session of the only tenant that is T ms in seats is
preempted at most T / quantum_urgent_ms times.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from batchengine.core import PAGE_TOKENS, Sla
from batchengine.policy.cost import StepCost, entry_ms, tokens_in
from batchengine.policy.prefill_budget import Decodes, budget_ms
from batchengine.policy.rows import RANK, TenantRow, TurnRow
from batchengine.policy.shares import Lines, Shares

HORIZON_MS_MAX = 3_600_000.0  # aging needs a finite horizon, whatever target a request names
PRIORITY_MAX = 8  # beyond it a priority counts as this


@dataclass(frozen=True, slots=True)
class Policy:
    """Constants of the scheduling rules; milliseconds and tokens."""

    chunk_tokens_min: int = 16  # one tile of the linear kernels: fewer tokens cost the same
    quantum_ms: float = 2000.0  # long against a step and a page seal, short against `patience_s`
    quantum_urgent_ms: float = 100.0  # a fifth of the interactive TTFT target
    margin_ms: float = 50.0  # hysteresis: deadlines closer than this are equal
    prefill_share: float = 1.0  # prefill time per decode time: decodes keep half their speed
    aged_share: float = 0.25  # of the prefill budget, to the late session of rule 6
    aged_seats: int = 0  # seats that rule 6 keeps for late ones; 0 = entries_max / 8, at least 1


@dataclass(frozen=True, slots=True)
class LaneView:
    """A lane and its sessions at one moment. `running` and `waiting` are disjoint.

    Keep `waiting` sorted (`bisect.insort`): sorting a sorted list costs one pass.
    """

    tokens_max: int  # tokens per step
    entries_max: int  # entries per step = seats
    chunk_tokens_max: int  # prefill tokens per step
    step_ms_max: float  # no step is planned longer, except for a chunk of `chunk_tokens_min`
    slots_free: int  # arena slots without a holder
    pages_free: int  # store pages that can be reserved now (free or evictable)
    pages_budget: int  # store pages in all
    cost: StepCost
    scored_cost: StepCost  # of sessions whose prompt is scored
    running: tuple[TurnRow, ...]
    waiting: tuple[TurnRow, ...]
    policy: Policy = Policy()
    tenants: Mapping[str, TenantRow] = field(default_factory=dict[str, TenantRow])  # if several


class PlannedEntry(NamedTuple):
    """Compute the next `n_tokens` of session `key`."""

    key: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Plan of one step, carried out in this order: preempt, shed, admit, run the batch."""

    batch: tuple[PlannedEntry, ...]
    admit: tuple[int, ...] = ()  # waiting -> running; each has an entry in `batch`
    preempt: tuple[int, ...] = ()  # running -> waiting: KV stays, open slots are reclaimable
    aged: tuple[int, ...] = ()  # those of `admit` that rule 6 admitted: one at most
    shed: tuple[int, ...] = ()  # can never run: needs more pages than the budget
    predicted_ms: float = 0.0


def horizon_ms(sla: Sla, ttft_ms: float, expected_ms: float = 0.0) -> float:
    """Return the ms that a session may wait before it is late; in [1, HORIZON_MS_MAX].

    This is the TTFT target, `ttft_ms` by default, or the TTLT target less `expected_ms` of compute
    if that is less. A priority changes it by up to half, so priorities order arrivals of one class
    only.
    """
    horizon = ttft_ms if sla.ttft_ms is None else sla.ttft_ms
    if sla.ttlt_ms is not None:
        horizon = min(horizon, sla.ttlt_ms - expected_ms)
    priority = max(-PRIORITY_MAX, min(PRIORITY_MAX, sla.priority))
    horizon *= 1.0 - priority / (2 * PRIORITY_MAX)
    return min(HORIZON_MS_MAX, horizon) if horizon >= 1.0 else 1.0


def plan(view: LaneView, now_ms: float) -> StepPlan:
    """Decide one step. Pure: no clock, no hidden state. Costs about 1 µs per running session,
    and some µs while sessions wait."""
    builder = _PlanBuilder(view, now_ms)
    if builder.suspects and builder.suspect_is_next():
        if builder.run_suspect():
            return builder.finish()
        builder = _PlanBuilder(view, now_ms)
    builder.take_decodes()
    if builder.prefills or view.waiting:
        builder.fill()
    if builder.stalled_for_pages and not builder.preempted:
        builder.preempt_for_pages()
    found = builder.finish()
    if builder.suspects and not found.batch and not found.preempt:
        alone = _PlanBuilder(view, now_ms)  # the other sessions lack seats or pages
        if alone.run_suspect():
            return alone.finish()
    return found


class _PlanBuilder:
    """A plan being made: remaining resources of the lane, and the grants so far."""

    def __init__(self, view: LaneView, now_ms: float) -> None:
        self.view = view
        self.now_ms = now_ms
        self.decodes: list[TurnRow] = []
        self.prefills: list[TurnRow] = []
        self.suspects: list[TurnRow] = []
        self.waiting: list[TurnRow] = []
        self.shares = Shares(view.tenants, view.running)
        self.lines = Lines(self.shares, (), ())
        self.granted: dict[int, int] = {}  # key -> tokens, in grant order
        self.admitted: list[TurnRow] = []
        self.aged: list[TurnRow] = []
        self.preempted: list[TurnRow] = []
        self.shed: list[int] = []
        self.stalled: list[TurnRow] = []
        self.stalled_for_pages = False
        self.slack_ms = math.inf  # until the first decode misses its TPOT target
        self.decode_ms = view.cost.fixed_ms
        self.prefill_ms = 0.0  # time of this step that longer work may take
        self.spent_ms = 0.0  # time that its grants take so far
        self.slots_left = view.slots_free
        self.pages_left = view.pages_free
        self.chunk_tokens = 0  # most tokens of longer work in this step
        self.tokens_left = 0
        for row in view.running:
            if row.paused or row.to_compute < 1:
                continue
            if row.suspect:
                self.suspects.append(row)
            elif row.to_compute == 1:
                self.decodes.append(row)
            else:
                self.prefills.append(row)
        active = len(self.suspects) + len(self.decodes) + len(self.prefills)
        self.seats_left = view.entries_max - active
        self.entries_left = view.entries_max
        if view.waiting and not self.suspects:
            self.suspects = [r for r in view.waiting if r.suspect and not r.paused]

    # ---- rule 1: suspects ----

    def suspect_is_next(self) -> bool:
        """Whether the suspect has waited longer than the others, which count as one session."""
        group = [r.served_ms for r in self.decodes] + [r.served_ms for r in self.prefills]
        waiting = (_last_ms(r) for r in self.view.waiting if not (r.suspect or r.paused))
        others_ms = max(group) if group else min(waiting, default=math.inf)
        return _last_ms(self._suspect()) <= others_ms

    def _suspect(self) -> TurnRow:
        return min(self.suspects, key=lambda r: (_last_ms(r), r.key))

    def run_suspect(self) -> bool:
        """Plan a solo step; False if the suspect cannot run: then the builder is unusable."""
        view = self.view
        row = self._suspect()
        due_ms = min((r.served_ms + r.tpot_ms for r in self.decodes), default=math.inf)
        self.prefill_ms = min(view.step_ms_max, due_ms - self.now_ms) - self.decode_ms
        self.tokens_left = self.chunk_tokens = min(view.chunk_tokens_max, view.tokens_max)
        self.decodes = []
        if row.running:
            return self._grant(row)
        return self._admit(row, aged=row.deadline_ms <= self.now_ms)

    # ---- rule 2: decodes ----

    def take_decodes(self) -> None:
        """Put every running decode into the batch, with its page and its time."""
        view = self.view
        if len(self.decodes) > min(view.entries_max, view.tokens_max):
            self._rotate_decodes()
        kv_tokens = 0
        due_ms = math.inf
        needy: list[TurnRow] = []
        for row in self.decodes:
            frontier = row.frontier
            kv_tokens += frontier + 1
            if frontier >= row.open_until or frontier >= row.pages_held * PAGE_TOKENS:
                needy.append(row)
            due = row.served_ms + row.tpot_ms
            if due < due_ms:
                due_ms = due
        if needy:
            kv_tokens -= self._open_pages(needy)
        cost = view.cost
        self.decode_ms += cost.decode_entry_ms * len(self.decodes) + cost.decode_kv_ms * kv_tokens
        self.slack_ms = due_ms - self.now_ms - self.decode_ms
        self.entries_left = view.entries_max - len(self.decodes)

    def _rotate_decodes(self) -> None:
        """Keep the decodes that were served least recently; more have resumed than a step holds."""
        room = min(self.view.entries_max, self.view.tokens_max)
        if self.prefills:
            room = max(1, min(room - 1, self.view.tokens_max - self.view.policy.chunk_tokens_min))
        kept = {r.key for r in self.shares.rotation(self.decodes)[:room]}
        self.decodes = [r for r in self.decodes if r.key in kept]

    def _open_pages(self, needy: list[TurnRow]) -> int:
        """Reserve a page for each decode that begins one, in order of service; others stall.

        Returns the KV tokens that the stalled ones would have attended.
        """
        needy.sort(key=self.shares.page_order)
        dropped = {row.key: row.frontier + 1 for row in needy if not self._reserve(row, 1)}
        if dropped:
            self.decodes = [r for r in self.decodes if r.key not in dropped]
        return sum(dropped.values())

    # ---- rules 3, 4 and 6: longer work ----

    def fill(self) -> None:
        """Plan prefill, admissions and aging with the time and tokens that decodes leave."""
        view = self.view
        self.chunk_tokens = min(view.chunk_tokens_max, view.tokens_max - len(self.decodes))
        self.tokens_left = self.chunk_tokens
        if self.tokens_left < 1:
            return
        self.waiting = sorted(view.waiting)
        self.prefills.sort()
        if self.shares.several:
            for row in self.decodes:
                self.shares.computed(row, entry_ms(view.cost, row.frontier, 1))
        self.lines = Lines(self.shares, self.prefills, self.waiting)
        head = self.lines.head()
        if head is not None:
            self._set_budget(head)
            self._age(head)
            self._serve()

    def _set_budget(self, head: TurnRow) -> None:
        """Set the milliseconds for longer work, by rule 3."""
        longest_ms = self.view.step_ms_max - self.decode_ms
        if not self.decodes:
            self.prefill_ms = longest_ms
            return
        work_ms = entry_ms(self._cost(head), head.frontier, head.to_compute)
        decodes = Decodes(self.decodes, self.decode_ms, self.slack_ms, self.now_ms)
        share = self.view.policy.prefill_share
        found_ms = budget_ms(head, work_ms, decodes, self.shares, share=share)
        self.prefill_ms = min(found_ms, longest_ms)

    def _age(self, head: TurnRow) -> None:
        """Serve the late session of the earliest deadline first, by rule 6; tenants take turns."""
        now_ms = self.now_ms
        for row in self._late_waiting():
            if _gives_way(row, head):
                continue
            limit = 1.0 if row is head else self.view.policy.aged_share
            if self._admit(row, aged=True, share=limit):
                self.aged.append(row)
                return
        late = [r for r in self.prefills if r.deadline_ms <= now_ms and r not in self.preempted]
        late = [r for r in late if not _gives_way(r, head)]
        if late:
            last_ms = {r.tenant: r.served_ms for r in sorted(late, key=lambda r: r.served_ms)}
            row = min(late, key=lambda r: (last_ms[r.tenant], r.tenant, *_age_order(r)))
            if row is not head:
                self._grant(row, self.view.policy.aged_share)

    def _late_waiting(self) -> list[TurnRow]:
        """Return the late waiting session of the earliest deadline of each tenant, in turn."""
        heads: dict[str, TurnRow] = {}
        for line in self.lines.waiting():
            for row in line:  # one class of one tenant, by deadline: take the first able one
                if row.deadline_ms > self.now_ms:
                    break
                if self._is_able(row):
                    heads[row.tenant] = min(heads.get(row.tenant, row), row, key=_age_order)
                    break
        since_ms = self.shares.since_ms
        return sorted(heads.values(), key=lambda r: (since_ms(r), *_age_order(r)))

    def _is_able(self, row: TurnRow) -> bool:
        """Whether a waiting session may be admitted to a common step. Sheds one that never fits."""
        if row.pages_max > self.view.pages_budget:
            if row.key not in self.shed:
                self.shed.append(row.key)
            return False
        return not (row.paused or row.suspect or row.key in self.granted)

    def _serve(self) -> None:
        """Serve running and waiting sessions by rules 3 and 7, merged in order of service."""
        lines = self.lines
        served = False
        while self.tokens_left > 0 and (row := lines.head()) is not None:
            lines.take(row)
            if row.running:
                if row.key not in self.granted and row not in self.preempted:
                    served = self._grant(row, floor=not served) or served
            elif self._is_able(row):
                if self._admit(row, aged=False, floor=not served):
                    served = True
                else:
                    lines.close()  # no later session may overtake this one

    # ---- granting ----

    def _grant(self, row: TurnRow, share: float = 1.0, floor: bool = True) -> bool:
        """Give `row` its next chunk out of `share` of the time; False if it gets nothing."""
        wanted = self._fit(row, share, floor) if self.entries_left > 0 else 0
        n = self._reserve(row, wanted) if wanted else 0
        if n:
            self.granted[row.key] = n
            self.tokens_left -= n
            self.entries_left -= 1
            ms = entry_ms(self._cost(row), row.frontier, n)
            self.spent_ms += ms
            self.shares.computed(row, ms)
        return n > 0

    def _fit(self, row: TurnRow, share: float, floor: bool) -> int:
        """Return how many tokens of `row` fit the time left: whole tiles, except at its end."""
        tile = self.view.policy.chunk_tokens_min
        want = min(row.to_compute, self.tokens_left, max(tile, int(self.chunk_tokens * share)))
        left_ms = min(self.prefill_ms * share, self.prefill_ms - self.spent_ms)
        n = min(want, tokens_in(self._cost(row), row.frontier, left_ms))
        if n < row.to_compute:
            n -= n % tile
        if n >= min(tile, row.to_compute):
            return n
        return min(want, tile) if floor else 0

    def _cost(self, row: TurnRow) -> StepCost:
        return self.view.scored_cost if row.scored else self.view.cost

    def _reserve(self, row: TurnRow, n: int) -> int:
        """Take slots and pages for the next `n` tokens; returns fewer tokens if they run out.

        [0, frontier)             computed
        [frontier, frontier + n)  this step; from open_until on it needs new slots,
                                  from pages_held * PAGE_TOKENS on new pages
        """
        held = row.pages_held * PAGE_TOKENS
        by_pages = held + self.pages_left * PAGE_TOKENS - row.frontier
        n = min(n, row.open_until + self.slots_left * PAGE_TOKENS - row.frontier, by_pages)
        if n < 1:
            if row.running:
                self.stalled.append(row)
                self.stalled_for_pages |= by_pages < 1
            return 0
        end = row.frontier + n
        self.slots_left -= max(0, _pages(end - row.open_until))
        self.pages_left -= max(0, _pages(end - held))
        return n

    # ---- rules 4 to 6: admission and preemption ----

    def _admit(self, row: TurnRow, aged: bool, share: float = 1.0, floor: bool = True) -> bool:
        """Give a waiting session a seat and its first tokens, or change nothing.

        The store must have all pages for its present work besides those that seated sessions still
        need, so that an admitted session does not stop for lack of pages.
        """
        if not self._fit(row, share, floor):
            return False
        if _pages_due(row) > self._pages_unpromised():
            if self.preempted:
                return False
            self._preempt(self._victims(row, aged, seats=1, slots=0))
            if _pages_due(row) > self._pages_unpromised():
                return False  # the victim's pages can be evicted before the next plan
        seats = max(0, 1 - self.seats_left)
        if aged and not seats and (self._is_crowded(row) or self._is_over_share(row)):
            seats = 1
        slots = row.slots_held + (row.frontier >= row.open_until) - self.slots_left
        if seats or slots > 0:
            victims = self._victims(row, aged, seats, slots)
            if not victims:
                return False
            self._preempt(victims)
        self.admitted.append(row)
        self.seats_left -= 1
        self.shares.seated(row, 1)
        self.slots_left -= row.slots_held  # not reclaimable any more
        self.pages_left -= row.pages_evictable  # not evictable any more
        return self._grant(row, share, floor)

    def _is_crowded(self, row: TurnRow) -> bool:
        """Whether the row's class has its aged seats, and a more urgent session waits."""
        if not self.waiting or self.waiting[0].rank >= row.rank:
            return False
        return self._seats_from()[row.rank] >= self._aged_seats()

    def _is_over_share(self, row: TurnRow) -> bool:
        """Whether a session of its class waits whose tenant has fewer seats per weight."""
        return any(any(map(self._is_able, line)) for line in self.lines.rivals(row))

    def _aged_seats(self) -> int:
        return self.view.policy.aged_seats or max(1, self.view.entries_max // 8)

    def _seated(self) -> list[TurnRow]:
        """Return the sessions that compute and hold a seat after the grants so far."""
        out = self.preempted
        rows = [r for r in self.view.running if not r.paused and r.to_compute and r not in out]
        return rows + self.admitted

    def _seats_from(self) -> list[int]:
        """[rank] -> seats held by that rank and less urgent ones."""
        ranks = sorted(r.rank for r in self._seated())
        return [len(ranks) - bisect_left(ranks, rank) for rank in RANK.values()]

    def _pages_unpromised(self) -> int:
        """Number of free pages less those that seated sessions need for their present work."""
        return self.view.pages_free - sum(map(_pages_due, self._seated()))

    def _victims(self, row: TurnRow, aged: bool, seats: int, slots: int) -> list[TurnRow]:
        """Return running sessions that `row` may displace for seats and slots; [] if too few."""
        claim = self._claim(row, aged)
        own_only = aged and self._is_over_share(row)
        taken: list[TurnRow] = []
        for victim in self._by_urgency():
            gives_seat = not victim.paused and victim.to_compute > 0
            useful = (seats > 0 and gives_seat) or (slots > 0 and victim.slots_held > 0)
            if own_only and (victim.rank, victim.tenant) != (row.rank, row.tenant):
                continue
            if useful and (victim.paused or claim.takes_from(victim)):
                taken.append(victim)
                seats -= gives_seat
                slots -= victim.slots_held
                if seats <= 0 and slots <= 0:
                    return taken
        return []

    def _by_urgency(self) -> list[TurnRow]:
        """Return running sessions not served in this plan: paused ones, then least urgent first;
        inside a class those of the tenant with most seats."""
        rows = [
            r for r in self.view.running if r.key not in self.granted and r not in self.preempted
        ]
        load = self.shares.load
        rows.sort(key=lambda r: (not r.paused, -r.rank, -load(r), r.admitted_ms, r.key))
        return rows

    def _claim(self, row: TurnRow, aged: bool) -> _Claim:
        seats_from, aged_seats = self._seats_from(), self._aged_seats()
        few = tuple(n <= aged_seats for n in seats_from)
        poor = seats_from[row.rank] < aged_seats
        return _Claim(row, aged, few, poor, self.now_ms, self.view.policy, self.shares)

    def preempt_for_pages(self) -> None:
        """Preempt one session that follows the first stalled one, when no page is left."""
        first, yields = min(self.stalled, key=self.shares.page_order), self.shares.yields_page
        rows = [r for r in self._by_urgency() if r.paused or yields(r, first)]
        self._preempt(rows[:1])

    def _preempt(self, victims: list[TurnRow]) -> None:
        """Take seats back, with the decodes that this plan has given their holders."""
        for row in victims:
            self.preempted.append(row)
            self.shares.seated(row, -(not row.paused and row.to_compute > 0))
            self.slots_left += row.slots_held
            self.seats_left += not row.paused and row.to_compute > 0
            if row in self.decodes:
                self.entries_left += 1
                self.slots_left += row.frontier >= row.open_until
                self.pages_left += row.frontier >= row.pages_held * PAGE_TOKENS

    def finish(self) -> StepPlan:
        """Return the plan: decodes in the order of the view, then chunks in the order of grants."""
        decodes = self.decodes
        ms = self.decode_ms + self.spent_ms
        if self.preempted:
            out = self.preempted
            ms -= sum(entry_ms(self.view.cost, r.frontier, 1) for r in decodes if r in out)
            decodes = [r for r in decodes if r not in out]
        batch = [PlannedEntry(r.key, 1) for r in decodes]
        batch.extend(map(PlannedEntry, self.granted.keys(), self.granted.values()))
        return StepPlan(
            batch=tuple(batch),
            admit=tuple(r.key for r in self.admitted),
            preempt=tuple(r.key for r in self.preempted),
            aged=tuple(r.key for r in self.aged),
            shed=tuple(self.shed),
            predicted_ms=ms if batch else 0.0,
        )


class _Claim(NamedTuple):
    """Seats that a waiting session may take, by rules 5 to 7.

    `few`: [rank] whether that class and those below hold no more than the aged seats; `poor`: the
    row's class and those below hold fewer.
    """

    row: TurnRow
    aged: bool
    few: tuple[bool, ...]
    poor: bool
    now_ms: float
    policy: Policy
    shares: Shares

    def takes_from(self, victim: TurnRow) -> bool:
        """Whether the victim has computed in its seat, and a rule gives the seat to the row."""
        row, shares, held_ms = self.row, self.shares, self.now_ms - victim.admitted_ms
        if victim.served_ms <= victim.admitted_ms:
            return False
        if shares.are_rivals(victim, row):
            own, other = shares.load(row), shares.load(victim)
            if shares.load(row, 1) < other:  # the victim's tenant has more even afterwards
                return True
            is_turn_over = own < other and shares.used(row) < shares.used(victim)
            if is_turn_over and held_ms >= self.policy.quantum_urgent_ms:
                return True
            if other < own:
                return False
        if self.aged and (victim.rank >= row.rank or self.poor):
            return held_ms >= self.policy.quantum_ms or self._was_overtaken(victim)
        if victim.rank <= row.rank:
            return False
        urgent_ms, aged_ms = self.policy.quantum_urgent_ms, self.policy.quantum_ms
        later_ms = row.deadline_ms + self.policy.margin_ms - self.now_ms
        is_later = victim.horizon_ms > later_ms or victim.tenant != row.tenant
        return is_later and held_ms >= (aged_ms if self.few[victim.rank] else urgent_ms)

    def _was_overtaken(self, victim: TurnRow) -> bool:
        """Whether the victim was seated while the row was late, and it was not its turn."""
        row, shares = self.row, self.shares
        if not shares.several or victim.admitted_ms < row.deadline_ms:
            return False
        return victim.rank != row.rank or shares.used(row) < shares.used(victim)


def _last_ms(row: TurnRow) -> float:
    """Return when the session was last served, or joined the queue if it waits."""
    return row.served_ms if row.running else row.deadline_ms - row.horizon_ms


def _gives_way(late: TurnRow, head: TurnRow) -> bool:
    """Whether the prompt of another tenant of the class is next in the order of shares."""
    return head.running and head.rank == late.rank and head.tenant != late.tenant


def _age_order(row: TurnRow) -> tuple[float, int]:
    return row.deadline_ms, row.key


def _pages(tokens: int) -> int:
    """Return how many pages `tokens` tokens need: the last one may be partly filled."""
    return -(-tokens // PAGE_TOKENS)


def _pages_due(row: TurnRow) -> int:
    """Pages that present work and one more token take, evictable ones it holds included."""
    wanted = min(_pages(row.frontier + row.to_compute + 1), row.pages_max)
    return max(0, wanted - row.pages_held) + row.pages_evictable
