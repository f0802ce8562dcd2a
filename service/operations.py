"""The operations on sessions, one row each: HTTP routes, admin commands and CLI commands are made
from this table.

Owns the lookup of sessions: an HTTP caller names its own sessions by whole ids, the operator
at the admin socket any session by its id, a unique beginning of it, or the client's own id.
Operations get the exact (tenant, id). Imports nothing heavy: the command line reads the table at
every start.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchengine import errors
from batchengine.core import ID_PREFIX_CHARS_MIN, BatchEngineError, Kind, Presence
from service import session_ids
from service.engine_api import EngineApi, Facts
from service.protocols.markup.transcript import chat_messages
from service.session_ids import CALL_CHARS_MAX, printable

STORED_MAX = 1000  # sessions on disk that a listing shows
CANDIDATES_SHOWN = 8
MOVE_SECONDS_MAX = 120.0  # a move takes milliseconds, unless the lane is busy with a long step
PAGES_SECONDS_MAX = 60.0  # of park, fork and drop, which wait for pages
ANSWER_SECONDS_MAX = 10.0  # of everything else


@dataclass(frozen=True, slots=True)
class Subject:
    """The session that an operation is about, by its exact (tenant, id), or for `explain` a
    request. `given` is its name as the caller wrote it; `is_operator`: the caller may see every
    tenant, and `tenant` None is a request of any.
    """

    tenant: str | None
    id: str
    given: str
    is_operator: bool = False
    is_session: bool = True

    @property
    def session(self) -> tuple[str, str]:
        """(tenant, id) of a session."""
        return self.tenant or "", self.id


@dataclass(frozen=True, slots=True)
class Argument:
    """An optional text of an operation: `name` in `run` and at the admin socket, `body` in an HTTP
    body of at most `chars_max` characters, `flag` on the command line."""

    name: str
    body: str
    flag: str
    help: str
    label: str  # in an error: what the text names
    hint: str  # in an error: where to get one
    chars_max: int = 256


Run = Callable[..., Awaitable[Facts]]  # (engine, subject, **arguments)


@dataclass(frozen=True, slots=True)
class Operation:
    """One row. `path` holds "{session}" or, where requests have the operation too, "{id}"."""

    name: str  # of the admin command
    run: Run
    answer: str  # the field of the admin answer that holds the result
    method: str
    path: str
    command: tuple[str, ...]  # words of the command line
    synopsis: str
    arguments: tuple[Argument, ...] = ()
    seconds_max: float = ANSWER_SECONDS_MAX  # until the command line gives up

    @property
    def subject(self) -> str:
        """The name of the subject in the path and at the admin socket."""
        return "id" if self.takes_requests else "session"

    @property
    def takes_requests(self) -> bool:
        """Whether the id of a request is a subject too."""
        return self.path.endswith("{id}")


# ------------------------------------------------------------------------ the functions of rows


async def promote(engine: EngineApi, subject: Subject, to: str | None = None) -> Facts:
    return await _move(engine, engine.promote, subject, to)


async def demote(engine: EngineApi, subject: Subject, to: str | None = None) -> Facts:
    return await _move(engine, engine.demote, subject, to)


async def _move(
    engine: EngineApi, move: Callable[..., Awaitable[Facts]], subject: Subject, to: str | None
) -> Facts:
    """Moves a session to lane `to`, or its turn to peer `to`, or to the best lane; raises 400 for a
    lane that does not exist, 409 where there is nothing to move."""
    lanes = [str(lane["name"]) for lane in engine.lanes()]
    if len(lanes) < 2 and not engine.peer_names() and to in (None, *lanes):
        raise errors.ONE_LANE(lane=", ".join(lanes))
    return await move(*subject.session, to)


async def show(engine: EngineApi, subject: Subject) -> Facts:
    """One timeline in detail; the others of its family by their ids."""
    detail = await engine.session_detail(*subject.session)
    timelines = engine.timelines(subject.session[0], detail["family"])
    return {**detail, "timelines": timelines} if len(timelines) > 1 else detail


async def why(engine: EngineApi, subject: Subject) -> Facts:
    return await engine.why(*subject.session)


async def messages(engine: EngineApi, subject: Subject) -> Facts:
    found = await engine.messages(*subject.session)
    return {**found, "messages": await chat_messages(found["messages"])}


async def park(engine: EngineApi, subject: Subject, tool_call_id: str | None = None) -> Facts:
    """Parks a session; raises 400 for a tool call id that no message can hold."""
    call = tool_call_id or ""
    if len(call) > CALL_CHARS_MAX or not call.isprintable():
        raise errors.INVALID_FIELD(
            param="tool_call_id",
            what="this is not a usable tool call id",
            why=f"it must be printable and at most {CALL_CHARS_MAX} characters",
            fix="copy the id of the call from the assistant's message",
        )
    return await engine.park(*subject.session, tool_call_id)


async def fork(engine: EngineApi, subject: Subject, new_id: str | None = None) -> Facts:
    """A copy under the client's own id `new_id`, or under one made here; raises 409."""
    tenant, session_id = subject.session
    made = session_ids.session_key(tenant, new_id or f"fork {secrets.token_hex(16)}")
    name = session_ids.shown_name(new_id or "")
    try:
        return await engine.fork(tenant, session_id, made, name)
    except BatchEngineError as error:
        if error.code == errors.SESSION_EXISTS.code and new_id:
            raise errors.SESSION_EXISTS(given=printable(new_id)) from None
        raise


