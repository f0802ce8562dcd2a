"""Removal of invalid pages and rows from the page tables of one lane.

Owns which pages a session keeps. Frozen sessions are left out: a migration owns their tables, and
`LaneLoop.thaw` checks them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging

from batchengine.kv.disputes import Disputes
from batchengine.kv.held import HeldTables
from batchengine.kv.sealing import SealPipeline
from batchengine.kv.slots import Slots
from batchengine.session import Loss, Session, State
from batchengine.session_kv import full_pages, page_start
from kv_store import keys
from kv_store.errors import StoreError
from kv_store.store import Store

log = logging.getLogger("batchengine.kv")


class Invalidation:
    """Removes invalid pages and rows from the tables of one lane."""

    def __init__(
        self,
        store: Store,
        slots: Slots,
        held: HeldTables,
        sealing: SealPipeline,
        disputes: Disputes,
    ) -> None:
        self._store = store
        self._slots = slots
        self._held = held
        self._sealing = sealing
        self._disputes = disputes

    def fall_back(self, session: Session, *, only_sealed: bool) -> bool:
        """Keep the held pages before the first one lost or invalid, and the sealed pages before the
        first invalid one; True if any KV was dropped.

        `only_sealed`: drop open pages and pending rows in any case. Does nothing if frozen.
        """
        if session.state is State.FROZEN:
            return False
        is_cut = self._held.recheck(session)
        parked = session.kv.parked
        if parked is not None and not self._store.pages.is_resident(parked.ref):
            self._slots.unpark(session)
        sealed, is_resident = session.kv.sealed, self._store.pages.is_resident
        good = sum(1 for _ in itertools.takewhile(is_resident, sealed))
        everything = only_sealed and (session.kv.open or session.kv.pending)
        if good == len(sealed) and not everything:
            return is_cut
        if good < len(sealed):
            session.loss = Loss.CHECKSUM
        self._sealing.drop(session)
        self._slots.truncate(session, session.kv.n_held + good)
        return True

    def drop_open(self) -> list[Session]:
        """Drop every row that is not sealed, and every seal under way.

        Returns the sessions that lost KV. A frozen session loses its open rows at the thaw.
        """
        self._sealing.drop()
        changed: list[Session] = []
        for session in self._slots.members.values():
            is_open = session.kv.open or session.kv.pending
            if is_open and session.state is not State.FROZEN:
                self._slots.keep_sealed(session)
                changed.append(session)
        return changed

    def invalidate_turn(self, session: Session, tokens: int) -> None:
        """Invalidate the session's pages after its first `tokens` tokens and their descendants.
        The session keeps the pages before them."""
        first = full_pages(min(tokens, session.frontier))
        chain = keys.chain_keys(session.tokens, self._store.pages.repr_id, session.salt)
        wrong = chain[first:]
        parent = chain[first - 1] if first else keys.ROOT_KEY
        rest = session.tokens[page_start(first) :]
        while (tail := self._store.pages.find_tail(parent, rest, session.salt)) is not None:
            rest = rest[: self._store.pages.page_tokens(tail)]
            wrong.append(self._store.pages.key_of(parent, rest, session.salt))
            del rest[-1:]  # a shorter tail may be in the store as well
        self._sealing.drop(session)
        self._slots.truncate(session, first)
        self._disputes.invalidate(wrong)

    async def recheck(self, sessions: list[Session]) -> None:
        """Verify the sealed pages of these sessions, one of which may have crashed the worker.

        The store invalidates a page that fails, and reports that. A session keeps the pages before
        it, unless the session is frozen or has moved meanwhile.
        """
        await self._sealing.read_back.settled()
        for session in sessions:
            refs = list(session.kv.sealed)
            good = len(refs)
            for index, ref in enumerate(refs):
                sound = False
                with contextlib.suppress(StoreError, OSError):
                    sound = await asyncio.wrap_future(self._store.pages.verify(ref))
                if not sound:
                    good = index
                    break
            is_ours = self._slots.owns(session) and session.state is not State.FROZEN
            if good < len(refs) and is_ours and session.kv.sealed[: good + 1] == refs[: good + 1]:
                page = session.kv.n_held + good
                log.warning("%r: page %d does not verify, it is computed again", session, page)
                self._slots.truncate(session, page)
