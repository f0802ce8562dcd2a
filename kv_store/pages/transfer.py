"""Pages from and for other daemons: verified on the way in, and on the way out.

A page that a peer computed enters the pool like a sealed one: its key is computed here from parent,
tokens and salt, its bytes are compared with the digest that came along, written, read back and
published. A page goes out in chunks, so that no seal waits for more than one of them.
"""

from __future__ import annotations

from concurrent.futures import Future

import xxhash

from kv_store import keys
from kv_store.errors import StaleRef, StoreCorrupt
from kv_store.pages.allocator import NoRoom, SlotAllocator
from kv_store.pages.core import StoreCore
from kv_store.pages.index import RESIDENT, Page, PageRef
from kv_store.pages.load import PageLoader
from kv_store.pages.seal import PageSealer
from kv_store.threads import new_future, settle

CHUNK_BYTES = 1 << 20  # read in about 0.2 ms: the longest that a seal waits for a reading


class PageTransfer:
    """Imports pages into one pool, and reads pages of it for peers."""

    def __init__(
        self, core: StoreCore, allocator: SlotAllocator, loader: PageLoader, sealer: PageSealer
    ) -> None:
        self._core = core
        self._slots = allocator
        self._loader = loader
        self._sealer = sealer

    def import_page(
        self,
        parent: bytes,
        tokens: keys.Tokens | bytes,
        salt: bytes,
        digest: bytes,
        data: bytes | bytearray | memoryview,
        *,
        origin: str,
        priority: int = 0,
    ) -> Future[PageRef] | NoRoom:
        """Publish the page of `tokens` after `parent`, of which a peer sent `data` and `digest`.

        Resolves once the page is durable in the manifest; the reference is pinned once for the
        caller and may be that of an older page with equal bytes. `origin` is recorded like the
        lanes of a sealed page: `computed_by` finds what a peer computed in this run. Fails as
        `seal`: StoreCorrupt for other bytes than `digest` says, NumericsFault if the store has
        another content under the key, StoreFull or OSError. Raises ValueError for bytes of another
        size than a page.
        """
        size = self._slots.layout.page_bytes
        if len(data) != size:
            raise ValueError(f"a page has {size} bytes, not {len(data)}")
        ticket = self._sealer.reserve(parent, tokens, salt, priority, frozenset((origin,)))
        if isinstance(ticket, NoRoom):
            return ticket
        result: Future[PageRef] = new_future()

        def sealed(done: Future[PageRef]) -> None:
            try:
                done.result()
                published = self._sealer.publish(ticket)
            except Exception as error:
                result.set_exception(error)
                return
            published.add_done_callback(lambda done: settle(result, done.result))
            self._core.ledger.commit()

        self._sealer.seal_bytes(ticket, data, digest).add_done_callback(sealed)
        self._core.counters["pages_from_peers"] += 1
        return result

    def read_out(self, ref: PageRef) -> PageReading:
        """Begin to read a resident page for a peer. Raises StaleRef; `close` the reading."""
        with self._core.lock:
            page = self._slots.index.get(ref)
            if page.state not in RESIDENT:
                raise StaleRef(f"{page!r} is not in the manifest")
            self._slots.index.pin(page)
        return PageReading(self._core, self._slots, self._loader, page)


class PageReading:
    """One page on its way to a peer; keeps the page pinned until `close`.

    `digest` is that of the whole payload, with which the receiver compares.
    """

    def __init__(
        self, core: StoreCore, allocator: SlotAllocator, loader: PageLoader, page: Page
    ) -> None:
        self._core = core
        self._slots = allocator
        self._loader = loader
        self._page: Page | None = page
        self.digest = page.digest
        self._offset = 0
        self._payload = xxhash.xxh3_128()
        self._sealed = xxhash.xxh3_128(seed=allocator.seed(page))

    def __repr__(self) -> str:
        return f"<PageReading {self._page!r} {self._offset}/{self._slots.layout.page_bytes}>"

    @property
    def left(self) -> int:
        """Bytes that have not been asked for."""
        return self._slots.layout.page_bytes - self._offset

    def chunk(self) -> Future[bytearray]:
        """Read the next bytes, at most CHUNK_BYTES; ask for one chunk after the other.

        The last chunk fails with StoreCorrupt if the page as a whole is not what was sealed, which
        makes it invalid, any chunk with StaleRef if the page became invalid or was closed.
        """
        offset, size = self._offset, min(CHUNK_BYTES, self.left)
        if not size:
            raise StaleRef(f"{self!r} was read already")
        self._offset += size
        return self._core.thread.submit(lambda: self._read(offset, size))

    def _read(self, offset: int, size: int) -> bytearray:
        """Read one chunk (page thread), under a pin of its own: `close` may come meanwhile."""
        with self._core.lock:
            page = self._page
            if page is None or page.state not in RESIDENT:
                raise StaleRef("the page became invalid, or its reading was closed")
            info = self._slots.info(page.page_id)
            self._slots.index.pin(page)
        data, good = bytearray(size), False
        is_last = offset + size == self._slots.layout.page_bytes
        try:
            self._core.extents.read_part(info, page.page_id, offset, memoryview(data))
            self._payload.update(data)
            self._sealed.update(data)
            good = not is_last or (
                self._sealed.digest() == page.checksum and self._payload.digest() == self.digest
            )
        except OSError as error:
            raise StoreCorrupt("a page cannot be read", why=str(error)) from error
        finally:
            with self._core.lock:
                if is_last or not good:
                    self._loader.was_read(page, good)
                self._slots.unpin(page, is_use=False)
        if not good:
            raise StoreCorrupt("a page does not read back as it was sealed")
        self._core.counters["pages_to_peers"] += is_last
        return data

    def close(self) -> None:
        """Give the page up; later calls do nothing."""
        with self._core.lock:
            page, self._page = self._page, None
            if page is not None:
                self._slots.unpin(page)
