"""The pages of one open store, as its caller sees them: match, pin, where a page is, its proof.

The floors below: `sealing` (arena to manifest), `loading` (reading back), `places` (space and
eviction). `Store` adds the directory: lock, recovery, arenas, closing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_store import keys
from kv_store.errors import StaleRef
from kv_store.layout import PAGE_TOKENS
from kv_store.pages import RESIDENT, PageRef, PageState
from kv_store.sealing import SealingPool, Ticket

__all__ = ["PagePool", "PageProof", "Ticket"]


@dataclass(frozen=True, slots=True)
class PageProof:
    """What a lane needs to verify an extent copy through its own mapping: XXH3-128 of the whole
    page with `seed` must equal `checksum`."""

    place_code: int
    seed: int
    checksum: bytes


class PagePool(SealingPool):
    """The pages of one open store. Methods without a Future do no I/O."""

    def match_prefix(
        self,
        tokens: keys.Tokens | bytes,
        salt: bytes,
        *,
        tokens_max: int | None = None,
        pin: bool = False,
        priority: int | None = None,
    ) -> list[PageRef]:
        """The longest run of full pages, from the first token on, that the store knows.

        Token ids are compared, not only their hash. At most `tokens_max` tokens are covered.
        Pages that were not read since start are included: `load()` them before use.
        """
        ids, parent, found = keys.token_bytes(tokens), keys.ROOT_KEY, list[PageRef]()
        if tokens_max is not None:
            ids = ids[: max(0, tokens_max) * 4]
        step = PAGE_TOKENS * 4
        with self._lock:
            for end in range(step, len(ids) + 1, step):
                part = ids[end - step : end]
                parent = keys.content_key(parent, part, self.repr_id, salt)
                page = self._table.resident(parent)
                if page is None or page.tokens != part:
                    break
                self._table.touch(page, priority)
                page.pins += pin
                found.append(page.ref)
            self.counters["pages_matched"] += len(found)
        return found

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
        with self._lock:
            for n in self._table.tail_lengths(parent, len(ids) // 4):
                part = ids[: n * 4]
                page = self._table.resident(keys.content_key(parent, part, self.repr_id, salt))
                if page is not None and page.tokens == part:
                    self._table.touch(page, priority)
                    page.pins += pin
                    self.counters["tails_found"] += 1
                    return page.ref
        return None

    def page_tokens(self, ref: PageRef) -> int:
        """How many tokens the page holds: 256, or fewer for a parked tail. Raises StaleRef."""
        with self._lock:
            return self._table.get(ref).n_tokens

    def key_of(self, parent: bytes, tokens: keys.Tokens | bytes, salt: bytes) -> bytes:
        return keys.content_key(parent, tokens, self.repr_id, salt)

    def pin(self, ref: PageRef) -> None:
        """Forbid eviction of a resident page. Raises StaleRef."""
        with self._lock:
            page = self._table.get(ref)
            if page.state not in RESIDENT:
                raise StaleRef(f"{page!r} cannot be pinned")
            page.pins += 1
            self._table.touch(page)

    def unpin(self, ref: PageRef) -> None:
        """Give one pin back. Raises StaleRef when there is none to give."""
        with self._lock:
            page = self._table.get(ref)
            if page.pins < 1:
                raise StaleRef(f"{page!r} is not pinned")
            page.pins -= 1
            self._settle(page)

    def touch(self, refs: Sequence[PageRef], priority: int) -> None:
        """Mark pages as used now, with a new eviction priority (lower goes first)."""
        with self._lock:
            for ref in refs:
                page = self._table.get(ref)
                if page.state in RESIDENT:
                    self._table.touch(page, priority)

    def state(self, ref: PageRef) -> PageState:
        with self._lock:
            return self._table.get(ref).state

    def is_resident(self, ref: PageRef) -> bool:
        """Whether the page may be read: not once it was condemned, though a pin keeps its place."""
        with self._lock:
            try:
                return self._table.get(ref).state in RESIDENT
            except StaleRef:
                return False

    def find(self, key: bytes) -> PageRef | None:
        """The page of a content key, if it is there; not pinned."""
        with self._lock:
            page = self._table.resident(key)
            return None if page is None else page.ref

    def place_code(self, ref: PageRef) -> int:
        """Where a lane finds the page: (extent index << 32) | place."""
        with self._lock:
            self._table.get(ref)
            return self._info(ref.page_id).place_code(ref.page_id)

    def proof(self, ref: PageRef) -> PageProof:
        """How a lane checks the sealed or published page through its own mapping."""
        with self._lock:
            page = self._table.get(ref)
            if not page.checksum:
                raise StaleRef(f"{page!r} is not sealed")
            return PageProof(
                self._info(ref.page_id).place_code(ref.page_id), self._seed(page), page.checksum
            )

    def digest(self, ref: PageRef) -> bytes:
        """The unseeded payload digest: what a recomputation must equal."""
        with self._lock:
            return self._table.get(ref).digest
