"""The states of every page slot of one representation. No I/O, no threads, no clock.

A slot is a page-sized span of an extent; (page_id, gen) names one use of it. Exactly the
transitions below exist. Only PUBLISHED pages may be read. A slot returns to FREE only when no
reader pins it and no writer is in it, and then its generation rises, so that an old reference
never reaches new bytes. Lookup by content key finds PUBLISHED, LISTED and LOADING pages only.

A *tail* is a page of fewer than 256 tokens: the parked end of a timeline. It is a leaf of its
chain; once a longer page of the same timeline is resident it is superseded: evicted first.

Every method is O(1) or O(log n) in the number of pages, except where it says otherwise; scans of
all pages are done in slices.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kv_store.errors import StaleRef
from kv_store.keys import ROOT_KEY
from kv_store.layout import PAGE_TOKENS
from kv_store.pages.eviction import EvictionOrder

GEN_MAX = 0xFFFFFFFF


class PageRef(NamedTuple):
    """One use of one slot. Both u32."""

    page_id: int
    gen: int

    def __repr__(self) -> str:
        return f"p{self.page_id}.{self.gen}"


class PageState(enum.Enum):
    __hash__ = object.__hash__  # members are singletons; the inherited one runs Python code

    FREE = "free"
    RESERVED = "reserved"  # promised to a ticket, no data
    SEALING = "sealing"  # the page thread is writing it
    SEALED = "sealed"  # verified bytes, manifest row not durable yet
    PUBLISHED = "published"  # readable
    LISTED = "listed"  # in the manifest, bytes not read since start
    LOADING = "loading"  # the page thread is verifying it
    QUARANTINE = "quarantine"  # evicted, aborted or invalid; waits for pins and writers to go
    BAD = "bad"  # the slot failed twice and is retired


class PageEvent(enum.Enum):
    __hash__ = object.__hash__

    RESERVE = "reserve"
    SEAL = "seal"
    SEALED = "sealed"
    PUBLISH = "publish"
    LIST = "list"
    LOAD = "load"
    VERIFY = "verify"
    RELEASE = "release"
    FREE = "free"
    RETIRE = "retire"


_S, _E = PageState, PageEvent
TRANSITIONS: dict[PageState, dict[PageEvent, PageState]] = {
    _S.FREE: {_E.RESERVE: _S.RESERVED, _E.LIST: _S.LISTED, _E.RETIRE: _S.BAD},
    _S.RESERVED: {_E.SEAL: _S.SEALING, _E.RELEASE: _S.QUARANTINE},
    _S.SEALING: {_E.SEALED: _S.SEALED, _E.RELEASE: _S.QUARANTINE},
    _S.SEALED: {_E.PUBLISH: _S.PUBLISHED, _E.RELEASE: _S.QUARANTINE},
    _S.PUBLISHED: {_E.RELEASE: _S.QUARANTINE},
    _S.LISTED: {_E.LOAD: _S.LOADING, _E.RELEASE: _S.QUARANTINE},
    _S.LOADING: {_E.VERIFY: _S.PUBLISHED, _E.RELEASE: _S.QUARANTINE},
    _S.QUARANTINE: {_E.FREE: _S.FREE, _E.RETIRE: _S.BAD},
    _S.BAD: {},
}
RESIDENT = frozenset({_S.PUBLISHED, _S.LISTED, _S.LOADING})
UNPUBLISHED = _S.RESERVED, _S.SEALING, _S.SEALED  # of tickets: their slots are freed if it fails
EVICTABLE = frozenset({_S.PUBLISHED, _S.LISTED})
SUPERSEDED = -(1 << 31)  # a priority below every caller's: evicted first
SLICE_PAGES = 64  # looked at under one hold of the store's lock
FAILURES_MAX = 2  # a slot that fails twice is a bad spot on the disk, not an accident


@dataclass(slots=True, eq=False)
class Page:
    """One slot. Fields from `key` on describe the content and are empty while FREE."""

    page_id: int
    gen: int
    state: PageState = PageState.FREE
    pins: int = 0
    writers: int = 0
    fails: int = 0
    key: bytes = b""
    parent: bytes = b""
    tokens: bytes = b""  # u32 LE ids: compared on every hit
    digest: bytes = b""  # unseeded, equal wherever this content is computed
    checksum: bytes = b""  # seeded with this slot's identity
    lanes: frozenset[str] = frozenset()  # that computed its rows; empty = in an earlier run
    priority: int = 0
    lru_seq: int = 0
    listed: bool = False  # the manifest has a row for this generation
    hashed: bool = False  # the key was computed from parent and tokens, in this run
    before: Page | None = None  # resident pages with the same parent form a list
    after: Page | None = None

    @property
    def ref(self) -> PageRef:
        return PageRef(self.page_id, self.gen)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // 4

    @property
    def is_tail(self) -> bool:
        return 0 < len(self.tokens) < PAGE_TOKENS * 4

    def __repr__(self) -> str:
        return (
            f"<Page {self.page_id}.{self.gen} {self.state.name} tokens={self.n_tokens}"
            f" pins={self.pins} key={self.key[:4].hex() or '-'}>"
        )


class PageIndex:
    """Every slot of one pool, the lookup by content key, and the order of eviction."""

    def __init__(self) -> None:
        self._pages: dict[int, Page] = {}
        self._free: list[int] = []  # heap: low slots first keeps writes together
        self._by_key: dict[bytes, Page] = {}
        self._children: dict[bytes, Page] = {}  # per parent key: the first of its resident pages
        self.resident = self._by_key.get  # the page of a content key, if it may be found
        self.first_child = self._children.get  # one resident page whose parent has this key
        self._parents_gone: set[bytes] = set()  # keys of `_children` without a resident page
        self._tails: dict[bytes, Counter[int]] = {}  # per parent: resident tails per length
        self._verified: OrderedDict[int, None] = OrderedDict()  # resident, least recently first
        self._order = EvictionOrder()
        self._counts: dict[PageState, int] = dict.fromkeys(PageState, 0)
        self._lru_seq = 0
        self.pinned = 0  # pages with a pin
        self.superseded = 0  # pages of priority SUPERSEDED
        self.tails = 0  # resident parked tails
        self.on_freed: list[Callable[[int], None]] = []  # called with each slot that is freed
        self.dirty_lru: set[int] = set()  # slots whose priority or age the manifest lacks

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[Page]:
        return iter(self._pages.values())

    def count(self, *states: PageState) -> int:
        return sum(self._counts[state] for state in states)

    def counts(self) -> dict[PageState, int]:
        return self._counts.copy()

    @property
    def used(self) -> int:
        """Slots that hold or await data; BAD slots cost space too."""
        return len(self._pages) - self._counts[PageState.FREE]

    def add_slot(self, page_id: int, gen: int) -> Page:
        if page_id in self._pages:
            raise StaleRef(f"slot {page_id} exists already")
        page = self._pages[page_id] = Page(page_id, gen)
        self._counts[PageState.FREE] += 1
        if gen < GEN_MAX:
            heapq.heappush(self._free, page_id)
        return page

    def is_empty(self, page_id: int) -> bool:
        return self._pages[page_id].state in (PageState.FREE, PageState.BAD)

    def remove_slot(self, page_id: int) -> None:
        """Forget an empty slot whose extent goes away."""
        self._counts[self._pages.pop(page_id).state] -= 1  # `peek_free` skips its heap entry

    def live(self, ref: PageRef) -> Page | None:
        """The page of a reference; None for a passed generation."""
        page = self._pages.get(ref.page_id)
        is_live = page is not None and page.gen == ref.gen and page.state is not PageState.FREE
        return page if is_live else None

    def get(self, ref: PageRef) -> Page:
        """The page of a live reference. Raises StaleRef for a passed generation."""
        page = self.live(ref)
        if page is None:
            raise StaleRef(f"page {ref!r} is gone", why="its slot was freed")
        return page

    def find(self, page_id: int) -> Page | None:
        """The page of a slot, whatever its state; None if there is no such slot."""
        return self._pages.get(page_id)

    def children(self, parent: bytes) -> Iterator[Page]:
        """The resident pages that follow the page of this key."""
        page = self._children.get(parent)
        while page is not None:
            yield page
            page = page.after

    def rootless(self) -> list[Page]:
        """Resident pages whose parent is not resident; O(their number)."""
        return [page for parent in self._parents_gone for page in self.children(parent)]

    def tail_lengths(self, parent: bytes, tokens_max: int) -> list[int]:
        """Lengths up to `tokens_max` of the resident tails after `parent`, longest first."""
        return sorted((n for n in self._tails.get(parent, ()) if n <= tokens_max), reverse=True)

    # -- states -------------------------------------------------------------------------------

    def apply(self, page: Page, event: PageEvent) -> None:
        """Change a page's state; no other method does. Raises StaleRef for a wrong transition."""
        target = TRANSITIONS[page.state].get(event)
        if target is None:
            raise StaleRef(f"{page!r} cannot {event.value}")
        if (page.pins or page.writers) and event in (PageEvent.FREE, PageEvent.RETIRE):
            raise StaleRef(f"{page!r} is still held", why=f"writers={page.writers}")
        was_resident, is_resident = page.state in RESIDENT, target in RESIDENT
        if is_resident and not was_resident and page.key in self._by_key:
            raise StaleRef(f"{page!r} repeats a resident key")
        self._counts[page.state] -= 1
        self._counts[target] += 1
        page.state = target
        if is_resident and not was_resident:
            self._by_key[page.key] = page
            self._parents_gone.discard(page.key)
            self._verified[page.page_id] = None
            self._link(page)
            self.touch(page)
        elif was_resident and not is_resident:
            del self._by_key[page.key]
            if page.key in self._children:
                self._parents_gone.add(page.key)
            del self._verified[page.page_id]
            self._unlink(page)
        self._reorder(page)
        if target is PageState.PUBLISHED:
            self.note_verified(page)
        if target is PageState.FREE:
            page.gen += 1
            page.key = page.parent = page.tokens = page.digest = page.checksum = b""
            page.lanes = frozenset()
            page.lru_seq, page.hashed = 0, False
            for freed in self.on_freed:
                freed(page.page_id)
            self._set_priority(page, 0)
            self.dirty_lru.discard(page.page_id)
            if page.gen < GEN_MAX:  # a slot whose generations are used up is never used again
                heapq.heappush(self._free, page.page_id)

    def pin(self, page: Page, count: int = 1) -> None:
        """Forbid eviction until `count` pins were given back."""
        if not page.pins:
            self.pinned += 1
            if page.state in EVICTABLE:
                self._order.remove(page.page_id)
        page.pins += count

    def unpin(self, page: Page, is_use: bool = True) -> None:
        """Give one pin back; giving back the last one is a use of the page if `is_use`."""
        page.pins -= 1
        if not page.pins:
            self.pinned -= 1
            if page.state not in RESIDENT:
                return
            if is_use:
                self.touch(page)
            else:
                self._reorder(page)

    def note_verified(self, page: Page) -> None:
        """Record that the page's bytes were read just now and are right."""
        self._verified.move_to_end(page.page_id)

    def least_verified(self) -> Page | None:
        """The page whose bytes were read longest ago and that may be read now. None: there is
        none, or the SLICE_PAGES read longest ago are being read already."""
        for page_id in itertools.islice(self._verified, SLICE_PAGES):
            page = self._pages[page_id]
            if page.state in EVICTABLE:
                return page
        return None

    def take_free(self) -> Page | None:
        """A FREE slot, lowest first, now RESERVED."""
        page = self.peek_free()
        if page is not None:
            heapq.heappop(self._free)
            self.apply(page, PageEvent.RESERVE)
        return page

    def peek_free(self) -> Page | None:
        """The slot that `take_free` would give."""
        while self._free:
            page = self._pages.get(self._free[0])
            if page is not None and page.state is PageState.FREE:
                return page
            heapq.heappop(self._free)
        return None

    # -- age and eviction ---------------------------------------------------------------------

    def touch(self, page: Page, priority: int | None = None) -> None:
        """Mark as used now; age is a sequence, never a wall clock."""
        self._lru_seq += 1
        page.lru_seq = self._lru_seq
        if priority is not None:
            self._set_priority(page, priority)
        self.dirty_lru.add(page.page_id)
        if not page.pins and page.key not in self._children:  # else it is not evictable
            self._reorder(page)

    def restore_age(self, page: Page, priority: int, lru_seq: int) -> None:
        """Set the priority and age of a replayed page to those of its manifest row."""
        page.lru_seq = lru_seq
        self._set_priority(page, priority)
        self._lru_seq = max(self._lru_seq, lru_seq)
        self.dirty_lru.discard(page.page_id)
        self._reorder(page)

    def next_victim(self, priority_max: int | None = None) -> Page | None:
        """The page to evict next: lowest priority first, then least recently used, never one that
        is pinned or has a resident child, since descendants need their prefix. Changes nothing."""
        page_id = self._order.first(priority_max)
        return None if page_id is None else self._pages[page_id]

    def tail_parents(self) -> list[bytes]:
        """Keys of the pages that parked tails follow, for `supersede_tails`."""
        return list(self._tails)

    def supersede_tails(self, parents: Iterable[bytes]) -> None:
        """Give tails that a longer page of their chain continues the lowest priority.

        Tails without a parent are skipped: only a parent's key proves that pages share a timeline.
        """
        for parent in parents:
            if parent not in self._tails or parent == ROOT_KEY:
                continue
            family = sorted(self.children(parent), key=lambda page: page.tokens)
            for page, follower in itertools.pairwise(family):  # in order, a continuation is next
                if page.is_tail and follower.tokens.startswith(page.tokens):
                    self.touch(page, SUPERSEDED)

    def _reorder(self, page: Page) -> None:
        if page.state in EVICTABLE and not page.pins and page.key not in self._children:
            self._order.add(page.page_id, page.priority, page.lru_seq)
        else:
            self._order.remove(page.page_id)

    def _set_priority(self, page: Page, priority: int) -> None:
        self.superseded += (priority == SUPERSEDED) - (page.priority == SUPERSEDED)
        page.priority = priority

    # -- chains -------------------------------------------------------------------------------

    def _link(self, page: Page) -> None:
        first = page.after = self._children.get(page.parent)
        if first is not None:
            first.before = page
        self._children[page.parent] = page
        if page.is_tail:
            self._count_tail(page, 1)
        if first is not None:
            return
        if (parent := self._by_key.get(page.parent)) is not None:
            self._order.remove(parent.page_id)
        elif page.parent != ROOT_KEY:
            self._parents_gone.add(page.parent)

    def _unlink(self, page: Page) -> None:
        if page.after is not None:
            page.after.before = page.before
        if page.before is not None:
            page.before.after = page.after
        elif page.after is not None:
            self._children[page.parent] = page.after
        else:
            del self._children[page.parent]
            self._parents_gone.discard(page.parent)
            if (parent := self._by_key.get(page.parent)) is not None:
                self._reorder(parent)
        page.before = page.after = None
        if page.is_tail:
            self._count_tail(page, -1)

    def _count_tail(self, page: Page, change: int) -> None:
        self.tails += change
        lengths = self._tails.setdefault(page.parent, Counter())
        lengths[page.n_tokens] += change
        if not lengths[page.n_tokens]:
            del lengths[page.n_tokens]
        if not lengths:
            del self._tails[page.parent]

    # -- checking -----------------------------------------------------------------------------

    def check_page(self, page: Page) -> None:
        """Compare one slot with the indexes. Raises AssertionError."""
        resident = page.state in RESIDENT
        assert page.pins >= 0, page
        assert 0 <= page.writers <= 1, page
        if page.state in (PageState.FREE, PageState.BAD):
            assert not page.pins, page
            assert not page.writers, page
        assert bool(page.writers) <= (page.state in (_S.SEALING, _S.LOADING, _S.QUARANTINE)), page
        assert (self._by_key.get(page.key) is page) == resident, page
        assert (page.page_id in self._verified) == resident, page
        if resident:
            assert page.parent in self._children, page
            assert (page.before is None) == (self._children[page.parent] is page), page
            assert page.before is None or page.before.after is page, page
            assert page.after is None or page.after.before is page, page
            if page.is_tail:
                assert self._tails[page.parent][page.n_tokens] > 0, page
        evictable = page.state in EVICTABLE and not page.pins and page.key not in self._children
        assert (page.page_id in self._order) == evictable, page

    def check_sums(self) -> None:
        """Compare the counts with the indexes; O(states). Raises AssertionError."""
        assert sum(self._counts.values()) == len(self._pages), self._counts
        assert len(self._by_key) == sum(self._counts[state] for state in RESIDENT)
        assert len(self._verified) == len(self._by_key)