async def drop(engine: EngineApi, subject: Subject) -> Facts:
    """Drops every timeline that the name means; raises 404 if there is none."""
    tenant, found = subject.session[0], list[Facts]()
    missing: BatchEngineError | None = None
    for one in engine.timelines(*subject.session):
        try:
            found.append(await engine.drop(tenant, one))
        except BatchEngineError as error:
            if error.code != errors.UNKNOWN_SESSION.code:
                raise
            missing = error
    if missing is not None and not found:
        raise missing
    tokens = sum(row["tokens"] for row in found)
    return {**found[0], "session_id": subject.id, "tokens": tokens, "timelines": len(found)}


async def explain(engine: EngineApi, subject: Subject) -> Facts:
    """The decisions about a request or session. HTTP callers get exactly what they name: an answer
    to the beginning of an id would show that another's id begins like it."""
    try:
        found = engine.explain(subject.id, subject.tenant)
    except BatchEngineError as error:
        if not subject.is_operator and error.kind in (Kind.NOT_FOUND, Kind.CONFLICT):
            raise errors.NOTHING_TO_EXPLAIN(given=printable(subject.given)) from None
        if subject.is_session and error.kind is Kind.NOT_FOUND:
            return await _undecided(engine, subject)
        raise
    name = found.get("request_id" if found.get("kind") == "request" else "session_id")
    is_exact = name in (subject.id, subject.id.removeprefix("be_"))
    if not subject.is_operator and not (is_exact and found.get("tenant", "") == subject.tenant):
        raise errors.NOTHING_TO_EXPLAIN(given=printable(subject.given))
    return found


async def _undecided(engine: EngineApi, subject: Subject) -> Facts:
    """A session about which this daemon has decided nothing yet."""
    detail = await engine.session_detail(*subject.session)
    known = {name: detail.get(name) for name in ("session_id", "tenant", "state", "tokens")}
    return {"kind": "session", **known, "decisions": []}


# ------------------------------------------------------------------------------------ the table

LANE = Argument(
    "to", "to", "--to",
    "The lane, or a peer, which computes a turn that has begun; without it the best one.", "lane",
    "leave --to out for the best one, or name one that `batchengine ps` shows",
)  # fmt: skip
TOOL_CALL = Argument(
    "tool_call_id", "tool_call_id", "--tool-call",
    "The tool call whose result leads back to the session.", "tool call",
    "leave --tool-call out, or give the id of the call", CALL_CHARS_MAX,
)  # fmt: skip
NEW_ID = Argument(
    "new_id", "session_id", "--as", "Session id of the copy; without it one is made.",
    "name for the copy", "leave --as out, and one is made", session_ids.ID_CHARS_MAX,
)  # fmt: skip
ONE = "/v1/sessions/{session}"

PROMOTE = Operation(
    "promote", promote, "move", "POST", ONE + "/promote", ("promote",),
    "Move a session to a fast lane, between two of its tokens.", (LANE,), MOVE_SECONDS_MAX,
)  # fmt: skip
DEMOTE = Operation(
    "demote", demote, "move", "POST", ONE + "/demote", ("demote",),
    "Move a session to a lane for work that can wait.", (LANE,), MOVE_SECONDS_MAX,
)  # fmt: skip
EXPLAIN = Operation(
    "explain", explain, "explain", "GET", "/v1/explain/{id}", ("explain",),
    "Why a request ran where it ran: the decision, its inputs, the prediction, what happened.",
)  # fmt: skip
SHOW = Operation(
    "session", show, "session", "GET", ONE, ("sessions", "show"),
    "Everything about one session but its text.",
)  # fmt: skip
WHY = Operation(
    "why", why, "why", "GET", ONE + "/why", ("sessions", "why"),
    "Where the last prompt left the session's history, and what that cost.",
)  # fmt: skip
MESSAGES = Operation(
    "messages", messages, "history", "GET", ONE + "/messages", ("sessions", "messages"),
    "The history of a session, message by message.",
)  # fmt: skip
PARK = Operation(
    "park", park, "parked", "POST", ONE + "/park", ("sessions", "park"),
    "Take a session off its lane while it waits; nothing is lost or computed again.",
    (TOOL_CALL,), PAGES_SECONDS_MAX,
)  # fmt: skip
FORK = Operation(
    "fork", fork, "fork", "POST", ONE + "/fork", ("sessions", "fork"),
    "A second session with the same history; the two share pages until they differ.",
    (NEW_ID,), PAGES_SECONDS_MAX,
)  # fmt: skip
DROP = Operation(
    "drop", drop, "dropped", "DELETE", ONE, ("sessions", "rm"),
    "Forget sessions and their history; what they compute now ends with an error.",
    (), PAGES_SECONDS_MAX,
)  # fmt: skip

