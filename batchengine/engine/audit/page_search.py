"""The tokens of a page that is known by its content key only.

Owns the search: sessions in memory first, then the ledger's latest.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from batchengine.core import PAGE_TOKENS
from batchengine.engine.audit.majority import PageContent
from batchengine.engine.state import EngineState
from kv_store import keys
from kv_store.errors import StoreError
from kv_store.pages.maintenance import ScrubResult
from kv_store.store import Store

LEDGER_LOOK_MAX = 64  # sessions on disk whose tokens are compared with a page


class Timeline(NamedTuple):
    """Tokens of a session, and what its pages are called by."""

    tokens: Sequence[int]
    salt: bytes
    priority: int


class PageSearch:
    """Searches the timelines that one engine knows."""

    def __init__(self, state: EngineState, store: Store) -> None:
        self._state = state
        self._store = store

    async def page_of(self, found: ScrubResult) -> PageContent | None:
        """The tokens of the page: of a session in memory, or one of the ledger's latest."""
        async for timeline in self._timelines():
            n = len(timeline.tokens) // PAGE_TOKENS * PAGE_TOKENS
            chain = await asyncio.to_thread(self._chain, timeline, n)
            if found.key in chain:
                end = (chain.index(found.key) + 1) * PAGE_TOKENS
            elif found.n_tokens < PAGE_TOKENS and found.parent in (keys.ROOT_KEY, *chain):
                at = 0 if found.parent == keys.ROOT_KEY else chain.index(found.parent) + 1
                end = at * PAGE_TOKENS + found.n_tokens
            else:
                continue
            page = PageContent(array("i", timeline.tokens[:end]), timeline.salt, timeline.priority)
            if end <= len(timeline.tokens) and page.key(self._store.pages.repr_id) == found.key:
                return page
        return None

    def _chain(self, timeline: Timeline, n: int) -> list[bytes]:
        tokens = array("i", timeline.tokens[:n])
        return keys.chain_keys(tokens, self._store.pages.repr_id, timeline.salt) if n else []

    async def _timelines(self) -> AsyncGenerator[Timeline]:
        """Of sessions in memory, newest use first, then of others."""
        live = list(self._state.sessions.values())
        live += [turn.session for turn in self._state.turns.values()]
        for session in reversed(live):
            yield Timeline(list(session.tokens), session.salt, session.priority)
        names = {session.name.decode() for session in live}
        infos = await asyncio.wrap_future(self._store.ledger.list_sessions())
        others = [info for info in infos if info.id not in names]
        for info in others[:LEDGER_LOOK_MAX]:
            with contextlib.suppress(StoreError):
                record = await asyncio.wrap_future(self._store.ledger.load_session(info.id))
                if record is not None:
                    yield Timeline(record.tokens, info.tenant.encode(), 0)
