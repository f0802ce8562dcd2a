"""The pages of one representation in an open store: prefix match, pins, slots, proofs.

Composed of an index (states and order), an allocator (slots and eviction), a loader (reading back),
a sealer (arena to manifest) and their maintenance. The parts that pools share are in `core`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kv_store import keys
from kv_store.errors import StaleRef
from kv_store.layout import PAGE_TOKENS, Descriptor
from kv_store.ledger.ledger import PageRow
from kv_store.pages.allocator import RETRACT_SLICE, Retracted, SlotAllocator
from kv_store.pages.core import StoreCore
from kv_store.pages.erase import PageEraser
from kv_store.pages.index import EVICTABLE, RESIDENT, Page, PageEvent, PageIndex, PageRef
from kv_store.pages.load import PageLoader
from kv_store.pages.maintenance import PageMaintenance
from kv_store.pages.seal import PageSealer, Ticket
from kv_store.pages.transfer import PageTransfer

__all__ = ["PagePool", "PageProof", "Ticket"]


FOLLOWERS_MAX = 64  # pages after one parent that `find_rows` compares: the newest
MATCH_SLICE = 64  # pages looked up under one hold of the lock


class PageProof(NamedTuple):
    """What a lane needs to verify an extent copy through its own mapping: XXH3-128 of the whole
    page with `seed` must equal `checksum`."""

    slot_code: int
    seed: int
    checksum: bytes


class PagePool:
    """The pages of one representation. Methods without a Future do no I/O.

    From the parts: `load`, `cold`, `verify` of PageLoader; `reserve`, `seal`, `publish`, `abort` of
    PageSealer; `scrub_next`, `verify_all` of PageMaintenance; `erase` of PageEraser;
    `import_page`, `read_page` of PageTransfer.
    """

    def __init__(self, core: StoreCore, descriptor: Descriptor, *, on_demand: bool = False) -> None:
        self.core = core
        self.descriptor = descriptor
        self.layout = descriptor.layout
        self.repr_id = descriptor.repr_id
        self.index = PageIndex()
        self.allocator = SlotAllocator(core, self.index, descriptor, on_demand=on_demand)
        self.loader = PageLoader(core, self.allocator)
        self.sealer = PageSealer(core, self.allocator, self.loader)
        self.maintenance = PageMaintenance(core, self.allocator, self.loader)
        self.load, self.cold, self.verify = self.loader.load, self.loader.cold, self.loader.verify
        self.reserve, self.seal = self.sealer.reserve, self.sealer.seal
        self.publish, self.abort = self.sealer.publish, self.sealer.abort
        self.scrub_next = self.maintenance.scrub_next
        self.verify_all = self.maintenance.verify_all
        self.erase = PageEraser(core, self.allocator).erase
        transfer = PageTransfer(core, self.allocator, self.loader, self.sealer)
        self.import_page, self.read_page = transfer.import_page, transfer.read_page
        core.pools.append(self.allocator)

    def match_prefix(
        self,
        tokens: keys.Tokens | bytes,
        salt: bytes,
        *,
        tokens_max: int | None = None,
        pin: bool = False,
        priority: int | None = None,
        parent: bytes = keys.ROOT_KEY,
    ) -> list[PageRef]:
        """The longest run of full pages, from the first token on, that the store holds.

        Token ids are compared, not only their hash; a timeline has one salt. At most `tokens_max`
        tokens are covered. Pages that were not read since start are included: `load()` them
        before use. `tokens` follow the page of key `parent`, which need not be here.
        """
        ids, found = keys.token_bytes(tokens), list[PageRef]()
        if tokens_max is not None:
            ids = ids[: max(0, tokens_max) * 4]
        step = PAGE_TOKENS * 4
        starts = range(0, len(ids) - step + 1, step)
        for first in range(0, len(starts), MATCH_SLICE):
            with self.core.lock:
                for start in starts[first : first + MATCH_SLICE]:
                    page = self._follower(parent, ids[start : start + step], salt)
                    if page is None:
                        break
                    self.index.touch(page, priority)
                    if pin:
                        self.index.pin(page)
                    found.append(page.ref)
                    parent = page.key
            if len(found) < first + MATCH_SLICE:
                break
        self.core.counters["pages_matched"] += len(found)
        return found

    def _follower(self, parent: bytes, ids: bytes, salt: bytes) -> Page | None:
        """The resident page of these tokens after the page of `parent`.

        Most pages have one follower: if its key was computed from its tokens in this run, comparing
        the tokens is enough. A timeline's first page is found by key, which includes the salt.
        """
        page = self.index.first_child(parent)
        if page is None:
            return None
        if parent == keys.ROOT_KEY or not page.hashed or page.tokens != ids:
            page = self.index.resident(keys.content_key(parent, ids, self.repr_id, salt))
            if page is None or page.tokens != ids:
                return None
            page.hashed = True
        return page

    def find_tail(
        self,
        parent: bytes,
        tokens: keys.Tokens | bytes,
        salt: bytes,
        *,
        pin: bool = False,
        priority: int | None = None,
    ) -> PageRef | None:
        """The longest parked tail after `parent` whose tokens `tokens` starts with.

        `tokens` start at the page's first position; `page_tokens(ref)` says how many are covered.
        Like a match it may not have been read since start: `load()` it before use.
        """
        ids = keys.token_bytes(tokens)[: (PAGE_TOKENS - 1) * 4]
        with self.core.lock:
            for n in self.index.tail_lengths(parent, len(ids) // 4):
                part = ids[: n * 4]
                page = self.index.resident(keys.content_key(parent, part, self.repr_id, salt))
                if page is not None and page.tokens == part:
                    self.index.touch(page, priority)
                    if pin:
                        self.index.pin(page)
                    self.core.counters["tails_found"] += 1
                    return page.ref
        return None

    def find_rows(
        self,
        parent: bytes,
        tokens: keys.Tokens | bytes,
        salt: bytes,
        *,
        rows_min: int = 1,
        pin: bool = False,
        priority: int | None = None,
    ) -> tuple[PageRef, int] | None:
        """The page after `parent` with the most leading tokens that `tokens` starts with, and how
        many: a parked tail that `tokens` starts with, or a page that shares `rows_min` or more with
        them, whose other rows are of another timeline. Of those FOLLOWERS_MAX are compared.
        """
        ids = keys.token_bytes(tokens)[: (PAGE_TOKENS - 1) * 4]
        with self.core.lock:
            tail = self.find_tail(parent, ids, salt)
            found = None if tail is None else self.index.get(tail)
            most = 0 if found is None else found.n_tokens
            for page in itertools.islice(self.index.children(parent), FOLLOWERS_MAX):
                common = _common_tokens(page.tokens, ids)
                is_more = common > most and common >= rows_min
                if is_more and page.key == self.key_of(parent, page.tokens, salt):
                    found, most = page, common
            if found is None:
                return None
            self.index.touch(found, priority)
            if pin:
                self.index.pin(found)
            return found.ref, most

    def page_tokens(self, ref: PageRef) -> int:
        """How many tokens the page holds: 256, or fewer for a parked tail. Raises StaleRef."""
        with self.core.lock:
            return self.index.get(ref).n_tokens

    def key_of(self, parent: bytes, tokens: keys.Tokens | bytes, salt: bytes) -> bytes:
        return keys.content_key(parent, tokens, self.repr_id, salt)

    def unpin(self, ref: PageRef) -> None:
        """Give one pin back. Raises StaleRef when there is none to give."""
        with self.core.lock:
            page = self.index.get(ref)
            if page.pins < 1:
                raise StaleRef(f"{page!r} is not pinned")
            self.allocator.unpin(page)

    def give_up(self, refs: Sequence[PageRef]) -> None:
        """Give back one pin of each page of a chain, in order, and evict the pages at its end that
        nothing else needs, though the next page stays: a peer has the chain now.

        A page that is pinned, or that pages of two timelines follow, stays with those before it.
        Raises StaleRef when there is no pin to give.
        """
        followers_max = 1  # the next page; then none, as that of the page before was evicted
        with self.core.lock:
            for ref in reversed(refs):
                page = self.index.get(ref)
                self.unpin(ref)
                followers = itertools.islice(self.index.children(page.key), 2)
                if page.state not in EVICTABLE or page.pins or len([*followers]) > followers_max:
                    followers_max = -1
                    continue
                self.allocator.release(page)
                self.core.counters["pages_handed_over"] += 1
                followers_max = min(followers_max, 0)

    def is_resident(self, ref: PageRef) -> bool:
        """Whether the page is resident; an invalid page is not, even while a pin keeps its slot."""
        with self.core.lock:
            page = self.index.live(ref)
            return page is not None and page.state in RESIDENT

    def find(self, key: bytes) -> PageRef | None:
        """The page of a content key, if it is there; not pinned."""
        with self.core.lock:
            page = self.index.resident(key)
            return None if page is None else page.ref

    def lanes_of(self, ref: PageRef) -> frozenset[str]:
        """The lanes that computed rows of this page; empty if it is of an earlier run, or gone."""
        with self.core.lock:
            page = self.index.live(ref)
            return frozenset() if page is None else page.lanes

    def computed_by(self, lanes: frozenset[str]) -> set[bytes]:
        """Keys of the pages with rows of any of these lanes. Looks at every page, in slices."""
        found = set[bytes]()
        for ids in self.allocator.slices():
            with self.core.lock:
                pages = filter(None, map(self.index.find, ids))
                found.update(
                    page.key for page in pages if page.state in RESIDENT and page.lanes & lanes
                )
        return found

    def following(self, key: bytes) -> list[bytes]:
        """Keys of the resident pages, of any run, whose parent is the page of this key."""
        with self.core.lock:
            return [page.key for page in self.index.children(key)]

    def of_this_run(self, chain: Iterable[bytes]) -> list[bytes]:
        """Those of the keys in `chain` whose resident page has rows computed in this run."""
        with self.core.lock:
            pages = filter(None, map(self.index.resident, chain))
            return [page.key for page in pages if page.lanes]

    def invalidate(
        self,
        *pages: PageRef | bytes,
        descendants: bool = False,
        slot_failed: bool = False,
        rootless: bool = False,
    ) -> set[bytes]:
        """Never serve these pages again, in this run or a later one. Returns the keys it covered.

        A page is named by reference or by content key; one that is gone is skipped. The named
        pages go first, then level by level what follows them, a slice under each hold of the lock.
        All their rows are freed by one commit: no later run finds a page without the one before it.

        `descendants`: the content is wrong, and with it every page computed from it, whether the
        named page is resident or not. `rootless`: also every page whose parent is not resident, as
        its origin cannot be known, and what follows those. `slot_failed`: the bytes do not read
        back as written; the second failure of a slot retires it; descendants stay valid.
        """
        if slot_failed and (descendants or rootless):
            raise ValueError("a failed slot says nothing about the content of other pages")
        index, retracted = self.index, list[Retracted]()
        with self.core.lock:
            named = {key for page in pages if (key := self._key_of(page))}
            left = deque(named)
            if rootless:
                left.extend(page.key for page in index.rootless())
        while left:
            count = len(retracted)
            with self.core.lock:
                for _ in range(RETRACT_SLICE):
                    key = left[0]
                    page = index.resident(key)
                    if page is None and (descendants or rootless):
                        page = index.first_child(key)
                    if page is not None:
                        retracted.append(self.allocator.retract(page, slot_failed=slot_failed))
                        if page.key != key:
                            left.append(page.key)
                        continue
                    left.popleft()
                    if not left:
                        break
                self.allocator.report(retracted[count:])
        named.update(one.page.key for one in retracted)
        if retracted:
            self.allocator.free_rows(retracted)
            self.core.ledger.commit()
            self.allocator.let_go(retracted[:RETRACT_SLICE])
            rest = retracted[RETRACT_SLICE:]
            if rest:
                with self.core.lock:
                    self.allocator.leaving += len(rest)
                self.core.thread.submit(lambda: self.allocator.let_go(rest, leaving=True))
        return named

    def _key_of(self, page: PageRef | bytes) -> bytes:
        """The content key of a page; empty for a reference that is not resident, as another page
        may have its key by now."""
        if not isinstance(page, PageRef):
            return page
        found = self.index.live(page)
        return found.key if found is not None and found.state in RESIDENT else b""

    def slot_code(self, ref: PageRef) -> int:
        """The page's slot as a u64 of a lane's page table: (extent index << 32) | slot."""
        with self.core.lock:
            self.index.get(ref)
            return self.allocator.info(ref.page_id).slot_code(ref.page_id)

    def codes_and_keys(self, refs: Sequence[PageRef]) -> tuple[list[int], list[bytes]]:
        """The slot code and the content key of each page. Raises StaleRef."""
        with self.core.lock:
            found = [self.index.get(ref).key for ref in refs]
            info = self.allocator.info
            return [info(ref.page_id).slot_code(ref.page_id) for ref in refs], found

    def watch_freed(self, freed: Callable[[int], None]) -> None:
        """Call `freed` from any thread with the slot code of each page whose slot is freed."""

        def watch(page_id: int) -> None:
            freed(self.allocator.info(page_id).slot_code(page_id))

        with self.core.lock:
            self.index.on_freed.append(watch)

    def proof(self, ref: PageRef) -> PageProof:
        """The data with which a lane checks a sealed or published page through its own mapping."""
        with self.core.lock:
            page = self.index.get(ref)
            if not page.checksum:
                raise StaleRef(f"{page!r} is not sealed")
            return PageProof(
                self.allocator.info(ref.page_id).slot_code(ref.page_id),
                self.allocator.seed(page),
                page.checksum,
            )

    def digest(self, ref: PageRef) -> bytes:
        """The unseeded payload digest; a recomputation must give the same."""
        with self.core.lock:
            return self.index.get(ref).digest

    def restore(self, row: PageRow) -> str:
        """Put one manifest row into the index; the reason if it cannot be, else empty."""
        page = self.index.find(row.ref.page_id)
        if page is None or row.repr_id != self.repr_id:
            return ""  # counted with its extent, or of another representation
        if row.state == "bad":
            self.index.apply(page, PageEvent.RETIRE)
            return ""
        if row.state != "published":
            return ""
        sizes = (len(row.key), len(row.parent), len(row.digest), len(row.checksum))
        if sizes != (32, 32, 16, 16) or not 0 < len(row.tokens) <= PAGE_TOKENS * 4:
            return "malformed row"
        if self.index.resident(row.key) is not None:
            return "repeated key"
        page.key, page.parent, page.tokens = row.key, row.parent, row.tokens
        page.digest, page.checksum = row.digest, row.checksum
        page.listed = True
        self.index.apply(page, PageEvent.LIST)
        self.index.restore_age(page, row.priority, row.lru_seq)
        return ""


def _common_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens two lists of ids have in common."""
    low, high = 0, min(len(a), len(b)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * 4 : middle * 4] == b[low * 4 : middle * 4]:
            low = middle
        else:
            high = middle - 1
    return low
