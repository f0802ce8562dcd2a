"""Pages from and for other daemons: verified on the way in, and on the way out.

A page that a peer computed enters the pool like a sealed one: its key is computed here from parent,
tokens and salt, its bytes are compared with the digest that came along, written, read back and
published. A page goes out whole, once it was read and verified like one that is scrubbed.
"""

from __future__ import annotations

from concurrent.futures import Future

from kv_store import keys
from kv_store.errors import StaleRef, StoreCorrupt
from kv_store.pages.allocator import NoRoom, SlotAllocator
from kv_store.pages.core import StoreCore
from kv_store.pages.index import RESIDENT, Page, PageRef
from kv_store.pages.load import PageLoader
from kv_store.pages.seal import PageSealer
from kv_store.threads import new_future, settle


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

    def read_page(self, ref: PageRef) -> Future[bytes]:
        """Read a resident page for a peer. Raises StaleRef; fails with StoreCorrupt if it is not
        what was sealed, which makes it invalid."""
        with self._core.lock:
            page = self._slots.index.get(ref)
            if page.state not in RESIDENT:
                raise StaleRef(f"{page!r} is not in the manifest")
            self._slots.index.pin(page)
        return self._core.thread.submit(lambda: self._read(page))

    def _read(self, page: Page) -> bytes:
        """Read a page, and give its pin back (page thread)."""
        with self._core.lock:
            is_valid = page.state in RESIDENT
        if not self._loader.read_again(page) or not is_valid:
            raise StoreCorrupt("a page does not read back as it was sealed")
        self._core.counters["pages_to_peers"] += 1
        return bytes(self._slots.buffer)
