"""The states of every page place and who may be evicted. No I/O, no threads, no clock.

Theory. A place is a page-sized span of an extent; (page_id, gen) names one use of it. Exactly the
transitions below exist. Only PUBLISHED pages may be read. A place returns to FREE only when no
reader pins it and no writer is in it, and then its generation rises, so an old reference can
never mean new bytes. Lookup by content key sees PUBLISHED, LISTED and LOADING pages only.

A *tail* is a page of fewer than 256 tokens: the parked end of a timeline. It is a leaf of its
chain; once a longer page of the same timeline is resident it is superseded, and goes first.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kv_store.errors import StaleRef
from kv_store.layout import PAGE_TOKENS

GEN_MAX = 0xFFFFFFFF


class PageRef(NamedTuple):
    """One use of one place. Both u32."""

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
    QUARANTINE = "quarantine"  # given up; waits for pins and writers to go
    BAD = "bad"  # the place failed twice and is retired


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
EVICTABLE = frozenset({_S.PUBLISHED, _S.LISTED})
SUPERSEDED = -(1 << 31)  # the priority below every caller's: first to go
FAILURES_MAX = 2  # a place that fails twice is a bad spot on the disk, not an accident


@dataclass(slots=True)
class Page:
    """One place. Fields after `fails` describe the content and are empty while FREE."""

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
    checksum: bytes = b""  # seeded with this place's identity
    priority: int = 0
    lru_seq: int = 0
    listed: bool = False  # the manifest has a row for this generation

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


class PageTable:
    """Every place of the store, the index by content key, and the order of eviction."""

    def __init__(self) -> None:
        self._pages: dict[int, Page] = {}
        self._free: list[int] = []  # heap: low places first keeps writes together
        self._by_key: dict[bytes, Page] = {}
        self._children: dict[bytes, int] = {}  # resident pages per parent key
        self._tails: dict[bytes, Counter[int]] = {}  # per parent: resident tails per length
        self._verified: OrderedDict[int, None] = OrderedDict()  # resident, least recently first
        self._counts: dict[PageState, int] = dict.fromkeys(PageState, 0)
        self._lru_seq = 0
        self.dirty_lru: set[int] = set()  # places whose priority or age the manifest lacks

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[Page]:
        return iter(self._pages.values())

    def count(self, *states: PageState) -> int:
        return sum(self._counts[state] for state in states)

    @property
    def used(self) -> int:
        """Places that hold or await data; BAD places cost space too."""
        return len(self._pages) - self._counts[PageState.FREE]

    def add_place(self, page_id: int, gen: int) -> Page:
        if page_id in self._pages:
            raise StaleRef(f"place {page_id} exists already")
        page = self._pages[page_id] = Page(page_id, gen)
        self._counts[PageState.FREE] += 1
        if gen < GEN_MAX:
            heapq.heappush(self._free, page_id)
        return page

    def remove_place(self, page_id: int) -> None:
        """Forget a FREE or BAD place whose extent goes away."""
        page = self._pages[page_id]
        if page.state not in (PageState.FREE, PageState.BAD):
            raise StaleRef(f"{page!r} is in use")
        self._counts[page.state] -= 1
        del self._pages[page_id]  # its heap entry is skipped by take_free

    def get(self, ref: PageRef) -> Page:
        """The page of a live reference. Raises StaleRef for a passed generation."""
        page = self._pages.get(ref.page_id)
        if page is None or page.gen != ref.gen or page.state is PageState.FREE:
            raise StaleRef(f"page {ref!r} is gone", why="its place was freed or given up")
        return page

    def find(self, page_id: int) -> Page | None:
        """The place, whatever its state."""
        return self._pages.get(page_id)

    def resident(self, key: bytes) -> Page | None:
        return self._by_key.get(key)

    def tail_lengths(self, parent: bytes, tokens_max: int) -> list[int]:
        """Lengths up to `tokens_max` of the resident tails after `parent`, longest first."""
        return sorted((n for n in self._tails.get(parent, ()) if n <= tokens_max), reverse=True)

    def apply(self, page: Page, event: PageEvent) -> None:
        """The only way a state changes. Raises StaleRef for a transition that does not exist."""
        target = TRANSITIONS[page.state].get(event)
        if target is None:
            raise StaleRef(f"{page!r} cannot {event.value}")
        if event in (PageEvent.FREE, PageEvent.RETIRE) and (page.pins or page.writers):
            raise StaleRef(f"{page!r} is still held", why=f"writers={page.writers}")
        was_resident, is_resident = page.state in RESIDENT, target in RESIDENT
        if is_resident and not was_resident and page.key in self._by_key:
            raise StaleRef(f"{page!r} repeats a resident key")
        self._counts[page.state] -= 1
        self._counts[target] += 1
        page.state = target
        if is_resident and not was_resident:
            self._by_key[page.key] = page
            self._count_child(page, 1)
            self._verified[page.page_id] = None
            self.touch(page)
        elif was_resident and not is_resident:
            del self._by_key[page.key]
            self._count_child(page, -1)
            del self._verified[page.page_id]
        if target is PageState.PUBLISHED:
            self.note_verified(page)
        if target is PageState.FREE:
            page.gen += 1
            page.key = page.parent = page.tokens = page.digest = page.checksum = b""
            page.priority = page.lru_seq = 0
            self.dirty_lru.discard(page.page_id)
            if page.gen < GEN_MAX:  # a place whose generations are used up is never used again
                heapq.heappush(self._free, page.page_id)

    def note_verified(self, page: Page) -> None:
        """The page's bytes were read and are right."""
        self._verified.move_to_end(page.page_id)

    def least_verified(self) -> Page | None:
        """The page whose bytes were read longest ago and that may be read now."""
        pages = (self._pages[page_id] for page_id in self._verified)
        return next((page for page in pages if page.state in EVICTABLE), None)

    @property
    def tails(self) -> int:
        """Resident parked tails."""
        return sum(lengths.total() for lengths in self._tails.values())

    def _count_child(self, page: Page, change: int) -> None:
        left = self._children.get(page.parent, 0) + change
        if left:
            self._children[page.parent] = left
        else:
            del self._children[page.parent]
        if not page.is_tail:
            return
        lengths = self._tails.setdefault(page.parent, Counter())
        lengths[page.n_tokens] += change
        if not lengths[page.n_tokens]:
            del lengths[page.n_tokens]
        if not lengths:
            del self._tails[page.parent]

    def retire_free(self, page: Page) -> None:
        """A place that the manifest calls bad."""
        self.apply(page, PageEvent.RETIRE)

    def take_free(self) -> Page | None:
        """A FREE place, lowest first, now RESERVED."""
        page = self.peek_free()
        if page is not None:
            heapq.heappop(self._free)
            self.apply(page, PageEvent.RESERVE)
        return page

    def peek_free(self) -> Page | None:
        """The place that `take_free` would give."""
        while self._free:
            page = self._pages.get(self._free[0])
            if page is not None and page.state is PageState.FREE:
                return page
            heapq.heappop(self._free)
        return None

    def touch(self, page: Page, priority: int | None = None) -> None:
        """Mark as used now; age is a sequence, never a wall clock."""
        self._lru_seq += 1
        page.lru_seq = self._lru_seq
        if priority is not None:
            page.priority = priority
        self.dirty_lru.add(page.page_id)

    def restore_age(self, page: Page, lru_seq: int) -> None:
        """Give a replayed page the age its manifest row recorded."""
        page.lru_seq = lru_seq
        self._lru_seq = max(self._lru_seq, lru_seq)
        self.dirty_lru.discard(page.page_id)

    def supersede_tails(self) -> list[Page]:
        """Give tails that a longer page of their chain continues the lowest priority; returns them.

        Not those without a parent: only a chain's key says whose timeline it is.
        """
        families: dict[bytes, list[Page]] = {parent: [] for parent in self._tails}
        for page in self._by_key.values():
            if page.parent in families and page.parent != bytes(len(page.parent)):
                families[page.parent].append(page)
        found: list[Page] = []
        for family in families.values():
            longest_first = sorted(family, key=lambda page: -page.n_tokens)
            for index, page in enumerate(longest_first):
                longer = longest_first[:index]
                if page.is_tail and any(
                    other.n_tokens > page.n_tokens and other.tokens.startswith(page.tokens)
                    for other in longer
                ):
                    self.touch(page, SUPERSEDED)
                    found.append(page)
        return found

    def victims(self, count: int) -> list[Page]:
        """Up to `count` pages to evict, in order: lowest priority first, then oldest, and never a
        page with a resident descendant, since descendants need their prefix. Changes nothing."""
        children = dict(self._children)
        heap = [
            (p.priority, p.lru_seq, p.page_id)
            for p in self._pages.values()
            if p.state in EVICTABLE and not p.pins and not children.get(p.key)
        ]
        heapq.heapify(heap)
        chosen: list[Page] = []
        while heap and len(chosen) < count:
            page = self._pages[heapq.heappop(heap)[2]]
            chosen.append(page)
            children[page.parent] -= 1
            parent = self._by_key.get(page.parent)
            if (
                parent is not None
                and not children[page.parent]
                and parent.state in EVICTABLE
                and not parent.pins
            ):
                heapq.heappush(heap, (parent.priority, parent.lru_seq, parent.page_id))
        return chosen

    def check(self) -> None:
        """Recount what is kept incrementally. Raises AssertionError on any difference."""
        counts = dict.fromkeys(PageState, 0)
        children: dict[bytes, int] = {}
        tails: dict[bytes, Counter[int]] = {}
        for page in self._pages.values():
            counts[page.state] += 1
            assert page.pins >= 0, page
            assert 0 <= page.writers <= 1, page
            if page.state in RESIDENT:
                assert self._by_key.get(page.key) is page, page
                children[page.parent] = children.get(page.parent, 0) + 1
                if page.is_tail:
                    tails.setdefault(page.parent, Counter())[page.n_tokens] += 1
            if page.state in (PageState.FREE, PageState.BAD):
                assert not page.pins, page
                assert not page.writers, page
            assert bool(page.writers) <= (page.state in (_S.SEALING, _S.LOADING, _S.QUARANTINE))
        assert counts == self._counts, (counts, self._counts)
        assert children == self._children
        assert tails == self._tails
        assert self._verified.keys() == {page.page_id for page in self._by_key.values()}
        assert len(self._by_key) == sum(counts[state] for state in RESIDENT)
        free = {i for i in self._free if i in self._pages and self._pages[i].state is _S.FREE}
        usable = {p.page_id for p in self._pages.values() if p.state is _S.FREE and p.gen < GEN_MAX}
        assert free == usable, "the free list and the free places differ"
        resident = sum(counts.values()) - counts[PageState.FREE]
        assert counts[PageState.FREE] + resident == len(self._pages)
