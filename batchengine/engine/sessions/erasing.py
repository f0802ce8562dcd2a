"""Erasing: what a dropped session has on disk is overwritten, except what others share.

Owns the order: seals under way end, slots and pages go, then the session's rows, at last the log of
the ledger. A failure leaves the session in the ledger, so that the drop can be asked for again.
Every other commit waits while the log is cleaned: drops share a cleaning, and a rest follows each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from batchengine.engine.lane.loop import states_saved
from batchengine.engine.sessions.directory import durable_name
from batchengine.engine.state import EngineState
from batchengine.session import common_prefix
from batchengine.session_kv import page_start
from kv_store import keys
from kv_store.errors import StoreError
from kv_store.ledger import writes
from kv_store.ledger.ledger import Ledger
from kv_store.store import Store

POLL_S = 0.005  # between two looks at lanes that finish a frame or a seal
REST_FACTOR = 3.0  # rest after a cleaning, for each second that it took
LANES_WAIT_S = 30.0  # a seal may wait for an earlier page, which waits for room in the store


async def erase(
    state: EngineState, store: Store, tenant: str, session_id: str, timelines: Sequence[list[int]]
) -> None:
    """Erase a session that is not in memory any more, and whose timeline was one of `timelines`.

    The ledger must be cleaned next. Raises StoreError or OSError: some of it may still be there.
    """
    name, salt = durable_name(tenant, session_id), tenant.encode()
    await asyncio.to_thread(store.orphaned.erase, name.encode())
    for tokens in timelines:
        try:
            async with asyncio.timeout(LANES_WAIT_S):
                await _lanes_done(state, tokens, salt)
        except TimeoutError as late:
            raise StoreError("a lane still writes pages that begin as the session does") from late
        shared = await asyncio.wrap_future(store.ledger.shared_tokens(name, tenant, tokens))
        kept = max(shared, _computing(state, store, tokens, salt))
        await asyncio.wrap_future(store.pages.erase(tokens, salt, kept))
        if store.states is not None:
            await asyncio.wrap_future(store.states.erase(tokens, store.pages.repr_id, salt, kept))
        if state.erase_at_peers is not None:
            await state.erase_at_peers(tokens, salt, kept)
    dropped = store.ledger.append(writes.DropSession(name))
    store.ledger.commit()
    await asyncio.wrap_future(dropped)


class LedgerCleaning:
    """Cleans the ledger of erased rows; calls that wait at the same time share one cleaning."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._turn = asyncio.Lock()
        self._calls = 0
        self._served = 0  # the first so many calls
        self._rested_s = 0.0  # loop time before which no cleaning begins

    async def clean(self) -> None:
        """Return once a cleaning that began after this call has ended. Raises StoreError."""
        self._calls += 1
        call, loop = self._calls, asyncio.get_running_loop()
        async with self._turn:
            if call <= self._served:
                return
            await asyncio.sleep(self._rested_s - loop.time())
            calls, began_s = self._calls, loop.time()
            try:
                await asyncio.wrap_future(self._ledger.clean())
            finally:
                self._rested_s = loop.time() + REST_FACTOR * (loop.time() - began_s)
            self._served = calls


async def _lanes_done(state: EngineState, tokens: list[int], salt: bytes) -> None:
    """Wait until no seal of the timeline is under way, no state is being saved that was when this
    began, and lanes have poisoned freed slots: by the frame after those in flight, if not before.
    """
    for loop in state.lanes:
        seals = [
            seal
            for seal in loop.kv.disputes.seals
            if seal.salt == salt and seal.chain == tokens[: len(seal.chain)]
        ]
        while not loop.kv.disputes.seals.isdisjoint(seals):  # noqa: ASYNC110  there is no event
            await asyncio.sleep(POLL_S)
        await states_saved(loop)
        slots, frames = loop.kv.slots, loop.kv.slots.frames
        while loop.up and slots.is_poisoning and slots.frames < frames + 3:
            loop.wake()
            await asyncio.sleep(POLL_S)


def _computing(state: EngineState, store: Store, tokens: list[int], salt: bytes) -> int:
    """How many leading tokens, in full pages, a turn that computes now has in common with these."""
    chain = keys.chain_keys(tokens, store.pages.repr_id, salt)
    tables = (turn.session.kv.keys for turn in state.turns.values())
    return max((page_start(common_prefix(chain, table)) for table in tables), default=0)
