"""Prefix matching: finds pages of a timeline in the store by content, and pins them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from batchengine.kv.slots import Slots
from batchengine.kv.states import LaneStates
from batchengine.session import Loss, Session
from batchengine.session_kv import page_start
from kv_store import keys
from kv_store.pages.index import PageRef
from kv_store.store import Store


class PrefixMatcher:
    """Puts published pages of a timeline's prefix into the table of its session."""

    def __init__(self, store: Store, slots: Slots, states: LaneStates) -> None:
        self._store = store
        self._slots = slots
        self._states = states

    def stored_tokens(self, prompt: Sequence[int], salt: bytes) -> int:
        """Return how many leading tokens of a prompt have published pages, in memory or on disk,
        from whose end a session can go on; the last token is left to compute."""
        tokens = prompt[:-1]
        refs = self._store.pages.match_prefix(tokens, salt)
        return page_start(self._resumable(refs, tokens, salt))

    def page_keys(self, prompt: Sequence[int], salt: bytes) -> list[bytes]:
        """Return the content keys of a prompt's full pages."""
        return keys.chain_keys(prompt, self._store.pages.repr_id, salt)

    def extend(
        self,
        session: Session,
        salt: bytes,
        priority: int,
        is_worth_reading: Callable[[int, int, int], bool] | None = None,
    ) -> Future[list[bool]] | None:
        """Take published pages of the timeline's prefix if they reach beyond the frontier. For a
        model with recurrent state they end where a file has it.

        The last token is left to compute. Returns None if the pages are ready, or there are none;
        else a future with the argument of `loaded`. Pages on disk are taken only if
        `is_worth_reading(tokens, tokens after the first such page, bytes to read)` returns True.
        """
        kv = session.kv
        first, end = kv.n_held, min(len(session.tokens) - 1, kv.compute_until)
        parent = kv.keys[first - 1] if first else keys.ROOT_KEY
        refs = self._store.pages.match_prefix(
            session.tokens[page_start(first) : end], salt, pin=True, priority=priority,
            parent=parent,
        )  # fmt: skip
        n_resumable = self._resumable(refs, session.tokens[page_start(first) : end], salt)
        for ref in refs[n_resumable:]:
            self._store.pages.unpin(ref)
        del refs[n_resumable:]
        if is_worth_reading is not None:
            refs = self._without_cold(refs, first, session.frontier, is_worth_reading)
        n_pages = first + len(refs)
        if page_start(n_pages) <= session.frontier:
            for ref in refs:
                self._store.pages.unpin(ref)
            return None
        follow = any(pending.page == n_pages for pending in kv.pending)
        after = kv.take_pending(lambda pending: follow and pending.page >= n_pages)
        self._slots.truncate(session, first)
        codes, kv.keys[first:] = self._store.pages.codes_and_keys(refs)
        kv.extend_sealed(refs, codes)
        if after:
            self._slots.claim_pending(session, after)
        future = self._store.pages.load(refs)
        if future.done():
            self.loaded(session, future.result())
            return None
        return future

    def _resumable(self, refs: Sequence[PageRef], tokens: Sequence[int], salt: bytes) -> int:
        """Return how many of the pages of a timeline, `tokens` from the first page on, a session
        can go on from: up to a saved state, or up to a parked tail that has one."""
        pages = self._store.pages
        if not refs or not self._states.is_used:
            return len(refs)
        page_keys = pages.codes_and_keys(refs)[1]
        rest = list(tokens[page_start(len(refs)) : page_start(len(refs) + 1)])
        if (tail := pages.find_tail(page_keys[-1], rest, salt)) is not None:
            key = pages.key_of(page_keys[-1], rest[: pages.page_tokens(tail)], salt)
            if self._states.has_saved(key):
                return len(refs)
        return self._states.resumable(page_keys)

    def _without_cold(
        self,
        refs: list[PageRef],
        page: int,
        frontier: int,
        is_worth_reading: Callable[[int, int, int], bool],
    ) -> list[PageRef]:
        """Return all `refs`, of the pages from `page` on, if reading is worth it, else unpin those
        from the first on disk on."""
        cold = self._store.pages.cold(refs)
        tokens = page_start(page + len(refs))
        if True not in cold or tokens <= frontier:
            return refs
        first = cold.index(True)
        cold_tokens = tokens - max(frontier, page_start(page + first))
        if is_worth_reading(tokens, cold_tokens, sum(cold) * self._store.pages.layout.page_bytes):
            return refs
        for ref in refs[first:]:
            self._store.pages.unpin(ref)
        return refs[:first]

    def loaded(self, session: Session, good: list[bool]) -> None:
        """Move the frontier to the first page that did not verify, and drop the pages from it on.

        Since the request the table may have lost pages, and pages may have become invalid.
        """
        pinned = zip(session.kv.sealed, good, strict=False)
        good = [ok and self._store.pages.is_resident(ref) for ref, ok in pinned]
        count = good.index(False) if False in good else len(good)
        n_pages = session.kv.n_held + count
        session.frontier = page_start(n_pages)
        if count < len(good):
            session.loss = Loss.CHECKSUM
        if n_pages < len(session.kv.codes):
            self._slots.truncate(session, n_pages)
