"""What people and agents do with a session: which one they mean, and the call to the engine.

Owns the names a session goes by: the id this daemon gave it, a unique beginning of that, and the
client's own id. HTTP callers mean their own sessions only, and by whole names; the operator at
the admin socket means any. Refuses an ambiguous name, and tells it from an unknown one to nobody
but the operator.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from batchengine.core import BatchEngineError
from service import errors, sessions
from service.chat import CALL_CHARS_MAX
from service.state import Service
from service.strict_json import printable

PREFIX_CHARS_MIN = 4
STORED_MAX = 1000  # sessions on disk that a listing shows and a prefix may mean
MOVES = ("promote", "demote")
NOT_FOUND, CONFLICT = 404, 409


def own_session(service: Service, tenant: str, given: str) -> str:
    """The id in the engine of a caller's own session, which may not exist; raises 400."""
    if given.startswith("be_req_") and service.engine.has_session(tenant, given):
        return given  # without a name: only while it computes, and only exactly
    return sessions.session_key(tenant, given, "session_id")


async def own_call(given: str, call: Any) -> dict[str, Any]:
    """The engine's answer about a caller's own session; one 404 for foreign and unknown."""
    try:
        return public(await call)
    except BatchEngineError as error:
        if error.http_status == NOT_FOUND:
            raise errors.unknown_session(printable(given)) from None
        raise


def public(found: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data without whose it is: a caller knows, and others must not."""
    return {
        name: _public_value(value) for name, value in found.items() if name not in ("tenant", "pid")
    }


def _public_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return public(value)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return [_public_value(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value


async def explain_own(service: Service, tenant: str, given: str) -> dict[str, Any]:
    """Decisions about a caller's own request or session; whole ids only, or prefixes would tell."""
    try:
        wanted = given if given.startswith("req_") else own_session(service, tenant, given)
        found = service.engine.explain(wanted, tenant)
    except BatchEngineError as error:
        if error.http_status == 400:
            raise
        raise errors.nothing_to_explain(printable(given)) from None
    name = found.get("request_id") if found.get("kind") == "request" else found.get("session_id")
    if found.get("tenant", "") != tenant or name not in (wanted, wanted.removeprefix("be_")):
        raise errors.nothing_to_explain(printable(given))
    return public(found)


async def find(service: Service, given: str, tenant: str | None = None) -> tuple[str, str]:
    """(tenant, id) of the session an operator means; raises 404, or 409 with the candidates.

    In this order: an exact id, the client's own id under any key, a unique beginning, and whatever
    of that is on disk only. `tenant` limits the search to one key name.
    """
    tenants = _tenants(service, tenant)
    rows = [_identity(row) for row in service.engine.sessions(tenant)]
    found = _among(rows, given, tenants)
    if not found:
        stored = await service.engine.stored_sessions(STORED_MAX)
        pairs = [_identity(row) for row in stored]
        found = _among([p for p in pairs if tenant is None or p[0] == tenant], given, tenants)
    if len(found) == 1:
        return found[0]
    if found:
        raise errors.ambiguous_session(printable(given), found)
    return await _asleep(service, given, tenants)


async def _asleep(service: Service, given: str, tenants: list[str]) -> tuple[str, str]:
    """A session so old that no listing has it; raises 404."""
    for name in tenants:
        session_id = sessions.session_key(name, given)
        try:
            await service.engine.session_detail(name, session_id)
        except BatchEngineError as error:
            if error.http_status != NOT_FOUND:
                raise
        else:
            return name, session_id
    keys = [key.name for key in service.config.auth]
    for strange in (name for name in tenants if name and name not in keys):
        raise errors.unknown_key(printable(strange), keys)
    raise errors.unknown_session(printable(given), operator=True)


def _tenants(service: Service, tenant: str | None) -> list[str]:
    if tenant is not None:
        return [tenant]
    return ["", *(key.name for key in service.config.auth)]


def _identity(row: Mapping[str, Any]) -> tuple[str, str]:
    return str(row.get("tenant", "")), str(row["session_id"])


def _among(rows: list[tuple[str, str]], given: str, tenants: list[str]) -> list[tuple[str, str]]:
    exact = [pair for pair in rows if pair[1] == given]
    if exact:
        return list(dict.fromkeys(exact))
    try:
        own = {(name, sessions.session_key(name, given)) for name in tenants}
    except BatchEngineError:
        own = set[tuple[str, str]]()
    named = [pair for pair in rows if pair in own]
    if named:
        return list(dict.fromkeys(named))
    if len(given.removeprefix("be_")) < PREFIX_CHARS_MIN:
        return []
    starts = (given, f"be_{given}")
    return list(dict.fromkeys(pair for pair in rows if pair[1].startswith(starts)))


async def move(
    service: Service, verb: str, tenant: str, session_id: str, to: str | None
) -> dict[str, Any]:
    """Promote or demote; raises 400 for a lane that is not there, 409 where there is nothing to
    move: the session is in the ledger only."""
    engine = service.engine
    lanes = [str(lane["name"]) for lane in engine.lanes()]
    if to is not None and to not in lanes:
        raise errors.unknown_lane(printable(to), lanes)
    if len(lanes) < 2:
        raise errors.one_lane(lanes)
    call = engine.promote if verb == "promote" else engine.demote
    try:
        return dict(await call(session_id, to, tenant))
    except BatchEngineError as error:
        if error.http_status != NOT_FOUND:
            raise
    await engine.session_detail(tenant, session_id)  # 404 if there is none at all
    raise errors.session_at_rest(session_id)


async def park(
    service: Service, tenant: str, session_id: str, tool_call_id: str | None
) -> dict[str, Any]:
    """Park for a tool call; raises 400 for an id that no conversation could lead back with."""
    call = tool_call_id or ""
    if len(call) > CALL_CHARS_MAX or not call.isprintable():
        raise errors.invalid_field(
            "tool_call_id",
            "this is not a usable tool call id",
            why=f"it must be printable and at most {CALL_CHARS_MAX} characters",
            fix="copy the id of the call from the assistant's message",
        )
    return dict(await service.engine.park(tenant, session_id, tool_call_id))


async def fork(
    service: Service, tenant: str, session_id: str, new_name: str | None
) -> dict[str, Any]:
    """A copy under the client's own id `new_name`, or under one made here; raises 409."""
    new_id = sessions.session_key(tenant, new_name or f"fork {secrets.token_hex(16)}")
    try:
        return dict(await service.engine.fork(tenant, session_id, new_id))
    except BatchEngineError as error:
        if error.http_status == CONFLICT and new_name:
            raise errors.session_exists(printable(new_name)) from None
        raise