OPERATIONS = (PROMOTE, DEMOTE, EXPLAIN, SHOW, WHY, MESSAGES, FORK, PARK, DROP)


async def perform(
    operation: Operation, engine: EngineApi, subject: Subject, arguments: Mapping[str, str | None]
) -> Facts:
    """Runs one operation; errors name the subject as the caller did.

    The name of a family stands for all of its timelines in `drop`, else for the main one.
    """
    if subject.is_session and operation is not DROP:
        subject = replace(subject, id=engine.timelines(*subject.session)[-1])
    try:
        return await operation.run(engine, subject, **arguments)
    except BatchEngineError as error:
        if error.code != errors.UNKNOWN_SESSION.code:
            raise
        raise errors.UNKNOWN_SESSION(given=printable(subject.given)) from None


def public(found: Facts) -> dict[str, Any]:
    """Plain data without fields that are the operator's alone."""
    return {
        name: _public_value(value) for name, value in found.items() if name not in ("tenant", "pid")
    }


def _public_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return public(value)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return [_public_value(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value


# -------------------------------------------------------------------------- finding the subject


def own_session(engine: EngineApi, tenant: str, given: str) -> str:
    """The id in the engine of a caller's own session, which may not exist; raises 400."""
    if given.startswith("be_req_") and engine.has_session(tenant, given):
        return given  # an anonymous session: only while it computes, by its whole id
    return session_ids.session_key(tenant, given, "session_id")


def own_subject(operation: Operation, engine: EngineApi, tenant: str, given: str) -> Subject:
    """The subject that an HTTP caller names: its own session, which may not exist, or request."""
    if operation.takes_requests and given.startswith("req_"):
        return Subject(tenant, given, given, is_session=False)
    return Subject(tenant, own_session(engine, tenant, given), given)


async def find_subject(
    operation: Operation,
    engine: EngineApi,
    key_names: Sequence[str],
    given: str,
    tenant: str | None = None,
) -> Subject:
    """The subject that the operator names; raises 404, or 409 with the candidates. `tenant` limits
    the search to one of the API keys of the configuration, whose names are `key_names`."""
    if operation.takes_requests and given.removeprefix("be_").startswith("req_"):
        return Subject(tenant, given, given, is_operator=True, is_session=False)
    found = await find(engine, key_names, given, tenant)
    return Subject(*found, given, is_operator=True)


async def find(
    engine: EngineApi, key_names: Sequence[str], given: str, tenant: str | None = None
) -> tuple[str, str]:
    """(tenant, id) of the session that an operator names; raises 404, or 409 with the candidates.

    In this order: an exact id, the client's own id under any key, a unique beginning; sessions in
    memory first, then those that are on disk only.
    """
    tenants = ["", *key_names] if tenant is None else [tenant]
    found = await engine.find_sessions(given, _keys_of(given, tenants), tenant)
    if len(found) == 1:
        return found[0]
    if found:
        shown = [f"{name} (key {key})" if key else name for key, name in found[:CANDIDATES_SHOWN]]
        if len(found) > len(shown):
            shown[-1] += f" and {len(found) - len(shown)} more"
        raise errors.AMBIGUOUS_SESSION(
            given=printable(given), count=len(found), found=", ".join(shown)
        )
    for name in tenants:  # an old session may be in the ledger and in no listing
        session_id = session_ids.session_key(name, given)
        if await engine.presence(name, session_id) is not Presence.UNKNOWN:
            return name, session_id
    if given.startswith("be_") and len(given) < len("be_") + ID_PREFIX_CHARS_MIN:
        raise errors.SHORT_ID(given=given, least=ID_PREFIX_CHARS_MIN)
    if tenant and tenant not in key_names:
        names = ", ".join(key_names)
        fix = f"name one of: {names}" if names else "leave --key-name out: none is set"
        raise errors.UNKNOWN_KEY_NAME(given=printable(tenant), fix=fix)
    raise errors.UNKNOWN_SESSION(given=printable(given))


def _keys_of(given: str, tenants: Sequence[str]) -> set[tuple[str, str]]:
    """(tenant, id in the engine) of a client's session `given`; none where the id is invalid."""
    try:
        return {(tenant, session_ids.session_key(tenant, given)) for tenant in tenants}
    except BatchEngineError:
        return set()


async def listing(engine: EngineApi, *, stored: bool) -> list[Facts]:
    """Every session in memory or interrupted; with `stored` those that are on disk only, too."""
    rows = list(engine.sessions())
    if stored:
        seen = {(row.get("tenant", ""), row["session_id"]) for row in rows}
        for row in await engine.stored_sessions(STORED_MAX):
            if (row.get("tenant", ""), row["session_id"]) not in seen:
                rows.append(row)
    return rows
