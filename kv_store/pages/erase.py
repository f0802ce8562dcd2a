"""Erasing of a dropped session's pages: their bytes are overwritten before their slots are free.

Owns which pages hold more of a timeline than others share. They are overwritten on the page thread,
one page per intent, so that a seal waits for at most one; then all rows are freed by one commit.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

from kv_store import keys
from kv_store.errors import StoreError
from kv_store.layout import PAGE_TOKENS
from kv_store.pages.allocator import RETRACT_SLICE, Retracted, SlotAllocator
from kv_store.pages.core import StoreCore
from kv_store.pages.extents import ExtentInfo
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
        retracted = self._retract(self._roots(keys.token_bytes(tokens), salt, kept))
        left, files = deque(retracted), dict[int, ExtentInfo]()
        result: Future[int] = new_future()

        def work() -> None:
            """Overwrite one page, and submit the next: other intents run in between."""
            if left:
                self._overwrite(left.popleft(), files)
                self._core.thread.submit(work).add_done_callback(check)
                return
            for info in files.values():
                self._core.extents.sync(info)
            self._slots.free_rows(retracted)
            self._core.ledger.commit().add_done_callback(written)

        def written(done: Future[int]) -> None:
            error = done.exception()
            self._slots.let_go(retracted)
            if error is None:
                result.set_result(len(retracted))
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
        """Keys of the first pages that hold more than `kept` tokens: a full one and tails."""
        repr_id, first = self._slots.repr_id, kept // PAGE_TOKENS
        full = ids[: (first + 1) * PAGE_TOKENS * 4]
        chain = keys.chain_keys(full, repr_id, salt)
        parent = chain[first - 1] if first else keys.ROOT_KEY
        rest = ids[first * PAGE_TOKENS * 4 : (first + 1) * PAGE_TOKENS * 4]
        with self._core.lock:
            lengths = self._index.tail_lengths(parent, len(rest) // 4)
        tails = [
            keys.content_key(parent, rest[: n * 4], repr_id, salt)
            for n in lengths
            if first * PAGE_TOKENS + n > kept
        ]
        return chain[first:] + tails

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
