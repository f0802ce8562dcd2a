"""Requests that hold new messages only: the turn that they go behind, and what is new to it.

Instructions and tools come with every request, and the conversation has most of them already. They
are appended where they differ from those that the turn before had.
"""

from __future__ import annotations

import dataclasses

import msgspec

from batchengine import errors
from batchengine.core import BatchEngineError, Kind, PastTurn
from service.engine_api import EngineApi
from service.http.routes.responses import is_stored
from service.protocols.requests import Prompt
from service.protocols.responses.formatter import response_id
from service.session_ids import is_kept


async def followed(
    engine: EngineApi, tenant: str, prompt: Prompt, session_id: str | None
) -> tuple[Prompt, PastTurn | None]:
    """The prompt of a request that appends, without the heading that its conversation has, and the
    turn that it goes behind, None if there is none. Raises 404 for a response that is unknown."""
    if prompt.append_to:
        past = await _response(engine, tenant, prompt.append_to)
    elif prompt.append and session_id is not None and is_kept(session_id):
        past = await _last_turn(engine, tenant, session_id)
    else:
        past = None
    return (prompt if past is None else _behind(prompt, past)), past


async def _response(engine: EngineApi, tenant: str, turn_id: str) -> PastTurn:
    try:
        past = await engine.past_turn(tenant, turn_id, has_texts=False)
    except BatchEngineError as error:
        if error.code != errors.UNKNOWN_TURN.code:
            raise
        raise errors.UNKNOWN_PREVIOUS(given=response_id(turn_id)) from None
    if not is_stored(past):
        raise errors.UNKNOWN_PREVIOUS(given=response_id(turn_id))
    return past


async def _last_turn(engine: EngineApi, tenant: str, session_id: str) -> PastTurn | None:
    """The last turn of a session; None of one that is unknown or has none."""
    try:
        detail = await engine.session_detail(tenant, engine.timelines(tenant, session_id)[-1])
        turns = detail["turns"]
        if not turns:
            return None
        return await engine.past_turn(tenant, turns[-1]["turn"], has_texts=False)
    except BatchEngineError as error:
        if error.kind not in (Kind.MISSING, Kind.NOT_FOUND):
            raise
        return None


def _behind(prompt: Prompt, past: PastTurn) -> Prompt:
    """The prompt without a heading that the turn before had; its record has what counts from now
    on. One that repeats that turn keeps the heading that it was sent with."""
    before, given = past.request.output.heading, prompt.output.heading
    system, tools = (new or old for new, old in zip(given, before, strict=True))
    output = msgspec.structs.replace(prompt.output, heading=(system, tools))
    added = tuple(prompt.append[1:])
    is_again = bool(added) and past.request.prompt[-len(added) :] == added
    is_new = (system, tools) != before
    append = prompt.append if is_new or is_again else prompt.append_bare
    return dataclasses.replace(prompt, output=output, append=append)
