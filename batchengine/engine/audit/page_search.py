"""Finds the tokens of a page of which only the content key is known.

Owns the order of the search: sessions in memory, then the latest of the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncGenerator

from batchengine.core import PAGE_TOKENS
from batchengine.engine.audit.majority import PageContent
from batchengine.engine.state import EngineState
from kv_store import keys
from kv_store.errors import StoreError
from kv_store.pages.maintenance import ScrubResult
from kv_store.store import Store

LEDGER_LOOK_MAX = 64  # sessions on disk whose tokens are compared with a page


async def page_of(found: ScrubResult, state: EngineState, store: Store) -> PageContent | None:
    """Return the content of the page from a session's timeline; None if no session has it."""
    repr_id = store.pages.repr_id
    async for whole in _timelines(state, store):
        chain = await asyncio.to_thread(keys.chain_keys, whole.tokens, repr_id, whole.salt)
        parents = [keys.ROOT_KEY, *chain]
        if found.parent not in parents:
            continue
        end = parents.index(found.parent) * PAGE_TOKENS + found.n_tokens
        page = whole._replace(tokens=whole.tokens[:end])
        if end <= len(whole.tokens) and page.key(repr_id) == found.key:
            return page
    return None


async def _timelines(state: EngineState, store: Store) -> AsyncGenerator[PageContent]:
    """Yield timelines, those in memory first, the most recently used before others."""
    live = state.known()
    for session in reversed(live):
        yield PageContent(array("i", session.tokens), session.salt, session.priority)
    names = {session.name.decode() for session in live}
    infos = await asyncio.wrap_future(store.ledger.list_sessions())
    others = [info for info in infos if info.id not in names]
    for info in others[:LEDGER_LOOK_MAX]:
        with contextlib.suppress(StoreError):
            record = await asyncio.wrap_future(store.ledger.load_session(info.id))
            if record is not None:
                yield PageContent(array("i", record.tokens), info.tenant.encode(), 0)
