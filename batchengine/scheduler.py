"""Which tokens a lane computes next: one pure function from a frozen view to a frozen plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from batchengine.core import Sla, SlaClass
from batchengine.cost import StepCost


class Row(NamedTuple):
    """One session that wants to compute, as the scheduler sees it.

    A tuple because a view is built before every step and a step may last 0.3 ms. Rows of
    waiting sessions do not change from step to step, so the engine can keep them. The first two
    fields are the order of service: tuples compare natively.
    """

    deadline_ms: float  # `deadline_ms(...)`: fixed when the session joined the queue
    key: int  # unique in the view; grows with arrival
    rank: int  # RANK[sla_class]: 0 = most urgent
    horizon_ms: float  # deadline - moment it joined the queue
    tpot_ms: float  # target between tokens
    served_ms: float  # last step that computed for it (token committed); join time before that
    admitted_ms: float  # when it last got its seat; ignored while waiting
    frontier: int  # first token whose KV is not committed
    to_compute: int  # tokens from frontier to the end of the timeline; 1 = decoding
    open_until: int  # tokens below this have an open arena place (multiple of PAGE_TOKENS)
    pages_held: int  # pages its timeline has: resident, shared or reserved
    pages_max: int  # pages it will have at its longest (prompt + tokens_max)
    places_held: int = 0  # arena places that come free if it is preempted now
    running: bool = False  # holds a seat (batch slot + open arena place)
    paused: bool = False  # its reader is slow: compute nothing, may lose its seat
    suspect: bool = False  # was in a step that killed the worker: runs alone


@dataclass(frozen=True, slots=True)
class Policy:
    """Constants of the scheduling rules; milliseconds and tokens."""

    chunk_tokens_min: int = 16
    quantum_ms: float = 1000.0
    margin_ms: float = 50.0
    overdue_ms: float = 10_000.0
    prefill_share: float = 1.0


@dataclass(frozen=True, slots=True)
class LaneView:
    """A lane and its sessions at one moment. `running` and `waiting` are disjoint."""

    tokens_max: int  # tokens per step
    entries_max: int  # entries per step = seats
    chunk_tokens_max: int  # prefill tokens per step
    step_ms_max: float  # no step is planned longer than this, but for the chunk floor
    places_free: int  # arena places nobody holds
    pages_free: int  # store pages that can be reserved now (free or evictable)
    pages_budget: int  # store pages in all
    cost: StepCost
    running: tuple[Row, ...]
    waiting: tuple[Row, ...]
    policy: Policy = Policy()


class Entry(NamedTuple):
    """Compute the next `n_tokens` of session `key`."""

    key: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything one step will do, in this order: preempt, admit, shed, run the batch."""

    batch: tuple[Entry, ...]
    admit: tuple[int, ...] = ()  # waiting -> running; each has an entry in `batch`
    preempt: tuple[int, ...] = ()  # running -> waiting: KV stays, seat and arena place go
    shed: tuple[int, ...] = ()  # can never run: needs more pages than the budget
    stalled: tuple[int, ...] = ()  # running, wanted to decode, got no place or page
    predicted_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class ClassTargets:
    """Default targets of one SLA class; `ttft_ms` is also the aging horizon and must be finite."""

    ttft_ms: float
    tpot_ms: float


RANK: dict[SlaClass, int] = {c: i for i, c in enumerate(SlaClass)}
CLASS_TARGETS: dict[SlaClass, ClassTargets] = {
    SlaClass.INTERACTIVE: ClassTargets(500.0, 50.0),
    SlaClass.STANDARD: ClassTargets(2_000.0, 100.0),
    SlaClass.BACKGROUND: ClassTargets(30_000.0, 500.0),
    SlaClass.BATCH: ClassTargets(300_000.0, 2_000.0),
}


def horizon_ms(sla: Sla, targets: ClassTargets, expected_ms: float = 0.0) -> float:
    """How long a session may wait before it is late: Row.horizon_ms; its deadline is join + this.

    `expected_ms` = predicted compute time of the whole request, for TTLT budgets.
    """
    raise NotImplementedError


def tpot_ms(sla: Sla, targets: ClassTargets) -> float:
    """Target between tokens: Row.tpot_ms."""
    return sla.tpot_ms if sla.tpot_ms is not None else targets.tpot_ms


def plan(view: LaneView, now_ms: float) -> StepPlan:
    """Decide one step. Pure: no clock, no hidden state."""
    raise NotImplementedError


def check(view: LaneView, plan: StepPlan) -> list[str]:
    """Invariants that `plan` violates on `view`, as sentences; empty = sound."""
    raise NotImplementedError
