"""The KV of one session: its page table, and every conversion between tokens and pages.

Owns the order of a table: pages that other daemons hold, then sealed pages, then either open pages
or rows to import. Refuses I/O: a cut returns the slots, pins and held pages that it drops, and the
lane of the session frees them.

    page    0 ...... held ...... sealed ....... open           pages [p, q) of a session without
            [ segments ][ store ][ arena slots  ]              open pages: [ pending: to import ]
    codes   [ one per held, sealed or open page ]

A segment is of whole super-pages, as attention to it is folded in these. When the holder of pages
[a, b) is lost, the table keeps what is before a, and `later` what is after b, until the range was
computed again.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from batchengine.core import PAGE_TOKENS, SUPERPAGE_PAGES
from batchengine.wire.lane import ARENA_BIT, HELD_BIT, FromArena, Segment
from kv_store.arenas.arena import ArenaSlot
from kv_store.pages.index import PageRef

END = 1 << 62  # above every position
SELF = ""  # as a peer: this daemon holds the pages itself, between those of two others


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


class StateSlot:
    """A slot for one recurrent state with a lane's worker. `release` is called once, or more."""

    __slots__ = ("_free", "index")

    def __init__(self, index: int, free: Callable[[int], None]) -> None:
        self.index = index
        self._free: Callable[[int], None] | None = free

    def release(self) -> None:
        """Give the slot up: steps that were sent before may still use it, which the worker computes
        before any step that gets it anew."""
        free, self._free = self._free, None
        if free is not None:
            free(self.index)


class LiveState(NamedTuple):
    """The recurrent state behind the first `position` tokens of a session's timeline."""

    slot: StateSlot
    position: int


class ParkedTail(NamedTuple):
    """A copy of the open tail in the store, held by one pin: leading rows of page `page`."""

    page: int
    rows: int
    ref: PageRef


class HeldSegment(NamedTuple):
    """Pages of a session that another daemon keeps: `n_pages` pages of its hold from page `first`.

    `peer` and `incarnation` name that run of a daemon, `link` is the number of the data link to it
    from the lane that the session is on.
    """

    peer: str
    incarnation: int
    link: int
    hold: int
    first: int
    n_pages: int

    def codes(self) -> range:
        """The page codes by which a worker finds these pages."""
        first = HELD_BIT | self.link << 32 | self.first
        return range(first, first + self.n_pages)

    def message(self) -> Segment:
        """The segment as a worker knows it."""
        return Segment(self.link, self.hold, self.first, self.n_pages)

    def split(self, n_pages: int) -> tuple[HeldSegment, HeldSegment]:
        """The segments of its first `n_pages` pages, and of the others."""
        return self._replace(n_pages=n_pages), self._replace(
            first=self.first + n_pages, n_pages=self.n_pages - n_pages
        )


def split_segments(
    segments: Sequence[HeldSegment], n_pages: int
) -> tuple[list[HeldSegment], list[HeldSegment]]:
    """The segments of the first `n_pages` pages, and of the others."""
    kept, rest = list[HeldSegment](), list[HeldSegment]()
    for segment in segments:
        here, after = segment.split(max(0, min(segment.n_pages, n_pages)))
        kept += [here] if here.n_pages else []
        rest += [after] if after.n_pages else []
        n_pages -= segment.n_pages
    return kept, rest


def segment_pages(segments: Sequence[HeldSegment]) -> int:
    """Number of pages in these segments."""
    return sum([segment.n_pages for segment in segments])


def whole_superpages(n_pages: int) -> int:
    """Return the largest number of whole super-pages in `n_pages`, in pages."""
    return n_pages - n_pages % SUPERPAGE_PAGES


class Holders(Protocol):
    """The daemons that hold pages of one lane's sessions, as page tables need them."""

    @abstractmethod
    def link(self, segment: HeldSegment) -> int | None:
        """Number of the lane's data link to the holder; None: it has the pages no more."""

    @abstractmethod
    def release(self, segments: Sequence[HeldSegment]) -> None:
        """These pages are not needed for their session any more."""

    @abstractmethod
    def hold_here(self, refs: Sequence[PageRef]) -> HeldSegment:
        """Make pages of this daemon's store a segment of a route; takes over one pin each."""


class Cut(NamedTuple):
    """What was removed from a table: slots to free, references with one pin each, held pages."""

    slots: list[ArenaSlot]
    refs: list[PageRef]
    held: list[HeldSegment]


