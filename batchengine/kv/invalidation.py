"""Rows that are wrong: what goes with them, and what a session keeps.

Owns which pages a session falls back to. Nothing is done to a frozen session: its table belongs to
the migration, and it is looked at again when it is thawed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from batchengine.kv.disputes import Disputes
from batchengine.kv.sealing import SealPipeline
from batchengine.kv.slots import Slots
from batchengine.session import Loss, Session, State
from batchengine.session_kv import full_pages, page_start
from kv_store import keys
from kv_store.errors import StoreError
from kv_store.store import Store

log = logging.getLogger("batchengine.kv")


class Invalidation:
    """Takes invalid pages and rows out of the tables of one lane."""

    def __init__(
        self, store: Store, slots: Slots, sealing: SealPipeline, disputes: Disputes
    ) -> None:
        self._store = store
        self._slots = slots
        self._sealing = sealing
        self._disputes = disputes

    def fall_back(self, session: Session, *, only_sealed: bool) -> bool:
        """Keep the sealed pages before the first invalid one; True if any KV went.

        `only_sealed`: open pages go in any case. Nothing is done to a frozen session.
        """
        if session.state is State.FROZEN:
            return False
        parked = session.kv.parked
        if parked is not None and not self._store.pages.is_resident(parked.ref):
            self._slots.unpark(session)
        good = len(session.kv.sealed)
        for index, ref in enumerate(session.kv.sealed):
            if not self._store.pages.is_resident(ref):
                good = index
                break
        everything = only_sealed and (session.kv.open or session.kv.pending)
        if good == len(session.kv.sealed) and not everything:
            return False
        if good < len(session.kv.sealed):
            session.loss = Loss.CHECKSUM
        self._sealing.drop(session)
        self._slots.truncate(session, good)
        return True

    def drop_open(self) -> list[Session]:
        """Forget every row that is not sealed, and publish nothing that is on its way.

        Returns the sessions that lost KV. A frozen one loses it when it is thawed.
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
        """Pages of the session after its first `tokens` tokens are wrong (F45), and so are their
        descendants. The session falls back to the pages before them."""
        first = full_pages(min(tokens, session.frontier))
        chain = keys.chain_keys(session.tokens, self._store.pages.repr_id, session.salt)
        wrong = chain[first:]
        parent = chain[first - 1] if first else keys.ROOT_KEY
        rest = session.tokens[page_start(first) :]
        while (tail := self._store.pages.find_tail(parent, rest, session.salt)) is not None:
            rest = rest[: self._store.pages.page_tokens(tail)]
            wrong.append(self._store.pages.key_of(parent, rest, session.salt))
            del rest[-1:]  # a shorter one may be there as well
        self._sealing.drop(session)
        self._slots.truncate(session, first)
        self._disputes.invalidate(wrong)

    async def recheck(self, sessions: list[Session]) -> None:
        """Read the sealed pages of sessions again: one of them may have ended the worker.

        A page that fails is never served again: the store reports it to its other holders, and
        the session falls back to the pages before it, unless it moves or has moved meanwhile.
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
                log.warning("%r: page %d does not verify, it is computed again", session, good)
                self._slots.truncate(session, good)
