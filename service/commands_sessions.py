"""Commands about sessions: promote, demote, explain, and `sessions` with its verbs.

Each asks the daemon over its admin socket, where every session of every key can be named.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, cast

import cyclopts
from cyclopts import Parameter

from service import told
from service.client import CONNECT_SECONDS, admin
from service.client import Json as Answer
from service.terminal import (
    Debug,
    Json,
    KeyName,
    SessionId,
    Socket,
    admin_path,
    print_json,
    print_table,
)

MOVE_S = 120.0  # a hand-over takes milliseconds, unless the lane is busy with a long step
CHORE_S = 60.0
LISTS = ("tool_calls",)
UNSHOWN = ("turns", "why", "parked_since", "tool_call_id")  # told below, or in other words
LISTED = ("state", "class", "lane", "tokens", "reused", "reason")

sessions = cyclopts.App(name="sessions", help="Sessions: list them; show, why, park, fork, rm.")

Lane = Annotated[str | None, Parameter(help="The lane; without it the best one for the purpose.")]


def add(app: cyclopts.App) -> None:
    """The commands of this module."""
    app.command(promote)
    app.command(demote)
    app.command(explain)
    app.command(sessions)


def _ask(
    socket: str | None, command: str, *, patience_s: float = CONNECT_SECONDS, **arguments: object
) -> Answer:
    return admin(admin_path(socket), command, patience_s=patience_s, **arguments)


def promote(
    session: SessionId,
    /,
    *,
    to: Lane = None,
    key_name: KeyName = None,
    admin_socket: Socket = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Move a session to a fast lane, between two of its tokens."""
    return _move("promote", session, to, key_name, admin_socket, json)


def demote(
    session: SessionId,
    /,
    *,
    to: Lane = None,
    key_name: KeyName = None,
    admin_socket: Socket = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Move a session to a lane for work that can wait."""
    return _move("demote", session, to, key_name, admin_socket, json)


def _move(
    verb: str, session: str, to: str | None, key: str | None, socket: str | None, json: bool
) -> int:
    """0 also when it is there already; 1 when it had to stay."""
    found = _ask(socket, verb, session=session, to=to, tenant=key, patience_s=MOVE_S)["move"]
    if json:
        print_json(found)
    else:
        print(f"{found['session_id']}  {told.move_line(found)}")
    return 0 if found["result"] in ("moved", "already there") else 1


def explain(
    name: Annotated[str, Parameter(name="ID", help="A request id (req_…) or a session.")],
    /,
    *,
    key_name: KeyName = None,
    admin_socket: Socket = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Why a request ran where it ran: the decision, its inputs, the prediction, what happened."""
    found = _ask(admin_socket, "explain", id=name, tenant=key_name)["explain"]
    if json:
        print_json(found)
    else:
        print("\n".join(told.explain_lines(found)))
    return 0


@sessions.default
def list_sessions(
    *,
    all: Annotated[
        bool, Parameter(name="--all", negative=(), help="Also those that are on disk only.")
    ] = False,
    admin_socket: Socket = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Sessions the daemon knows: where they are, how long, what their last turn reused."""
    rows: list[dict[str, Any]] = _ask(admin_socket, "sessions", stored=all)["sessions"]
    if json:
        print_json({"sessions": rows})
    else:
        print_table([_listed(row, rows) for row in rows], "no sessions yet")
    return 0


def _listed(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the table; the key's name only where there are keys, and so on."""
    shown = {"session": row["session_id"]}
    if any(other.get("tenant") for other in rows):
        shown["key"] = row.get("tenant")
    prompt = row.get("tokens_prompt")
    reused = f"{row['tokens_reused']}/{prompt}" if prompt else None
    shown |= {name: row.get(name) for name in LISTED} | {"reused": reused}
    if any(other.get("state") == "parked" for other in rows):
        shown["parked"] = told.parked(row, time.time())
    return shown


@sessions.command
def show(
    session: SessionId,
    /,
    *,
    key_name: KeyName = None,
    admin_socket: Socket = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Everything about one session but its text."""
    found = _ask(admin_socket, "session", session=session, tenant=key_name)["session"]
    if json:
        print_json(found)
        return 0
    plain = {name: value for name, value in found.items() if name not in UNSHOWN}
    if (waits := told.parked(found, time.time())) is not None:
        plain["parked"] = waits
    for name, value in plain.items():
        shown = ", ".join(map(str, cast("list[object]", value))) if name in LISTS else value
        print(f"{name:<18} {'-' if shown in ('', None) else shown}")
    print()
    print_table(found["turns"], "no turns")
    if found.get("why"):
        print()
        print("\n".join(told.why_lines(found["why"])))
    return 0


@sessions.command
def why(
    session: SessionId,
    /,
    *,
    key_name: KeyName = None,
    admin_socket: Socket = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Where the last prompt left the session's history, and what that cost."""
    found = _ask(admin_socket, "why", session=session, tenant=key_name)["why"]
    if json:
        print_json(found)
    else:
        print("\n".join(told.why_lines(found)))
    return 0


@sessions.command
def park(
    session: SessionId,
    /,
    *,
    tool_call: Annotated[
        str | None, Parameter(help="The tool call whose result leads back to the session.")
    ] = None,
    key_name: KeyName = None,
    admin_socket: Socket = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Take a session off its lane while it waits; nothing is lost or computed again."""
    found = _ask(
        admin_socket, "park", session=session, tenant=key_name, tool_call_id=tool_call,
        patience_s=CHORE_S,
    )["parked"]  # fmt: skip
    if json:
        print_json(found)
    else:
        print(f"{found['session_id']}  {found['state']}, {found['tokens']:,} tokens kept")
    return 0


@sessions.command
def fork(
    session: SessionId,
    /,
    *,
    new_id: Annotated[
        str | None, Parameter(name="--as", help="Session id of the copy; without it one is made.")
    ] = None,
    key_name: KeyName = None,
    admin_socket: Socket = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """A second session with the same history; the two share pages until they differ."""
    found = _ask(
        admin_socket, "fork", session=session, tenant=key_name, new_id=new_id, patience_s=CHORE_S
    )["fork"]
    if json:
        print_json(found)
        return 0
    name = f" (clients may call it {new_id!r})" if new_id else ""
    print(
        f"{found['session_id']}{name}  {found['tokens']:,} tokens,"
        f" {found['pages_shared']:,} pages shared with {found['forked_from']}"
    )
    return 0


@sessions.command
def rm(
    session: SessionId,
    /,
    *more: SessionId,
    key_name: KeyName = None,
    admin_socket: Socket = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Forget sessions and their history; what they compute now ends with an error."""
    gone: list[Any] = []
    try:
        for name in (session, *more):
            found = _ask(admin_socket, "drop", session=name, tenant=key_name, patience_s=CHORE_S)
            gone.append(found["dropped"])
            if not json:
                print(f"{gone[-1]['session_id']}  dropped, {gone[-1]['tokens']:,} tokens")
    finally:  # what is gone is told even when the next name is refused
        if json and gone:
            print_json({"dropped": gone})
    return 0
