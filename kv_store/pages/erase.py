"""Erasing of a dropped session's pages: their bytes are overwritten before their slots are free.

Owns which pages hold more of a timeline than others share: those of its pool, and those that a
model or an arithmetic which is not open has left. They are overwritten on the page thread, one page
per intent, so that a seal waits for at most one; then all rows are freed by one commit.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from kv_store import keys
from kv_store.arenas.arena import POISON
from kv_store.errors import StoreCorrupt, StoreError
from kv_store.layout import PAGE_TOKENS
from kv_store.ledger import writes
from kv_store.ledger.queries import PageLink, page_links
from kv_store.pages.allocator import RETRACT_SLICE, Retracted, SlotAllocator
from kv_store.pages.core import StoreCore
from kv_store.pages.extents import ExtentInfo
from kv_store.pages.index import PageRef
from kv_store.threads import new_future


class PageEraser:
    """Erases pages of one pool."""

    def __init__(self, core: StoreCore, allocator: SlotAllocator) -> None:
        self._core = core
        self._slots = allocator
        self._index = allocator.index

    def erase(self, tokens: keys.Tokens, salt: bytes, kept: int) -> Future[int]:
        """Erase the pages that hold a token of the timeline after its first `kept`, and those
        computed from them; resolves to their number once their bytes and rows are gone.

        A page that a session still reads is not served any more, and overwritten after its use.
        """
        ids = keys.token_bytes(tokens)
        retracted = self._retract(self._roots(ids, salt, kept))
        left, files = deque(retracted), dict[int, ExtentInfo]()
        foreign: deque[PageRef] | None = None  # not looked for yet
        freed = list[PageRef]()
        result: Future[int] = new_future()

        def work() -> None:
            """Overwrite one page, and submit the next: other intents run in between."""
            nonlocal foreign
            if left:
                self._overwrite(left.popleft(), files)
            elif foreign is None:
                foreign = deque(self._foreign(ids, salt, kept))
            elif foreign:
                freed.append(self._overwrite_foreign(foreign.popleft()))
            else:
                for info in files.values():
                    self._core.extents.sync(info)
                self._slots.free_rows(retracted)
                if freed:
                    self._core.ledger.append(writes.FreePages(tuple(freed)))
                self._core.ledger.commit().add_done_callback(written)
                return
            self._core.thread.submit(work).add_done_callback(check)

        def written(done: Future[int]) -> None:
            error = done.exception()
            self._slots.let_go(retracted)
            if error is None:
                result.set_result(len(retracted) + len(freed))
            else:
                result.set_exception(error)

        def check(done: Future[None]) -> None:
            if (error := done.exception()) is not None:  # the disk, or the store is closed
                self._slots.free_rows(retracted)
                self._slots.let_go(retracted)
                result.set_exception(
                    error if isinstance(error, StoreError) else StoreError(str(error))
                )

        self._core.thread.submit(work).add_done_callback(check)
        return result

    def _roots(self, ids: bytes, salt: bytes, kept: int) -> list[bytes]:
        """Keys of the first pages of the pool that hold more than `kept` tokens."""

        def lengths(parent: bytes, tokens_max: int) -> list[int]:
            with self._core.lock:
                return self._index.tail_lengths(parent, tokens_max)

        return roots_of(ids, self._slots.repr_id, salt, kept, lengths)

    def _foreign(self, ids: bytes, salt: bytes, kept: int) -> list[PageRef]:
        """The pages of representations that are not open (page thread)."""
        with self._core.lock:
            repr_ids = {info.repr_id for info in self._core.foreign}
        found = list[PageRef]()
        for repr_id in repr_ids:
            read = partial(page_links, repr_id=repr_id)
            found += linked_pages(self._core.ledger.read(read).result(), ids, repr_id, salt, kept)
        return found

    def _overwrite_foreign(self, ref: PageRef) -> PageRef:
        """Overwrite a page of a representation that is not open, if its extent is still there (page
        thread); returns the next use of its slot."""
        with self._core.lock:
            infos = [info for info in self._core.foreign if ref.page_id in info.page_ids]
        for info in infos:
            blank = memoryview(bytes([POISON]) * info.page_bytes)
            try:
                self._core.extents.write_closed(info, ref.page_id, blank)
            except StoreCorrupt:  # no such file, or one of another size
                self._core.drop_foreign(info)
            self._core.counters["pages_erased"] += 1
        return PageRef(ref.page_id, ref.gen + 1)

    def _retract(self, roots: list[bytes]) -> list[Retracted]:
        """Retract the pages of these keys and what follows them, in slices."""
        left, found = deque(roots), list[Retracted]()
        while left:
            with self._core.lock:
                seen = len(found)
                while left and len(found) - seen < RETRACT_SLICE:
                    key = left[0]
                    page = self._index.resident(key) or self._index.first_child(key)
                    if page is None:
                        left.popleft()
                        continue
                    found.append(self._slots.retract(page, slot_failed=False))
                    if page.key != key:
                        left.append(page.key)
                self._core.counters["pages_erased"] += len(found) - seen
                self._core.events.put([one.page.key for one in found[seen:] if one.page.pins > 1])
        return found

    def _overwrite(self, one: Retracted, files: dict[int, ExtentInfo]) -> None:
        """Overwrite a page that nothing else reads or writes (page thread)."""
        with self._core.lock:
            page = one.page
            if page.pins > 1 or page.writers:
                return  # its last user's release has the slot overwritten
            info = self._slots.info(page.page_id)
        self._slots.overwrite(page.page_id)
        files[info.index] = info


def roots_of(
    ids: bytes,
    repr_id: bytes,
    salt: bytes,
    kept: int,
    lengths_of: Callable[[bytes, int], Iterable[int]],
) -> list[bytes]:
    """Keys of the first pages that hold more than `kept` tokens: a full one and tails.

    `lengths_of`: of tails behind a parent, up to a number of tokens.
    """
    first = kept // PAGE_TOKENS
    full = ids[: (first + 1) * PAGE_TOKENS * 4]
    chain = keys.chain_keys(full, repr_id, salt)
    parent = chain[first - 1] if first else keys.ROOT_KEY
    rest = ids[first * PAGE_TOKENS * 4 : (first + 1) * PAGE_TOKENS * 4]
    tails = [
        keys.content_key(parent, rest[: n * 4], repr_id, salt)
        for n in lengths_of(parent, len(rest) // 4)
        if first * PAGE_TOKENS + n > kept
    ]
    return chain[first:] + tails


def linked_pages(
    links: Iterable[PageLink], ids: bytes, repr_id: bytes, salt: bytes, kept: int
) -> list[PageRef]:
    """The pages of `links` that hold a token of a timeline after its first `kept`, and those
    computed from them."""
    by_key, children = dict[bytes, PageLink](), defaultdict[bytes, list[PageLink]](list)
    for link in links:
        by_key[link.key] = link
        children[link.parent].append(link)

    def lengths(parent: bytes, tokens_max: int) -> list[int]:
        found = {link.n_tokens for link in children.get(parent, ())}
        return [n for n in found if n <= min(tokens_max, PAGE_TOKENS - 1)]

    roots = roots_of(ids, repr_id, salt, kept, lengths)
    left, found = deque(by_key[key] for key in roots if key in by_key), list[PageRef]()
    # pages behind a root that is gone are found by its key
    left.extend(link for key in roots if key not in by_key for link in children.pop(key, ()))
    while left:
        link = left.popleft()
        found.append(link.ref)
        left.extend(children.pop(link.key, ()))  # once: damaged rows may name each other
    return found