class LaterPages(NamedTuple):
    """Pages after a range that was lost: from page `first` on those of `held`, then `sealed`.

    `release` gives up what a cut removes of them.
    """

    first: int
    held: list[HeldSegment]
    sealed: list[PageRef]
    release: Callable[[Cut], None]

    @property
    def last(self) -> int:
        """The page after these."""
        return self.first + segment_pages(self.held) + len(self.sealed)


class SessionKv:
    """The page table of one session.

    The first `n_held` pages are those of the segments `held`. `sealed[p - n_held]` is the store's
    reference of page p, held by one pin; the page outlives the worker. The pages from `first_open`
    on are open: `open[p - first_open]` is their arena slot. `codes[p]` is the code by which the
    worker finds page p. `pending` are rows of the pages from `first_open` on, of a table without
    open pages: the session computes once they were imported or given up; the list is replaced,
    never changed. `parked` is a copy of the last open page. `keys` are content keys of leading full
    pages, as far as needed, at least of the held ones. `digests` are those of the pages
    that were handed over, by key. `writers[p]` are the lanes of this run that
    computed rows of open page p. `invalid_from`: the first held page that is known to be wrong.
    `cut_off`: a holder of held pages does not answer, so the session does not compute. `state` is
    the recurrent state with the worker, of a model that has one; `awaits_state`: it is being
    loaded.
    """

    __slots__ = (
        "awaits_state", "codes", "cut_off", "digests", "held", "invalid_from", "keys", "later",
        "n_held", "open", "parked", "pending", "sealed", "state", "writers",
    )  # fmt: skip

    def __init__(self) -> None:
        self.codes = array("Q")
        self.held: list[HeldSegment] = []
        self.n_held = 0
        self.later: list[LaterPages] = []
        self.invalid_from: int | None = None
        self.cut_off = False
        self.sealed: list[PageRef] = []
        self.open: list[ArenaSlot] = []
        self.pending: list[PendingRows] = []
        self.parked: ParkedTail | None = None
        self.keys: list[bytes] = []
        self.digests: dict[bytes, bytes] = {}
        self.writers: dict[int, frozenset[str]] = {}
        self.state: LiveState | None = None
        self.awaits_state = False

    def __repr__(self) -> str:
        return (
            f"<SessionKv held={self.n_held} sealed={len(self.sealed)} open={len(self.open)}"
            f" reach={self.reach()}>"
        )

    # ------------------------------------------------------------------------------- questions

    def reach(self) -> int:
        """The highest possible frontier, in tokens: every position below it has a page."""
        return len(self.codes) * PAGE_TOKENS

    @property
    def first_open(self) -> int:
        """The page after the held and the sealed ones."""
        return self.n_held + len(self.sealed)

    @property
    def sealed_tokens(self) -> int:
        """Number of leading tokens whose KV is in the store, here or with a peer."""
        return page_start(self.first_open)

    @property
    def compute_until(self) -> int:
        """Position up to which the session may compute: where pages follow that it has already."""
        return page_start(self.later[0].first) if self.later else END

    def slot_at(self, position: int) -> ArenaSlot | None:
        """Return the open slot that holds `position`; None if no open page does."""
        offset = position // PAGE_TOKENS - self.first_open
        return self.open[offset] if 0 <= offset < len(self.open) else None

    def filled(self, start: int, end: int) -> list[tuple[int, ArenaSlot]]:
        """Return index and slot of open pages that are full once `start .. end` are computed.

        pages   start // 256                     end // 256
                [ first ......... full after the step ......... )
        """
        first, last = start // PAGE_TOKENS, end // PAGE_TOKENS
        n_before = self.first_open
        return [(page, self.open[page - n_before]) for page in range(first, last)]

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
        page = self.first_open
        self.codes[page] = code
        self.writers.pop(page, None)
        self.sealed.append(ref)
        return self.open.pop(0)

    def unseal_last(self) -> PageRef:
        """Drop the last sealed page of a table without open ones; the caller must unpin it."""
        self.codes.pop()
        return self.sealed.pop()

    def take_open(self) -> list[ArenaSlot]:
        """Drop the open pages. Returns their slots, which the caller must free."""
        slots, self.open = self.open, []
        del self.codes[self.first_open :]
        return slots

    def cut(self, tokens: int) -> Cut:
        """Keep the pages and the pending rows of the first `tokens` tokens, and no parked tail; the
        state only if it is of these.

        Of the held pages only whole super-pages are kept: the session computes the rest again. If
        one of them goes, so do the `later` ones.
        """
        n_pages = pages_for(tokens)
        if tokens < page_start(self.n_held):
            n_pages = whole_superpages(full_pages(tokens))
        n_sealed, n_open = max(n_pages - self.n_held, 0), max(n_pages - self.first_open, 0)
        dropped = Cut(self.open[n_open:], self.sealed[n_sealed:], self._cut_held(n_pages))
        if dropped.held:
            self.drop_later()
        if self.invalid_from is not None and n_pages <= self.invalid_from:
            self.invalid_from = None
        if self.parked is not None:
            dropped.refs.append(self.parked.ref)
            self.parked = None
        del self.open[n_open:], self.sealed[n_sealed:], self.codes[n_pages:]
        self.cut_pending(tokens)
        self.cut_state(tokens)
        return dropped

    def cut_state(self, tokens: int) -> None:
        """Release the recurrent state unless it is of the first `tokens` tokens."""
        if self.state is not None and self.state.position > tokens:
            self.set_state(None)

    def set_state(self, state: LiveState | None) -> None:
        """Replace the recurrent state, which is released."""
        before, self.state = self.state, state
        if before is not None:
            before.slot.release()

    def _cut_held(self, n_pages: int) -> list[HeldSegment]:
        """Keep the held pages before `n_pages`; returns the others, whose codes stay."""
        if n_pages >= self.n_held:
            return []
        self.held, dropped = split_segments(self.held, n_pages)
        self.n_held = n_pages
        self.cut_off &= n_pages > 0
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
        """Drop pending rows, later pages, content keys and the recurrent state after the first
        `tokens` tokens; the pages of the table stay."""
        self.cut_pending(tokens)
        self.cut_state(tokens)
        self.cut_later(tokens // PAGE_TOKENS)
        for key in self.keys[tokens // PAGE_TOKENS :]:
            self.digests.pop(key, None)
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

    # ---------------------------------------------------------------------- pages of other daemons

    def hand_over(self, segment: HeldSegment) -> list[PageRef]:
        """Replace the first sealed pages by a segment of as many; returns their references, which
        the caller must unpin. Raises ValueError, and changes nothing, if there are not as many.
        """
        refs = self.sealed[: segment.n_pages]
        if not refs or len(refs) < segment.n_pages or segment.n_pages % SUPERPAGE_PAGES:
            raise ValueError(f"{self!r}: {segment.n_pages} pages cannot be handed over")
        del self.sealed[: segment.n_pages]
        self._append_held([segment])
        return refs

    def append_held(self, segment: HeldSegment) -> None:
        """Append a segment to a table of nothing but segments. Raises ValueError for others."""
        if len(self.codes) != self.n_held or segment.n_pages % SUPERPAGE_PAGES:
            raise ValueError(f"{self!r}: no segment of {segment.n_pages} pages may follow")
        self.codes.extend(segment.codes())
        self._append_held([segment])

    def take_back(self, refs: Sequence[PageRef], codes: Sequence[int]) -> list[HeldSegment]:
        """Replace the last held pages by sealed ones, whose pins the table takes over.

        Returns the segments that are not needed any more. Raises ValueError for other than whole
        super-pages.
        """
        first = self.n_held - len(refs)
        if first < 0 or first % SUPERPAGE_PAGES:
            raise ValueError(f"{self!r}: {len(refs)} pages cannot be taken back")
        self.codes[first : self.n_held] = array("Q", codes)
        self.sealed[:0] = refs
        return self._cut_held(first)

    def replace_held(self, segments: Sequence[HeldSegment]) -> None:
        """Set the segments anew, of as many pages: by another route, or under other links.

        Raises ValueError if they have another number of pages.
        """
        if segment_pages(segments) != self.n_held:
            raise ValueError(f"{self!r}: segments of {segment_pages(segments)} pages")
        self.held, self.n_held = [], 0
        self._append_held(segments)

    def _append_held(self, segments: Sequence[HeldSegment]) -> None:
        """Append segments whose pages are in the table; neighbours in one hold become one."""
        for segment in segments:
            page, last = self.n_held, self.held[-1] if self.held else None
            self.codes[page : page + segment.n_pages] = array("Q", segment.codes())
            self.n_held += segment.n_pages
            if (
                last is not None
                and last._replace(first=last.first + last.n_pages, n_pages=segment.n_pages)
                == segment
            ):
                self.held[-1] = last._replace(n_pages=last.n_pages + segment.n_pages)
            else:
                self.held.append(segment)

    def set_aside(self, index: int, release: Callable[[Cut], None]) -> Cut:
        """Drop segment `index`, which is lost, and keep what follows it as `later` pages.

        Returns what the table loses: the segment, the open pages, the copy of the tail. Pending
        rows are released; `release` gives up what a later cut removes.
        """
        lost, after = self.held[index], self.held[index + 1 :]
        sealed, self.sealed = self.sealed, []
        slots, self.open = self.open, []
        refs = [] if self.parked is None else [self.parked.ref]
        self.held, self.parked = self.held[:index], None
        self.n_held = segment_pages(self.held)
        self.cut_off &= self.n_held > 0
        del self.codes[self.n_held :]
        self.cut_pending(0)
        self.cut_state(page_start(self.n_held))
        if after or sealed:
            first = self.n_held + lost.n_pages
            self.later = [LaterPages(first, after, sealed, release), *self.later]
        return Cut(slots, refs, [lost])

    def take_later(self) -> LaterPages:
        """Remove the first later pages, which follow the table's pages now; the caller puts them
        into the table, or releases them."""
        later, *self.later = self.later
        return later

    def drop_later(self) -> None:
        """Release all later pages."""
        self.cut_later(0)

    def cut_later(self, n_pages: int) -> None:
        """Keep the later pages before `n_pages`, and release the others."""
        before, self.later = self.later, []
        for later in before:
            n_held = segment_pages(later.held)
            kept = max(0, min(n_pages - later.first, n_held + len(later.sealed)))
            if kept < n_held:
                kept = whole_superpages(kept)
            held, dropped = split_segments(later.held, kept)
            n_sealed = max(0, kept - n_held)
            if kept:
                self.later.append(later._replace(held=held, sealed=later.sealed[:n_sealed]))
            if dropped or later.sealed[n_sealed:]:
                later.release(Cut([], later.sealed[n_sealed:], dropped))

    def check(self, frontier: int) -> None:
        """Raise AssertionError if an invariant is broken, for a session at this frontier."""
        if self.reach() < frontier:
            raise AssertionError(f"{self!r}: frontier {frontier} has no page")
        if self.first_open + len(self.open) != len(self.codes):
            raise AssertionError(f"{self!r}: {len(self.codes)} codes")
        for index, code in enumerate(self.codes[self.n_held :], self.n_held):
            if (code < HELD_BIT, code >= ARENA_BIT) != (
                index < self.first_open,
                index >= self.first_open,
            ):
                raise AssertionError(f"{self!r}: page {index} is not where the table says")
        if self.pending:
            first = len(self.codes)
            if self.open:
                raise AssertionError(f"{self!r}: pending rows behind open pages")
            if [p.page for p in self.pending] != [*range(first, first + len(self.pending))]:
                raise AssertionError(f"{self!r}: pending rows do not follow page {first - 1}")
        if self.parked is not None and self.parked.page + 1 != len(self.codes):
            raise AssertionError(f"{self!r}: page {self.parked.page} is parked")
        if self.cut_off and not self.held:
            raise AssertionError(f"{self!r}: waits for a holder that has nothing of it")
        if self.held or self.later:
            self._check_held(frontier)

    def _check_held(self, frontier: int) -> None:
        """The part of `check` for pages of other daemons."""
        codes = [code for segment in self.held for code in segment.codes()]
        if self.n_held != len(codes) or self.codes[: self.n_held].tolist() != codes:
            raise AssertionError(f"{self!r}: codes differ from the segments {self.held}")
        later = [segment for pages in self.later for segment in pages.held]
        for segment in (*self.held, *later):
            if segment.n_pages < 1 or segment.n_pages % SUPERPAGE_PAGES or segment.first < 0:
                raise AssertionError(f"{self!r}: {segment} is not of whole super-pages")
        if frontier < page_start(self.n_held):
            raise AssertionError(f"{self!r}: frontier {frontier} inside held pages")
        if len(self.keys) < self.n_held:
            raise AssertionError(f"{self!r}: {len(self.keys)} keys for {self.n_held} held pages")
        end = len(self.codes) + len(self.pending)
        for pages in self.later:
            if pages.first < end or pages.last == pages.first or pages.first % SUPERPAGE_PAGES:
                raise AssertionError(f"{self!r}: later pages {pages.first} .. {pages.last}")
            end = pages.last
