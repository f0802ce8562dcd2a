"""The KV of one session: its page table, and every conversion between tokens and pages.

Owns the order of a table: sealed pages first, then either open pages or rows to import. Refuses
I/O: a cut returns the slots and pins that it drops, and the lane of the session frees them.

    page    0 ....... sealed ....... open           pages [p, q) of a session without open pages:
            [ store ][ arena slots  ]               [ pending: rows to import ]
    codes   [ one per sealed or open page ]
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from batchengine.core import PAGE_TOKENS
from batchengine.wire.lane import FromArena
from kv_store.arenas.arena import ArenaSlot
from kv_store.pages.index import PageRef

ARENA_BIT = 1 << 63  # of a slot code: set = open page in the lane's arena


def page_start(page: int) -> int:
    """Return the first position of a page; also the number of tokens in `page` pages."""
    return page * PAGE_TOKENS


def full_pages(tokens: int) -> int:
    """Return how many pages `tokens` tokens fill; also the page of position `tokens`."""
    return tokens // PAGE_TOKENS


def pages_for(tokens: int) -> int:
    """Return how many pages `tokens` tokens need."""
    return -(-tokens // PAGE_TOKENS)


def rows_in(page: int, tokens: int) -> int:
    """Return how many rows of a page `tokens` tokens fill: 0 .. 256."""
    return max(0, min(PAGE_TOKENS, tokens - page * PAGE_TOKENS))


class PendingRows(NamedTuple):
    """Rows of one page that are not in the lane's arena: up to `rows` leading ones at `source`.

    `release` gives up the pin or hold that keeps the source. It is called once.
    """

    page: int
    rows: int
    source: FromArena | PageRef
    release: Callable[[], None]


class ParkedTail(NamedTuple):
    """A copy of the open tail in the store, held by one pin: leading rows of page `page`."""

    page: int
    rows: int
    ref: PageRef


class Cut(NamedTuple):
    """What a cut removed from a table: slots to free, and references with one pin each."""

    slots: list[ArenaSlot]
    refs: list[PageRef]


class SessionKv:
    """The page table of one session.

    `sealed[p]` is the store's reference of page p, held by one pin; the page outlives the worker.
    The pages after those are open: `open[p - len(sealed)]` is their arena slot. `codes[p]` is the
    slot code by which the worker finds page p, sealed or open. `pending` are rows of the pages
    after the sealed ones, of a table without open pages: the session computes once they were
    imported or given up; the list is replaced, never changed. `parked` is a copy of the last open
    page. `keys` are content keys of leading full pages, as far as needed. `writers[p]` are the
    lanes of this run that computed rows of open page p.
    """

    __slots__ = ("codes", "keys", "open", "parked", "pending", "sealed", "writers")

    def __init__(self) -> None:
        self.codes = array("Q")
        self.sealed: list[PageRef] = []
        self.open: list[ArenaSlot] = []
        self.pending: list[PendingRows] = []
        self.parked: ParkedTail | None = None
        self.keys: list[bytes] = []
        self.writers: dict[int, frozenset[str]] = {}

    def __repr__(self) -> str:
        return f"<SessionKv sealed={len(self.sealed)} open={len(self.open)} reach={self.reach()}>"

    # ------------------------------------------------------------------------------- questions

    def reach(self) -> int:
        """The highest possible frontier, in tokens: every position below it has a page."""
        return len(self.codes) * PAGE_TOKENS

    @property
    def sealed_tokens(self) -> int:
        """Number of leading tokens whose KV is in the store."""
        return len(self.sealed) * PAGE_TOKENS

    def slot_at(self, position: int) -> ArenaSlot | None:
        """Return the open slot that holds `position`; None if no open page does."""
        offset = position // PAGE_TOKENS - len(self.sealed)
        return self.open[offset] if 0 <= offset < len(self.open) else None

    def filled(self, start: int, end: int) -> list[tuple[int, ArenaSlot]]:
        """Return index and slot of open pages that are full once `start .. end` are computed.

        pages   start // 256                     end // 256
                [ first ......... full after the step ......... )
        """
        first, last = start // PAGE_TOKENS, end // PAGE_TOKENS
        return [(page, self.open[page - len(self.sealed)]) for page in range(first, last)]

    def is_waiting_for_arena(self) -> bool:
        """Whether pending rows are in an arena: those are imported without waiting for a seat."""
        return bool(self.pending) and isinstance(self.pending[0].source, FromArena)

    def writers_of(self, first: int, last: int) -> frozenset[str]:
        """The lanes of this run that computed rows of open pages `first` to `last` inclusive."""
        pages = range(first, last + 1)
        return frozenset(lane for page in pages for lane in self.writers.get(page, ()))

    # --------------------------------------------------------------------------------- changes

    def note_writer(self, start: int, end: int, lane: str) -> None:
        """Record that `lane` computed positions `start .. end`."""
        none = frozenset[str]()
        for page in range(full_pages(start), pages_for(end)):
            is_begun = page_start(page) < start
            before = self.writers.get(page, none) if is_begun else none
            if lane not in before:
                self.writers[page] = before | {lane}

    def append(self, slot: ArenaSlot) -> None:
        """Add an arena slot for the page after the last one."""
        self.open.append(slot)
        self.codes.append(slot.code)

    def extend_sealed(self, refs: Sequence[PageRef], codes: Sequence[int]) -> None:
        """Append sealed pages, whose pins the table takes over. The table has no open page."""
        self.sealed.extend(refs)
        self.codes.extend(codes)

    def seal_first(self, ref: PageRef, code: int) -> ArenaSlot:
        """Replace the first open page by its copy in the store, held by a pin. Returns its slot."""
        self.codes[len(self.sealed)] = code
        self.writers.pop(len(self.sealed), None)
        self.sealed.append(ref)
        return self.open.pop(0)

    def unseal_last(self) -> PageRef:
        """Drop the last sealed page of a table without open ones; the caller must unpin it."""
        self.codes.pop()
        return self.sealed.pop()

    def take_open(self) -> list[ArenaSlot]:
        """Drop the open pages. Returns their slots, which the caller must free."""
        slots, self.open = self.open, []
        del self.codes[len(self.sealed) :]
        return slots

    def cut(self, tokens: int) -> Cut:
        """Keep the pages and the pending rows of the first `tokens` tokens, and no parked tail."""
        n_pages = pages_for(tokens)
        n_open = max(n_pages - len(self.sealed), 0)
        dropped = Cut(self.open[n_open:], self.sealed[n_pages:])
        if self.parked is not None:
            dropped.refs.append(self.parked.ref)
            self.parked = None
        del self.open[n_open:], self.sealed[n_pages:], self.codes[n_pages:]
        self.cut_pending(tokens)
        return dropped

    def cut_pending(self, tokens: int) -> None:
        """Keep the pending rows of the first `tokens` tokens, and release the others."""
        if not self.pending:
            return
        kept: list[PendingRows] = []
        for pending in self.pending:
            rows = min(pending.rows, tokens - pending.page * PAGE_TOKENS)
            if rows > 0:
                kept.append(pending._replace(rows=rows))
            else:
                pending.release()
        if kept != self.pending:
            self.pending = kept

    def cut_timeline(self, tokens: int) -> None:
        """Drop pending rows and content keys after the first `tokens` tokens; pages stay."""
        self.cut_pending(tokens)
        del self.keys[tokens // PAGE_TOKENS :]

    def take_pending(self, wanted: Callable[[PendingRows], bool]) -> list[PendingRows]:
        """Remove the pending rows that are `wanted`; the caller must release them."""
        taken = [pending for pending in self.pending if wanted(pending)]
        if taken:
            self.pending = [pending for pending in self.pending if not wanted(pending)]
        return taken

    def claim(self, pending: Sequence[PendingRows]) -> None:
        """Set the pending rows, of the pages right after the table; earlier ones are released.

        Raises ValueError, and changes nothing, if they do not follow, or the table has open pages.
        """
        first = len(self.codes)
        wanted = [*range(first, first + len(pending))] if not self.open else []
        if [rows.page for rows in pending] != wanted:
            raise ValueError(f"{self!r}: pending rows do not follow page {first - 1}")
        self.cut_pending(0)
        self.pending = list(pending)

    def check(self, frontier: int) -> None:
        """Raise AssertionError if an invariant is broken, for a session at this frontier."""
        if self.reach() < frontier:
            raise AssertionError(f"{self!r}: frontier {frontier} has no page")
        if len(self.sealed) + len(self.open) != len(self.codes):
            raise AssertionError(f"{self!r}: {len(self.codes)} codes")
        for index, code in enumerate(self.codes):
            if (code < ARENA_BIT) != (index < len(self.sealed)):
                raise AssertionError(f"{self!r}: page {index} is not where the table says")
        if self.pending:
            first = len(self.codes)
            if self.open:
                raise AssertionError(f"{self!r}: pending rows behind open pages")
            if [p.page for p in self.pending] != [*range(first, first + len(self.pending))]:
                raise AssertionError(f"{self!r}: pending rows do not follow page {first - 1}")
        if self.parked is not None and self.parked.page + 1 != len(self.codes):
            raise AssertionError(f"{self!r}: page {self.parked.page} is parked")
