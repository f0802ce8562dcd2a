"""A session: one token timeline, how far its KV is committed, and where its pages are.

Owns the timeline, the frontier, the page table and the table of states. Refuses illegal
transitions by lookup. Whether a session is prefilling is read from the frontier, where its KV
lives from the page table; neither is a state.

    timeline   [ tokens whose KV is committed | tokens still to compute ]
                 0 .. frontier                  frontier .. len(tokens)
    table      [ page 0 | page 1 | ... ]   page p holds positions [256 p, 256 p + 256)
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from batchengine.core import PAGE_TOKENS
from batchengine.wire import FromArena
from kv_store.arena import ArenaPlace
from kv_store.pages import PageRef

ARENA_BIT = 1 << 63  # of a place code: set = open page in the lane's arena
NOT_LOGGED = -1  # Session.logged: the ledger has never heard of it;
LOG_UNKNOWN = -2  # a record of it was refused: ask the ledger what it has

# Session.loss: what became of KV the session had, in words for its reader
LOST_WITH_WORKER = "tail lost with its worker"
LOST_TO_OTHERS = "its open page was lent to another session"
LOST_TO_EVICTION = "pages evicted"
LOST_TO_CHECKSUM = "page failed its checksum"


class State(enum.Enum):
    """What a session may do next; see TRANSITIONS."""

    IDLE = "idle"  # no request; named sessions keep tokens and KV
    WAITING = "waiting"  # has a request, no seat in a batch
    RUNNING = "running"  # holds a seat
    FROZEN = "frozen"  # its pages are being handed over
    CLOSED = "closed"


class Event(enum.Enum):
    """What happens to a session."""

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
    # One with a turn starts again after the thaw.
    State.FROZEN: {Event.THAW: State.IDLE, Event.CLOSE: State.CLOSED},
    State.CLOSED: {},
}


class IllegalTransition(Exception):
    """A bug in the engine: this event cannot happen in this state."""


class Orphan(NamedTuple):
    """Rows of one page that are not in the lane's arena: up to `rows` leading ones at `source`.

    `release` lets go of what keeps the source there, once nobody wants the rows any more.
    """

    page: int
    rows: int
    source: FromArena | PageRef
    release: Callable[[], None]


class Parked(NamedTuple):
    """A copy of the open tail in the store, held by one pin: leading rows of page `page`."""

    page: int
    rows: int
    ref: PageRef


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix of two token sequences; bisects on slices."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class Session:
    """A token timeline with KV. `key` is unique in this engine's life.

    `epoch` is the fencing number: an append-only stretch of the timeline under one owner. It
    grows when the owner changes or the timeline is cut; a number that was tried is never reused.

    Page p is sealed for p < len(pinned): `pinned[p]` is the store's reference, held by one pin,
    and the page outlives the worker. The pages after those are open: `places[p - len(pinned)]` is
    their arena place. `codes[p]` is what the worker reads for either. `keys` are content keys of
    leading full pages, as far as they were needed. With `orphans` there are no open pages: their
    rows are elsewhere, and the session computes once they were adopted or given up.
    """

    __slots__ = (
        "alone_deaths",
        "codes",
        "computed",
        "distrusted",
        "epoch",
        "epoch_tried",
        "frontier",
        "key",
        "keys",
        "lanes",
        "logged",
        "logged_epoch",
        "loss",
        "name",
        "orphans",
        "parked",
        "pinned",
        "places",
        "priority",
        "salt",
        "session_id",
        "state",
        "suspect",
        "tenant",
        "tokens",
    )

    def __init__(self, key: int, session_id: str, tenant: str) -> None:
        self.key = key
        self.session_id = session_id
        self.tenant = tenant
        self.name = f"{tenant}\x1f{session_id}".encode()  # durable: the same in every life
        self.state = State.IDLE
        self.salt = tenant.encode()  # of content keys: tenants share no pages
        self.priority = 0  # of its pages against eviction: higher stays
        self.epoch = 1
        self.epoch_tried = 1
        self.tokens: list[int] = []
        self.frontier = 0
        self.computed = 0  # the highest frontier a step was sent for: below it, work is repeated
        self.codes = array("Q")
        self.pinned: list[PageRef] = []
        self.places: list[ArenaPlace] = []
        self.orphans: list[Orphan] = []
        self.parked: Parked | None = None
        self.keys: list[bytes] = []
        self.logged = NOT_LOGGED  # tokens of the timeline that the ledger was given
        self.logged_epoch = 0  # the epoch it was given: `epoch` follows when a turn begins
        self.lanes: frozenset[str] = frozenset()  # that computed KV it has: at least those
        self.distrusted = False  # its open rows may be wrong: they go at the next look
        self.loss = ""  # why KV is gone that the next turn may expect
        self.suspect = False
        self.alone_deaths = 0

    def __repr__(self) -> str:
        return (
            f"<Session {self.session_id} {self.state.name} frontier={self.frontier}"
            f"/{len(self.tokens)} pages={len(self.codes)} sealed={len(self.pinned)}"
            f" epoch={self.epoch}>"
        )

    def on(self, event: Event) -> None:
        """Move to the next state; an event the table does not list is a bug."""
        after = TRANSITIONS[self.state].get(event)
        if after is None:
            raise IllegalTransition(f"{self!r}: {event.name}")
        self.state = after

    def next_epoch(self) -> int:
        """A number no owner or timeline of this session ever had."""
        self.epoch_tried = max(self.epoch, self.epoch_tried) + 1
        return self.epoch_tried

    def advance(self, n_tokens: int, lane: str) -> None:
        """This lane computed so many more tokens."""
        if not self.frontier:
            self.lanes = frozenset((lane,))
        elif lane not in self.lanes:
            self.lanes |= {lane}
        self.frontier += n_tokens

    @property
    def to_compute(self) -> int:
        """Tokens between the frontier and the end of the timeline."""
        return len(self.tokens) - self.frontier

    @property
    def is_expecting(self) -> bool:
        """Rows of it are on their way: it cannot compute before, nor needs to be seated for it.

        A parked tail is only fetched for a session with a seat.
        """
        orphans = self.orphans
        return bool(orphans) and (
            self.state is State.RUNNING or isinstance(orphans[0].source, FromArena)
        )

    @property
    def open_until(self) -> int:
        """Positions below this already have a page."""
        return len(self.codes) * PAGE_TOKENS

    def rebase(self, prompt: Sequence[int]) -> int:
        """Make `prompt` the timeline; the frontier stays inside the common prefix.

        At least one token is left to compute, so that a step has logits to sample from. A timeline
        that is cut, not continued, begins a new epoch: rows written under the old one can no
        longer be mistaken for its own. Returns how many leading tokens the two share. The lane
        that holds its pages must `fit` them afterwards.
        """
        fresh = list(prompt)
        shared = common_prefix(self.tokens, fresh)
        if shared < len(self.tokens):
            self.epoch = self.next_epoch()
        self.tokens = fresh
        self._trim_orphans(shared)
        self.frontier = min(self.frontier, shared, len(fresh) - 1)
        self.computed = min(self.computed, shared)
        del self.keys[shared // PAGE_TOKENS :]
        return shared

    def _trim_orphans(self, shared: int) -> None:
        """Of rows that are elsewhere only those of the first `shared` tokens are still wanted."""
        kept: list[Orphan] = []
        for orphan in self.orphans:
            rows = min(orphan.rows, shared - orphan.page * PAGE_TOKENS)
            if rows > 0:
                kept.append(orphan._replace(rows=rows))
            else:
                orphan.release()
        self.orphans = kept

    def check(self) -> None:
        """Invariants that hold between steps."""
        if not 0 <= self.frontier <= len(self.tokens):
            raise AssertionError(f"{self!r}: frontier outside the timeline")
        if len(self.codes) * PAGE_TOKENS < self.frontier:
            raise AssertionError(f"{self!r}: committed tokens without a page")
        if len(self.pinned) + len(self.places) != len(self.codes):
            raise AssertionError(f"{self!r}: {len(self.pinned)} pins, {len(self.places)} places")
        if self.orphans:
            first = len(self.codes)
            if self.places or [o.page for o in self.orphans] != [
                *range(first, first + len(self.orphans))
            ]:
                raise AssertionError(f"{self!r}: orphans do not follow page {first - 1}")
        for index, code in enumerate(self.codes):
            if (code < ARENA_BIT) != (index < len(self.pinned)):
                raise AssertionError(f"{self!r}: page {index} is not where the table says")
