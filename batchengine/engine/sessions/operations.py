"""Operations on a named session besides generating: fork, park, drop, why, detail.

Owns their effects on state and ledger. An operation that would race with a running turn is refused,
or waits for the end of the turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from batchengine import errors
from batchengine.core import BatchEngineError
from batchengine.engine.sessions.directory import durable_name, family_of
from batchengine.engine.sessions.erasing import LedgerCleaning, erase
from batchengine.engine.sessions.parking import Parking
from batchengine.engine.sessions.recovery import SessionRecovery
from batchengine.engine.sessions.requests import Requests
from batchengine.engine.sessions.timelines.outline import Outlines
from batchengine.engine.sessions.transcript import (
    HeadMarks,
    channel_messages_of,
    messages_of,
    text_of,
)
from batchengine.engine.state import EngineState, parked_facts
from batchengine.engine.turns.journal import IDLE, PARKED, RUNNING, Journal
from batchengine.engine.turns.records import (
    ParkedMark,
    Rebase,
    SessionFacts,
    SessionMeta,
    TimelineMark,
    encode,
    parked_row,
    session_meta,
    with_call,
)
from batchengine.markup import CHANNEL, FIELDS, MARKUPS, MESSAGE, RESULT_MARKS, START
from batchengine.session import Session
from batchengine.session_kv import full_pages, page_start
from batchengine.text.frontend import TextFrontend
from kv_store.errors import LedgerRefused, StoreError
from kv_store.ledger import writes
from kv_store.store import Store

log = logging.getLogger("batchengine.sessions")

BEFORE_TOKENS = 12  # shown before a difference: enough to find its position in the text
ROLE_TOKENS_MAX = 32_768  # how far back the beginning of a message is searched
DROP_WAIT_S = 30.0  # far longer than a step


class Recorded(NamedTuple):
    """What the ledger has, or will have, of a session."""

    meta: SessionMeta
    epoch: int
    timeline: Sequence[int]


class SessionOperations:
    """Operations of one engine. All methods run on its event loop."""

    def __init__(
        self,
        state: EngineState,
        store: Store,
        journal: Journal,
        recovery: SessionRecovery,
        requests: Requests,
        parking: Parking,
        text: TextFrontend,
        cleaning: LedgerCleaning,
    ) -> None:
        self._state = state
        self._store = store
        self._journal = journal
        self._recovery = recovery
        self._requests = requests
        self._parking = parking
        self._text = text
        self._cleaning = cleaning
        self._outlines = Outlines(text.tokenizer)
        ids = text.tokenizer.special_ids
        heads = [ids[mark] for mark in (START, CHANNEL, MESSAGE) if mark in ids]
        self._heads = HeadMarks(*heads) if len(heads) == len(HeadMarks._fields) else None
        shown = [*MARKUPS["gemma"].markers, *RESULT_MARKS] if FIELDS in ids else []
        self._shown = frozenset(ids[mark] for mark in shown if mark in ids)

    # -------------------------------------------------------------------------- operations

    async def park(self, tenant: str, session_id: str, tool_call_id: str | None) -> dict[str, Any]:
        """Move the KV of a session that waits for a tool out of its lane, now or after its turn.

        A request with the result of `tool_call_id` whose prompt continues the timeline continues
        the session. Raises BatchEngineError (404, 409, 503): then it does not.
        """
        session, facts, (meta, epoch, timeline) = await self._known(tenant, session_id)
        before = meta, None if facts is None else facts.parks
        if tool_call_id:
            mark = TimelineMark.of(timeline)
            meta = with_call(meta, tool_call_id)
            meta = msgspec.structs.replace(meta, parked=None, mark=mark)
        is_busy = session is not None and self._state.is_busy(session)
        status, parked = RUNNING if is_busy else PARKED, ParkedMark.now(tool_call_id or "")
        if not is_busy:
            meta = msgspec.structs.replace(meta, parked=parked)
        if facts is not None:
            facts.meta = meta
            facts.parks = parked.tool_call_id if is_busy else None
        name = durable_name(tenant, session_id)
        try:
            await self._wait(
                self._store.ledger.append(writes.SetMeta(name, epoch, status, encode(meta)))
            )
        except (BatchEngineError, LedgerRefused) as error:
            if facts is not None and facts.meta is meta:
                facts.meta, facts.parks = before
            if not isinstance(error, LedgerRefused):
                raise
            await self._recovery.record(tenant, session_id)  # 404, else it has a new owner
            raise errors.SESSION_IN_USE(session_id=session_id) from error
        mark = (meta if facts is None else facts.meta).mark  # a turn may have ended meanwhile
        if tool_call_id and mark is not None:
            self._recovery.calls.add(tenant, tool_call_id, session_id, mark)
        shown = "parked"
        if session is not None and facts is not None and self._state.is_busy(session):
            shown = "parks at the end of its turn"
            facts.parks = parked.tool_call_id
        elif session is not None:
            await self._parking.park(session, leave=True)
        return {
            "session_id": session_id,
            "state": shown,
            "tokens": len(timeline),
            "tool_calls": meta.calls,
        }

    async def _known(
        self, tenant: str, session_id: str
    ) -> tuple[Session | None, SessionFacts | None, Recorded]:
        """A session that is in memory, once it does not move, with its facts; and what is recorded
        of it, if need be read from the ledger. Raises BatchEngineError (404, 409)."""
        session = self._state.sessions.get((tenant, session_id))
        while session is not None and session.key in self._state.moves:
            await self._state.moved(session)
            session = self._state.sessions.get((tenant, session_id))
        facts = None if session is None else self._state.facts.get(session.key)
        if session is not None and facts is not None and session.logged >= 0:
            return session, facts, Recorded(facts.meta, session.logged_epoch, session.tokens)
        if session is not None and self._state.is_busy(session):
            raise errors.SESSION_IN_USE(session_id=session_id)  # it is read from the ledger
        found = await self._recovery.record(tenant, session_id)
        meta = session_meta(found.info.meta) if facts is None else facts.meta
        return session, facts, Recorded(meta, found.info.epoch, found.tokens)

    async def fork(
        self, tenant: str, session_id: str, new_id: str, client_name: str
    ) -> dict[str, Any]:
        """Create a second session with the same timeline. Raises BatchEngineError."""
        source = self._state.sessions.get((tenant, session_id))
        if source is not None:
            self._journal.flush()
            if self._state.is_at_rest(source):
                await self._parking.park(source, leave=False)
        found = await self._recovery.record(tenant, session_id)
        if (tenant, new_id) in self._state.sessions:
            raise errors.SESSION_EXISTS(given=new_id)
        name, old = durable_name(tenant, new_id), durable_name(tenant, session_id)
        epoch = self._state.first_epoch
        known = session_meta(found.info.meta)
        meta = SessionMeta(known.repr_id, known.rebase, known.edit, name=client_name)
        try:
            await self._wait(
                self._store.ledger.append(
                    writes.CopySession(old, name, tenant, epoch),
                    writes.SetMeta(name, epoch, IDLE, encode(meta)),
                )
            )
        except LedgerRefused as error:
            await self._recovery.record(tenant, session_id)  # 404 if it was dropped
            raise errors.SESSION_EXISTS(given=new_id) from error
        shared = self._store.pages.match_prefix(found.tokens, tenant.encode())
        return {
            "session_id": new_id,
            "forked_from": session_id,
            "tokens": len(found.tokens),
            "pages_shared": len(shared),
            "tokens_shared": page_start(len(shared)),
        }

    async def drop(self, tenant: str, session_id: str) -> dict[str, Any]:
        """Erase the session and its history; its running and queued requests fail.

        Its pages go, too, as far as no other session of the tenant has the same tokens. Returns
        once nothing of it is on disk. Raises BatchEngineError.
        """
        name = tenant, session_id
        found = await self._recovery.record(tenant, session_id)
        while (other := self._state.dropping.get(name)) is not None:
            await other.wait()
            found = await self._recovery.record(tenant, session_id)
        ended = self._state.dropping[name] = asyncio.Event()  # its new requests are refused
        try:
            timelines = await self._leave_memory(tenant, session_id, found.tokens)
            await erase(self._state, self._store, tenant, session_id, timelines)
            await self._cleaning.clean()
            self._recovery.forget(tenant, session_id)
        except (StoreError, OSError) as failure:
            raise errors.NOT_ERASED(session_id=session_id, why=failure) from failure
        finally:
            del self._state.dropping[name]
            ended.set()
        return {"session_id": session_id, "tokens": len(found.tokens), "state": "dropped"}

    async def _leave_memory(
        self, tenant: str, session_id: str, stored: list[int]
    ) -> list[list[int]]:
        """End a session in memory; returns the timelines that it has in the ledger and had here."""
        timelines, session = [stored], self._state.sessions.get((tenant, session_id))
        if session is not None:
            await self._end_requests(session)
            if session.tokens[: len(stored)] == stored:
                timelines.clear()
            timelines.append(list(session.tokens))
            self._state.forget(session)
        self._recovery.calls.forget(tenant, session_id)
        return timelines

    async def why(self, tenant: str, session_id: str) -> dict[str, Any]:
        """Where the last prompt differed from the session's history, and the tokens recomputed."""
        session = self._state.sessions.get((tenant, session_id))
        facts = None if session is None else self._state.facts.get(session.key)
        if session is None or facts is None:
            found = await self._recovery.record(tenant, session_id)
            meta, tokens = session_meta(found.info.meta), found.tokens
        else:
            meta, tokens = facts.meta, session.tokens
        answer: dict[str, Any] = {"session_id": session_id, "last": None, "edit": None}
        if meta.rebase is not None:
            answer["last"] = row = self._rebase_row(meta.rebase)
            if meta.rebase.is_edit:
                row |= self._position_of(tokens[: meta.rebase.shared])
        if meta.edit is not None:
            is_last = meta.edit == meta.rebase
            answer["edit"] = answer["last"] if is_last else self._rebase_row(meta.edit)
        return answer

    async def detail(self, tenant: str, session_id: str) -> dict[str, Any]:
        """Return all facts about one session except its text."""
        session = self._state.sessions.get((tenant, session_id))
        found = await self._recovery.record(tenant, session_id)
        info = found.info
        detail: dict[str, Any] = {
            "session_id": session_id,
            "family": family_of(session_id),
            "parent": session_meta(info.meta).parent or None,
            "tenant": tenant,
            "name": session_meta(info.meta).name or None,
            "used_s": session_meta(info.meta).used_s or None,
            "tokens": len(found.tokens),
            "epoch": info.epoch,
            "owner_lane": info.owner_lane,
            "owner_incarnation": info.owner_incarnation,
            "state": "on disk" if session is None else session.state.value,
            "turns": [
                {
                    "turn": turn.id,
                    "prompt_tokens": turn.prompt_end,
                    "new_tokens": max(0, turn.prompt_end - turn.prompt_start),
                    "status": turn.status,
                    "finish_reason": turn.finish_reason,
                }
                for turn in found.turns
            ],
            "tool_calls": list(session_meta(info.meta).calls),
        }
        detail |= (
            parked_row(session_meta(info.meta))
            if session is None
            else parked_facts(self._state, session)
        )
        if (tenant, session_id) in self._recovery.interrupted:
            detail["state"] = "interrupted"
        if session is not None:
            detail |= {
                "tokens": len(session.tokens),
                "frontier": session.frontier,
                "pages": len(session.kv.codes),
                "pages_sealed": len(session.kv.sealed),
                **self._state.held_facts(session),
            }
        return detail | {"why": await self.why(tenant, session_id)}

    async def messages(self, tenant: str, session_id: str) -> dict[str, Any]:
        """Return the session's history as messages; as `text` where they cannot be recognised."""
        record = await self._recovery.readable(tenant, session_id)
        session = self._state.sessions.get((tenant, session_id))
        if session is not None and session.tokens:
            tokens = list(session.tokens)
        elif record is not None:
            tokens = record.tokens
        else:
            raise errors.UNKNOWN_SESSION(given=session_id)
        piece, tokenizer = self._text.piece, self._text.tokenizer
        ends = (tokenizer.control | frozenset(tokenizer.eog)) - self._shown
        if self._heads is not None:
            found = await channel_messages_of(tokens, self._heads, ends, piece)
        else:
            found = await messages_of(tokens, self._outlines.marks, ends, piece)
        answer = {"session_id": session_id, "tokens": len(tokens), "messages": found}
        return answer if found else answer | {"text": await text_of(tokens, piece)}

    # ------------------------------------------------------------------------------- inner

    def _rebase_row(self, found: Rebase) -> dict[str, Any]:
        """Return a rebase as numbers and text."""
        pages = full_pages(max(found.kept, 0))
        row: dict[str, Any] = {
            "common_prefix_tokens": found.shared,
            "timeline_tokens": found.timeline,
            "prompt_tokens": found.prompt,
            "is_edit": found.is_edit,
            "tokens_reused": max(found.kept, 0),
            "tokens_computed": found.prompt - max(found.kept, 0),
            "pages_kept": pages,
            "reason": found.reason,
        }
        if found.is_edit:
            row |= {
                "first_difference": found.shared,
                "old_token": found.old[0],
                "new_token": found.new[0],
                "old_text": self._text_of(found.old),
                "new_text": self._text_of(found.new),
            }
        return row

    def _position_of(self, before: Sequence[int]) -> dict[str, Any]:
        """Return the text before the difference, and the role of the message that it is in."""
        position: dict[str, Any] = {"text_before": self._text_of(tuple(before[-BEFORE_TOKENS:]))}
        for index in range(len(before) - 1, max(-1, len(before) - 1 - ROLE_TOKENS_MAX), -1):
            if before[index] in self._outlines.marks:
                role = self._outlines.role(before, index)
                if role:
                    return position | {"inside": f"{role} message"}
        return position

    def _text_of(self, tokens: tuple[int, ...]) -> str:
        return b"".join(self._text.piece(token) for token in tokens).decode(errors="replace")

    async def _wait(self, future: Any) -> None:
        """Wait until the record is durable. Raises LedgerRefused, or NOT_DURABLE."""
        self._store.ledger.commit()
        try:
            await asyncio.wrap_future(future)
        except LedgerRefused:
            raise
        except StoreError as error:
            raise errors.NOT_DURABLE(why=error) from error

    async def _end_requests(self, session: Session) -> None:
        """Fail every request of the session, and wait until it neither computes nor moves."""
        error = errors.SESSION_DROPPED(session_id=session.session_id)
        try:
            async with asyncio.timeout(DROP_WAIT_S):
                await self._requests.end(session, error)
                await self._state.moved(session)
        except TimeoutError as late:
            raise errors.NOT_DROPPED(session_id=session.session_id, waited_s=DROP_WAIT_S) from late
