"""A session: one token timeline, how far its KV is committed, and where its pages are.

Owns the timeline, the frontier, the page table and the table of states. Refuses transitions that
the table does not list. The frontier shows whether a session is prefilling, the page table where
its KV is; neither is a state.

    timeline   [ tokens whose KV is committed | tokens still to compute ]
                 0 .. frontier                  frontier .. len(tokens)
    table      [ page 0 | page 1 | ... ]   page p holds positions [256 p, 256 p + 256)
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from batchengine.core import PAGE_TOKENS
from batchengine.session_kv import Cut, SessionKv

NOT_LOGGED = -1  # Session.logged: the ledger has no row of the session;
LOG_UNKNOWN = -2  # the ledger refused a record: read what it has


class Loss(enum.Enum):
    """Why a session lost KV: the label of the metric, and the reason that the session reports."""

    WORKER = ("worker", "tail lost with its worker")
    RECLAIMED = ("lent", "its open page was given to another session")
    EVICTED = ("evicted", "pages evicted")
    CHECKSUM = ("checksum", "page failed its checksum")
    PEER = ("peer", "a peer that held pages of it is gone")
    STATE = ("state", "its recurrent state was not kept")

    def __init__(self, label: str, text: str) -> None:
        self.label = label
        self.text = text


class State(enum.Enum):
    """State of a session; TRANSITIONS lists what may follow."""

    IDLE = "idle"  # no request; named sessions keep tokens and KV
    WAITING = "waiting"  # has a request, no seat in a batch
    RUNNING = "running"  # holds a seat
    FROZEN = "frozen"  # in a migration between two lanes
    CLOSED = "closed"


class Event(enum.Enum):
    """Cause of a transition between two states."""

    START = "start"
    ADMIT = "admit"
    PREEMPT = "preempt"
    FINISH = "finish"
    FREEZE = "freeze"
    THAW = "thaw"
    CLOSE = "close"


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.IDLE: {
        Event.START: State.WAITING,
        Event.FREEZE: State.FROZEN,
        Event.CLOSE: State.CLOSED,
    },
    State.WAITING: {
        Event.ADMIT: State.RUNNING,
        Event.FINISH: State.IDLE,
        Event.FREEZE: State.FROZEN,
    },
    State.RUNNING: {
        Event.PREEMPT: State.WAITING,
        Event.FINISH: State.IDLE,
        Event.FREEZE: State.FROZEN,
    },
    # With a turn, START follows after the thaw.
    State.FROZEN: {Event.THAW: State.IDLE, Event.CLOSE: State.CLOSED},
    State.CLOSED: {},
}


class IllegalTransition(Exception):
    """TRANSITIONS has no entry for this event in this state: a bug in the engine."""


COMPARED_AT_ONCE = 4096  # tokens: what is compared twice, and read behind a difference


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the longest common prefix of two lists; compares slices, bisects the first that
    differs."""
    low, length = 0, min(len(a), len(b))
    while (high := min(low + COMPARED_AT_ONCE, length)) > low and a[low:high] == b[low:high]:
        low = high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class Session:
    """A token timeline with KV. `key` is unique in one run of the engine.

    `epoch` is the fencing number of an append-only stretch of the timeline under one owner. It
    grows when the owner changes or the timeline is cut; a number that was tried is never reused.
    """

    __slots__ = (
        "alone_deaths",
        "computed",
        "epoch",
        "epoch_tried",
        "frontier",
        "key",
        "kv",
        "logged",
        "logged_epoch",
        "loss",
        "name",
        "priority",
        "salt",
        "session_id",
        "sla_class",
        "state",
        "suspect",
        "tenant",
        "tokens",
    )

    def __init__(self, key: int, session_id: str, tenant: str) -> None:
        self.key = key
        self.session_id = session_id
        self.tenant = tenant
        self.name = f"{tenant}\x1f{session_id}".encode()  # durable: the same in every run
        self.state = State.IDLE
        self.salt = tenant.encode()  # of content keys: tenants share no pages
        self.priority = 0  # of its pages against eviction: higher stays
        self.sla_class = ""  # of its last turn in this run
        self.epoch = 1
        self.epoch_tried = 1
        self.tokens: list[int] = []
        self.frontier = 0
        self.computed = 0  # highest frontier a step was sent for: tokens below are recomputed
        self.kv = SessionKv()
        self.logged = NOT_LOGGED  # tokens of the timeline that were sent to the ledger
        self.logged_epoch = 0  # the epoch that was sent; `epoch` is sent when a turn begins
        self.loss: Loss | None = None  # why KV that the next turn may expect is gone
        self.suspect = False
        self.alone_deaths = 0

    def __repr__(self) -> str:
        return (
            f"<Session {self.session_id} {self.state.name} frontier={self.frontier}"
            f"/{len(self.tokens)} pages={len(self.kv.codes)} sealed={len(self.kv.sealed)}"
            f" epoch={self.epoch}>"
        )

    def on(self, event: Event) -> None:
        """Move to the next state; raises IllegalTransition if TRANSITIONS has none."""
        after = TRANSITIONS[self.state].get(event)
        if after is None:
            raise IllegalTransition(f"{self!r}: {event.name}")
        self.state = after

    def next_epoch(self) -> int:
        """Return an epoch that this session has not used or tried yet."""
        self.epoch_tried = max(self.epoch, self.epoch_tried) + 1
        return self.epoch_tried

    def advance(self, n_tokens: int, lane: str) -> None:
        """Move the frontier by `n_tokens` tokens, which `lane` computed."""
        self.kv.note_writer(self.frontier, self.frontier + n_tokens, lane)
        self.frontier += n_tokens

    def common(self, prompt: Sequence[int], page_keys: Sequence[bytes]) -> int:
        """Return the length of the common prefix of timeline and `prompt`, whose first full pages
        have these content keys: where both sides know keys, no token is compared."""
        pages = common_prefix(self.kv.keys, page_keys)
        start = pages * PAGE_TOKENS
        is_cut = pages < min(len(self.kv.keys), len(page_keys))
        end = start + PAGE_TOKENS if is_cut else max(len(self.tokens), len(prompt))
        return start + common_prefix(self.tokens[start:end], prompt[start:end])

    @property
    def to_compute(self) -> int:
        """Tokens between the frontier and the end of the timeline."""
        return len(self.tokens) - self.frontier

    @property
    def is_expecting(self) -> bool:
        """Whether rows of the session are being imported, before which it cannot compute.

        Rows of an arena are imported with or without a seat, a parked tail only with one.
        """
        kv = self.kv
        return bool(kv.pending) and (self.state is State.RUNNING or kv.is_waiting_for_arena())

    def rebase(self, prompt: Sequence[int]) -> int:
        """Make `prompt` the timeline; the frontier stays inside the common prefix.

        At least one token is left to compute, so that a step has logits to sample from. A timeline
        that is cut, not continued, begins a new epoch, so that rows of the old epoch are never
        taken for rows of the new one. Returns the length of the common prefix, in tokens. The lane
        that holds the pages must call `fit` afterwards.
        """
        fresh = list(prompt)
        shared = common_prefix(self.tokens, fresh)
        if shared < len(self.tokens):
            self.epoch = self.next_epoch()
        self.tokens = fresh
        self.kv.cut_timeline(shared)
        self.frontier = min(self.frontier, shared, len(fresh) - 1)
        self.computed = min(self.computed, shared)
        return shared

    def cut(self, tokens: int) -> Cut:
        """Keep the KV of the first `tokens` tokens; the frontier falls back to what is left.

        Returns the slots, pins and held pages that the lane of the session must free.
        """
        dropped = self.kv.cut(tokens)
        self.frontier = min(self.frontier, tokens, self.kv.reach())
        return dropped

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. Call between steps."""
        if not 0 <= self.frontier <= len(self.tokens):
            raise AssertionError(f"{self!r}: frontier outside the timeline")
        self.kv.check(self.frontier)
