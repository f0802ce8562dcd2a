"""The scheduler's inputs for one turn and for one tenant, as plain data."""

from __future__ import annotations

from typing import NamedTuple

from batchengine.core import SlaClass

RANK: dict[SlaClass, int] = {c: i for i, c in enumerate(SlaClass)}


class TurnRow(NamedTuple):
    """Scheduler's inputs for one session with tokens to compute.

    A tuple because a view is built before every step and a step may last 0.3 ms. The row of a
    waiting session does not change from step to step, so the engine can keep it. The first
    three fields define the order of service, so rows are compared as tuples.
    """

    rank: int  # RANK[sla_class]: 0 = most urgent
    deadline_ms: float  # join time + horizon_ms: fixed when the session joined the queue
    key: int  # unique in the view; grows with arrival
    horizon_ms: float  # `horizon_ms(...)`
    tpot_ms: float  # target between tokens
    served_ms: float  # end of the last step that computed for it; join time before that
    admitted_ms: float  # when it last got its seat; ignored while waiting
    frontier: int  # first token whose KV is not committed
    to_compute: int  # tokens from frontier to the end of the timeline; 1 = decoding
    open_until: int  # tokens below this have an open arena slot (multiple of PAGE_TOKENS)
    pages_held: int  # pages its timeline has: resident, shared or reserved
    pages_max: int  # pages it will have at its longest (prompt + tokens_max)
    slots_held: int = 0  # freed by a preemption; of a waiting session, counted in slots_free too
    running: bool = False  # holds a seat (batch slot + open arena slot)
    paused: bool = False  # slow reader, or rows not imported yet: not computed, may lose its seat
    suspect: bool = False  # was in a step that killed the worker: runs alone
    pages_evictable: int = 0  # of pages_held: evictable, so counted in LaneView.pages_free too
    tenant: str = ""  # whose session it is
    scored: bool = False  # its prompt is, so its tokens take longer


class TenantRow(NamedTuple):
    """One tenant of a lane where several have turns."""

    weight: float = 1.0  # of its share, against those of the others
    since_ms: float = 0.0  # when rule 6 last admitted a session of it, or when it came
    used: tuple[float, ...] = (0.0,) * len(RANK)  # [rank] ms of steps per weight
