"""What people and agents do with a session beside asking it: resume, fork, park, drop, why.

Owns these verbs over the engine's tables and the ledger. Refuses what would race with a running
turn, in words; moves no page itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from batchengine.core import PAGE_TOKENS, BatchEngineError, GenerationRequest
from batchengine.engine import refusals
from batchengine.engine.journal import IDLE, PARKED, RUNNING, Journal
from batchengine.engine.record import (
    CALLS_MAX,
    Parked,
    Rebase,
    SessionMeta,
    encode,
    parked_row,
    session_meta,
)
from batchengine.engine.record import turn_record as read_turn
from batchengine.engine.reopen import Reopener, durable_name
from batchengine.engine.reports import parked_facts
from batchengine.engine.tables import Tables
from batchengine.engine.turn import Turn
from batchengine.session import Session, State
from batchengine.tokenizer import TextFrontend
from kv_store import LedgerRefused, StoreError, records
from kv_store.sessions import SessionRecord
from kv_store.store import Store

BEFORE_TOKENS = 12  # before a difference: enough to find the place again
ROLE_TOKENS_MAX = 32_768  # how far back the beginning of a message is looked for
ROLE_MARK = re.compile(rb"<\|(im_start|start_header_id|start)\|>")  # ChatML, Llama 3, Harmony
ROLE = re.compile(r"\s*(system|developer|user|assistant|tool|ipython)\b")
DROP_WAIT_S = 30.0  # a step ends long before
PARK_WAIT_S = 5.0  # a frame, a write and a commit: milliseconds, unless the store is stuck


class Care:
    """Verbs on named sessions. All methods run on the engine's loop."""

    def __init__(
        self,
        tables: Tables,
        store: Store,
        journal: Journal,
        reopener: Reopener,
        text: TextFrontend,
        spawn: Callable[[Coroutine[Any, Any, None], str], None],
    ) -> None:
        self._tables = tables
        self._store = store
        self._journal = journal
        self._reopener = reopener
        self._text = text
        self._spawn = spawn

    def named(self, request: GenerationRequest) -> GenerationRequest:
        """The request with the session it means: that of its tool calls, or of its own key.

        A request with an idempotency key and no session gets one from the key, so that a retry
        finds what the first attempt computed, in this life or the next.
        """
        if request.session_id is not None:
            return request
        found = self._reopener.session_of(request.tenant, request.tool_call_ids)
        if found is None and request.idempotency_key:
            digest = hashlib.sha256(b"batchengine idempotency\0" + request.idempotency_key.encode())
            found = f"idem_{digest.hexdigest()[:32]}"
        return request if found is None else dataclasses.replace(request, session_id=found)

    async def resumable(
        self, tenant: str, session_id: str, from_token: int, turn_id: str = ""
    ) -> GenerationRequest:
        """The request of the session's last turn, as its client had sent it. 404, 409, 400.

        With `turn_id` only if that is the last turn: tokens of another are no answer's rest.
        """
        found = await self._record(tenant, session_id)
        turn = found.turns[-1] if found.turns else None
        if turn is not None and turn_id not in ("", turn.id):
            is_known = any(other.id == turn_id for other in found.turns)
            raise refusals.turn_followed(session_id, turn_id, is_known=is_known)
        asked = None if turn is None else read_turn(turn.sampling)
        if turn is None or asked is None:
            raise refusals.nothing_to_resume(session_id)
        if not 0 <= from_token <= asked.tokens_max:
            raise refusals.from_token_outside(from_token, asked.tokens_max)
        prompt = found.tokens[: turn.prompt_end]
        return asked.request(turn.id, session_id, tenant, prompt)

    # ------------------------------------------------------------------------------- verbs

    async def park(self, tenant: str, session_id: str, tool_call_id: str | None) -> dict[str, Any]:
        """The session waits for a tool: its KV leaves the lane, the call leads back to it.

        While it computes, this happens at the end of its turn. Raises BatchEngineError (404, 409,
        503): the call leads nowhere then.
        """
        session = self._tables.named.get((tenant, session_id))
        while session is not None and self._is_held(session):  # a move ends soon, either way
            await asyncio.sleep(0.002)
            session = self._tables.named.get((tenant, session_id))
        facts = None if session is None else self._tables.facts.get(session.key)
        if session is None or facts is None or session.logged < 0:
            if session is not None and self._is_busy(session):
                raise refusals.session_in_use(session_id, "parked")  # it is being looked up
            found = await self._record(tenant, session_id)
            epoch, tokens = found.info.epoch, len(found.tokens)
            meta = session_meta(found.info.meta) if facts is None else facts.meta
        else:
            meta, epoch, tokens = facts.meta, session.logged_epoch, len(session.tokens)
        before = meta, None if facts is None else facts.parks
        if tool_call_id:
            calls = (*(c for c in meta.calls if c != tool_call_id), tool_call_id)[-CALLS_MAX:]
            meta = _with_calls(meta, calls)
        is_busy = session is not None and self._is_busy(session)
        state, parked = RUNNING if is_busy else PARKED, Parked.now(tool_call_id or "")
        if not is_busy:
            meta = msgspec.structs.replace(meta, parked=parked)
        if facts is not None:
            facts.meta = meta
            facts.parks = parked.tool_call_id if is_busy else None
        name = durable_name(tenant, session_id)
        try:
            await self._wait(self._store.ledger.set_meta(name, epoch, state, encode(meta)))
        except (BatchEngineError, LedgerRefused) as error:
            if facts is not None and facts.meta is meta:
                facts.meta, facts.parks = before
            if not isinstance(error, LedgerRefused):
                raise
            await self._record(tenant, session_id)  # 404 if it is not there, else its owner changed
            raise refusals.session_in_use(session_id, "parked") from error
        if tool_call_id:
            self._reopener.remember_call(tenant, tool_call_id, session_id)
        state = "parked"
        if session is not None and facts is not None and self._is_busy(session):
            state = "parks at the end of its turn"
            facts.parks = parked.tool_call_id
        elif session is not None:
            await self._park_pages(session, and_leave=True)
        return {
            "session_id": session_id,
            "state": state,
            "tokens": tokens,
            "tool_calls": meta.calls,
        }

    async def fork(self, tenant: str, session_id: str, new_id: str) -> dict[str, Any]:
        """A second session with the same timeline: pages are shared until the two differ."""
        source = self._tables.named.get((tenant, session_id))
        if source is not None:
            self._journal.flush()
            if not self._is_busy(source):
                await self._park_pages(source, and_leave=False)
        found = await self._record(tenant, session_id)
        if (tenant, new_id) in self._tables.named:
            raise refusals.session_exists(new_id)
        name, old = durable_name(tenant, new_id), durable_name(tenant, session_id)
        epoch = self._tables.first_epoch
        meta = _with_calls(session_meta(found.info.meta), ())
        try:
            await self._wait(
                self._store.ledger.append(
                    records.CopySession(old, name, tenant, epoch, None),
                    records.SetMeta(name, epoch, IDLE, encode(meta)),
                )
            )
        except LedgerRefused as error:
            await self._record(tenant, session_id)  # 404: it was dropped meanwhile
            raise refusals.session_exists(new_id) from error
        shared = self._store.match_prefix(found.tokens, tenant.encode())
        return {
            "session_id": new_id,
            "forked_from": session_id,
            "tokens": len(found.tokens),
            "pages_shared": len(shared),
            "tokens_shared": len(shared) * PAGE_TOKENS,
        }

    async def drop(self, tenant: str, session_id: str) -> dict[str, Any]:
        """The session and its history end; a running turn hears it."""
        found = await self._record(tenant, session_id)
        session = self._tables.named.get((tenant, session_id))
        if session is not None:
            await self._end_turns(session)
            self._tables.forget(session)
            self._give_up_tails(session.tokens)
        self._reopener.forget(tenant, session_id)
        await self._wait(self._store.ledger.drop_session(durable_name(tenant, session_id)))
        self._reopener.forget(tenant, session_id)  # a call that it was parked for meanwhile
        tokens = found.tokens if session is None else session.tokens  # its last turn's, too
        async with _at_most(PARK_WAIT_S):
            while not self._give_up_tails(tokens):  # noqa: ASYNC110  no event for its end
                await asyncio.sleep(0.002)
        await asyncio.wrap_future(self._store.drop_tails(tokens, tenant, tenant.encode()))
        return {"session_id": session_id, "tokens": len(found.tokens), "state": "dropped"}

    async def why(self, tenant: str, session_id: str) -> dict[str, Any]:
        """Where the last prompt left the history it was expected to continue, and what it cost."""
        session = self._tables.named.get((tenant, session_id))
        facts = None if session is None else self._tables.facts.get(session.key)
        if session is None or facts is None:
            found = await self._record(tenant, session_id)
            meta, tokens = session_meta(found.info.meta), found.tokens
        else:
            meta, tokens = facts.meta, session.tokens
        answer: dict[str, Any] = {"session_id": session_id, "last": None, "edit": None}
        if meta.rebase is not None:
            answer["last"] = told = self._told(meta.rebase)
            if meta.rebase.is_edit:
                told |= self._place_of(tokens[: meta.rebase.shared])
        if meta.edit is not None:
            is_last = meta.edit == meta.rebase
            answer["edit"] = answer["last"] if is_last else self._told(meta.edit)
        return answer

    async def detail(self, tenant: str, session_id: str) -> dict[str, Any]:
        """Everything there is to know about one session, but its text."""
        session = self._tables.named.get((tenant, session_id))
        found = await self._record(tenant, session_id)
        info = found.info
        detail: dict[str, Any] = {
            "session_id": session_id,
            "tenant": tenant,
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
            else parked_facts(self._tables, session)
        )
        if (tenant, session_id) in self._reopener.interrupted:
            detail["state"] = "interrupted"
        if session is not None:
            detail |= {
                "tokens": len(session.tokens),
                "frontier": session.frontier,
                "pages": len(session.codes),
                "pages_sealed": len(session.pinned),
            }
        return detail | {"why": await self.why(tenant, session_id)}

    # ------------------------------------------------------------------------------- inner

    def _told(self, found: Rebase) -> dict[str, Any]:
        """A rebase in numbers and text."""
        pages = max(found.kept, 0) // PAGE_TOKENS
        told: dict[str, Any] = {
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
            told |= {
                "first_difference": found.shared,
                "old_token": found.old[0],
                "new_token": found.new[0],
                "old_text": self._text_of(found.old),
                "new_text": self._text_of(found.new),
            }
        return told

    def _place_of(self, before: Sequence[int]) -> dict[str, Any]:
        """The text that both histories have before they differ, and whose message that is in."""
        place: dict[str, Any] = {"text_before": self._text_of(tuple(before[-BEFORE_TOKENS:]))}
        for index in range(len(before) - 1, max(-1, len(before) - 1 - ROLE_TOKENS_MAX), -1):
            if ROLE_MARK.match(self._text.piece(before[index])):
                role = ROLE.match(self._text_of(tuple(before[index + 1 : index + 4])))
                if role is not None:
                    return place | {"inside": f"{role[1]} message"}
        return place

    def _text_of(self, tokens: tuple[int, ...]) -> str:
        return b"".join(self._text.piece(token) for token in tokens).decode(errors="replace")

    async def _record(self, tenant: str, session_id: str) -> SessionRecord:
        return await self._reopener.record(durable_name(tenant, session_id), session_id)

    async def _wait(self, future: Any) -> None:
        """Until the record is durable; BatchEngineError if it cannot be."""
        self._store.ledger.commit()
        try:
            await asyncio.wrap_future(future)
        except LedgerRefused:
            raise
        except StoreError as error:
            raise refusals.not_durable(error) from error

    def _is_busy(self, session: Session) -> bool:
        return session.key in self._tables.queues

    def _is_held(self, session: Session) -> bool:
        """It computes nothing, and requests for it wait: it is on its way to another lane."""
        queue = self._tables.queues.get(session.key)
        turns = self._tables.turns.values()
        return queue is not None and not queue and all(t.session is not session for t in turns)

    def turn_over(self, turn: Turn) -> None:
        """The session is idle: it leaves the lane if it waits for a tool."""
        facts = self._tables.facts.get(turn.session.key)
        if turn.generation.request.park or (facts is not None and facts.parks is not None):
            if facts is not None:
                facts.parks = None
            self._spawn(self._park_pages(turn.session, and_leave=True), "park")

    async def park_everything(self) -> None:
        """Before the daemon ends: no tail of an idle session is to be computed again."""
        named = [s for s in self._tables.named.values() if not self._is_busy(s)]
        await asyncio.gather(*(self._park_pages(s, and_leave=False) for s in named))

    async def _park_pages(self, session: Session, *, and_leave: bool) -> None:
        """Have the open tail sealed; then, if the session is to leave the lane, let go of all.

        What it had is found again by its content. A session that runs again meanwhile stays.
        """
        loop = self._tables.home.get(session.key)
        if loop is None or session.state is not State.IDLE:
            return
        if loop.pages.park(session):
            # A frame digests it, a thread writes it, a commit names it: none of them tells us.
            async with _at_most(PARK_WAIT_S):
                while _is_parking(session):  # noqa: ASYNC110  no event for its end
                    await asyncio.sleep(0.002)
        is_still_there = self._tables.home.get(session.key) is loop and not self._is_busy(session)
        if and_leave and is_still_there and session.state is State.IDLE:
            loop.pages.truncate(session, 0)
            loop.wake()

    def _give_up_tails(self, tokens: Sequence[int]) -> bool:
        """Of all lanes, for a seal stays with the lane that its session left."""
        gone = [loop.pages.give_up_tails(tokens) for loop in self._tables.loops]
        return all(gone)

    async def _end_turns(self, session: Session) -> None:
        """Everybody who reads or waits hears that the session is gone."""
        error, tables = refusals.session_dropped(session.session_id), self._tables
        try:
            async with asyncio.timeout(DROP_WAIT_S):
                while self._is_busy(session):
                    for generation in tables.queues[session.key]:
                        generation.fail(error)
                    for generation, beginning in tables.beginning.items():
                        if beginning is session:
                            generation.fail(error)
                    for generation, turn in list(tables.turns.items()):
                        if turn.session is session and not generation.finished:
                            generation.abort(error)
                    await asyncio.sleep(0.002)
        except TimeoutError as late:
            raise refusals.not_dropped(session.session_id, DROP_WAIT_S) from late


def _is_parking(session: Session) -> bool:
    """It rests, its tail is still in the arena, and the store does not have it yet."""
    return session.parked is None and bool(session.places) and session.state is State.IDLE


@contextlib.asynccontextmanager
async def _at_most(seconds: float) -> AsyncGenerator[None]:
    """Give up quietly after so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            yield


def _with_calls(meta: SessionMeta, calls: tuple[str, ...]) -> SessionMeta:
    """The same with other tool calls."""
    return SessionMeta(meta.repr_id, meta.rebase, meta.edit, calls)
