"""Turns of the ledger, found by their ids alone: what was asked, and what was answered.

Owns the search, and whether an answer is still what its client got: a session whose client has
edited its history since no longer has it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from batchengine import errors
from batchengine.core import BatchEngineError, GenerationRequest, PastTurn
from batchengine.engine.sessions.directory import durable_name, name_of
from batchengine.engine.sessions.erasing import LedgerCleaning
from batchengine.engine.sessions.recovery import SessionRecovery
from batchengine.engine.state import EngineState
from batchengine.engine.turns.journal import DONE, RUNNING
from batchengine.engine.turns.records import TurnRecord, encode, turn_record
from batchengine.engine.turns.resend import SLICE
from batchengine.text.detokeniser import StopMatcher
from batchengine.text.frontend import TextFrontend
from kv_store.errors import StoreError
from kv_store.ledger import writes
from kv_store.ledger.queries import SessionRecord, TurnInfo
from kv_store.store import Store


@dataclass(frozen=True, slots=True)
class TurnPlace:
    """A turn in the record of its session; the timeline's tokens before `end` are its own."""

    session_id: str
    record: SessionRecord
    turn: TurnInfo
    asked: TurnRecord
    end: int
    is_last: bool


class PastTurns:
    """Turns of one engine's ledger. All methods run on its event loop."""

    def __init__(
        self,
        state: EngineState,
        store: Store,
        recovery: SessionRecovery,
        text: TextFrontend,
        cleaning: LedgerCleaning,
    ) -> None:
        self._state = state
        self._store = store
        self._recovery = recovery
        self._text = text
        self._cleaning = cleaning

    async def place(self, tenant: str, turn_id: str) -> TurnPlace:
        """Find a turn of this tenant. Raises BatchEngineError: it is unknown or no longer whole."""
        try:
            name = await asyncio.wrap_future(self._store.ledger.session_of_turn(tenant, turn_id))
        except StoreError as error:
            raise errors.SESSION_DAMAGED(why=error.why or "the ledger cannot read it") from error
        found = None if name is None else await self._recovery.find(tenant, name_of(name)[1])
        if name is None or found is None:
            raise _unknown(turn_id)
        index = next((i for i, turn in enumerate(found.turns) if turn.id == turn_id), None)
        if index is None or not self._recovery.has_same_tokens(found):
            raise _unknown(turn_id)
        turn, later = found.turns[index], found.turns[index + 1 :]
        asked = turn_record(turn.sampling)
        end = min((one.prompt_start for one in later), default=len(found.tokens))
        if asked is None or end < turn.prompt_end:
            raise _unknown(turn_id)
        if later and not self._is_whole(turn, asked, found.tokens, end):
            raise _unknown(turn_id)
        return TurnPlace(name_of(name)[1], found, turn, asked, end, not later)

    async def find(self, tenant: str, turn_id: str, *, has_texts: bool = True) -> PastTurn:
        """Return a turn of this tenant with the texts of its answer, which cost time for each
        token, or without them. Raises BatchEngineError.

        A turn that waits for its first token is not in the ledger yet.
        """
        try:
            place = await self.place(tenant, turn_id)
        except BatchEngineError as error:
            waiting = [one.request for one in self._state.requests if one.turn_id == turn_id]
            if error.code != errors.UNKNOWN_TURN.code or not waiting:
                raise
            if waiting[0].tenant != tenant or waiting[0].session_id is None:
                raise
            found = await self._recovery.find(tenant, waiting[0].session_id)
            return PastTurn(waiting[0], 0, ("",), "", True, True, only=found is None)
        turn, tokens = place.turn, place.record.tokens[: place.end]
        asked = place.asked.request(turn.id, place.session_id, tenant, tokens[: turn.prompt_end])
        answer = tokens[turn.prompt_end :]
        return PastTurn(
            request=asked,
            tokens=len(answer),
            texts=await self._texts_of(asked, answer) if has_texts else ("",),
            finish_reason=_ending(turn),
            is_last=place.is_last,
            is_running=self._is_running(turn_id),
            only=all(one.id == turn_id or _is_forgotten(one) for one in place.record.turns),
            ended_s=place.asked.ended_s,
            cached_tokens=place.asked.cached_tokens,
        )

    async def forget(self, tenant: str, turn_id: str) -> dict[str, Any]:
        """Erase what the record of a response has beside its tokens, which later turns need.

        Raises BatchEngineError: it is unknown, or the disk refuses.
        """
        place = await self.place(tenant, turn_id)
        name = durable_name(tenant, place.session_id)
        record = encode(msgspec.structs.replace(place.asked, echo=""))
        try:
            written = self._store.ledger.append(writes.SetTurnRecord(name, turn_id, record))
            self._store.ledger.commit()
            await asyncio.wrap_future(written)
            await self._cleaning.clean()
        except StoreError as failure:
            raise errors.NOT_ERASED(session_id=place.session_id, why=failure) from failure
        return {"session_id": place.session_id, "turn_id": turn_id, "state": "forgotten"}

    def _is_running(self, turn_id: str) -> bool:
        return any(one.turn_id == turn_id for one in self._state.requests)

    def _is_whole(self, turn: TurnInfo, asked: TurnRecord, tokens: list[int], end: int) -> bool:
        """Whether an answer of a timeline ends at `end` since its turn ended there; it may have
        been cut since. A template may have another token in place of the one that ended it."""
        if turn.finish_reason == "length":
            return end - turn.prompt_end >= asked.tokens_max
        if turn.finish_reason != "stop" or asked.stop or asked.constraint is not None:
            return True  # where it ended is not known from its tokens
        last, following = tokens[turn.prompt_end : end][-1:], tokens[end : end + 1]
        tokenizer = self._text.tokenizer
        return not tokenizer.eog.isdisjoint(last) or (
            not tokenizer.closes.isdisjoint(following) and tokenizer.eog.isdisjoint(following)
        )

    async def _texts_of(self, asked: GenerationRequest, tokens: list[int]) -> tuple[str, ...]:
        """The texts that the client of this answer got; other tasks run meanwhile."""
        if asked.ends_at_end_token and tokens and tokens[-1] in self._text.tokenizer.eog:
            tokens = tokens[:-1]
        detokeniser = self._text.detokeniser(asked.output)
        stops = StopMatcher(asked.stop, asked.sampling.tokens_min)
        texts: list[str] = []
        for start in range(0, len(tokens), SLICE):
            await asyncio.sleep(0)
            for token in tokens[start : start + SLICE]:
                text, stopped = stops.push(detokeniser.push(token))
                texts.append(text)
                if stopped:
                    return (*texts, "")
        text, stopped = stops.push(detokeniser.flush())
        return (*texts, text + ("" if stopped else stops.flush()))


def _is_forgotten(turn: TurnInfo) -> bool:
    record = turn_record(turn.sampling)
    return record is not None and record.is_forgotten


def _ending(turn: TurnInfo) -> str:
    """Why the turn ended: a finish reason, or the status of one that did not end by itself."""
    if turn.status == DONE:
        return turn.finish_reason
    return "" if turn.status == RUNNING else turn.status


def _unknown(turn_id: str) -> BatchEngineError:
    return errors.UNKNOWN_TURN(turn_id=turn_id)
